"""Reads an XLA module: its parameters, shapes and collectives.

HLO is the language of XLA's modules. TensorFlow and the TPU compiler both
return modules in it, serialized as protocol buffers.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

from tf_cross_shard._src.virtual_tpu import exchanges

_COLLECTIVE: Final = re.compile(r"(ragged-)?all-|collective-|reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Collective:
  """An operation in which replicas exchange data.

  Attributes:
    kind: The name of the operation in HLO, such as "all-reduce".
    dtype: The dtype of the operands in HLO, such as "f32".
    shapes: The shape of each operand.
    bytes: The size of all operands together.
    groups: The groups of replicas that exchange data with each other.
  """

  kind: str
  dtype: str
  shapes: tuple[tuple[int, ...], ...]
  bytes: int
  groups: tuple[tuple[int, ...], ...]


class Module:
  """An HLO module, parsed from its serialized form."""

  def __init__(self, serialized: bytes) -> None:
    self._proto = hlo_pb2.HloModuleProto.FromString(serialized)
    self._by_id = {
      instruction.id: instruction
      for computation in self._proto.computations
      for instruction in computation.instructions
    }

  @property
  def num_parameters(self) -> int:
    return len(self._proto.host_program_shape.parameters)

  def portable(self) -> bytes:
    """Serializes the module in a form that all compilers accept."""
    # StableHLO has no copy operation: it becomes a reshape to the same shape. A
    # sum in the name scope of `exchanges.all_to_all` becomes that exchange.
    for instruction in self._by_id.values():
      if instruction.opcode == "copy":
        instruction.opcode = "reshape"
      is_sum = instruction.opcode == "all-reduce"
      if is_sum and exchanges.ALL_TO_ALL in instruction.metadata.op_name:
        instruction.opcode = "all-to-all"
        instruction.dimensions[:] = [0]
        del instruction.called_computation_ids[:]
    return self._proto.SerializeToString()

  def dynamic_operations(self) -> list[str]:
    """Returns the names of TensorFlow operations with shapes set by data."""
    return [
      instruction.metadata.op_name or instruction.name
      for instruction in self._by_id.values()
      if any(True in x.is_dynamic_dimension for x in _leaves(instruction.shape))
    ]

  def collectives(self, num_replicas: int) -> list[Collective]:
    """Returns every exchange between replicas, in the order of the module."""
    collectives = []
    for instruction in self._by_id.values():
      kind = instruction.opcode
      # An asynchronous collective is two operations: count the "-start".
      if not _COLLECTIVE.match(kind) or kind.endswith("-done"):
        continue
      shapes = [
        leaf
        for operand in instruction.operand_ids
        for leaf in _leaves(self._by_id[operand].shape)
      ]
      collectives.append(
        Collective(
          kind=kind.removesuffix("-start"),
          dtype="+".join(dict.fromkeys(map(_dtype, shapes))),
          shapes=tuple(tuple(shape.dimensions) for shape in shapes),
          bytes=sum(map(_num_bytes, shapes)),
          groups=_groups(instruction) or (tuple(range(num_replicas)),),
        )
      )
    return collectives


def _leaves(shape: Any) -> Iterator[Any]:
  """Yields the arrays in a shape, which may be a nested tuple."""
  if not shape.tuple_shapes:
    yield shape
  for element in shape.tuple_shapes:
    yield from _leaves(element)


def _dtype(shape: Any) -> str:
  """Returns the name of an array's dtype in HLO; PRED is called bool."""
  name: str = xla_data_pb2.PrimitiveType.Name(shape.element_type)
  return "bool" if name == "PRED" else name.lower()


def _num_bytes(shape: Any) -> int:
  # The first number in the name is the number of bits: 16 for BF16, 8 for
  # F8E4M3FN. PRED has no number and takes a byte.
  bits = re.search(r"\d+", _dtype(shape))
  return math.prod(shape.dimensions) * int(bits[0] if bits else 8) // 8


def _groups(instruction: Any) -> tuple[tuple[int, ...], ...]:
  """Returns the replica groups; no group means one group of all replicas."""
  devices = instruction.collective_device_list
  iota = devices.iota_replica_group_list
  if not iota.num_replica_groups:
    # Older TensorFlows do not have this field.
    iota = getattr(instruction, "iota_collective_device_list", iota)
  # The short form of groups: a range of replicas, reshaped and transposed.
  if iota.num_replica_groups:
    dimensions = list(iota.iota_reshape_dims)
    ids = np.arange(math.prod(dimensions)).reshape(dimensions)
    ids = ids.transpose(list(iota.iota_transpose_perm))
    return tuple(map(tuple, ids.reshape(iota.num_replica_groups, -1).tolist()))
  groups = instruction.replica_groups or devices.replica_groups
  return tuple(tuple(group.replica_ids) for group in groups)
