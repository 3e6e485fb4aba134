"""Skips and counts the steps whose sums contain a NaN or an infinity."""

from collections.abc import Sequence

import tensorflow as tf

from tf_cross_shard._src.core.gradients import clipping
from tf_cross_shard._src.core.reduce import engine as engine_lib
from tf_cross_shard._src.core.variables import Gradient
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


class NonfiniteGuard:
  """Decides, alike on all members of a group, whether a step is applied.

  All members have the same sums, or parts that are all NaN if one part is.
  """

  def __init__(
    self,
    skip_nonfinite: bool,
    wrapped: wrapped_lib.WrappedOptimizer,
    engine: engine_lib.Engine,
  ) -> None:
    self._wrapped = wrapped
    self.skipped_steps: tf.Variable | None = None
    if skip_nonfinite:
      with engine.making_variables():
        self.skipped_steps = tf.Variable(
          0, trainable=False, dtype=tf.int64, name="skipped_steps"
        )

  @property
  def may_skip(self) -> bool:
    """Whether this guard or a dynamic LossScaleOptimizer skips such steps."""
    return self.skipped_steps is not None or self._wrapped.skips_overflows

  def count(self, sums: Sequence[Gradient]) -> tf.Tensor | None:
    """Counts a skipped step; returns whether to apply the step (None: yes)."""
    if self.skipped_steps is None:
      return None
    is_finite = clipping.all_finite(sums)
    self.skipped_steps.assign_add(tf.cast(~is_finite, tf.int64))
    return None if self._wrapped.skips_overflows else is_finite
