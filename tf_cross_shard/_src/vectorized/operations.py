"""Converters of operations that pfor converts wrongly, or does not know."""

from typing import Any, Final

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.vectorized import vectorizer
from tf_cross_shard._src.vectorized.vectorizer import (
  Call,
  converts,
  stacked,
  wrap,
)

_raw: Final = tf.raw_ops


@converts("Unique", forced=False)
def _unique(call: Call) -> Any:
  """Adds up rows of the same index, with as many rows as before.

  Models may have different numbers of distinct indices. So the first of equal
  indices gets the sum of their rows, and the others get zeros.
  """
  indices, is_stacked, _ = call.input(0)
  if not is_stacked or row_sparse.MERGE not in call.op.node_def.attr:
    return vectorizer.in_loop(call)
  order = tf.argsort(indices, stable=True)
  in_order = tf.gather(indices, order, batch_dims=1)
  places = tf.searchsorted(in_order, indices)
  first = tf.gather(order, places, batch_dims=1)
  position = tf.cast(first, call.op.outputs[1].dtype)
  return [wrap(indices, True), wrap(position, True)]


@converts("PadV2", forced=False)
def _pad(call: Call) -> Any:
  """Pads with a value. pfor's own converter pads with zeros."""
  value = call.input(2)
  if call.input(1).is_stacked or value.is_stacked:
    return vectorizer.in_loop(call)
  paddings = tf.pad(call.unstacked_input(1), [[1, 0], [0, 0]])
  padded = _raw.PadV2(
    input=stacked(call, 0), paddings=paddings, constant_values=value.t
  )
  return [wrap(padded, True)]


@converts("Bitcast", forced=False)
def _bitcast(call: Call) -> Any:
  return [wrap(tf.bitcast(call.input(0).t, call.op.outputs[0].dtype), True)]


@converts("L2Loss", forced=False)
def _l2_loss(call: Call) -> Any:
  tensor = call.input(0).t
  axes = list(range(1, tensor.shape.rank))
  return [wrap(tf.reduce_sum(tensor * tensor, axes) / 2, True)]


@converts("ZerosLike", forced=False)
def _zeros(call: Call) -> Any:
  """Returns zeros; pfor's own converter fails for lists of tensors."""
  given = call.input(0)
  zeros = _raw.ZerosLike(x=given.t)
  handle_data_util.copy_handle_data(given.t, zeros)
  return [wrap(zeros, given.is_stacked)]
