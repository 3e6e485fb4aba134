"""The context of a replica's function while it is traced."""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

# The name scope of exchanges, for which TensorFlow has no operation that CPUs
# lower: `hlo.Module.portable` looks for it.
ALL_TO_ALL: Final = "CrossReplicaAllToAll"
_MARK: Final = "tf_cross_shard_replica_program"


def mark_replica_program() -> None:
  """Marks the function being built as a replica's program."""
  setattr(tf.compat.v1.get_default_graph(), _MARK, True)


def in_replica_program() -> bool:
  """Whether what is built now becomes part of a replica's program.

  The replica context does not tell: in a merge call there is none.
  """
  eager = tf.executing_eagerly()
  graph = None if eager else tf.compat.v1.get_default_graph()
  while graph is not None and not hasattr(graph, _MARK):
    graph = getattr(graph, "outer_graph", None)
  return graph is not None


def cross_replica_sum(
  tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
) -> tf.Tensor:
  """Sums a tensor over this replica's group; called in a replica's program."""
  if tensor.dtype == tf.float64:  # TPUs sum it; this operation does not.
    return tf.reduce_sum(_gather(tensor, group_assignment), axis=0)
  return gen_xla_ops.xla_all_reduce(
    input=tensor,
    group_assignment=group_assignment,
    reduce_op="Add",
    mode="CrossReplica",
  )


def all_to_all(
  tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
) -> tf.Tensor:
  """Gives the i-th slice along axis 0 to the i-th member of the group.

  It is written down as a sum; `hlo.Module.portable` makes it an exchange.
  """
  with tf.name_scope(ALL_TO_ALL):
    return cross_replica_sum(tensor, group_assignment)


class TracedReplicaContext(tf.distribute.ReplicaContext):
  """The context in which a replica's function is traced."""

  @property
  def replica_id_in_sync_group(self) -> tf.Tensor:
    """This replica's number, an operation of the function being traced."""
    return _replica_id()

  def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
    """Concatenates the replicas' values."""

    def gather(tensor: Any) -> tf.Tensor:
      values = _gather(tf.convert_to_tensor(tensor), self._all)
      return tf.concat(tf.unstack(values), axis)

    return tf.nest.map_structure(gather, value)

  def of_first_replica(self, value: Any) -> tf.Tensor:
    """Replica 0's value."""
    tensor = tf.convert_to_tensor(value)
    if tf.get_static_value(tensor) is not None:
      return tensor  # One program: a constant is the same on all replicas.
    return _gather(tensor, self._all, 1)[0]

  @property
  def _all(self) -> list[list[int]]:
    """One group of all replicas."""
    return [list(range(self.strategy.num_replicas_in_sync))]


def _replica_id() -> tf.Tensor:
  """The number of the replica that runs the program."""
  return tf.cast(gen_xla_ops.xla_replica_id(), tf.int32)


def _gather(
  tensor: tf.Tensor,
  group_assignment: Sequence[Sequence[int]],
  count: int | None = None,
) -> tf.Tensor:
  """The values of the group's first `count` members along a new axis 0.

  A sum in which each is in its own place.
  """
  dtype = tensor.dtype
  if dtype.is_complex:
    parts = tf.math.real(tensor), tf.math.imag(tensor)
    gathered = (_gather(part, group_assignment, count) for part in parts)
    return tf.complex(*gathered)
  if dtype.size < 4:  # All of its values are numbers of a wider dtype.
    wide = tf.cast(tensor, tf.float32 if dtype.is_floating else tf.int32)
    return tf.cast(_gather(wide, group_assignment, count), dtype)
  # As words, every bit arrives, and so do dtypes that TPUs do not sum.
  words = tf.bitcast(tensor, tf.uint32)
  members = tf.constant(group_assignment)[:, :count]
  is_own = tf.reduce_any(members == _replica_id(), axis=0)
  is_own = tf.reshape(is_own, [-1, *[1] * words.shape.rank])
  spread = tf.where(is_own, words[None], tf.zeros([], words.dtype))
  return tf.bitcast(cross_replica_sum(spread, group_assignment), dtype)
