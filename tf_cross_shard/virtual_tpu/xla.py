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
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Final

import numpy as np
from packaging import specifiers

# setup.cfg holds the same ranges; `tests/xla_test.py` compares them.
TESTED: Final = {
  "jax": ">=0.10.2,<0.11",
  "jaxlib": ">=0.10.2,<0.11",
  "libtpu": ">=0.0.51,<0.0.52",
}
_EXTRAS: Final = {
  "jax": "virtual-tpu",
  "jaxlib": "virtual-tpu",
  "libtpu": "tpu-compiler",
}
# libtpu looks for a TPU machine's metadata unless it is told what to assume.
_NO_TPU_HERE: Final = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_UNKNOWN: Final = (
  "`topology` must be a TPU slice that libtpu knows, such as 'v5e:4x2',"
  " 'v5p:2x2x1', 'v6e:16x16' or 'v4:2x2x1'; got {!r} ({})."
)
_lock: Final = threading.Lock()


def require(distribution: str) -> None:
  """Raises an error unless a tested version of a distribution is installed."""
  extra, tested = _EXTRAS[distribution], TESTED[distribution]
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
      f"This was tested with {distribution}{tested} and uses what is not public"
      f" in it; found {distribution} {version}. {remedy}"
    )


class Buffers:
  """One array per replica, in the replicas' memory."""

  def __init__(self, array: Any) -> None:
    """Wraps what jaxlib made."""
    self._array = array
    self.shape = array.shape
    self.dtype = array.dtype

  @property
  def array(self) -> Any:
    """What executables take."""
    return self._array

  def to_numpy(self, replica: int) -> np.ndarray:
    """A view of one replica's array; copy what is to outlive the next step."""
    return np.asarray(self._array._arrays[replica])

  def addresses(self) -> list[int]:
    """Where each replica's array lies in memory."""
    return [each.unsafe_buffer_pointer() for each in self._array._arrays]


class Client:
  """`num_replicas` devices that share this machine's CPU."""

  def __init__(self, num_replicas: int) -> None:
    """Makes the devices. No setting of jax's own is touched."""
    require("jax")
    require("jaxlib")
    self._jax = importlib.import_module("jax")
    self._xla = importlib.import_module("jax._src.lib").xla_client
    self._core = importlib.import_module("jax._src.core")
    self._array = importlib.import_module("jax._src.array")
    self._client = self._xla.make_cpu_client(num_devices=num_replicas)
    self._devices = tuple(self._client.devices())
    mesh = self._jax.sharding.Mesh(np.array(self._devices), ("replica",))
    self._shardings = tuple(
      map(self._jax.sharding.SingleDeviceSharding, self._devices)
    )
    # jax takes the replicas' arrays for copies of one and does not compare.
    self._sharding = self._jax.sharding.NamedSharding(
      mesh, self._jax.sharding.PartitionSpec()
    )

  @property
  def num_replicas(self) -> int:
    """How many devices there are."""
    return len(self._devices)

  def put(self, arrays: Sequence[np.ndarray]) -> Buffers:
    """Copies one array to each replica."""
    first = arrays[0]
    with self._jax.enable_x64(True):
      aval = self._core.ShapedArray(first.shape, first.dtype)
      # One by one: of what it takes for copies jax would put the first
      # everywhere.
      parts = [
        self._xla.batched_device_put(aval, sharding, [array], [device])
        for array, sharding, device in zip(
          arrays, self._shardings, self._devices, strict=True
        )
      ]
      return Buffers(
        self._array.ArrayImpl(
          aval, self._sharding, parts, committed=True, _skip_checks=True
        )
      )

  def compile(
    self, module: bytes, outputs: Sequence[tuple[tuple[int, ...], Any]]
  ) -> "Executable":
    """Compiles a module for all replicas."""
    options = _options(self._xla, range(self.num_replicas))
    loaded = self._client.compile_and_load(
      _to_stablehlo(self._xla, module),
      self._xla.DeviceList(self._devices),
      options,
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
    return Executable(loaded, handlers)


class Executable:
  """A program loaded onto the replicas of a `Client`."""

  def __init__(self, loaded: Any, handlers: Sequence[Any]) -> None:
    """Takes what jaxlib loaded."""
    self._loaded = loaded
    self._handlers = list(handlers)

  def __call__(self, arguments: Sequence[Buffers]) -> list[Buffers]:
    """Runs all replicas once, and waits for them."""
    results = self._loaded.execute_sharded([each.array for each in arguments])
    outputs = results.consume_with_handlers(self._handlers)
    for output in outputs:
      output.block_until_ready()
    return [Buffers(output) for output in outputs]


@dataclasses.dataclass(frozen=True)
class Topology:
  """The devices of a TPU slice."""

  name: str
  coordinates: tuple[tuple[int, ...], ...]
  kind: str
  devices: tuple[Any, ...]


@functools.cache
def topology(name: str) -> Topology:
  """The slice of this name, as libtpu describes it."""
  for distribution in TESTED:
    require(distribution)
  # libtpu divides by what it is given, and takes no name for another one.
  if not re.fullmatch(r"[a-z]\w*:[1-9]\d*(x[1-9]\d*){1,2}", name):
    raise ValueError(_UNKNOWN.format(name, "not GENERATION:XxY or XxYxZ"))
  with _lock:
    for key, value in _NO_TPU_HERE.items():
      os.environ.setdefault(key, value)
    topologies = importlib.import_module("jax.experimental.topologies")
    try:
      described = topologies.get_topology_desc(
        platform="tpu", topology_name=name
      )
    except Exception as error:
      raise ValueError(_UNKNOWN.format(name, error)) from error
  devices = tuple(described.devices)
  return Topology(
    name=name,
    coordinates=tuple(
      tuple(map(int, (*device.coords, device.core_on_chip)))
      for device in devices
    ),
    kind=str(devices[0].device_kind),
    devices=devices,
  )


def coordinates(name: str) -> tuple[tuple[int, ...], ...]:
  """Where the replicas of a slice are: x, y, z, and the core on the chip."""
  return topology(name).coordinates


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the TPU compiler made of a module."""

  module: bytes
  text: str
  memory: Any
  cost: dict[str, float]
  seconds: float


def compile_for_tpu(module: bytes, where: Topology) -> Compiled:
  """Compiles a module for every device of a slice; needs no TPU."""
  xla = importlib.import_module("jax._src.lib").xla_client
  ir = importlib.import_module("jax._src.lib.mlir").ir
  mlir = importlib.import_module("jax._src.interpreters.mlir")
  context = mlir.make_ir_context()
  options = _options(xla, [device.id for device in where.devices])
  with _lock, context:
    stablehlo = ir.Module.parse(_to_stablehlo(xla, module))
    start = time.perf_counter()
    executable = where.devices[0].client.compile(
      stablehlo, xla.DeviceList(where.devices), options
    )
    seconds = time.perf_counter() - start
  optimized = executable.hlo_modules()[0]
  return Compiled(
    module=optimized.as_serialized_hlo_module_proto(),
    text=optimized.to_string(),
    memory=executable.get_compiled_memory_stats(),
    cost=dict(executable.cost_analysis() or {}),
    seconds=seconds,
  )


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
