"""Converters of operations that pfor converts wrongly, or does not know."""

from collections.abc import Callable
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


@converts("Transpose", "ConjugateTranspose", forced=False)
def _transpose(call: Call) -> Any:
  """Transposes; pfor adds 1 to negative axes, too, and so moves the models."""
  if not call.input(0).is_stacked or call.input(1).is_stacked:
    return vectorizer.in_loop(call)
  value, axes = call.input(0).t, call.input(1).t
  rank = tf.cast(tf.rank(value) - 1, axes.dtype)
  order = tf.concat([[0], tf.where(axes < 0, axes + rank, axes) + 1], axis=0)
  return [wrap(getattr(_raw, call.op_type)(x=value, perm=order), True)]


@converts("BiasAddGrad", forced=False)
def _bias_gradient(call: Call) -> Any:
  """Adds up in float32, as the operation does: sums in float16 stop growing."""
  value = call.input(0).t
  rank = value.shape.rank
  if rank is None:
    return vectorizer.in_loop(call)
  channel = 2 if call.get_attr("data_format") == b"NCHW" else rank - 1
  axes = [axis for axis in range(1, rank) if axis != channel]
  wide = tf.float32 if value.dtype == tf.float16 else value.dtype
  total = tf.reduce_sum(tf.cast(value, wide), axes)
  return [wrap(tf.cast(total, value.dtype), True)]


def _is_bias_right(call: Call) -> bool:
  """Returns whether pfor finds the channels."""
  value, is_bias_stacked = call.op.inputs[0], call.inputs[-1].is_stacked
  if call.get_attr("data_format") == b"NCHW":
    return bool(value.shape.rank == 4)
  return is_bias_stacked or (value.shape.rank or 9) < 5


# Where pfor's converters are right. TensorFlow has a limit of axes for some.
_RIGHT_ONLY_IF: Final[dict[str, Callable[[Call], bool]]] = {
  "BiasAdd": _is_bias_right,
  **dict.fromkeys(
    ("Softmax", "LogSoftmax"),
    lambda call: (call.op.inputs[0].shape.rank or 9) < 5,
  ),
  "Fill": lambda call: (
    not call.input(0).is_stacked and call.input(0).t.dtype == tf.int32
  ),
  "Pad": lambda call: (
    not call.input(1).is_stacked and (call.op.inputs[0].shape.rank or 9) < 6
  ),
  # Without axes, it would also drop that of the models, if it is 1.
  "Squeeze": lambda call: (
    bool(call.get_attr("squeeze_dims")) or vectorizer.num_models(call) > 1
  ),
  # pfor joins the indices with a range of int32.
  "TensorScatterUpdate": lambda call: call.op.inputs[1].dtype == tf.int32,
  **dict.fromkeys(
    ("ApproximateEqual", "ClipByValue", "PadV2", "Roll"), lambda call: False
  ),
}


@converts(*_RIGHT_ONLY_IF, forced=False)
def _by_pfor_or_in_loop(call: Call) -> Any:
  is_right = _RIGHT_ONLY_IF[call.op_type](call)
  return (vectorizer.convert_by_pfor if is_right else vectorizer.in_loop)(call)
