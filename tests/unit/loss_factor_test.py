"""The factor of the mean in each cell of its table, and what is said of it."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard.gradients import loss_factor


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
  """By itself, by the way in, and by the user's word against the way in."""
  assert loss_factor.loss_factor(reduction, taken, 8, group_size) == factor
  assert loss_factor.loss_factor(reduction, taken, 1, 1) == 1.0
  other = "global" if taken == "replica" else "replica"
  for averaged_over, default in ((None, taken), (taken, other), (taken, taken)):
    convention = loss_factor.LossConvention(reduction, averaged_over)
    assert convention.for_loss(default, 8, group_size) == factor
    assert convention.for_gradients(8, group_size) == 1.0
    scaled = loss_factor.LossConvention(reduction, averaged_over, True)
    assert scaled.for_loss(default, 8, group_size) == 1.0
    assert scaled.for_gradients(8, group_size) == factor


# What is said of it.


class Recorder(logging.Handler):
  """Keeps what is logged."""

  def __init__(self) -> None:
    super().__init__()
    self.lines: list[str] = []

  def emit(self, record: logging.LogRecord) -> None:
    self.lines.append(f"{record.levelname}: {record.getMessage()}")


@pytest.fixture
def log() -> Iterator[list[str]]:
  """What absl logs in a test, informative lines included."""
  logger, recorder = logging.getLogger("absl"), Recorder()
  level = logger.level
  logger.addHandler(recorder)
  logger.setLevel(logging.INFO)
  yield recorder.lines
  logger.setLevel(level)
  logger.removeHandler(recorder)


@pytest.mark.parametrize("default", ["replica", "global"])
def test_a_default_is_told_once_by_each_optimizer(
  log: list[str], default: str
) -> None:
  whose = "this replica's" if default == "replica" else "all replicas'"
  for count in (1, 2):
    convention = loss_factor.LossConvention("mean", None)
    for _ in range(3):
      convention.for_loss(default, 4, 2)
      convention.end_step(4, 2)
    assert len(log) == count
    assert log[-1].startswith("WARNING:")
    assert f"averaged over {whose} examples" in log[-1]
    assert "loss_averaged_over=" in log[-1]


@pytest.mark.parametrize(
  ("averaged_over", "group_size", "local", "over_all"),
  [
    (None, 1, 1, 4),
    (None, 2, 0.5, 2),
    ("replica", 4, 0.25, 1),
    ("global", 2, 0.5, 2),
  ],
)
def test_a_step_that_never_scaled_is_warned_about_once(
  log: list[str],
  averaged_over: str | None,
  group_size: int,
  local: float,
  over_all: float,
) -> None:
  convention = loss_factor.LossConvention("mean", averaged_over)
  for _ in range(3):
    convention.end_step(4, group_size)
  [line] = log
  assert line.startswith("WARNING:")
  assert 'reduction="mean" is missing its factor' in line
  assert f"{local:g} if the loss is averaged over this replica's" in line
  assert f"{over_all:g} if over all replicas'" in line
  assert "scale_loss(loss)" in line


def test_one_trace_scales_all_steps(log: list[str]) -> None:
  convention = loss_factor.LossConvention("mean", "replica")
  convention.for_loss("replica", 4, 2, traced=True)
  for _ in range(2):
    convention.end_step(4, 2)
  assert log == []
  # A LossScaleOptimizer around it calls `apply`: the sum is of Keras' losses.
  total = loss_factor.LossConvention("sum", None)
  total.end_step(4, 2, through_apply=True)
  assert "4 if over all" in log[0]


def test_a_right_step_misses_no_factor(log: list[str]) -> None:
  """Ungrouped, Keras' losses need none; nor does a choice whose factor is 1."""
  loss_factor.LossConvention("mean", None).end_step(4, 4)
  loss_factor.LossConvention("mean", "global").end_step(4, 4)
  loss_factor.LossConvention("mean", "replica").end_step(4, 1)
  loss_factor.LossConvention("mean", None, True).end_step(4, 2)
  loss_factor.LossConvention("sum", None).end_step(4, 2)
  loss_factor.LossConvention("mean", None).end_step(1, 1)
  # Nor is anything guessed where the user chose, or there is one replica.
  loss_factor.LossConvention("mean", "global").for_loss("replica", 4, 2)
  loss_factor.LossConvention("mean", None).for_loss("replica", 1, 1)
  assert log == []


def test_each_thread_has_a_step_of_its_own(log: list[str]) -> None:
  """What one replica's thread scaled says nothing of another's."""
  convention = loss_factor.LossConvention("mean", "replica")

  def run(call: Callable[..., Any], *args: Any) -> None:
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()

  convention.for_loss("replica", 2, 2)  # here
  run(convention.for_loss, "replica", 2, 2)  # ends without end_step
  convention.end_step(2, 2)  # here: scaled
  assert log == []
  convention.for_loss("replica", 2, 2)
  run(convention.end_step, 2, 2)  # there: never scaled
  assert len(log) == 1


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
