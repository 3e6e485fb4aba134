"""Checks gradients for NaN and infinity."""

from collections.abc import Sequence

import tensorflow as tf

from tf_cross_shard._src.core.gradients.clipping import Gradient


def all_finite(grads: Sequence[Gradient]) -> tf.Tensor:
  """Returns whether all elements of all gradients are finite.

  >>> bool(all_finite([tf.constant([1.0, 2.0]), None]))
  True
  >>> bool(all_finite([tf.constant([1.0, float("inf")])]))
  False
  """
  values = [
    grad.values if isinstance(grad, tf.IndexedSlices) else grad
    for grad in grads
    if grad is not None
  ]
  finite = [
    tf.reduce_all(tf.math.is_finite(part))
    for value in values
    for part in _floats(value)
  ]
  return tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)


def _floats(value: tf.Tensor) -> list[tf.Tensor]:
  """Splits complex tensors and drops integers, for `tf.math.is_finite`."""
  if value.dtype.is_complex:
    return [tf.math.real(value), tf.math.imag(value)]
  return [value] if value.dtype.is_floating else []
