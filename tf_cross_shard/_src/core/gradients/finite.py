"""Checks gradients for NaN and infinity."""

from collections.abc import Callable, Sequence

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


def zero_or_nan(
  grads: Sequence[Gradient],
  all_reduce_sum: Callable[[list[tf.Tensor]], list[tf.Tensor]],
) -> tf.Tensor:
  """Returns 0 on all members, or NaN if any member's gradients are not finite.

  Members that have different parts of the gradients have to skip the same
  steps.

  Args:
    grads: This member's gradients.
    all_reduce_sum: Sums tensors over the members.
  """
  is_bad = tf.cast(~all_finite(grads), tf.float32)
  [bad_members] = all_reduce_sum([is_bad])
  return tf.where(bad_members > 0, float("nan"), 0.0)


def _floats(value: tf.Tensor) -> list[tf.Tensor]:
  """Splits complex tensors and drops integers, for `tf.math.is_finite`."""
  if value.dtype.is_complex:
    return [tf.math.real(value), tf.math.imag(value)]
  return [value] if value.dtype.is_floating else []
