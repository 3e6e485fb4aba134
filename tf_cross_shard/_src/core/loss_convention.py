"""Chooses the factor by which a loss is multiplied; see `core.loss_factor`.

The way in decides over which examples the loss is averaged, unless you pass
`loss_averaged_over`. In `fit`, the losses of `compile` are known.
"""

from typing import Final

from absl import logging

from tf_cross_shard._src.core import loss_factor
from tf_cross_shard._src.core import settings as settings_lib

# The possible values of `loss_averaged_over`, in words.
_EXAMPLES: Final = {
  loss_factor.REPLICA: "this replica's examples",
  loss_factor.GLOBAL: "all replicas' examples",
}


class LossConvention:
  """Chooses the loss factor; warns once where it may be wrong."""

  def __init__(
    self,
    settings: settings_lib.Settings,
    num_replicas: int,
    group_size: int,
  ) -> None:
    """Takes the number of replicas in sync, which is 1 if they are models."""
    self._settings = settings
    # Maps each value of `loss_averaged_over` to its factor.
    self.factors = {
      over: loss_factor.loss_factor(
        settings.reduction, over, num_replicas, group_size
      )
      for over in _EXAMPLES
    }
    # Whether a step has differentiated what Keras computes of these losses.
    self.is_in_fit = False
    self._was_scaled = False
    self._warnings: set[str] = set()

  def for_loss(self, default: str) -> float:
    """Returns the factor of a loss, and remembers that a loss was scaled."""
    self._was_scaled = True
    return 1.0 if self._settings.scale_gradients else self._factor(default)

  def for_gradients(self) -> float:
    """Returns the factor of the gradients: 1 unless `scale_gradients`."""
    is_scaled = self._settings.scale_gradients
    return self._factor(loss_factor.GLOBAL) if is_scaled else 1.0

  def for_compiled(
    self,
    name: str,
    is_sum: bool,
    is_number: bool,
    is_divided: bool,
    is_of_whole_batch: bool = False,
  ) -> float:
    """Returns by what to multiply a loss of `compile`, before `for_loss`.

    Keras has divided means by the number of replicas (`is_divided`), but not
    sums. `is_number`: the function returns one number for all examples.
    """
    right = self.factors[loss_factor.REPLICA]
    if is_divided:
      right = self.factors[loss_factor.GLOBAL]
    elif is_sum and not is_of_whole_batch:
      right = 1.0
    chosen = self._settings.loss_averaged_over
    taken = self.factors[chosen or loss_factor.GLOBAL]
    if chosen is not None:
      if taken != right and (is_sum or is_divided):
        self._warn(
          f'With loss_averaged_over="{chosen}", fit multiplies the loss {name}'
          f" by {taken:g}, but the right factor is {right:g}. Do not pass"
          " loss_averaged_over: in fit, the optimizer knows Keras' losses."
        )
      return 1.0
    if is_sum and right != 1:
      self._warn(
        "train_on_batch gives every replica the whole batch, so the summed loss"
        f" {name} is multiplied by {right:g}: each member of a group has the"
        " same sum. Use fit, which divides batches among the replicas, or pass"
        " loss_averaged_over to CrossShardOptimizer to choose another factor."
      )
    elif is_number and not is_sum:
      over = loss_factor.GLOBAL if is_divided else loss_factor.REPLICA
      self._warn(
        f"The loss {name} returns one number for all examples of a replica,"
        " which fit takes for their mean. Return one value for each example,"
        f' or pass loss_averaged_over="{over}" if the number is a mean.'
      )
    return right / taken

  def check_was_scaled(self, is_divided: bool) -> None:
    """Warns once if a step sums gradients of a loss that was never scaled.

    `is_divided`: whether gradients are divided by a loss scale afterwards.
    """
    settings = self._settings
    if self._was_scaled:
      return
    if is_divided:
      self._warn(
        "A LossScaleOptimizer divides gradients by its loss scale, but the loss"
        " was never multiplied by it. Call compute_gradients() or minimize(),"
        " or scale_loss(loss) inside the tape."
      )
      return
    chosen = settings.loss_averaged_over
    if chosen is None and self.is_in_fit:
      chosen = loss_factor.GLOBAL
    elif chosen is None and not settings.is_mean:
      chosen = loss_factor.REPLICA  # The user may want the plain sum.
    missing = {k: f for k, f in self.factors.items() if chosen in (None, k)}
    if not settings.scale_gradients and set(missing.values()) != {1.0}:
      shown = " and ".join(
        f"{factor:g} if the loss is averaged over {_EXAMPLES[over]}"
        for over, factor in missing.items()
      )
      self._warn(
        "CrossShardOptimizer sums gradients of a loss that was never scaled, so"
        f' with reduction="{settings.reduction}" they lack a factor, which is'
        f" {shown}. Pass loss_averaged_over and call scale_loss(loss) inside"
        " the tape (docs/training.md), or pass scale_gradients=True, the only"
        " way within Keras' MultiOptimizer."
      )

  def _factor(self, default: str) -> float:
    """Returns the factor; warns when a default decides in a loop."""
    chosen = self._settings.loss_averaged_over
    taken = chosen or default
    [other] = set(self.factors) - {taken}
    factor, factor_of_other = self.factors[taken], self.factors[other]
    # Keras' own calls hand in a "global" loss.
    is_known = self.is_in_fit and taken == loss_factor.GLOBAL
    if chosen is None and not is_known and factor != factor_of_other:
      self._warn(
        "CrossShardOptimizer assumes that the loss is averaged over"
        f" {_EXAMPLES[taken]}, and multiplies it by {factor:g}. If this is"
        f' right, pass loss_averaged_over="{taken}". If the loss is averaged'
        f' over {_EXAMPLES[other]}, pass loss_averaged_over="{other}"; the'
        f" factor is then {factor_of_other:g}. See docs/training.md."
      )
    return factor

  def _warn(self, line: str) -> None:
    if line not in self._warnings:
      self._warnings.add(line)
      logging.warning("%s", line)
