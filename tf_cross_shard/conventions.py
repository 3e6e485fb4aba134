"""What the loss is taken to be averaged over, and saying so once.

A default cannot know who made the loss. So the convention that is taken is
logged at its first use, and a step that never scaled its loss is warned about.
"""

import threading

from absl import logging

from tf_cross_shard import scaling


class LossConvention:
  """Decides `"replica"` or `"global"` and remembers whether a step scaled.

  >>> convention = LossConvention("mean", None)
  >>> convention.factor("global", num_replicas=4, group_size=2)
  2.0
  >>> LossConvention("mean", "replica").factor("global", 4, 2)
  0.5

  Attributes:
    reduction: `"mean"` or `"sum"`.
    averaged_over: `"replica"`, `"global"`, or None for the way in to decide.
    ever_scaled: Whether a loss was scaled at all.
  """

  def __init__(self, reduction: str, averaged_over: str | None) -> None:
    """Makes the convention of one optimizer.

    Args:
      reduction: `"mean"` or `"sum"`.
      averaged_over: `"replica"`, `"global"`, or None for the way in to decide.
    """
    self.reduction = reduction
    self.averaged_over = averaged_over
    # One replica's trace or eager call is one thread's business.
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
    """Notes that this step scales its loss, and answers by what factor.

    The convention that a default takes is said at its first use.

    Args:
      default: `"replica"` or `"global"`, taken when the user chose neither.
      num_replicas: Replicas in the whole strategy.
      group_size: Replicas that sum together.
      traced: Whether a function is being traced, which may later run in steps
        that nobody sees here.

    Returns:
      What `scaling.loss_factor` answers for the convention.
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
        if taken == scaling.REPLICA
        else "all replicas' examples",
      )
    return scaling.loss_factor(self.reduction, taken, num_replicas, group_size)

  def end_step(
    self,
    num_replicas: int,
    group_size: int,
    by_keras: bool = False,
    traced: bool = False,
    is_divided: bool = False,
  ) -> None:
    """Warns, once, when gradients are summed whose loss was never scaled.

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
      scaling.loss_factor(self.reduction, over, num_replicas, group_size)
      for over in (scaling.REPLICA, scaling.GLOBAL)
    )
    is_missing = over_all != 1 if by_keras else self.reduction == scaling.MEAN
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
