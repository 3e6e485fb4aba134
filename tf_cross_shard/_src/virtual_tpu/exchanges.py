"""Exchanges between data-parallel replicas, and their converters.

The exchanges add XLA's operations to the graph, which then is the program of a
TPU replica. The converters make sums over the entries of a group of them.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from tf_cross_shard._src.vectorized import replica_context
from tf_cross_shard._src.vectorized.vectorizer import (
  Call,
  converts,
  stacked,
  wrap,
)

# The name scope of all-to-all exchanges. TensorFlow has no all-to-all operation
# that it can lower for CPUs, so the graph contains a sum in this name scope,
# which stands for the exchange.
ALL_TO_ALL: Final = "CrossReplicaAllToAll"
# The name scope in which replicas combine what they read of a variable.
COMBINED: Final = "CombinedRead"


def cross_replica_sum(
  tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
) -> tf.Tensor:
  """Sums a tensor over this replica's group, inside a replica's program."""
  # TPUs sum float64, but this operation does not: gather the values instead.
  if tensor.dtype == tf.float64:
    return tf.reduce_sum(gather(tensor, group_assignment), axis=0)
  return gen_xla_ops.xla_all_reduce(
    input=tensor,
    group_assignment=group_assignment,
    reduce_op="Add",
    mode="CrossReplica",
  )


def all_to_all(
  tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
) -> tf.Tensor:
  """Sends the i-th of equal slices along axis 0 to the i-th member."""
  # The operation has no dtypes of 8 bytes: exchange words of 4 bytes.
  words = tf.bitcast(tensor, tf.uint32) if tensor.dtype.size == 8 else tensor
  with tf.name_scope(ALL_TO_ALL):
    received = cross_replica_sum(words, group_assignment)
  return received if words is tensor else tf.bitcast(received, tensor.dtype)


def first_of_group(
  tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
) -> tf.Tensor:
  """Returns the value that the first member of this replica's group has."""
  taken_from = [0] * sum(map(len, group_assignment))
  for members in group_assignment:
    for member in members:
      taken_from[member] = members[0]
  return replica_context.taken_from(tensor, taken_from)


class DataParallelContext(replica_context.TracedReplicaContext):
  """The context of a data-parallel replica."""

  def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
    """Concatenates the tensors of all replicas, or structures of tensors."""

    def join(tensor: Any) -> tf.Tensor:
      values = gather(tf.convert_to_tensor(tensor), self._all)
      return tf.concat(tf.unstack(values), axis)

    return tf.nest.map_structure(join, value)

  def of_first_replica(self, value: Any) -> tf.Tensor:
    """Returns replica 0's value on every replica."""
    tensor = tf.convert_to_tensor(value)
    # All replicas run one program, so a constant is the same on all.
    if tf.get_static_value(tensor) is not None:
      return tensor
    return gather(tensor, self._all, 1)[0]

  def combine(self, value: tf.Tensor) -> tf.Tensor:
    """Returns the sum of what replicas read of a variable."""
    with tf.name_scope(COMBINED):
      combined: tf.Tensor = self.all_reduce("SUM", value)
    return combined

  @property
  def _all(self) -> list[list[int]]:
    """The group assignment of one group that holds all replicas."""
    return [list(range(self.strategy.num_replicas_in_sync))]


def gather(
  tensor: tf.Tensor,
  group_assignment: Sequence[Sequence[int]],
  count: int | None = None,
) -> tf.Tensor:
  """Gathers the values of the group's first `count` members: `[count, ...]`."""
  # The gather is a sum: each replica contributes its value in its entry of
  # axis 0, and zeros elsewhere.
  dtype = tensor.dtype
  # Gather the two parts of a complex number separately.
  if dtype.is_complex:
    parts = tf.math.real(tensor), tf.math.imag(tensor)
    gathered = (gather(part, group_assignment, count) for part in parts)
    return tf.complex(*gathered)
  # A narrow dtype goes through a wider one, which represents all its values.
  if dtype.size < 4:
    wide = tf.cast(tensor, tf.float32 if dtype.is_floating else tf.int32)
    return tf.cast(gather(wide, group_assignment, count), dtype)
  # Sum 32-bit words: every bit arrives unchanged, and dtypes that TPUs do not
  # sum can be gathered too.
  words = tf.bitcast(tensor, tf.uint32)
  # is_member[i]: whether this replica is member i of its group.
  members = tf.constant(group_assignment)[:, :count]
  is_member = tf.reduce_any(members == replica_context.replica_id(), axis=0)
  is_member = tf.reshape(is_member, [-1, *[1] * words.shape.rank])
  spread = tf.where(is_member, words[None], tf.zeros([], words.dtype))
  return tf.bitcast(cross_replica_sum(spread, group_assignment), dtype)


# Converters.


class _Groups:
  """The groups of an exchange, `assignment` `[groups, size]`.

  `group_of[i]` is the group of replica i, and `position[i]` its place there.
  """

  def __init__(self, call: Call) -> None:
    self.assignment = np.asarray(tf.get_static_value(call.op.inputs[1]))
    self.size = self.assignment.shape[1]
    self.group_of = np.zeros(self.assignment.size, np.int32)
    self.position = np.zeros(self.assignment.size, np.int32)
    for group, members in enumerate(self.assignment):
      self.group_of[members] = group
      self.position[members] = np.arange(self.size)

  def sums(self, stack: tf.Tensor) -> tf.Tensor:
    """Returns the sum of each group's values, `[groups, ...]`."""
    dtype = stack.dtype
    # As the other engines do: add half precision in float32.
    if dtype in (tf.bfloat16, tf.float16):
      stack = tf.cast(stack, tf.float32)
    members = [
      tf.gather(stack, self.assignment[:, i]) for i in range(self.size)
    ]
    return tf.cast(tf.add_n(members), dtype)


@converts("XlaAllReduce")
def _all_reduce(call: Call) -> Any:
  if ALL_TO_ALL in call.op.name:
    return _all_to_all(call)
  groups, (value, is_stacked, _) = _Groups(call), call.input(0)
  if not is_stacked:
    return [wrap(value * tf.cast(groups.size, value.dtype), False)]
  if groups.size == 1:
    return [wrap(value, True)]
  sums = groups.sums(value)
  if len(groups.assignment) == 1:
    return [wrap(sums[0], False)]
  return [wrap(tf.gather(sums, groups.group_of), True)]


@converts("XlaReduceScatter")
def _reduce_scatter(call: Call) -> Any:
  groups, values = _Groups(call), stacked(call, 0)
  parts = tf.reshape(
    groups.sums(values), [len(groups.assignment), groups.size, -1]
  )
  places = np.stack([groups.group_of, groups.position], 1)
  return [wrap(tf.gather_nd(parts, places), True)]


def _all_to_all(call: Call) -> Any:
  groups, values = _Groups(call), stacked(call, 0)
  shape = tf.shape(values)
  # slices[r, i] is what replica r sends to member i of its group.
  slices = tf.reshape(
    values, tf.concat([[groups.assignment.size, groups.size, -1], shape[2:]], 0)
  )
  senders = groups.assignment[groups.group_of]  # [N, size]
  receiver = np.broadcast_to(groups.position[:, np.newaxis], senders.shape)
  received = tf.gather_nd(slices, np.stack([senders, receiver], -1))
  return [wrap(tf.reshape(received, shape), True)]
