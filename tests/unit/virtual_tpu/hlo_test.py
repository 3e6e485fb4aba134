"""Tests how the contents of an XLA module are read."""

from typing import Any

import pytest
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

from tf_cross_shard._src.virtual_tpu import hlo

N = 4
TYPES = xla_data_pb2.PrimitiveType


def _shape(name: str, *dimensions: int) -> Any:
  shape = xla_data_pb2.ShapeProto(element_type=TYPES.Value(name))
  shape.dimensions.extend(dimensions)
  shape.is_dynamic_dimension.extend([False] * len(dimensions))
  return shape


def _tuple(*shapes: Any) -> Any:
  shape = xla_data_pb2.ShapeProto(element_type=TYPES.TUPLE)
  shape.tuple_shapes.extend(shapes)
  return shape


def _module(*instructions: Any) -> hlo.Module:
  proto = hlo_pb2.HloModuleProto(name="module")
  computation = proto.computations.add(name="main", id=1)
  computation.instructions.extend(instructions)
  return hlo.Module(proto.SerializeToString())


def _instruction(id_: int, opcode: str, shape: Any, *operands: int) -> Any:
  instruction = hlo_pb2.HloInstructionProto(
    id=id_, opcode=opcode, name=f"{opcode}.{id_}", shape=shape
  )
  instruction.operand_ids.extend(operands)
  return instruction


class TestCollectives:
  @pytest.mark.parametrize(
    ("dtype", "name", "size"),
    [
      ("F64", "f64", 48),
      ("BF16", "bf16", 12),
      ("PRED", "bool", 6),
      ("C128", "c128", 96),
      ("F8E4M3B11FNUZ", "f8e4m3b11fnuz", 6),
      ("S4", "s4", 3),
    ],
  )
  def test_bytes(self, dtype: str, name: str, size: int) -> None:
    shape = _shape(dtype, 2, 3)
    module = _module(
      _instruction(1, "parameter", shape),
      _instruction(2, "all-reduce", shape, 1),
    )
    [found] = module.collectives(N)
    assert (found.dtype, found.bytes) == (name, size)
    assert found.groups == ((0, 1, 2, 3),)

  def test_merged_and_asynchronous(self) -> None:
    one, two = _shape("F32", 4), _shape("BF16", 2)
    start = _instruction(3, "all-reduce-start", _tuple(one, two), 1, 2)
    for ids in ([0, 1], [2, 3]):
      start.replica_groups.add().replica_ids.extend(ids)
    module = _module(
      _instruction(1, "parameter", one),
      _instruction(2, "parameter", two),
      start,
      _instruction(4, "all-reduce-done", _tuple(one, two), 3),
    )
    pairs = ((0, 1), (2, 3))
    assert module.collectives(N) == [
      hlo.Collective("all-reduce", "f32+bf16", ((4,), (2,)), 20, pairs)
    ]

  def test_groups_as_a_transposed_range(self) -> None:
    shape = _shape("F32", 4)
    reduce = _instruction(2, "all-reduce", shape, 1)
    iota = reduce.collective_device_list.iota_replica_group_list
    iota.num_replica_groups, iota.num_devices_per_group = 2, 4
    iota.iota_reshape_dims.extend([4, 2])
    iota.iota_transpose_perm.extend([1, 0])
    module = _module(_instruction(1, "parameter", shape), reduce)
    [found] = module.collectives(8)
    assert found.groups == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_copies_become_reshapes() -> None:
  shape = _shape("F32", 4)
  module = _module(
    _instruction(1, "parameter", shape), _instruction(2, "copy", shape, 1)
  )
  proto = hlo_pb2.HloModuleProto.FromString(module.portable())
  opcodes = [each.opcode for each in proto.computations[0].instructions]
  assert opcodes == ["parameter", "reshape"]
