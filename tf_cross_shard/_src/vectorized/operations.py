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
  """Adds up rows of the same index, with as many rows as before."""
  # Models may have different numbers of distinct indices. So the first of equal
  # indices gets the sum of their rows, and the others get zeros.
  indices, is_stacked, _ = call.input(0)
  if not is_stacked or row_sparse.MERGE not in call.op.node_def.attr:
    return vectorizer.in_loop(call)
  order = tf.argsort(indices, stable=True)
  in_order = tf.gather(indices, order, batch_dims=1)
  places = tf.searchsorted(in_order, indices)
  first = tf.gather(order, places, batch_dims=1)
  position = tf.cast(first, call.op.outputs[1].dtype)
  return [wrap(indices, True), wrap(position, True)]


@converts("Pad", "PadV2", forced=False)
def _pad(call: Call) -> Any:
  """Pads, with zeros or a number. pfor pads with zeros only."""
  rank = call.op.inputs[0].shape.rank
  # TensorFlow pads six axes.
  if rank is None or rank > 5 or any(x.is_stacked for x in call.inputs[1:]):
    return vectorizer.in_loop(call)
  value = call.input(2).t if call.num_inputs > 2 else 0
  padded = tf.pad(
    call.input(0).t,
    tf.pad(call.input(1).t, [[1, 0], [0, 0]]),
    constant_values=value,
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


# pfor's converters are right for four axes only.


@converts("BiasAdd", forced=False)
def _bias_add(call: Call) -> Any:
  """Adds a number for each channel, the last axis or axis 1."""
  value, bias = call.input(0), call.input(1)
  rank = call.op.inputs[0].shape.rank
  if rank is None:
    return vectorizer.in_loop(call)
  is_first = call.get_attr("data_format") == b"NCHW"
  ones = [1] * (rank - 2)
  shape = [-1, *ones] if is_first else [*ones, -1]
  size = tf.shape(bias.t)[-1]
  shape = [size if x == -1 else x for x in [1, *shape]]
  count = [tf.shape(bias.t)[0]] if bias.is_stacked else []
  return [wrap(value.t + tf.reshape(bias.t, [*count, *shape]), True)]


@converts("BiasAddGrad", forced=False)
def _bias_add_grad(call: Call) -> Any:
  gradient, rank = call.input(0).t, call.op.inputs[0].shape.rank
  if rank is None:
    return vectorizer.in_loop(call)
  channel = 1 if call.get_attr("data_format") == b"NCHW" else rank - 1
  axes = [i + 1 for i in range(rank) if i != channel]
  return [wrap(tf.reduce_sum(gradient, axes), True)]


@converts("Squeeze", forced=False)
def _squeeze(call: Call) -> Any:
  """Drops axes of size 1. Without axes, pfor's drops that of one model."""
  value, axes = call.input(0).t, call.get_attr("squeeze_dims")
  if axes:
    axes = [i + 1 if i >= 0 else i for i in axes]
    return [wrap(tf.squeeze(value, axes), True)]
  sizes = tf.shape(value)
  kept = tf.concat([[True], sizes[1:] != 1], axis=0)
  before = call.op.inputs[0].shape
  shape = tf.boolean_mask(sizes, kept)
  if before.is_fully_defined():
    shape = [vectorizer.num_models(call), *(x for x in before if x != 1)]
  return [wrap(tf.reshape(value, shape), True)]


@converts("Softmax", "LogSoftmax", forced=False)
def _softmax(call: Call) -> Any:
  """Computes a softmax over the last axis; TensorFlow takes five axes."""
  value = call.input(0).t
  shape = tf.shape(value)
  flat = tf.reshape(value, tf.stack([-1, shape[-1]]))
  flat = getattr(_raw, call.op_type)(logits=flat)
  return [wrap(tf.reshape(flat, shape), True)]


@converts("SoftmaxCrossEntropyWithLogits", forced=False)
def _cross_entropy(call: Call) -> Any:
  """Repeats logits or labels of one row, which the operation takes."""
  logits, labels = stacked(call, 0), stacked(call, 1)
  shape = tf.broadcast_dynamic_shape(tf.shape(logits), tf.shape(labels))
  flat = tf.stack([-1, shape[-1]])
  loss, gradient = _raw.SoftmaxCrossEntropyWithLogits(
    features=tf.reshape(tf.broadcast_to(logits, shape), flat),
    labels=tf.reshape(tf.broadcast_to(labels, shape), flat),
  )
  loss = tf.reshape(loss, shape[:-1])
  return [wrap(loss, True), wrap(tf.reshape(gradient, shape), True)]


# pfor adds 1 to negative axes, too, and so moves the models.


def _axes(call: Call, i: int) -> tf.Tensor:
  """Returns axes that count from the first one, with that of the models."""
  axes = call.unstacked_input(i)
  rank = tf.cast(tf.rank(call.input(0).t) - 1, axes.dtype)
  return tf.where(axes < 0, axes + rank, axes) + 1


@converts("Transpose", "ConjugateTranspose", forced=False)
def _transpose(call: Call) -> Any:
  if not call.input(0).is_stacked or call.input(1).is_stacked:
    return vectorizer.in_loop(call)
  order = tf.concat([[0], _axes(call, 1)], axis=0)
  operation = getattr(_raw, call.op_type)
  return [wrap(operation(x=call.input(0).t, perm=order), True)]


@converts("Roll", forced=False)
def _roll(call: Call) -> Any:
  if any(x.is_stacked for x in call.inputs[1:]):
    return vectorizer.in_loop(call)
  value, shift = call.input(0).t, call.input(1).t
  return [wrap(_raw.Roll(input=value, shift=shift, axis=_axes(call, 2)), True)]


# pfor's converters fail for some inputs.


# Rare ones. tf.clip_by_value is made of two others.
converts("ApproximateEqual", "ClipByValue", forced=False)(vectorizer.in_loop)


@converts("Fill", forced=False)
def _fill(call: Call) -> Any:
  dims, value = call.unstacked_input(0), call.input(1).t
  rank = call.op.outputs[0].shape.rank
  if rank is None:
    return vectorizer.in_loop(call)
  count = vectorizer.num_models(call)
  value = tf.reshape(value, [count, *[1] * rank])
  shape = tf.concat([tf.constant([count], dims.dtype), dims], axis=0)
  return [wrap(tf.broadcast_to(value, shape), True)]
