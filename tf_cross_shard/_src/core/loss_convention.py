"""Chooses the factor by which a loss is multiplied.

The factor turns the sum over a group into a mean; see `core.loss_factor`.
It depends on whether the loss is averaged over the examples of one replica or
of all replicas. Unless you pass `loss_averaged_over`, a default applies. The
default cannot know where a loss comes from. So you get a warning when a default
is first used, and when a step sums gradients of a loss that was never scaled.
"""

import sys
import threading
import types
from typing import Any, Final

import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import loss_factor
from tf_cross_shard._src.core import settings as settings_lib

# The possible values of `loss_averaged_over`, in words.
_EXAMPLES: Final = {
  loss_factor.REPLICA: "this replica's examples",
  loss_factor.GLOBAL: "all replicas' examples",
}
# Warnings of optimizers with `scale_gradients`. A program that cannot be edited
# may create many such optimizers, so all of them share one set.
_shared_warnings: Final[set[str]] = set()


class LossConvention:
  """Chooses the loss factor; warns if a step seems to use the wrong one.

  >>> settings = settings_lib.Settings(loss_averaged_over="global")
  >>> convention = LossConvention(settings, num_replicas=4, group_size=2)
  >>> convention.for_loss(loss_factor.REPLICA)
  2.0
  >>> convention.for_gradients()
  1.0
  """

  def __init__(
    self,
    settings: settings_lib.Settings,
    num_replicas: int,
    group_size: int,
  ) -> None:
    """Takes the number of replicas in sync, which is 1 if they are models."""
    self._settings = settings
    self._num_replicas = num_replicas
    self._group_size = group_size
    # What the step of the calling replica has done so far. It is local to the
    # thread, because each replica traces, or runs eagerly, in one thread.
    self._step = threading.local()
    self._scaled_in_trace = False
    self._ever_scaled = False
    self._own_warnings: set[str] = set()

  def for_loss(self, default: str) -> float:
    """Returns the factor of the loss, and notes that this step scales it."""
    self._ever_scaled = True
    self._step.scaled = True
    # The function that is being traced may run in later steps.
    self._scaled_in_trace |= not tf.executing_eagerly()
    return 1.0 if self._settings.scale_gradients else self._factor(default)

  def for_gradients(self) -> float:
    """Returns the factor of the gradients: 1 unless `scale_gradients`."""
    is_scaled = self._settings.scale_gradients
    return self._factor(loss_factor.GLOBAL) if is_scaled else 1.0

  def for_compiled(
    self,
    name: str,
    reduction: str | None,
    is_number: bool,
    is_divided: bool,
    is_of_whole_batch: bool = False,
  ) -> float:
    """Returns by what to multiply a loss of `compile`.

    With several replicas, Keras divides a loss by their number if its reduction
    is a mean of several values. Then the factor of a `"global"` loss is right,
    and nothing is to be done. Keras does not divide

    - a loss with `reduction="sum"`, or without a reduction. Gradients of such
      losses are summed over the group: the loss needs no factor;
    - in Keras 3, a loss whose function returns a number. Like tf_keras, this
      method takes the number for a mean over the replica's examples.

    `for_loss` multiplies the sum of all losses of the model by one factor, so
    this method returns the quotient of the right factor and that factor. With
    `loss_averaged_over`, the user has decided, and it returns 1.

    >>> convention = LossConvention(settings_lib.Settings(), 4, 2)
    >>> convention.for_compiled("mse", "sum", False, False)  # Then `for_loss`:
    0.5
    >>> convention.for_loss(loss_factor.GLOBAL)
    2.0

    `is_number` is whether the loss function returns one number for all
    examples, `is_divided` whether Keras divides it by the number of replicas.
    `is_of_whole_batch` is whether every replica has the whole batch, as in
    Keras 3's `train_on_batch`. Then the sum over the group is a mean for every
    loss.
    """
    is_sum = reduction == "sum" or (
      reduction in (None, "none") and not is_number
    )
    factors, chosen = self.factors(), self._settings.loss_averaged_over
    right = factors[loss_factor.REPLICA]
    if is_sum and not is_of_whole_batch:
      right = 1.0
    elif is_sum and right != 1 and chosen is None:
      self._warn(
        "train_on_batch gives every replica the whole batch, so the summed loss"
        " %s is multiplied by %g: each member of a group has the same sum. Use"
        " fit, which divides batches among the replicas, or pass"
        " loss_averaged_over to CrossShardOptimizer to choose another factor.",
        *(name, right),
      )
    if chosen is not None:
      taken = factors[chosen]
      if is_divided:
        right, what = factors[loss_factor.GLOBAL], "divides it by the replicas"
      else:
        what = "sums it over examples"
      if (is_sum or is_divided) and taken != right:
        self._warn(
          'With loss_averaged_over="%s", fit multiplies the loss %s by %g, but'
          " Keras %s, so the right factor is %g. Do not pass"
          " loss_averaged_over: in fit, the optimizer knows Keras' losses.",
          *(chosen, name, taken, what, right),
        )
      return 1.0
    if is_number and not is_sum:
      self._warn(
        "The loss %s returns one number for all examples of a replica. fit"
        " assumes that it is their mean. Better return one value for each"
        " example: Keras reduces them, and you can choose"
        ' reduction="sum" in a loss object. If the model has no other loss or'
        " regularizer, you can pass to CrossShardOptimizer instead:"
        ' loss_averaged_over="%s" if the number is a mean, or "global" if it is'
        " a sum divided by the batch size of all replicas.",
        *(name, loss_factor.GLOBAL if is_divided else loss_factor.REPLICA),
      )
    return 1.0 if is_divided else right / factors[loss_factor.GLOBAL]

  def warn_of_own_loss(self, model: str) -> None:
    """Warns that a model computes its loss in a method of its own."""
    if self._settings.loss_averaged_over is None:
      factors = self.factors()
      self._warn(
        "%s overrides compute_loss. fit assumes that its value is averaged over"
        " all replicas' examples, as Keras' are, and multiplies it by %g."
        ' If this is right, pass loss_averaged_over="global". If the value is'
        " averaged over this replica's examples, pass"
        ' loss_averaged_over="replica"; the factor is then %g.',
        *(model, factors[loss_factor.GLOBAL], factors[loss_factor.REPLICA]),
      )

  def check_was_scaled(self, through_apply: bool, is_divided: bool) -> None:
    """Warns once if a step sums gradients of a loss that was never scaled.

    If Keras itself calls `apply`, the loss is assumed to be averaged over the
    examples of all replicas, as Keras' own losses are. `is_divided` is whether
    gradients are divided by a loss scale afterwards.
    """
    if is_divided and not self._ever_scaled:
      self._warn(
        "A LossScaleOptimizer divides gradients by its loss scale, but the loss"
        " was never multiplied by it. Call compute_gradients() or minimize(),"
        " or scale_loss(loss) inside the tape."
      )
      return
    settings = self._settings
    scaled = getattr(self._step, "scaled", False) or settings.scale_gradients
    self._step.scaled = False
    if tf.executing_eagerly():
      # An eager step may call a traced function that scales the loss.
      scaled = scaled or self._scaled_in_trace
    # The factors that the loss may be missing, given what is known about it.
    factors = self.factors()
    chosen = settings.loss_averaged_over
    if chosen is not None:
      missing = {factors[chosen]}
    elif through_apply and _is_in_keras():
      missing = {factors[loss_factor.GLOBAL]}
    elif settings.is_mean:
      missing = set(factors.values())  # In a custom loop, either is possible.
    else:
      missing = {1.0}  # The user may want the plain sum of the gradients.
    if scaled or missing == {1.0}:
      return
    remedy = (
      "Call scale_loss(loss) inside the tape (docs/training.md) or pass"
      " scale_gradients=True, the only way within Keras' MultiOptimizer."
    )
    if chosen is not None:
      factor = factors[chosen]
      self._warn(
        "CrossShardOptimizer sums gradients of a loss that was never scaled, so"
        ' with loss_averaged_over="%s" and reduction="%s" they are %g times too'
        " %s. %s",
        *(chosen, settings.reduction, max(factor, 1 / factor)),
        *("large" if factor < 1 else "small", remedy),
      )
      return
    self._warn(
      "CrossShardOptimizer sums gradients of a loss that was never scaled, so"
      ' the result of reduction="%s" is wrong by a constant factor: %g if the'
      " loss is averaged over this replica's examples, %g if over all"
      ' replicas\' examples. Pass loss_averaged_over="replica" or "global". %s',
      settings.reduction,
      factors[loss_factor.REPLICA],
      factors[loss_factor.GLOBAL],
      remedy,
    )

  def _factor(self, default: str) -> float:
    """Returns the factor; warns when a default is first used."""
    chosen = self._settings.loss_averaged_over
    factors = self.factors()
    taken = chosen or default
    [other] = set(factors) - {taken}
    if (
      chosen is None and factors[taken] != factors[other] and not _is_in_keras()
    ):
      self._warn(
        "CrossShardOptimizer assumes that the loss is averaged over %s, and"
        ' multiplies it by %g. If this is right, pass loss_averaged_over="%s".'
        ' If the loss is averaged over %s, pass loss_averaged_over="%s"; the'
        " factor is then %g. See docs/training.md.",
        *(_EXAMPLES[taken], factors[taken], taken),
        *(_EXAMPLES[other], other, factors[other]),
      )
    return factors[taken]

  def factors(self) -> dict[str, float]:
    """Maps each value of `loss_averaged_over` to its factor."""
    return {
      over: loss_factor.loss_factor(
        self._settings.reduction, over, self._num_replicas, self._group_size
      )
      for over in _EXAMPLES
    }

  def _warn(self, text: str, *values: Any) -> None:
    is_shared = self._settings.scale_gradients
    logged = _shared_warnings if is_shared else self._own_warnings
    line = text % values
    if line not in logged:
      logged.add(line)
      logging.warning("%s", line)


def _is_in_keras() -> bool:
  """Returns whether Keras called this package, as in `fit` with Keras' losses.

  This looks at call frames, which decide only whether a warning is logged.
  """
  frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001
  while frame is not None:
    module = frame.f_globals.get("__name__", "")
    if not module.startswith(("tf_cross_shard", "tensorflow")):
      return module.startswith(("keras.src.", "tf_keras.src."))
    frame = frame.f_back
  return False
