"""Skips steps whose gradients are not finite, and counts them.

The sums over the group are checked. All members have the same sums, and so
decide alike without communication.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard.gradients.clipping import Gradient


def all_finite(grads: Sequence[Gradient]) -> tf.Tensor:
  """Whether no gradient holds a NaN or an infinity.

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
  """The parts of a tensor that `is_finite` takes."""
  if value.dtype.is_complex:
    return [tf.math.real(value), tf.math.imag(value)]
  return [value] if value.dtype.is_floating else []


class NonfiniteGuard:
  """Applies a step, or skips and counts it.

  Attributes:
    is_on: Whether steps are checked.
    count: How many were not finite, int64; each replica has its group's. None
      if steps are not checked.

  >>> from tf_cross_shard import collectives
  >>> engine = collectives.for_strategy(tf.distribute.get_strategy())
  >>> guard = NonfiniteGuard(True, engine)
  >>> guard.apply_if_finite([tf.constant(float("nan"))], lambda: 1 / 0)
  >>> int(guard.count.numpy())
  1
  """

  def __init__(self, is_on: bool, engine: Any) -> None:
    if not isinstance(is_on, bool):
      raise TypeError(f"`skip_nonfinite` must be True or False; got {is_on!r}.")
    self.is_on = is_on
    self.count: Any = None
    if is_on:
      engine.check_conditional("skip_nonfinite")
      with engine.making_variables():
        self.count = tf.Variable(
          0, trainable=False, dtype=tf.int64, name="skipped_steps"
        )

  def apply_if_finite(
    self,
    sums: Sequence[Gradient],
    apply: Callable[[], None],
    always: bool = False,
  ) -> None:
    """Calls `apply`, unless steps are checked and `sums` are not finite.

    With `always` it is called in any case: it skips such steps by itself.
    """
    if not self.is_on:
      apply()
      return
    is_finite = all_finite(sums)
    self.count.assign_add(tf.cast(~is_finite, self.count.dtype))
    if always:
      apply()
    else:
      tf.cond(is_finite, apply, lambda: None)
