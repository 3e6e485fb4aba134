"""Clips gradients by value, norm or global norm; finds NaN and infinity."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.variables import Gradient

# By precedence: an optimizer uses only the first limit that is set.
LIMITS: Final = ("clipnorm", "global_clipnorm", "clipvalue")


def clip(
  grads: Sequence[Gradient],
  *,
  clipnorm: Any = None,
  global_clipnorm: Any = None,
  clipvalue: Any = None,
  keep_infinite: bool = False,
  sums_rows: bool = True,
) -> list[Gradient]:
  """Clips gradients by the first limit that is set; None stays None."""
  limits = (clipnorm, global_clipnorm, clipvalue)
  if limits == (None, None, None):
    return list(grads)
  # Add up rows that share an index, so that the norm of a gradient does not
  # depend on how it is stored. Keras does not, except after a global norm.
  merged = (
    [row_sparse.merge_duplicates(g) for g in grads] if sums_rows else grads
  )
  # Widen half precision: in float16, the square of 300 is infinite.
  wide = [
    _each(grad, tf.cast, tf.float32)
    if _dtype(grad) in (tf.float16, tf.bfloat16)
    else grad
    for grad in merged
  ]
  if clipnorm is not None:  # g_i * min(1, c / ||g_i||)
    wide = [_each(grad, tf.clip_by_norm, clipnorm) for grad in wide]
  elif global_clipnorm is not None:
    # g_i * min(1, c / norm) with norm = sqrt(sum_j ||g_j||^2), which
    # clip_by_global_norm would compute for each gradient separately.
    norm = tf.sqrt(square_of_norm(wide))
    wide = [
      grad
      if grad is None
      else tf.clip_by_global_norm(
        [grad],
        row_sparse.in_dtype(global_clipnorm, grad.dtype),
        use_norm=tf.cast(norm, grad.dtype),
      )[0][0]
      for grad in wide
    ]
    wide = [row_sparse.merge_duplicates(grad) for grad in wide]
  elif clipvalue is not None:  # min(max(g_i, -c), c)
    wide = [
      _each(grad, _clip_by_value, clipvalue, keep_infinite) for grad in wide
    ]
  return [
    _each(clipped, tf.cast, _dtype(grad))
    for clipped, grad in zip(wide, grads, strict=True)
  ]


def select(
  condition: tf.Tensor | bool,
  clipped: Sequence[Gradient],
  grads: Sequence[Gradient],
) -> list[Gradient]:
  """Returns `clipped` if a condition holds, and `grads` otherwise."""
  if isinstance(condition, bool):
    return list(clipped if condition else grads)
  selected = []
  for new, grad in zip(clipped, grads, strict=True):
    old = row_sparse.merge_duplicates(grad)  # As in `clipped`.
    old = old.values if isinstance(old, tf.IndexedSlices) else old
    selected.append(_each(new, lambda x, y: tf.where(condition, x, y), old))
  return selected


def limits_of(optimizer: Any) -> dict[str, Any]:
  """Returns Keras' clipping limits as arguments of `clip`: 0 becomes None."""
  limits = {name: getattr(optimizer, name, None) for name in LIMITS}
  return {
    name: limit if limit and limit > 0 else None
    for name, limit in limits.items()
  }


def square_of_norm(grads: Sequence[Gradient]) -> tf.Tensor:
  """Returns the sum of the squares of all elements."""
  dtype = tf.float64 if tf.float64 in map(_dtype, grads) else tf.float32
  # l2_loss is half of the sum of squares, in one pass over the elements.
  halves = [
    tf.nn.l2_loss(tf.cast(_values(grad), dtype))
    for grad in grads
    if grad is not None
  ]
  return 2.0 * tf.reduce_sum(tf.stack(halves)) if halves else tf.zeros([])


def all_finite(grads: Sequence[Gradient]) -> tf.Tensor:
  """Returns whether all elements of all gradients are finite."""
  finite = []
  for grad in grads:
    if grad is not None:
      value = grad.values if isinstance(grad, tf.IndexedSlices) else grad
      parts = [value]
      if value.dtype.is_complex:
        parts = [tf.math.real(value), tf.math.imag(value)]
      floats = [part for part in parts if part.dtype.is_floating]
      finite += [tf.reduce_all(tf.math.is_finite(part)) for part in floats]
  return tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)


def spread_nonfinite(grad: Gradient) -> Gradient:
  """Makes all rows NaN if a number in one of them is not finite."""
  if not isinstance(grad, tf.IndexedSlices):
    return grad
  nan = tf.constant(float("nan"), grad.dtype)
  values = tf.where(all_finite([grad]), grad.values, nan)
  return tf.IndexedSlices(values, grad.indices, grad.dense_shape)


def _values(grad: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
  """Returns the elements or rows of a gradient, as real numbers."""
  values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
  return tf.abs(values) if values.dtype.is_complex else values


def _clip_by_value(
  values: tf.Tensor, limit: Any, keep_infinite: bool
) -> tf.Tensor:
  limit = row_sparse.in_dtype(limit, values.dtype)
  clipped = tf.clip_by_value(values, -limit, limit)
  if keep_infinite:  # A later check finds the overflow.
    return tf.where(tf.math.is_inf(values), values, clipped)
  return clipped


def _dtype(grad: Gradient) -> tf.DType | None:
  return None if grad is None else grad.dtype


def _each(
  grad: Gradient, function: Callable[..., tf.Tensor], *arguments: Any
) -> Gradient:
  """Applies a function to a dense gradient, or to the rows of a sparse one."""
  if isinstance(grad, tf.IndexedSlices):
    values = function(grad.values, *arguments)
    return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
  return None if grad is None else function(grad, *arguments)
