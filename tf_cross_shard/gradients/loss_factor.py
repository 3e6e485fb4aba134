"""The one factor on the loss that makes a sum over replicas a mean.

Gradients are always *summed* over a group. Whether that gives a mean depends
on what the loss was averaged over before it was differentiated:

| the loss is averaged over        | "mean"                    | "sum"        |
|----------------------------------|---------------------------|--------------|
| this replica's examples, replica | 1 / group_size            | 1            |
| all replicas' examples, global   | num_replicas / group_size | num_replicas |
"""

from typing import Final

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


def canonical_reduction(reduction: object, argument: str = "reduction") -> str:
  """Returns `"mean"` or `"sum"` for any accepted spelling of a reduction.

  >>> canonical_reduction("weighted_mean")
  'mean'
  """
  spelling = getattr(reduction, "value", reduction)
  if isinstance(spelling, str) and spelling.lower() in _REDUCTIONS:
    return _REDUCTIONS[spelling.lower()]
  raise ValueError(
    f"`{argument}` must be one of {sorted(_REDUCTIONS)}; got {reduction!r}."
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
