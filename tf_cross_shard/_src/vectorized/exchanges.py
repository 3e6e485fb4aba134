"""Converters of exchanges between data-parallel replicas.

An all-reduce becomes a sum over the entries of a group of replicas.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.vectorized import replica_context
from tf_cross_shard._src.vectorized.vectorizer import (
  Call,
  converts,
  stacked,
  wrap,
)


class _Groups:
  """The groups of an exchange.

  Attributes:
    assignment: `[groups, size]`: the members of each group.
    group_of: `[N]`: the group of each replica.
    position: `[N]`: the place of each replica in its group.
  """

  def __init__(self, call: Call) -> None:
    if call.pfor.mask is not None:
      raise NotImplementedError(
        "Replicas exchange values inside a conditional that only some of them"
        " enter. Move the exchange out of it."
      )
    self.assignment = np.asarray(tf.get_static_value(call.op.inputs[1]))
    self.size = self.assignment.shape[1]
    self.group_of = np.zeros(self.assignment.size, np.int32)
    self.position = np.zeros(self.assignment.size, np.int32)
    for group, members in enumerate(self.assignment):
      self.group_of[members] = group
      self.position[members] = np.arange(self.size)

  def sums(self, rows: tf.Tensor) -> tf.Tensor:
    """Returns the sum of each group's rows, `[groups, ...]`."""
    dtype = rows.dtype
    # As the other engines do: add half precision in float32.
    if dtype in (tf.bfloat16, tf.float16):
      rows = tf.cast(rows, tf.float32)
    members = [tf.gather(rows, self.assignment[:, i]) for i in range(self.size)]
    return tf.cast(tf.add_n(members), dtype)


@converts("XlaAllReduce")
def _all_reduce(call: Call) -> Any:
  if replica_context.ALL_TO_ALL in call.op.name:
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
  groups, own = _Groups(call), stacked(call, 0)
  parts = tf.reshape(
    groups.sums(own), [len(groups.assignment), groups.size, -1]
  )
  places = np.stack([groups.group_of, groups.position], 1)
  return [wrap(tf.gather_nd(parts, places), True)]


def _all_to_all(call: Call) -> Any:
  groups, own = _Groups(call), stacked(call, 0)
  shape = tf.shape(own)
  # slices[r, i] is what replica r sends to member i of its group.
  slices = tf.reshape(
    own, tf.concat([[groups.assignment.size, groups.size, -1], shape[2:]], 0)
  )
  senders = groups.assignment[groups.group_of]  # [N, size]
  receiver = np.broadcast_to(groups.position[:, np.newaxis], senders.shape)
  received = tf.gather_nd(slices, np.stack([senders, receiver], -1))
  return [wrap(tf.reshape(received, shape), True)]


@converts("Identity", forced=False)
def _identity(call: Call) -> Any:
  tensor, is_stacked, _ = call.input(0)
  if is_stacked and replica_context.SAME in call.op.node_def.attr:
    return [wrap(tensor[0], False)]
  return [wrap(tf.identity(tensor), is_stacked)]
