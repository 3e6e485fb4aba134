"""The one factor on the loss that makes a sum over replicas a mean.

Gradients are always *summed* over a group. Whether that gives a mean depends
on what the loss was averaged over before it was differentiated:

| the loss is averaged over        | "mean"                    | "sum"        |
|----------------------------------|---------------------------|--------------|
| this replica's examples, replica | 1 / group_size            | 1            |
| all replicas' examples, global   | num_replicas / group_size | num_replicas |
"""

import threading
from typing import Final

from absl import logging

MEAN: Final = "mean"
SUM: Final = "sum"
REPLICA: Final = "replica"
GLOBAL: Final = "global"

# TensorFlow 1 spells a mean "weighted_mean", Keras "sum_over_batch_size".
_REDUCTIONS: Final = {
  "mean": MEAN,
  "weighted_mean": MEAN,
  "sum_over_batch_size": MEAN,
  "mean_with_sample_weight": MEAN,
  "sum": SUM,
  "weighted_sum": SUM,
}


def canonical_reduction(reduction: object) -> str:
  """Returns `"mean"` or `"sum"` for any accepted spelling of a reduction.

  >>> canonical_reduction("weighted_mean")
  'mean'
  """
  spelling = getattr(reduction, "value", reduction)
  if isinstance(spelling, str) and spelling.lower() in _REDUCTIONS:
    return _REDUCTIONS[spelling.lower()]
  raise ValueError(
    f"`reduction` must be one of {sorted(_REDUCTIONS)}; got {reduction!r}."
    ' Use "mean" to average gradients over the group or "sum" to add them.'
  )


def check_averaged_over(loss_averaged_over: object) -> str | None:
  """Returns `loss_averaged_over` if it is `"replica"`, `"global"` or None.

  >>> check_averaged_over("global")
  'global'
  """
  if loss_averaged_over is None:
    return None
  is_text = isinstance(loss_averaged_over, str)
  if is_text and loss_averaged_over in (REPLICA, GLOBAL):
    return str(loss_averaged_over)
  raise ValueError(
    f'`loss_averaged_over` must be "{REPLICA}" (the loss is a mean over this'
    f" replica's examples), \"{GLOBAL}\" (over all replicas' examples, as Keras"
    f" losses are) or None to decide by the call; got {loss_averaged_over!r}."
  )


def loss_factor(
  reduction: str, averaged_over: str, num_replicas: int, group_size: int
) -> float:
  """The factor that the loss is multiplied by before gradients are taken.

  With `L_r` the loss of replica `r` over its own examples, the summed
  gradient of a group `G` is `sum over r in G of factor * dL_r`.

  >>> loss_factor("mean", "replica", num_replicas=8, group_size=4)
  0.25
  >>> loss_factor("mean", "global", num_replicas=8, group_size=4)
  2.0
  >>> loss_factor("sum", "replica", num_replicas=8, group_size=4)
  1.0
  """
  copies = num_replicas if averaged_over == GLOBAL else 1
  return copies / group_size if reduction == MEAN else float(copies)


class LossConvention:
  """Decides between `"replica"` and `"global"`, and checks that steps scale.

  A default cannot know where a loss comes from. So the convention that it takes
  is logged at its first use, and a step that never scaled its loss is warned
  about.

  >>> convention = LossConvention("mean", None)
  >>> convention.factor("global", num_replicas=4, group_size=2)
  2.0
  >>> LossConvention("mean", "replica").factor("global", 4, 2)
  0.5
  """

  def __init__(self, reduction: str, averaged_over: str | None) -> None:
    self.reduction = reduction
    self.averaged_over = averaged_over
    # A replica traces or runs eagerly in one thread.
    self._step = threading.local()
    self._scaled_in_trace = False
    self.ever_scaled = False
    self._told = False
    self._warned = False

  def factor(
    self,
    default: str,
    num_replicas: int,
    group_size: int,
    traced: bool = False,
  ) -> float:
    """Returns the factor, and remembers that this step scales its loss.

    The first time that `default` decides, a message says so.

    Args:
      default: `"replica"` or `"global"`, where the user chose neither.
      num_replicas: Replicas in the whole strategy.
      group_size: Replicas that sum together.
      traced: Whether a function is being traced, which may run in later steps.
    """
    self.ever_scaled = True
    self._step.scaled = True
    self._scaled_in_trace |= traced
    taken = self.averaged_over or default
    if self.averaged_over is None and num_replicas > 1 and not self._told:
      self._told = True
      logging.info(
        "CrossShardOptimizer takes the loss to be averaged over %s. If it is"
        ' not, pass loss_averaged_over="replica" (a mean over this replica\'s'
        ' examples) or "global" (over all replicas\', as Keras losses are).',
        "this replica's examples"
        if taken == REPLICA
        else "all replicas' examples",
      )
    return loss_factor(self.reduction, taken, num_replicas, group_size)

  def end_step(
    self,
    num_replicas: int,
    group_size: int,
    by_keras: bool = False,
    traced: bool = False,
    is_divided: bool = False,
  ) -> None:
    """Warns, once, if gradients are summed whose loss was never scaled.

    Args:
      num_replicas: Replicas in the whole strategy.
      group_size: Replicas that sum together.
      by_keras: Whether Keras calls, whose losses are averaged over all
        replicas' examples.
      traced: Whether a function is being traced.
      is_divided: Whether gradients are divided by a loss scale afterwards.
    """
    if is_divided and not self.ever_scaled and not self._warned:
      self._warned = True
      logging.warning(
        "A LossScaleOptimizer divides gradients by its loss scale, and the loss"
        " was never multiplied by it. Use compute_gradients() or minimize(), or"
        " scale_loss(loss) inside the tape."
      )
    scaled = getattr(self._step, "scaled", False)
    self._step.scaled = False
    if not traced:
      # A function that was traced once may scale in every eager step.
      scaled = scaled or self._scaled_in_trace
    local, over_all = (
      loss_factor(self.reduction, over, num_replicas, group_size)
      for over in (REPLICA, GLOBAL)
    )
    is_missing = over_all != 1 if by_keras else self.reduction == MEAN
    if scaled or self._warned or num_replicas == 1 or not is_missing:
      return
    self._warned = True
    logging.warning(
      "CrossShardOptimizer sums gradients whose loss it never scaled, so"
      ' reduction="%s" is missing its factor: %g if the loss is averaged'
      " over this replica's examples, %g if over all replicas' examples."
      " Use compute_gradients() or minimize(), or scale_loss(loss) inside the"
      " tape.",
      self.reduction,
      local,
      over_all,
    )
