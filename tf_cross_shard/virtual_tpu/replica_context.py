"""The context of a replica's function while it is traced."""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

# The name scope of float64 sums, which `hlo.Module.portable` looks for.
FLOAT64_SUM: Final = "CrossReplicaSumOfFloat64"
# And of exchanges, which TensorFlow has no operation for that CPUs lower.
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
  if tensor.dtype == tf.float64:
    # TPUs sum float64, but this operation does not take it. It travels as pairs
    # of words, which `hlo.Module.portable` makes numbers again.
    if tensor.shape.num_elements() == 0:
      return tensor
    with tf.name_scope(FLOAT64_SUM):
      # Without the barrier XLA turns a constant into words at compile time.
      [hidden] = gen_xla_ops.xla_optimization_barrier(input=[tensor])
      words = cross_replica_sum(tf.bitcast(hidden, tf.uint32), group_assignment)
      return tf.bitcast(words, tf.float64)
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
    return tf.cast(gen_xla_ops.xla_replica_id(), tf.int32)

  def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
    """Concatenates the replicas' values."""
    places = tf.range(self.strategy.num_replicas_in_sync)

    def gather(tensor: Any) -> tf.Tensor:
      parts = self._exchange(tf.convert_to_tensor(tensor), places)
      return tf.concat(parts, axis)

    return tf.nest.map_structure(gather, value)

  def of_first_replica(self, value: Any) -> tf.Tensor:
    """Replica 0's value."""
    tensor = tf.convert_to_tensor(value)
    if tf.get_static_value(tensor) is not None:
      return tensor  # One program: a constant is the same on all replicas.
    return self._exchange(tensor, tf.range(1))[0]

  def _exchange(self, tensor: tf.Tensor, places: tf.Tensor) -> list[tf.Tensor]:
    """The values of the replicas whose numbers are `places`, in order.

    A sum in which each is in its own place.
    """
    dtype = tensor.dtype
    if dtype.is_complex:
      parts = tf.math.real(tensor), tf.math.imag(tensor)
      return list(map(tf.complex, *(self._exchange(x, places) for x in parts)))
    if dtype.size < 4:  # All of its values are numbers of a wider dtype.
      wide = tf.cast(tensor, tf.float32 if dtype.is_floating else tf.int32)
      return [tf.cast(x, dtype) for x in self._exchange(wide, places)]
    # As words, every bit arrives, and so do dtypes that TPUs do not sum.
    words = tf.bitcast(tensor, tf.uint32)
    is_own = places == self.replica_id_in_sync_group
    own = tf.reshape(is_own, [-1, *[1] * words.shape.rank])
    spread = tf.where(own, words[None], tf.zeros([], words.dtype))
    sums = tf.unstack(self.all_reduce("SUM", spread), places.shape[0])
    return [tf.bitcast(total, dtype) for total in sums]
