"""Clipping of one replica's own gradients, before they are summed."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_cross_shard import sparse

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


def clip(
  grads: Sequence[Gradient],
  *,
  clipnorm: float | None = None,
  global_clipnorm: float | None = None,
  clipvalue: float | None = None,
) -> list[Gradient]:
  """Clips gradients by norm, by global norm or by value.

  With `g_i` the gradients and `c` the limit:

      clipnorm         g_i * min(1, c / ||g_i||)
      global_clipnorm  g_i * min(1, c / sqrt(sum_j ||g_j||^2))
      clipvalue        min(max(g_i, -c), c)

  Rows of a sparse gradient that share an index are added first: the norm of a
  gradient does not depend on how it is written down.

  >>> clip([tf.constant([3.0, 4.0]), None], clipnorm=1.0)[0].numpy().tolist()
  [0.6000000238418579, 0.800000011920929]

  Args:
    grads: Dense or sparse gradients of one replica; None passes through.
    clipnorm: Largest norm of each gradient. None does not clip.
    global_clipnorm: Largest norm of all gradients together.
    clipvalue: Largest absolute value of an element.

  Returns:
    The clipped gradients in the same order.
  """
  limits = (clipnorm, global_clipnorm, clipvalue)
  if limits == (None, None, None):
    return list(grads)
  merged = [
    sparse.merge_duplicates(grad)
    if isinstance(grad, tf.IndexedSlices)
    else grad
    for grad in grads
  ]
  if clipnorm is not None:
    return [_each(grad, tf.clip_by_norm, clipnorm) for grad in merged]
  if clipvalue is not None:
    lowest, highest = -clipvalue, clipvalue
    return [_each(grad, tf.clip_by_value, lowest, highest) for grad in merged]
  clipped, _ = tf.clip_by_global_norm(merged, global_clipnorm)
  return list(clipped)


def _each(
  grad: Gradient, clip_tensor: Callable[..., tf.Tensor], *limits: Any
) -> Gradient:
  """Clips a dense gradient or the rows of a sparse one; None stays None."""
  if isinstance(grad, tf.IndexedSlices):
    values = clip_tensor(grad.values, *limits)
    return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
  return None if grad is None else clip_tensor(grad, *limits)
