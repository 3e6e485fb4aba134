"""The factor of the mean in each cell of its table, and its arguments."""

from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard._src.core import loss_factor


@pytest.mark.parametrize(
  ("spelling", "canonical"),
  [
    ("mean", "mean"),
    ("Weighted_Mean", "mean"),
    ("sum_over_batch_size", "mean"),
    ("SUM", "sum"),
    (tf.compat.v1.losses.Reduction.MEAN, "mean"),
    (tf.compat.v1.losses.Reduction.SUM, "sum"),
  ],
)
def test_accepted_spellings(spelling: Any, canonical: str) -> None:
  assert loss_factor.canonical_reduction(spelling) == canonical


@pytest.mark.parametrize("reduction", ["avg", None, ["mean"]])
def test_unknown_reduction_lists_the_known_ones(reduction: Any) -> None:
  with pytest.raises(ValueError, match="`reduction` must be one of") as error:
    loss_factor.canonical_reduction(reduction)
  for known in ("mean", "weighted_mean", "sum_over_batch_size", "sum"):
    assert repr(known) in str(error.value)
  assert f"got {reduction!r}." in str(error.value)


@pytest.mark.parametrize("averaged_over", ["Replica", 0, []])
def test_unknown_convention_explains_the_known_ones(averaged_over: Any) -> None:
  with pytest.raises(ValueError, match="`loss_averaged_over`") as error:
    loss_factor.check_averaged_over(averaged_over)
  for words in ('"replica" (', '"global" (', f"got {averaged_over!r}."):
    assert words in str(error.value)
  for known in ("replica", "global", None):
    assert loss_factor.check_averaged_over(known) == known


CELLS = [
  ("mean", "replica", 8, 1 / 8),
  ("mean", "replica", 2, 1 / 2),
  ("mean", "global", 8, 1.0),
  ("mean", "global", 2, 4.0),
  ("sum", "replica", 8, 1.0),
  ("sum", "replica", 2, 1.0),
  ("sum", "global", 8, 8.0),
  ("sum", "global", 2, 8.0),
]


@pytest.mark.parametrize(("reduction", "taken", "group_size", "factor"), CELLS)
def test_each_cell_of_the_table(
  reduction: str, taken: str, group_size: int, factor: float
) -> None:
  assert loss_factor.loss_factor(reduction, taken, 8, group_size) == factor
  assert loss_factor.loss_factor(reduction, taken, 1, 1) == 1.0
