"""The factor on the loss that turns a sum over replicas into a mean.

Gradients are always *summed* over a group. A factor on the loss makes this sum
the mean over the group's examples. The factor depends on which examples the
loss is averaged over:

| the loss is averaged over        | "mean"                    | "sum"        |
|----------------------------------|---------------------------|--------------|
| this replica's examples, replica | 1 / group_size            | 1            |
| all replicas' examples, global   | num_replicas / group_size | num_replicas |

A loss that is summed over examples needs no factor. Keras' losses in `fit` are
averaged over all replicas' examples, or made so: see
`loss_convention.LossConvention.for_compiled`.
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
  """Returns `"mean"` or `"sum"` for any spelling of a reduction."""
  spelling = getattr(reduction, "value", reduction)
  if isinstance(spelling, str) and spelling.lower() in _REDUCTIONS:
    return _REDUCTIONS[spelling.lower()]
  raise ValueError(
    f"`{argument}` must be one of {sorted(_REDUCTIONS)}; got {reduction!r}."
    ' Use "mean" to average gradients over the group or "sum" to add them.'
  )


def check_averaged_over(loss_averaged_over: object) -> str | None:
  """Returns `loss_averaged_over`; raises `ValueError` for an unknown value."""
  if loss_averaged_over is None:
    return None
  is_text = isinstance(loss_averaged_over, str)
  if is_text and loss_averaged_over in (REPLICA, GLOBAL):
    return str(loss_averaged_over)
  raise ValueError(
    f'`loss_averaged_over` must be "{REPLICA}" (the loss is a mean over this'
    f" replica's examples), \"{GLOBAL}\" (over all replicas' examples, as Keras"
    f" losses are) or None, in which case the method that you call decides;"
    f" got {loss_averaged_over!r}."
  )


def loss_factor(
  reduction: str, averaged_over: str, num_replicas: int, group_size: int
) -> float:
  """Returns the factor by which to multiply the loss before differentiation."""
  # A loss that is averaged over all replicas' examples is `num_replicas` times
  # too small on each replica.
  copies = num_replicas if averaged_over == GLOBAL else 1
  return copies / group_size if reduction == MEAN else float(copies)
