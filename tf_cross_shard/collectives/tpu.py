"""TPUs: all replicas are one XLA program.

There is one operation, the cross-replica sum with the groups as its operand.
Gradients are not packed: the TPU compiler merges their sums by itself, and a
buffer would only be copied twice. A TPU program has no shapes that depend on
data, and so sparse gradients become dense, as in the TPU's own optimizers.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from tf_cross_shard import groups as groups_lib
from tf_cross_shard.collectives import base, replica_isolation

DTYPES: Final = (
  tf.bfloat16,
  tf.float16,
  tf.float32,
  tf.float64,
  tf.int32,
  tf.uint32,
)


class TPU(base.Engine):
  """Sums over the replicas of a TPU program, grouped or not.

  A strategy of another make whose replicas are one XLA program takes part by
  its methods `extended.cross_replica_sum(tensor, group_assignment)` and
  `extended.all_to_all(tensor, group_assignment)`.
  """

  is_one_program = True

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums each tensor by itself."""
    for tensor in tensors:
      if tensor.dtype not in DTYPES:
        names = ", ".join(dtype.name for dtype in DTYPES)
        raise TypeError(
          f"TPUs sum {names}; got a gradient of dtype {tensor.dtype.name}."
          " Cast it before apply_gradients."
        )
    assignment = self.groups.to_lists()
    return [self._sum(tensor, assignment) for tensor in tensors]

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Not offered: see `keeps_rows`."""
    raise NotImplementedError(
      "A TPU program has no shapes that depend on data, so that replicas"
      " cannot join rows. Make the tensors dense."
    )

  def reduce_scatter(self, row: tf.Tensor) -> tf.Tensor:
    """Each member receives its part only."""
    if row.dtype not in (tf.bfloat16, tf.float16, tf.float32):
      return super().reduce_scatter(row)
    return gen_xla_ops.xla_reduce_scatter(
      input=row,
      group_assignment=_in_order(self.groups),
      scatter_dimension=0,
      reduce_op="Add",
    )

  def all_gather_part(self, part: tf.Tensor) -> tf.Tensor:
    """Each member sends its part to all: there is no operation that gathers."""
    if part.dtype == tf.float64:
      return super().all_gather_part(part)
    return self._exchange(tf.tile(part, [self.groups.group_size]))

  def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
    """Each member receives its row only."""
    return tf.reshape(self._exchange(tf.reshape(rows, [-1])), rows.shape)

  @property
  def bucket_bytes(self) -> None:
    """Nothing is packed."""
    return None

  @property
  def keeps_rows(self) -> bool:
    """No: to merge those of one index would be a shape that depends on data."""
    return False

  @property
  def orders_graphs(self) -> bool:
    """One program: its operations are ordered like any function's."""
    return True

  def isolate(self) -> contextlib.AbstractContextManager[Any]:
    """Merge calls cost nothing here: they run at once, also in `tf.cond`."""
    return replica_isolation.isolate_in_one_program(self.strategy)

  def _exchange(self, tensor: tf.Tensor) -> Any:
    """Gives the i-th slice to the i-th member."""
    exchange = getattr(self.strategy.extended, "all_to_all", _all_to_all)
    return exchange(tensor, _in_order(self.groups))

  def _sum(self, tensor: tf.Tensor, assignment: list[list[int]]) -> Any:
    """One cross-replica sum."""
    of_strategy = getattr(self.strategy.extended, "cross_replica_sum", None)
    if of_strategy is not None:
      return of_strategy(tensor, assignment)
    return tf.raw_ops.CrossReplicaSum(input=tensor, group_assignment=assignment)


def _in_order(groups: groups_lib.Groups) -> list[list[int]]:
  """The groups with members in the order of `Engine.position`."""
  return [sorted(members) for members in groups]


def _all_to_all(tensor: tf.Tensor, assignment: list[list[int]]) -> tf.Tensor:
  """Gives the i-th slice to the i-th member."""
  return tf.raw_ops.AllToAll(
    input=tensor,
    group_assignment=assignment,
    concat_dimension=0,
    split_dimension=0,
    split_count=len(assignment[0]),
  )


def is_tpu(strategy: tf.distribute.Strategy) -> bool:
  """Whether the replicas of a strategy are one XLA program."""
  return isinstance(
    strategy,
    (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy),
  ) or hasattr(strategy.extended, "cross_replica_sum")
