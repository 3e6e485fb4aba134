"""The engines of replicas that run one program: TPUs, and models.

all-reduce       CrossReplicaSum(tensor, group_assignment)
reduce-scatter   XlaReduceScatter(row, group_assignment)
all-gather       AllToAll(group_size copies of the part, group_assignment)
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.reduce import engine, isolation
from tf_cross_shard._src.core.variables import Variable

# The dtypes that CrossReplicaSum supports.
DTYPES: Final = (
  tf.bfloat16,
  tf.float16,
  tf.float32,
  tf.float64,
  tf.int32,
  tf.uint32,
)


class _InOneProgram(engine.Engine):
  """What both engines of one program share."""

  is_single_program = True

  def __init__(
    self,
    strategy: tf.distribute.Strategy,
    groups: groups_lib.Groups,
    program: single_program.SingleProgram,
  ) -> None:
    super().__init__(strategy, groups)
    self._program = program

  def same_on_all_replicas(self, value: tf.Tensor) -> tf.Tensor:
    return self._program.same_on_all_replicas(value)

  def isolate(self) -> contextlib.AbstractContextManager[Any]:
    return isolation.OneProgramContext(self.strategy)


class OneProgram(_InOneProgram):
  """Collectives within groups of the replicas of one XLA program."""

  is_compiled = True
  # As in the TPU's own optimizers: the rows of all replicas would often be more
  # than those of the table.
  supports_sparse = False
  method = "CrossReplicaSum, in one XLA program"

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    for tensor in tensors:
      if tensor.dtype not in DTYPES:
        names = ", ".join(dtype.name for dtype in DTYPES)
        raise TypeError(
          f"{type(self.strategy).__name__} sums only {names}; got a gradient"
          f" of dtype {tensor.dtype.name}. Cast it before apply_gradients."
        )
    assignment = self.groups.to_lists()
    add_up = self._program.cross_replica_sum
    return [add_up(tensor, assignment) for tensor in tensors]

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list(map(self._gather, tensors))

  def reduce_scatter(self, row: tf.Tensor) -> tf.Tensor:
    if row.dtype not in (tf.bfloat16, tf.float16, tf.float32):
      return super().reduce_scatter(row)  # XlaReduceScatter has no float64.
    return gen_xla_ops.xla_reduce_scatter(
      input=row,
      group_assignment=_in_order(self.groups),
      scatter_dimension=0,
      reduce_op="Add",
    )

  def all_gather_part(self, part: tf.Tensor) -> tf.Tensor:
    # TensorFlow has no all-gather operation for TPUs.
    if part.dtype == tf.float64:
      return super().all_gather_part(part)
    return self._gather(part)

  def _gather(self, tensor: tf.Tensor) -> tf.Tensor:
    repeated = tf.concat([tensor] * self.groups.group_size, axis=0)
    return self._program.all_to_all(repeated, _in_order(self.groups))

  def broadcast_from_first(self, variables: Iterable[Variable]) -> None:
    """Gives all members of a group the values of its first member."""
    # Members on a virtual TPU may round the same numbers differently: the last
    # ones of a tensor fill no vector of the processor.
    if self.groups.group_size == 1:
      return
    assignment = _in_order(self.groups)
    with self.isolate():
      for variable in map(variables_lib.native, variables):
        value = tf.convert_to_tensor(variable)
        first = self._program.first_of_group(value, assignment)
        if variable.dtype.is_floating and first is not value:
          variable.assign(first)

  # The TPU compiler merges small sums; packing would copy gradients twice.
  @property
  def bucket_bytes(self) -> None:
    return None


class Models(_InOneProgram, engine.OneDevice):
  """Replicas that are models: there is nothing to sum."""

  method = "nothing to sum: each replica is a model"

  @property
  def num_replicas(self) -> int:
    return self._program.num_copies


def _in_order(groups: groups_lib.Groups) -> list[list[int]]:
  """Returns the groups with their members in the order of `position`."""
  return [sorted(members) for members in groups]
