"""Skips steps whose gradients contain a NaN or an infinity, and counts them.

The check looks at the sums over the group. All members of a group have the same
sums, so all members make the same decision without communication. With
`shard_update`, each member has a part of the sums, and `ShardedUpdate` makes
all parts NaN if any part is not finite.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import context as context_lib
from tf_cross_shard._src.core.gradients import finite
from tf_cross_shard._src.core.gradients.clipping import Gradient


class NonfiniteGuard(context_lib.Stage):
  """Applies a step, or skips and counts it.

  Attributes:
    count: An int64 variable: the number of steps with a NaN or an infinity.
      Each replica holds the count of its group. None without `skip_nonfinite`.

  >>> from tf_cross_shard import CrossShardOptimizer
  >>> optimizer = CrossShardOptimizer("sgd", skip_nonfinite=True)
  >>> weight = tf.Variable(3.0)
  >>> _ = optimizer.apply_gradients([(tf.constant(float("nan")), weight)])
  >>> float(weight.numpy()), int(optimizer.skipped_steps.numpy())
  (3.0, 1)
  """

  def __init__(self, context: context_lib.Context) -> None:
    """Creates the variable `count` if `skip_nonfinite` is set."""
    super().__init__(context)
    self._is_on = self.settings.skip_nonfinite
    self.count: Any = None
    if self._is_on:
      with self.engine.making_variables():
        self.count = tf.Variable(
          0, trainable=False, dtype=tf.int64, name="skipped_steps"
        )

  def is_step(self, sums: Sequence[Gradient]) -> Any:
    """Returns whether a step that is being applied changes the weights.

    Call this method inside the `apply` that you pass to `apply_if_finite`,
    which does not call `apply` if `skip_nonfinite` skips the step. A dynamic
    LossScaleOptimizer skips a step whose sums are not finite, so with such an
    optimizer this method checks the sums.
    """
    is_dynamic = self.inner.skips_overflows
    return finite.all_finite(sums) if is_dynamic else True

  def apply_if_finite(
    self, sums: Sequence[Gradient], apply: Callable[[], None]
  ) -> None:
    """Calls `apply`, unless `skip_nonfinite` is set and a sum is not finite."""
    if not self._is_on:
      apply()
      return
    is_finite = finite.all_finite(sums)
    self.count.assign_add(tf.cast(~is_finite, self.count.dtype))
    if self.inner.skips_overflows:
      apply()  # The LossScaleOptimizer skips the step, and lowers its scale.
    else:
      tf.cond(is_finite, apply, lambda: None)
