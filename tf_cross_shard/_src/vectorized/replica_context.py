"""Traces a replica's function: its context, and exchanges between replicas.

While a replica's function is traced, its replica context is a
`TracedReplicaContext`. Its methods add XLA's operations to the graph, in which
each replica finds its own number and exchanges data with others. So the graph
is the program of a TPU replica. `converters` vectorizes it for this device.
"""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.core.framework import attr_value_pb2

# The name scope of all-to-all exchanges. TensorFlow has no all-to-all operation
# that it can lower for CPUs, so the graph contains a sum in this name scope,
# which stands for the exchange.
ALL_TO_ALL: Final = "CrossReplicaAllToAll"
# The attribute of an identity operation whose input all replicas have.
SAME: Final = "_same_on_all_replicas"
_MARK: Final = "tf_cross_shard_replica_program"


def mark_replica_program() -> None:
  """Marks the graph being built as a replica's program."""
  setattr(tf.compat.v1.get_default_graph(), _MARK, True)


def in_replica_program() -> bool:
  """Returns whether operations created now become part of a replica's program.

  The replica context cannot tell: inside a merge call there is none.
  """
  if tf.executing_eagerly():
    return False
  graph = tf.compat.v1.get_default_graph()
  while graph is not None and not hasattr(graph, _MARK):
    graph = getattr(graph, "outer_graph", None)
  return graph is not None


def cross_replica_sum(
  tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
) -> tf.Tensor:
  """Sums a tensor over this replica's group, inside a replica's program."""
  # TPUs sum float64, but this operation does not: gather the values instead.
  if tensor.dtype == tf.float64:
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
  """Sends the i-th slice along axis 0 to the i-th member of the group.

  The size of axis 0 is a multiple of the size of a group. The result has the
  shape of `tensor`.
  """
  # The operation has no dtypes of 8 bytes: exchange words of 4 bytes.
  words = tf.bitcast(tensor, tf.uint32) if tensor.dtype.size == 8 else tensor
  with tf.name_scope(ALL_TO_ALL):
    received = cross_replica_sum(words, group_assignment)
  return received if words is tensor else tf.bitcast(received, tensor.dtype)


def same_on_all_replicas(tensor: tf.Tensor) -> tf.Tensor:
  """Marks a value that all replicas compute alike, such as a count of calls.

  A condition on this value takes one branch, with all replicas in it.
  """
  marked = tf.identity(tensor)
  attribute = attr_value_pb2.AttrValue(b=True)
  marked.op._set_attr(SAME, attribute)  # noqa: SLF001  # There is no public way.
  return marked


class TracedReplicaContext(tf.distribute.ReplicaContext):
  """The replica context while a replica's function is traced."""

  @property
  def replica_id_in_sync_group(self) -> tf.Tensor:
    """This replica's number, as an operation in the graph being traced."""
    return _replica_id()

  def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
    """Concatenates the tensors of all replicas, or structures of tensors."""

    def gather(tensor: Any) -> tf.Tensor:
      values = _gather(tf.convert_to_tensor(tensor), self._all)
      return tf.concat(tf.unstack(values), axis)

    return tf.nest.map_structure(gather, value)

  def of_first_replica(self, value: Any) -> tf.Tensor:
    """Returns replica 0's value on every replica."""
    tensor = tf.convert_to_tensor(value)
    # All replicas run one program, so a constant is the same on all.
    if tf.get_static_value(tensor) is not None:
      return tensor
    return _gather(tensor, self._all, 1)[0]

  @property
  def _all(self) -> list[list[int]]:
    """The group assignment of one group that holds all replicas."""
    return [list(range(self.strategy.num_replicas_in_sync))]


def _replica_id() -> tf.Tensor:
  """Returns the number of the replica that runs the program."""
  return tf.cast(gen_xla_ops.xla_replica_id(), tf.int32)


def _gather(
  tensor: tf.Tensor,
  group_assignment: Sequence[Sequence[int]],
  count: int | None = None,
) -> tf.Tensor:
  """Gathers the values of the group's first `count` members.

  The gather is a sum. Each replica contributes a tensor with a new axis 0 of
  `count` rows that holds its own value in its own row and zeros elsewhere.

  Returns a tensor of shape `[count, *tensor.shape]`.
  """
  dtype = tensor.dtype
  # Gather the two parts of a complex number separately.
  if dtype.is_complex:
    parts = tf.math.real(tensor), tf.math.imag(tensor)
    gathered = (_gather(part, group_assignment, count) for part in parts)
    return tf.complex(*gathered)
  # A narrow dtype goes through a wider one, which represents all its values.
  if dtype.size < 4:
    wide = tf.cast(tensor, tf.float32 if dtype.is_floating else tf.int32)
    return tf.cast(_gather(wide, group_assignment, count), dtype)
  # Sum 32-bit words: every bit arrives unchanged, and dtypes that TPUs do not
  # sum can be gathered too.
  words = tf.bitcast(tensor, tf.uint32)
  # is_own[i]: whether this replica is member i of its group.
  members = tf.constant(group_assignment)[:, :count]
  is_own = tf.reduce_any(members == _replica_id(), axis=0)
  is_own = tf.reshape(is_own, [-1, *[1] * words.shape.rank])
  spread = tf.where(is_own, words[None], tf.zeros([], words.dtype))
  return tf.bitcast(cross_replica_sum(spread, group_assignment), dtype)
