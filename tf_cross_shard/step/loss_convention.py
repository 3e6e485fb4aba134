"""Decides what a loss was averaged over, and checks that steps scale it.

A default cannot know where a loss comes from. So the first time that one
decides it is logged, and a step that never scaled its loss is warned about.
"""

import sys
import threading
import types
import weakref
from typing import Any, Final

import tensorflow as tf
from absl import logging

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import settings as settings_lib
from tf_cross_shard.collectives import collective_ops
from tf_cross_shard.gradients import loss_factor

_EXAMPLES: Final = {
  loss_factor.REPLICA: "this replica's examples",
  loss_factor.GLOBAL: "all replicas' examples",
}


_logged_by_all: Final[set[str]] = set()


class LossConvention:
  """The factor of one optimizer's losses.

  >>> pairs = groups_lib.Groups([[0, 1], [2, 3]])
  >>> settings = settings_lib.Settings(loss_averaged_over="global")
  >>> convention = LossConvention(settings, pairs)
  >>> convention.for_loss(loss_factor.REPLICA)
  2.0
  >>> convention.for_gradients()
  1.0
  """

  def __init__(
    self, settings: settings_lib.Settings, groups: groups_lib.Groups
  ) -> None:
    self._settings = settings
    self._groups = groups
    # A replica traces or runs eagerly in one thread.
    self._step = threading.local()
    self._scaled_in_trace = False
    self._ever_scaled = False
    self._logged: set[str] = set()

  def for_loss(self, default: str) -> float:
    """Returns the factor of the loss, and remembers that this step scales it.

    Args:
      default: `"replica"` or `"global"`, where the user chose neither.
    """
    self._ever_scaled = True
    self._step.scaled = True
    trace = weakref.ref(collective_ops.outermost_function())
    self._step.default = default, trace
    # A function that is traced may run in later steps.
    self._scaled_in_trace |= not tf.executing_eagerly()
    return 1.0 if self._settings.scale_gradients else self._factor(default)

  def for_gradients(self) -> float:
    """Returns the factor of the gradients: 1 unless `scale_gradients`."""
    if not self._settings.scale_gradients:
      return 1.0
    default, trace = getattr(self._step, "default", (loss_factor.GLOBAL, None))
    # A TPU's functions are all traced by one thread.
    now = collective_ops.outermost_function()
    is_of_step = trace is not None and trace() is now
    return self._factor(default if is_of_step else loss_factor.GLOBAL)

  def check_was_scaled(self, through_apply: bool, is_divided: bool) -> None:
    """Warns, once, if gradients are summed whose loss was never scaled.

    What comes through `apply` is taken for a loss that is averaged over all
    replicas' examples, as Keras' losses are.

    Args:
      through_apply: Whether the step came through Keras' `apply`.
      is_divided: Whether gradients are divided by a loss scale afterwards.
    """
    if is_divided and not self._ever_scaled:
      self._warn(
        "A LossScaleOptimizer divides gradients by its loss scale, and the loss"
        " was never multiplied by it. Use compute_gradients() or minimize(), or"
        " scale_loss(loss) inside the tape."
      )
      return
    settings = self._settings
    scaled = getattr(self._step, "scaled", False) or settings.scale_gradients
    self._step.scaled = False
    if tf.executing_eagerly():
      # A function that was traced once may scale in every eager step.
      scaled = scaled or self._scaled_in_trace
    factors = self._factors()
    chosen = settings.loss_averaged_over
    if chosen is not None:
      missing = {factors[chosen]}
    elif through_apply:
      missing = {factors[loss_factor.GLOBAL]}
    elif settings.is_mean:
      missing = set(factors.values())  # A loop of one's own has either loss.
    else:
      missing = {1.0}  # The sum of the gradients as they are may be wanted.
    if scaled or missing == {1.0}:
      return
    self._warn(
      "CrossShardOptimizer sums gradients whose loss it never scaled, so"
      ' reduction="%s" is missing its factor: %g if the loss is averaged'
      " over this replica's examples, %g if over all replicas' examples. Pass"
      ' loss_averaged_over="replica" or "global" to say which, and use'
      " compute_gradients() or minimize(), or scale_loss(loss) inside the"
      " tape, or pass scale_gradients=True, the one way within Keras'"
      " MultiOptimizer.",
      settings.reduction,
      factors[loss_factor.REPLICA],
      factors[loss_factor.GLOBAL],
    )

  def _factor(self, default: str) -> float:
    """Returns the factor of the convention; logs the first guess."""
    chosen = self._settings.loss_averaged_over
    factors = self._factors()
    taken = chosen or default
    [other] = set(factors) - {taken}
    if (
      chosen is None and factors[taken] != factors[other] and not _is_in_keras()
    ):
      self._warn(
        "CrossShardOptimizer assumes a loss that is averaged over %s, and"
        ' scales by %g. Pass loss_averaged_over="%s" if that is right. If the'
        ' loss is averaged over %s, pass loss_averaged_over="%s": then the'
        " factor is %g.",
        *(_EXAMPLES[taken], factors[taken], taken),
        *(_EXAMPLES[other], other, factors[other]),
      )
    return factors[taken]

  def _factors(self) -> dict[str, float]:
    """Returns the factor by what the loss is averaged over."""
    groups = self._groups
    return {
      over: loss_factor.loss_factor(
        self._settings.reduction, over, groups.num_replicas, groups.group_size
      )
      for over in _EXAMPLES
    }

  def _warn(self, text: str, *values: Any) -> None:
    """Logs a warning once."""
    # Loops that cannot be edited may make many optimizers.
    is_common = self._settings.scale_gradients
    logged = _logged_by_all if is_common else self._logged
    if text not in logged:
      logged.add(text)
      logging.warning(text, *values)


def _is_in_keras() -> bool:
  """Whether Keras called this package: in `fit`, losses are Keras'.

  Call frames decide about a line of the log here, and about no number.
  """
  frame: types.FrameType | None = sys._getframe(1)
  while frame is not None:
    module = frame.f_globals.get("__name__", "")
    if not module.startswith(("tf_cross_shard", "tensorflow")):
      return module.startswith(("keras.src.", "tf_keras.src."))
    frame = frame.f_back
  return False
