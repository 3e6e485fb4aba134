"""The factor of the mean, in each cell of its table."""

import enum
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard.gradients import loss_factor


class Spelling(enum.Enum):
  """Stands in for a framework's enumeration of reductions."""

  AVERAGE = "SUM_OVER_BATCH_SIZE"
  ADD = "sum"
  KEEP = "none"


@pytest.mark.parametrize(
  ("spelling", "canonical"),
  [
    ("mean", "mean"),
    ("MEAN", "mean"),
    ("Weighted_Mean", "mean"),
    ("sum_over_batch_size", "mean"),
    ("sum", "sum"),
    ("SUM", "sum"),
    ("weighted_sum", "sum"),
    (tf.compat.v1.losses.Reduction.MEAN, "mean"),
    (tf.compat.v1.losses.Reduction.SUM, "sum"),
    (Spelling.AVERAGE, "mean"),
    (Spelling.ADD, "sum"),
  ],
)
def test_accepted_spellings(spelling: Any, canonical: str) -> None:
  assert loss_factor.canonical_reduction(spelling) == canonical


@pytest.mark.parametrize(
  "reduction",
  ["", "avg", "none", "mean ", None, 1, True, ["mean"], Spelling.KEEP],
)
def test_unknown_reduction_lists_the_known_ones(reduction: Any) -> None:
  with pytest.raises(ValueError, match="`reduction` must be one of") as error:
    loss_factor.canonical_reduction(reduction)
  text = str(error.value)
  for known in ("mean", "weighted_mean", "sum_over_batch_size", "sum"):
    assert repr(known) in text
  assert f"got {reduction!r}." in text
  assert 'Use "mean" to average gradients over the group or "sum"' in text


@pytest.mark.parametrize("averaged_over", ["replica", "global", None])
def test_accepted_conventions(averaged_over: str | None) -> None:
  assert loss_factor.check_averaged_over(averaged_over) == averaged_over


@pytest.mark.parametrize("averaged_over", ["", "Replica", "batch", 0, True, []])
def test_unknown_convention_explains_the_known_ones(averaged_over: Any) -> None:
  with pytest.raises(ValueError, match="`loss_averaged_over`") as error:
    loss_factor.check_averaged_over(averaged_over)
  text = str(error.value)
  assert '"replica" (the loss is a mean over this replica\'s examples)' in text
  assert '"global" (over all replicas\' examples' in text
  assert "None to decide by the call" in text
  assert text.endswith(f"got {averaged_over!r}.")


@pytest.mark.parametrize(
  ("reduction", "averaged_over", "group_size", "factor"),
  [
    ("mean", "replica", 8, 1 / 8),
    ("mean", "replica", 2, 1 / 2),
    ("mean", "global", 8, 1.0),
    ("mean", "global", 2, 4.0),
    ("sum", "replica", 8, 1.0),
    ("sum", "replica", 2, 1.0),
    ("sum", "global", 8, 8.0),
    ("sum", "global", 2, 8.0),
  ],
)
def test_each_cell_of_the_table(
  reduction: str, averaged_over: str, group_size: int, factor: float
) -> None:
  found = loss_factor.loss_factor(
    reduction, averaged_over, num_replicas=8, group_size=group_size
  )
  assert found == factor
  assert isinstance(found, float)


def _mean(values: list[float]) -> float:
  return sum(values) / len(values)


@pytest.mark.parametrize("averaged_over", ["replica", "global"])
@pytest.mark.parametrize(
  ("reduction", "combine"), [("mean", _mean), ("sum", sum)]
)
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0, 3], [1, 2]]])
def test_the_summed_loss_is_what_the_reduction_says(
  groups: list[list[int]],
  reduction: str,
  combine: Callable[[list[float]], float],
  averaged_over: str,
) -> None:
  """The group's result does not depend on who divided the loss before."""
  own_means = [1.0, 2.0, 4.0, 8.0]  # of each replica's examples
  divided = 1 if averaged_over == "replica" else len(own_means)
  factor = loss_factor.loss_factor(reduction, averaged_over, 4, len(groups[0]))
  for group in groups:
    summed = sum(factor * own_means[r] / divided for r in group)
    assert summed == combine([own_means[r] for r in group])


def test_one_replica_needs_no_factor() -> None:
  for reduction in ("mean", "sum"):
    for averaged_over in ("replica", "global"):
      assert loss_factor.loss_factor(reduction, averaged_over, 1, 1) == 1.0


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
