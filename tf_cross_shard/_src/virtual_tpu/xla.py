"""Runs XLA modules on this CPU through jaxlib, and compiles them for TPUs.

This is the only file that uses jax, jaxlib and libtpu. Their interfaces for
whole XLA modules are private, so only tested versions are accepted. The
libraries are imported when they are first needed.
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
from collections.abc import Callable, Sequence
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


def require(*distributions: str) -> None:
  """Raises `ImportError` unless tested versions of libraries are installed."""
  # One extra has all that the call needs, so that nobody installs twice.
  extra = "tpu-compiler" if "libtpu" in distributions else "virtual-tpu"
  remedy = f"In your clone of tf_cross_shard, run: pip install '.[{extra}]'."
  for distribution in distributions:
    tested = TESTED[distribution]
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


# A jax.Array that consists of one array for each replica, in its memory.
Buffers = Any
# Runs a program once on all replicas: inputs to outputs.
Executable = Callable[[Sequence[Buffers]], list[Buffers]]


def to_numpy(buffers: Buffers, replica: int) -> np.ndarray:
  """Returns a view of one replica's array, which the next step overwrites."""
  return np.asarray(buffers._arrays[replica])


class Client:
  """Virtual devices, one for each replica, that share this machine's CPU.

  The settings of jax do not change.
  """

  def __init__(self, num_replicas: int) -> None:
    self.num_replicas = num_replicas
    self._jax = importlib.import_module("jax")
    self._xla = importlib.import_module("jax._src.lib").xla_client
    self._core = importlib.import_module("jax._src.core")
    self._array = importlib.import_module("jax._src.array")
    self._client = self._xla.make_cpu_client(num_devices=num_replicas)
    self._devices = tuple(self._client.devices())
    # To jax, the replicas' arrays are copies of one array; it does not compare
    # them. A NamedSharding would stay in jax's caches and keep the threads of
    # the client alive.
    shardings = importlib.import_module("jax._src.sharding_impls")
    self._sharding = shardings.GSPMDSharding.get_replicated(self._devices)
    self._shardings = tuple(
      map(self._jax.sharding.SingleDeviceSharding, self._devices)
    )

  def put(self, arrays: Sequence[np.ndarray]) -> Buffers:
    """Copies the i-th array to the i-th replica, for each replica."""
    first = arrays[0]
    with self._jax.enable_x64(True):
      aval = self._core.ShapedArray(first.shape, first.dtype)
      # Put the arrays one by one: jax would put the first array on every
      # device, because it takes the others for copies. The public functions
      # take eight times as long, and every argument of every step passes here.
      parts = [
        self._xla.batched_device_put(aval, sharding, [array], [device])
        for array, sharding, device in zip(
          arrays, self._shardings, self._devices, strict=True
        )
      ]
      return self._array.ArrayImpl(
        aval, self._sharding, parts, committed=True, _skip_checks=True
      )

  def compile(
    self, module: bytes, outputs: Sequence[tuple[tuple[int, ...], Any]]
  ) -> Executable:
    """Compiles a module for all replicas, given each output's shape and dtype.

    Returns a function that runs the module once on every replica, and waits
    until all replicas have ended.
    """
    loaded = self._client.compile_and_load(
      _to_stablehlo(self._xla, module),
      self._xla.DeviceList(self._devices),
      _options(self._xla, range(self.num_replicas)),
    )
    with self._jax.enable_x64(True):
      handlers = [
        self._xla.array_result_handler(
          self._core.ShapedArray(shape, dtype),
          self._sharding,
          committed=True,
          _skip_checks=True,
        )
        for shape, dtype in outputs
      ]

    def run(arguments: Sequence[Buffers]) -> list[Buffers]:
      results = loaded.execute_sharded(arguments)
      outputs: list[Buffers] = results.consume_with_handlers(handlers)
      for output in outputs:
        output.block_until_ready()
      return outputs

    return run


@dataclasses.dataclass(frozen=True)
class Topology:
  """The devices of a TPU slice.

  Attributes:
    name: The name of the slice, such as "v5e:4x2".
    kind: libtpu's name of the devices.
    coordinates: For each device: x, y, z, and the core on the chip.
    devices: libtpu's description of each device.
  """

  name: str
  kind: str
  coordinates: tuple[tuple[int, ...], ...]
  devices: tuple[Any, ...]


@functools.cache
def topology(name: str) -> Topology:
  """Returns the TPU slice with this name, as libtpu describes it."""
  require(*TESTED)
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
  """Compiles a module for every device of a TPU slice.

  Returns the executable, and the seconds that the compiler took.
  """
  xla = importlib.import_module("jax._src.lib").xla_client
  ir = importlib.import_module("jax._src.lib.mlir").ir
  mlir = importlib.import_module("jax._src.interpreters.mlir")
  with _lock, mlir.make_ir_context():
    stablehlo = ir.Module.parse(_to_stablehlo(xla, module))
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


def _to_stablehlo(xla: Any, module: bytes) -> Any:
  """Converts a serialized HLO module to StableHLO, which compilers accept."""
  computation = xla.XlaComputation(module)
  return xla._xla.mlir.xla_computation_to_mlir_module(computation)
