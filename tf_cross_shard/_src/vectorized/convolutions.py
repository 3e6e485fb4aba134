"""Converters of convolutions with a filter for each replica.

The replicas' channels are concatenated, and so are their filters:

    same batch for all replicas   [b, h, w, in]      one filter with N * out
    a batch for each replica      [b, h, w, N * in]  N groups of channels

The second form is a grouped convolution. TensorFlow computes its gradients on
GPUs, and on CPUs only with oneDNN. XLA's grouped convolutions are slow on CPUs.
In both cases, convolutions run once for each replica. CPU time of a convolution
with its gradients, 8 replicas, 32 examples of 7 x 7 x 8, in milliseconds: once
for each replica 3.1, grouped 1.7; with XLA 3.6 and 59.
"""

import functools
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core.wrapped import kernels
from tf_cross_shard._src.vectorized import vectorizer
from tf_cross_shard._src.vectorized.vectorizer import Call, converts, wrap

_raw: Final = tf.raw_ops


@converts("Conv2D", forced=False)
def _convolve(call: Call) -> Any:
  x, filters = call.input(0), call.input(1)
  if not filters.is_stacked:
    return vectorizer.convert_by_pfor(call)
  if not _can_concatenate(call, x.t, filters.t, x.is_stacked):
    return vectorizer.in_loop(call)
  batch = _concatenate(x.t) if x.is_stacked else x.t
  merged = _concatenate(filters.t)
  return _split(call, _raw.Conv2D(input=batch, filter=merged, **_attrs(call)))


@converts("Conv2DBackpropInput", forced=False)
def _differentiate_by_input(call: Call) -> Any:
  filters, gradient = call.input(1), call.input(2)
  if not filters.is_stacked:
    return vectorizer.convert_by_pfor(call)
  x = call.op.outputs[0]
  if not gradient.is_stacked or not _can_concatenate(call, x, filters.t):
    return vectorizer.in_loop(call)
  sizes = call.unstacked_input(0) * [1, 1, 1, filters.t.shape[0]]
  result = _raw.Conv2DBackpropInput(
    input_sizes=sizes,
    filter=_concatenate(filters.t),
    out_backprop=_concatenate(gradient.t),
    **_attrs(call),
  )
  return _split(call, result)


@converts("Conv2DBackpropFilter", forced=False)
def _differentiate_by_filter(call: Call) -> Any:
  x, gradient = call.input(0), call.input(2)
  filters = call.op.outputs[0]
  if not gradient.is_stacked or not _can_concatenate(
    call, x.t, filters, x.is_stacked
  ):
    return vectorizer.in_loop(call)
  sizes = call.unstacked_input(1) * [1, 1, 1, gradient.t.shape[0]]
  result = _raw.Conv2DBackpropFilter(
    input=_concatenate(x.t) if x.is_stacked else x.t,
    filter_sizes=sizes,
    out_backprop=_concatenate(gradient.t),
    **_attrs(call),
  )
  return _split(call, result)


def _attrs(call: Call) -> dict[str, Any]:
  names = "strides", "padding", "explicit_paddings", "dilations"
  attrs = {name: call.get_attr(name) for name in names}
  return {**attrs, "padding": attrs["padding"].decode()}


def _can_concatenate(
  call: Call, x: tf.Tensor, filters: tf.Tensor, with_groups: bool = True
) -> bool:
  """Returns whether one convolution can compute those of all replicas."""
  return (
    call.get_attr("data_format") == b"NHWC"
    and x.shape[-1] is not None
    and x.shape[-1] == filters.shape[-2]  # Otherwise it has groups already.
    and not (with_groups and kernels.is_compiled())
    and not (with_groups and not _has_groups(x.dtype, call.get_attr("padding")))
  )


@functools.cache
def _has_groups(dtype: tf.DType, padding: bytes) -> bool:
  """Returns whether TensorFlow has gradients of grouped convolutions here."""
  pads = [[0, 0], [1, 0], [0, 1], [0, 0]]

  @tf.function(autograph=False)
  def differentiate() -> Any:
    x, filters = tf.ones([1, 3, 3, 2], dtype), tf.ones([2, 2, 1, 2], dtype)
    padded = pads if padding == b"EXPLICIT" else padding.decode()
    return tf.gradients(tf.nn.conv2d(x, filters, 1, padded), [x, filters])

  with tf.init_scope():
    try:
      differentiate()
    except (tf.errors.OpError, ValueError):
      return False
  return True


def _concatenate(stack: tf.Tensor) -> tf.Tensor:
  """`[N, a, b, c, d]` to `[a, b, c, N * d]`."""
  n, *others, last = tf.unstack(tf.shape(stack), 5)
  together = tf.reshape(
    tf.transpose(stack, [1, 2, 3, 0, 4]), tf.stack([*others, n * last])
  )
  shape = stack.shape
  together.set_shape([*shape[1:4], shape[4] and shape[0] * shape[4]])
  return together


def _split(call: Call, together: tf.Tensor) -> Any:
  """`[a, b, c, N * d]` to `[N, a, b, c, d]`."""
  *others, last = tf.unstack(tf.shape(together), 4)
  n = vectorizer.num_models(call)
  stack = tf.transpose(
    tf.reshape(together, tf.stack([*others, n, last // n])), [3, 0, 1, 2, 4]
  )
  stack.set_shape([n, *call.op.outputs[0].shape])
  return [wrap(stack, True)]
