"""Calls the TPU's own compiler, libtpu, through jax, whose names are private.

Only tested versions of jax, jaxlib and libtpu are accepted. They are imported
when they are first needed.
"""
# ruff: noqa: SLF001  # Uses jax's and jaxlib's private interfaces.

import dataclasses
import functools
import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Final

import numpy as np
from packaging import specifiers

# setup.cfg has the same ranges; `tests/unit/virtual_tpu/xla_test.py` compares
# both.
TESTED: Final = {
  "jax": ">=0.10.2,<0.11",
  "jaxlib": ">=0.10.2,<0.11",
  "libtpu": ">=0.0.51,<0.0.52",
}
# Without these variables, libtpu asks for the metadata of a TPU machine.
_WITHOUT_TPU: Final = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_lock: Final = threading.Lock()


def require() -> None:
  """Raises `ImportError` unless tested versions of libraries are installed."""
  remedy = (
    "In your clone of tf_cross_shard, run: pip install '.[tpu-compiler]'."
  )
  for distribution, tested in TESTED.items():
    try:
      version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
      limit = "libtpu has releases for Linux on x86-64 only."
      if sys.version_info < (3, 11):
        limit = f"It has no release for Python 3.10, and {limit}"
      raise ImportError(
        f"This needs {distribution}{tested}, which is not installed. {remedy}"
        f" ({limit})"
      ) from None
    if version not in specifiers.SpecifierSet(tested):
      raise ImportError(
        f"This was tested with {distribution}{tested} and uses its private"
        f" names; found {distribution} {version}. {remedy}"
      )


@dataclasses.dataclass(frozen=True)
class Topology:
  """The devices of a TPU slice.

  `coordinates` has for each device: x, y, z, and the core on the chip.
  """

  name: str
  kind: str
  coordinates: tuple[tuple[int, ...], ...]
  devices: tuple[Any, ...]


@functools.cache
def topology(name: str) -> Topology:
  """Returns the TPU slice with this name, as libtpu describes it."""
  require()
  try:
    # Check the name first: libtpu divides by the numbers, and would take an
    # incomplete name for another slice.
    if not re.fullmatch(r"[a-z]\w*:[1-9]\d*(x[1-9]\d*){1,2}", name):
      raise ValueError("not GENERATION:XxY or XxYxZ")
    with _lock:
      for key, value in _WITHOUT_TPU.items():
        os.environ.setdefault(key, value)
      topologies = importlib.import_module("jax.experimental.topologies")
      described = topologies.get_topology_desc(
        platform="tpu", topology_name=name
      )
  except Exception as error:
    raise ValueError(
      "`topology` must be a TPU slice that libtpu knows, such as 'v5e:4x2',"
      f" 'v5p:2x2x1', 'v6e:16x16' or 'v4:2x2x1'; got {name!r} ({error})."
    ) from error
  devices = tuple(described.devices)
  return Topology(
    name=name,
    kind=str(devices[0].device_kind),
    coordinates=tuple(
      tuple(map(int, (*device.coords, device.core_on_chip)))
      for device in devices
    ),
    devices=devices,
  )


def coordinates(name: str) -> tuple[tuple[int, ...], ...]:
  """Returns the position of every replica in a TPU slice.

  >>> coordinates("v5e:2x2")
  ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0))

  Args:
    name: The TPU generation and the number of chips in each direction, such as
      "v5e:4x2".

  Returns:
    For each replica: x, y, z, and the core on the chip.

  Raises:
    ValueError: If the slice is unknown.
    ImportError: If jax, jaxlib or libtpu is missing or has an untested version.
  """
  return topology(name).coordinates


def compile_for_tpu(module: bytes, where: Topology) -> tuple[Any, float]:
  """Compiles for a TPU slice; returns the executable and the seconds."""
  xla = importlib.import_module("jax._src.lib").xla_client
  ir = importlib.import_module("jax._src.lib.mlir").ir
  mlir = importlib.import_module("jax._src.interpreters.mlir")
  with _lock, mlir.make_ir_context():
    computation = xla.XlaComputation(module)
    # StableHLO, which compilers accept.
    text = xla._xla.mlir.xla_computation_to_mlir_module(computation)
    stablehlo = ir.Module.parse(text)
    start = time.perf_counter()
    executable = where.devices[0].client.compile(
      stablehlo,
      xla.DeviceList(where.devices),
      _options(xla, [device.id for device in where.devices]),
    )
    return executable, time.perf_counter() - start


def _options(xla: Any, devices: Sequence[int]) -> Any:
  """Returns options for one replica on each device and no partitioning."""
  options = xla.CompileOptions()
  options.num_replicas = len(devices)
  options.num_partitions = 1
  options.device_assignment = xla.DeviceAssignment.create(
    np.array(devices).reshape(len(devices), 1)
  )
  return options
