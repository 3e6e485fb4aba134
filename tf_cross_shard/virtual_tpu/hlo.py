"""What stands in an XLA module: its outputs, aliases and collectives."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

# Operations that move data between replicas. Asynchronous ones are counted
# where they start.
_COLLECTIVES: Final = frozenset(
  kind + start
  for kind in (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
  )
  for start in ("", "-start")
)
_BITS: Final = {"PRED": 8, "TOKEN": 0, "OPAQUE_TYPE": 0, "C64": 64, "C128": 128}
_NAMES: Final = {"PRED": "bool"}


@dataclasses.dataclass(frozen=True)
class Collective:
  """One operation in which replicas exchange data."""

  kind: str
  dtype: str
  shapes: tuple[tuple[int, ...], ...]
  bytes: int
  groups: tuple[tuple[int, ...], ...]


class Module:
  """An HLO module that can be read and slightly changed."""

  def __init__(self, serialized: bytes) -> None:
    """Parses a module."""
    self._proto = hlo_pb2.HloModuleProto.FromString(serialized)
    self._by_id = {
      instruction.id: instruction
      for computation in self._proto.computations
      for instruction in computation.instructions
    }

  @property
  def num_parameters(self) -> int:
    """How many arrays the module takes."""
    return len(self._proto.host_program_shape.parameters)

  @property
  def num_outputs(self) -> int:
    """How many arrays the module answers."""
    return len(self._results())

  def output_shapes(self) -> list[tuple[int, ...]]:
    """The shape of each array that the module answers."""
    return [tuple(each.dimensions) for each in self._results()]

  def outputs_to_parameters(self) -> dict[int, int]:
    """Of each output that may take over a parameter's memory: both numbers."""
    return {
      next(iter(entry.output_shape_index), 0): entry.parameter_number
      for entry in self._proto.input_output_alias.entries
    }

  def reductions(self) -> list[tuple[str, str]]:
    """What each all-reduce does to two numbers: operation and dtype."""
    results = {
      computation.id: self._by_id[computation.root_id]
      for computation in self._proto.computations
    }
    roots = [
      results[instruction.called_computation_ids[0]]
      for instruction in self._by_id.values()
      if instruction.opcode == "all-reduce"
    ]
    return [(root.opcode, _dtype(root.shape)) for root in roots]

  def portable(self, float64_sum: str) -> bytes:
    """The module in a form that all compilers take.

    StableHLO has no copy operation. A reshape to the same shape does the same;
    the compiler makes the copies that it needs. Sums of float64 numbers become
    such sums again.
    """
    for instruction in self._by_id.values():
      if instruction.opcode == "copy":
        instruction.opcode = "reshape"
      is_sum = instruction.opcode == "all-reduce"
      if is_sum and float64_sum in instruction.metadata.op_name:
        self._sum_float64(instruction)
    serialized: bytes = self._proto.SerializeToString()
    return serialized

  def dynamic_operations(self) -> list[str]:
    """Source names of operations whose shape depends on data."""
    return [
      instruction.metadata.op_name or instruction.name
      for instruction in self._by_id.values()
      if any(
        True in shape.is_dynamic_dimension
        for shape in _leaves(instruction.shape)
      )
    ]

  def custom_calls(self) -> list[str]:
    """Targets of calls to code that XLA does not compile itself."""
    return [
      instruction.custom_call_target
      for instruction in self._by_id.values()
      if instruction.opcode == "custom-call"
    ]

  def collectives(self, num_replicas: int) -> list[Collective]:
    """Every exchange between replicas, in the order of the module."""
    return [
      self._collective(instruction, num_replicas)
      for instruction in self._by_id.values()
      if instruction.opcode in _COLLECTIVES
    ]

  def _sum_float64(self, reduce: Any) -> None:
    """Lets an all-reduce of words sum the numbers that they are made of."""
    words = self._by_id[reduce.operand_ids[0]]
    numbers = self._by_id[words.operand_ids[0]]
    reduce.operand_ids[0] = numbers.id
    reduce.shape.CopyFrom(numbers.shape)
    for back in self._by_id.values():
      if reduce.id in back.operand_ids and back.opcode == "bitcast-convert":
        back.opcode = "reshape"
    for computation in self._proto.computations:
      if computation.id not in reduce.called_computation_ids:
        continue
      shape = computation.program_shape
      for each in computation.instructions:
        each.shape.element_type = xla_data_pb2.PrimitiveType.F64
      for parameter in (*shape.parameters, shape.result):
        parameter.element_type = xla_data_pb2.PrimitiveType.F64

  def _results(self) -> list[Any]:
    """The arrays that the module answers; a single one is no tuple."""
    result = self._proto.host_program_shape.result
    is_tuple = result.element_type == xla_data_pb2.PrimitiveType.TUPLE
    return list(result.tuple_shapes) if is_tuple else [result]

  def _collective(self, instruction: Any, num_replicas: int) -> Collective:
    """What one instruction exchanges."""
    operands = [self._by_id[i] for i in instruction.operand_ids]
    shapes = [leaf for each in operands for leaf in _leaves(each.shape)]
    dtypes = dict.fromkeys(_dtype(shape) for shape in shapes)
    return Collective(
      kind=instruction.opcode.removesuffix("-start"),
      dtype="+".join(dtypes),
      shapes=tuple(tuple(shape.dimensions) for shape in shapes),
      bytes=sum(map(_num_bytes, shapes)),
      groups=_groups(instruction) or (tuple(range(num_replicas)),),
    )


def _leaves(shape: Any) -> Iterator[Any]:
  """The arrays in a shape, which may be a tuple."""
  if not shape.tuple_shapes:
    yield shape
  for each in shape.tuple_shapes:
    yield from _leaves(each)


def _dtype(shape: Any) -> str:
  """HLO's name of an array's dtype."""
  name = xla_data_pb2.PrimitiveType.Name(shape.element_type)
  return _NAMES.get(name, name.lower())


def _num_bytes(shape: Any) -> int:
  """The size of an array."""
  name = xla_data_pb2.PrimitiveType.Name(shape.element_type)
  digits = "".join(filter(str.isdigit, name[:4])) or "0"
  bits = _BITS.get(name, 8 if name.startswith("F8") else int(digits))
  if name == "BF16":
    bits = 16
  return math.prod(shape.dimensions) * bits // 8


def _groups(instruction: Any) -> tuple[tuple[int, ...], ...]:
  """The replica groups; empty for one group of all."""
  listed = instruction.replica_groups
  if listed:
    return _listed_groups(listed)
  # A field that this TensorFlow does not know of would look like no groups.
  described = instruction.collective_device_list
  for iota in (
    getattr(instruction, "iota_collective_device_list", None),
    described.iota_replica_group_list,
  ):
    if iota is not None and iota.num_replica_groups:
      return _iota_groups(iota)
  return _listed_groups(described.replica_groups)


def _listed_groups(groups: Any) -> tuple[tuple[int, ...], ...]:
  """Groups that are written out."""
  return tuple(tuple(group.replica_ids) for group in groups)


def _iota_groups(described: Any) -> tuple[tuple[int, ...], ...]:
  """Groups given as a reshaped and transposed range of replicas."""
  dimensions = list(described.iota_reshape_dims)
  ids = np.arange(math.prod(dimensions)).reshape(dimensions)
  ids = ids.transpose(list(described.iota_transpose_perm))
  shape = described.num_replica_groups, described.num_devices_per_group
  return tuple(map(tuple, ids.reshape(shape).tolist()))
