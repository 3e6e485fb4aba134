"""Skips steps whose gradients are not finite, and counts them.

The sums over the group are checked. All members have the same sums, and so
decide alike without communication.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard.collectives import base as engines
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base


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
    count: How many were not finite, int64; each replica has its group's. None
      if steps are not checked.

  >>> from tf_cross_shard import CrossShardOptimizer
  >>> guard = CrossShardOptimizer("sgd", skip_nonfinite=True)._step.guard
  >>> guard.apply_if_finite([tf.constant(float("nan"))], lambda: 1 / 0)
  >>> int(guard.count.numpy())
  1
  """

  def __init__(
    self, is_on: bool, inner: base.InnerOptimizer, engine: engines.Engine
  ) -> None:
    """Makes the count, where steps are checked."""
    self._is_on = is_on
    self._inner = inner  # It may be put into a LossScaleOptimizer later.
    self.count: Any = None
    if is_on:
      with engine.making_variables():
        self.count = tf.Variable(
          0, trainable=False, dtype=tf.int64, name="skipped_steps"
        )

  @property
  def may_skip(self) -> bool:
    """Whether a step may be left out because of a NaN or an infinity."""
    return self._is_on or self._inner.scales_dynamically

  def is_step(self, sums: Sequence[Gradient]) -> Any:
    """Whether a step with these sums, which is being applied, is one."""
    return all_finite(sums) if self._inner.scales_dynamically else True

  def apply_if_finite(
    self, sums: Sequence[Gradient], apply: Callable[[], None]
  ) -> None:
    """Calls `apply`, unless steps are checked and `sums` are not finite."""
    if not self._is_on:
      apply()
      return
    is_finite = all_finite(sums)
    self.count.assign_add(tf.cast(~is_finite, self.count.dtype))
    if self._inner.scales_dynamically:  # It skips by itself.
      apply()
    else:
      tf.cond(is_finite, apply, lambda: None)
