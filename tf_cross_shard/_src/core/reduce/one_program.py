"""The engine of TPUs and vectorized replicas, which all run one program.

XLA's collectives receive the groups as an operand:

    all-reduce       CrossReplicaSum(tensor, group_assignment)
    reduce-scatter   XlaReduceScatter(row, group_assignment)
    all-gather       AllToAll(group_size copies of the part, group_assignment)

Gradients are not packed into buffers. The TPU compiler merges small sums by
itself, and packing would only copy the gradients twice.

On TPUs, row-sparse gradients become dense, as in the TPU's own optimizers: the
rows of all replicas would often be more than those of the table. Replicas on
one device send nothing, so they gather rows, as many as there are lookups. No
program has shapes that depend on data, so none updates only the rows in the
batch.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core.gradients import packing
from tf_cross_shard._src.core.reduce import engine, isolation

# The dtypes that CrossReplicaSum supports.
DTYPES: Final = (
  tf.bfloat16,
  tf.float16,
  tf.float32,
  tf.float64,
  tf.int32,
  tf.uint32,
)


class OneProgram(engine.Engine):
  """Collectives within groups of the replicas of one program.

  A strategy other than TPUStrategy, such as VectorizedStrategy, must provide
  the methods `extended.cross_replica_sum(tensor, group_assignment)` and
  `extended.all_to_all(tensor, group_assignment)`. With
  `extended.stacks_replicas`, the replicas are on one device, and the program is
  not compiled by XLA.
  """

  is_spmd = True

  @property
  def method(self) -> str:  # type: ignore[override]
    if self.is_compiled:
      return "CrossReplicaSum, in one XLA program"
    return "add_n of the replicas' rows, in one program"

  @property
  def is_compiled(self) -> bool:  # type: ignore[override]
    return not getattr(self.strategy.extended, "stacks_replicas", False)

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    for tensor in tensors:
      if tensor.dtype not in DTYPES:
        names = ", ".join(dtype.name for dtype in DTYPES)
        raise TypeError(
          f"{type(self.strategy).__name__} sums only {names}; got a gradient"
          f" of dtype {tensor.dtype.name}. Cast it before apply_gradients."
        )
    assignment = self.groups.to_lists()
    return [self._sum(tensor, assignment) for tensor in tensors]

  @property
  def supports_sparse(self) -> bool:  # type: ignore[override]
    return not self.is_compiled

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list(map(self._gather, tensors))

  def reduce_scatter(self, row: tf.Tensor) -> tf.Tensor:
    if row.dtype not in (tf.bfloat16, tf.float16, tf.float32):
      return super().reduce_scatter(row)  # XlaReduceScatter has no float64.
    return gen_xla_ops.xla_reduce_scatter(
      input=self._widened(row),
      group_assignment=_in_order(self.groups),
      scatter_dimension=0,
      reduce_op="Add",
    )

  def all_gather_part(self, part: tf.Tensor) -> tf.Tensor:
    """Concatenates parts: each member sends its part to all members.

    TensorFlow has no all-gather operation for TPUs.
    """
    if part.dtype == tf.float64:
      return super().all_gather_part(part)
    return self._gather(part)

  def _gather(self, tensor: tf.Tensor) -> tf.Tensor:
    exchange = getattr(self.strategy.extended, "all_to_all", _all_to_all)
    repeated = tf.concat([tensor] * self.groups.group_size, axis=0)
    return exchange(repeated, _in_order(self.groups))

  def all_reduce_narrow(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return self.all_reduce_sum(list(map(self._widened, tensors)))

  def _widened(self, tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in the dtype in which this engine adds it.

    A TPU adds in the dtype of the tensors. Replicas on one device send nothing,
    so that a wider sum costs nothing.
    """
    is_wide = self.is_compiled or tensor.dtype not in packing.WIRE_DTYPES
    return tensor if is_wide else tf.cast(tensor, tf.float32)

  def same_on_all_replicas(self, value: tf.Tensor) -> tf.Tensor:
    mark = getattr(self.strategy.extended, "same_on_all_replicas", None)
    return value if mark is None else mark(value)

  @property
  def bucket_bytes(self) -> None:
    return None

  def isolate(self) -> contextlib.AbstractContextManager[Any]:
    return isolation.OneProgramContext(self.strategy)

  def _sum(self, tensor: tf.Tensor, assignment: list[list[int]]) -> Any:
    of_strategy = getattr(self.strategy.extended, "cross_replica_sum", None)
    if of_strategy is not None:
      return of_strategy(tensor, assignment)
    return tf.raw_ops.CrossReplicaSum(input=tensor, group_assignment=assignment)


def _in_order(groups: groups_lib.Groups) -> list[list[int]]:
  """Returns the groups with their members in the order of `position`."""
  return [sorted(members) for members in groups]


def _all_to_all(tensor: tf.Tensor, assignment: list[list[int]]) -> tf.Tensor:
  """Sends the i-th of equal slices to the i-th member."""
  return tf.raw_ops.AllToAll(
    input=tensor,
    group_assignment=assignment,
    concat_dimension=0,
    split_dimension=0,
    split_count=len(assignment[0]),
  )


def runs_one_program(strategy: tf.distribute.Strategy) -> bool:
  """Returns whether the replicas of a strategy run one program."""
  return isinstance(
    strategy,
    (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy),
  ) or hasattr(strategy.extended, "cross_replica_sum")
