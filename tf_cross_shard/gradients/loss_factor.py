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
_EXAMPLES: Final = {
  REPLICA: "this replica's examples",
  GLOBAL: "all replicas' examples",
}

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

  A default cannot know where a loss comes from. So the first time that one
  decides it is logged, and a step that never scaled its loss is warned about.

  >>> convention = LossConvention("mean", "global")
  >>> convention.for_loss("replica", num_replicas=4, group_size=2)
  2.0
  >>> convention.for_gradients(num_replicas=4, group_size=2)
  1.0
  """

  def __init__(
    self,
    reduction: str,
    averaged_over: str | None,
    scale_gradients: bool = False,
  ) -> None:
    if not isinstance(scale_gradients, bool):
      raise TypeError(
        f"`scale_gradients` must be True or False; got {scale_gradients!r}."
      )
    self.reduction = reduction
    self.averaged_over = averaged_over
    self.scale_gradients = scale_gradients
    # A replica traces or runs eagerly in one thread.
    self._step = threading.local()
    self._scaled_in_trace = False
    self._ever_scaled = False
    self._told = False
    self._warned = False

  def for_loss(
    self,
    default: str,
    num_replicas: int,
    group_size: int,
    *,
    traced: bool = False,
    is_sure: bool = False,
  ) -> float:
    """Returns the factor of the loss, and remembers that this step scales it.

    Args:
      default: `"replica"` or `"global"`, where the user chose neither.
      num_replicas: Replicas in the whole strategy.
      group_size: Replicas that sum together.
      traced: Whether a function is being traced, which may run in later steps.
      is_sure: Whether the default is known to be right, as in Keras' `fit`.
    """
    self._ever_scaled = True
    self._step.scaled = True
    self._step.default = default, is_sure
    self._scaled_in_trace |= traced
    if self.scale_gradients:
      return 1.0
    return self._factor(default, num_replicas, group_size, is_sure)

  def for_gradients(self, num_replicas: int, group_size: int) -> float:
    """Returns the factor of the gradients: 1 unless `scale_gradients`."""
    if not self.scale_gradients:
      return 1.0
    default, is_sure = getattr(self._step, "default", (GLOBAL, False))
    return self._factor(default, num_replicas, group_size, is_sure)

  def _factor(
    self, default: str, num_replicas: int, group_size: int, is_sure: bool
  ) -> float:
    """The factor of the convention; logs the first guess."""
    taken = self.averaged_over or default
    other = GLOBAL if taken == REPLICA else REPLICA
    factors = {
      over: loss_factor(self.reduction, over, num_replicas, group_size)
      for over in (taken, other)
    }
    is_guess = self.averaged_over is None and not is_sure
    if is_guess and factors[taken] != factors[other] and not self._told:
      self._told = True
      logging.warning(
        "CrossShardOptimizer assumes a loss that is averaged over %s, and"
        ' scales by %g. Pass loss_averaged_over="%s" if that is right. If the'
        ' loss is averaged over %s, pass loss_averaged_over="%s": then the'
        " factor is %g.",
        _EXAMPLES[taken],
        factors[taken],
        taken,
        _EXAMPLES[other],
        other,
        factors[other],
      )
    return factors[taken]

  def end_step(
    self,
    num_replicas: int,
    group_size: int,
    *,
    traced: bool = False,
    is_divided: bool = False,
    through_apply: bool = False,
    by_keras: bool = False,
  ) -> None:
    """Warns, once, if gradients are summed whose loss was never scaled.

    Unless the user chose, such a loss is taken for one that is averaged over
    all replicas' examples, as Keras' losses are.

    Args:
      num_replicas: Replicas in the whole strategy.
      group_size: Replicas that sum together.
      traced: Whether a function is being traced.
      is_divided: Whether gradients are divided by a loss scale afterwards.
      through_apply: Whether the step came through Keras' `apply`.
      by_keras: Whether Keras called without a way to scale the loss, as its
        MultiOptimizer does.

    Raises:
      RuntimeError: If Keras called, and the factor that is missing is not 1.
    """
    if is_divided and not self._ever_scaled and not self._warned:
      self._warned = True
      logging.warning(
        "A LossScaleOptimizer divides gradients by its loss scale, and the loss"
        " was never multiplied by it. Use compute_gradients() or minimize(), or"
        " scale_loss(loss) inside the tape."
      )
    scaled = getattr(self._step, "scaled", False) or self.scale_gradients
    self._step.scaled = False
    if not traced:
      # A function that was traced once may scale in every eager step.
      scaled = scaled or self._scaled_in_trace
    local, over_all = (
      loss_factor(self.reduction, over, num_replicas, group_size)
      for over in (REPLICA, GLOBAL)
    )
    missing = local if self.averaged_over == REPLICA else over_all
    is_chosen = self.averaged_over is not None or through_apply
    if self.reduction == SUM and not is_chosen:
      missing = 1.0  # The sum of the gradients as they are may be wanted.
    if scaled or self._warned or missing == 1:
      return
    if by_keras:
      raise RuntimeError(
        f'Keras never scaled the loss, so reduction="{self.reduction}" is'
        f" missing its factor {missing:g}. Pass scale_gradients=True to the"
        " CrossShardOptimizer."
      )
    self._warned = True
    logging.warning(
      "CrossShardOptimizer sums gradients whose loss it never scaled, so"
      ' reduction="%s" is missing its factor: %g if the loss is averaged'
      " over this replica's examples, %g if over all replicas' examples."
      " Use compute_gradients() or minimize(), or scale_loss(loss) inside the"
      " tape, or pass scale_gradients=True.",
      self.reduction,
      local,
      over_all,
    )
