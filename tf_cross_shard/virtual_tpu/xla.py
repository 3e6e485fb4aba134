"""XLA through jaxlib: N replicas on this CPU, and the TPU compiler.

The one file that names jax, jaxlib and libtpu, whose interfaces for whole XLA
modules are not public. They are imported when first needed, and only in
versions that this was tested with.
"""

import dataclasses
import functools
import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, Final

import numpy as np
from packaging import specifiers

# setup.cfg holds the same ranges; `tests/unit/virtual_tpu_xla_test.py` compares
# them.
TESTED: Final = {
  "jax": ">=0.10.2,<0.11",
  "jaxlib": ">=0.10.2,<0.11",
  "libtpu": ">=0.0.51,<0.0.52",
}
# libtpu looks for a TPU machine's metadata unless it is told what to assume.
_WITHOUT_TPU: Final = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_lock: Final = threading.Lock()


def require(distribution: str) -> None:
  """Raises an error unless a tested version of a distribution is installed."""
  tested = TESTED[distribution]
  extra = "tpu-compiler" if distribution == "libtpu" else "virtual-tpu"
  remedy = f"Install it with: pip install 'tf-cross-shard[{extra}]'."
  try:
    version = metadata.version(distribution)
  except metadata.PackageNotFoundError:
    raise ImportError(
      f"This needs {distribution}{tested}, which is not installed. {remedy}"
      " (It has no release for Python 3.10, and libtpu none but for Linux on"
      " x86-64.)"
    ) from None
  if version not in specifiers.SpecifierSet(tested):
    raise ImportError(
      f"This was tested with {distribution}{tested} and uses private names of"
      f" it; found {distribution} {version}. {remedy}"
    )


# A jax.Array with one array per replica, in the replicas' memory.
Buffers = Any
Executable = Callable[[Sequence[Buffers]], list[Buffers]]


def to_numpy(buffers: Buffers, replica: int) -> np.ndarray:
  """A view of one replica's array; the next step overwrites it."""
  return np.asarray(buffers._arrays[replica])


class Client:
  """Devices that share this machine's CPU; changes no setting of jax."""

  def __init__(self, num_replicas: int) -> None:
    self.num_replicas = num_replicas
    self._jax = importlib.import_module("jax")
    self._xla = importlib.import_module("jax._src.lib").xla_client
    self._core = importlib.import_module("jax._src.core")
    self._array = importlib.import_module("jax._src.array")
    self._client = self._xla.make_cpu_client(num_devices=num_replicas)
    self._devices = tuple(self._client.devices())
    # jax takes the replicas' arrays for copies of one and does not compare. A
    # NamedSharding would stay in jax's caches, and keep the client's threads.
    shardings = importlib.import_module("jax._src.sharding_impls")
    self._sharding = shardings.GSPMDSharding.get_replicated(self._devices)
    self._shardings = tuple(
      map(self._jax.sharding.SingleDeviceSharding, self._devices)
    )

  def put(self, arrays: Sequence[np.ndarray]) -> Buffers:
    """Copies one array to each replica."""
    first = arrays[0]
    with self._jax.enable_x64(True):
      aval = self._core.ShapedArray(first.shape, first.dtype)
      # One by one: jax would put the first of what it takes for copies
      # everywhere. By its private names: the public ones take eight times as
      # long, and every argument of every step passes here.
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
    """A function that runs a module, with outputs of these shapes and dtypes.

    It runs all replicas once, and waits for them.
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
  """The devices of a TPU slice."""

  name: str
  kind: str
  coordinates: tuple[tuple[int, ...], ...]
  devices: tuple[Any, ...]


@functools.cache
def topology(name: str) -> Topology:
  """The slice of this name, as libtpu describes it."""
  for distribution in TESTED:
    require(distribution)
  try:
    # libtpu divides by the numbers, and takes no name for some other slice.
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
  """Where the replicas of a TPU slice are.

  >>> coordinates("v5e:2x2")
  ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0))

  Args:
    name: Generation and chips in each direction, such as "v5e:4x2".

  Returns:
    For each replica: x, y, z, and the core on the chip.

  Raises:
    ValueError: If there is no such slice.
    ImportError: If libtpu or jaxlib is missing or of an untested version.
  """
  return topology(name).coordinates


def compile_for_tpu(module: bytes, where: Topology) -> tuple[Any, float]:
  """A module compiled for every device of a slice, and the seconds."""
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
  """One partition, and replica r on the r-th of `devices`."""
  options = xla.CompileOptions()
  options.num_replicas = len(devices)
  options.num_partitions = 1
  options.device_assignment = xla.DeviceAssignment.create(
    np.array(devices).reshape(len(devices), 1)
  )
  return options


def _to_stablehlo(xla: Any, module: bytes) -> Any:
  """The form in which compilers take modules."""
  computation = xla.XlaComputation(module)
  return xla._xla.mlir.xla_computation_to_mlir_module(computation)
