"""The convention taken is said once, and a missing factor is warned about."""

import logging
import threading
from collections.abc import Iterator

import pytest

from tf_cross_shard.gradients import loss_factor


class Recorder(logging.Handler):
  """Keeps what is logged."""

  def __init__(self) -> None:
    super().__init__()
    self.records: list[logging.LogRecord] = []

  def emit(self, record: logging.LogRecord) -> None:
    self.records.append(record)


@pytest.fixture
def log() -> Iterator[list[logging.LogRecord]]:
  """What absl logs in a test, informative lines included."""
  logger, recorder = logging.getLogger("absl"), Recorder()
  level = logger.level
  logger.addHandler(recorder)
  logger.setLevel(logging.INFO)
  yield recorder.records
  logger.setLevel(level)
  logger.removeHandler(recorder)


@pytest.mark.parametrize(
  ("reduction", "taken", "group_size", "factor"),
  [
    ("mean", "replica", 4, 0.25),
    ("mean", "replica", 2, 0.5),
    ("mean", "global", 4, 1.0),
    ("mean", "global", 2, 2.0),
    ("sum", "replica", 4, 1.0),
    ("sum", "replica", 2, 1.0),
    ("sum", "global", 4, 4.0),
    ("sum", "global", 2, 4.0),
  ],
)
def test_the_factor_of_each_cell(
  reduction: str, taken: str, group_size: int, factor: float
) -> None:
  # By the way in, and by the user's word against the way in.
  other = "global" if taken == "replica" else "replica"
  for averaged_over, default in ((None, taken), (taken, other), (taken, taken)):
    convention = loss_factor.LossConvention(reduction, averaged_over)
    assert convention.factor(default, 4, group_size) == factor
    assert factor == loss_factor.loss_factor(reduction, taken, 4, group_size)


@pytest.mark.parametrize(
  ("default", "whose"),
  [
    ("replica", "this replica's examples"),
    ("global", "all replicas' examples"),
  ],
)
def test_a_default_is_told_once(
  log: list[logging.LogRecord], default: str, whose: str
) -> None:
  convention = loss_factor.LossConvention("mean", None)
  for _ in range(3):
    convention.factor(default, 4, 2)
    convention.end_step(4, 2)
  [line] = log
  assert line.levelno == logging.INFO
  text = line.getMessage()
  assert text.startswith(
    f"CrossShardOptimizer takes the loss to be averaged over {whose}. If it is"
    " not, pass loss_averaged_over="
  )
  assert 'loss_averaged_over="replica" (a mean over this replica\'s' in text
  assert 'or "global" (over all replicas\', as Keras losses are)' in text


def test_each_optimizer_tells_its_own(log: list[logging.LogRecord]) -> None:
  for _ in range(2):
    loss_factor.LossConvention("sum", None).factor("replica", 4, 2)
  assert [line.levelno for line in log] == [logging.INFO] * 2


def test_a_choice_or_one_replica_needs_no_telling(
  log: list[logging.LogRecord],
) -> None:
  for reduction in ("mean", "sum"):
    for averaged_over in ("replica", "global"):
      chosen = loss_factor.LossConvention(reduction, averaged_over)
      chosen.factor("replica", 4, 2)
      chosen.factor("global", 4, 2)
    loss_factor.LossConvention(reduction, None).factor("replica", 1, 1)
  assert log == []


@pytest.mark.parametrize(
  ("averaged_over", "group_size", "factors"),
  [
    (None, 2, "0.5 if the loss is averaged over this replica's examples, 2 if"),
    (
      None,
      4,
      "0.25 if the loss is averaged over this replica's examples, 1 if",
    ),
    ("replica", 1, "1 if the loss is averaged over this replica's examples, 4"),
  ],
)
def test_a_step_that_never_scaled_is_warned_about_once(
  log: list[logging.LogRecord],
  averaged_over: str | None,
  group_size: int,
  factors: str,
) -> None:
  convention = loss_factor.LossConvention("mean", averaged_over)
  for _ in range(3):
    convention.end_step(4, group_size)
  [line] = log
  assert line.levelno == logging.WARNING
  text = line.getMessage()
  assert "sums gradients whose loss it never scaled" in text
  assert 'reduction="mean" is missing its factor' in text
  assert factors in text
  assert "if over all replicas' examples" in text
  assert "Use compute_gradients() or minimize(), or scale_loss(loss)" in text


def test_a_scaled_step_is_not_warned_about_but_the_next_is(
  log: list[logging.LogRecord],
) -> None:
  convention = loss_factor.LossConvention("mean", "replica")
  convention.factor("replica", 4, 4)
  convention.end_step(4, 4)
  assert log == []
  convention.end_step(4, 4)
  assert [line.levelno for line in log] == [logging.WARNING]


def test_a_sum_or_one_replica_misses_no_factor(
  log: list[logging.LogRecord],
) -> None:
  loss_factor.LossConvention("sum", None).end_step(4, 2)
  loss_factor.LossConvention("mean", None).end_step(1, 1)
  assert log == []


def test_each_thread_has_a_step_of_its_own(
  log: list[logging.LogRecord],
) -> None:
  """What one replica's thread scaled says nothing of another's."""
  convention = loss_factor.LossConvention("mean", "replica")

  def run(call: object, *args: object) -> None:
    assert callable(call)
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()

  convention.factor("replica", 2, 2)  # here
  run(convention.factor, "replica", 2, 2)  # ends without end_step
  convention.end_step(2, 2)  # here: scaled
  assert log == []
  convention.factor("replica", 2, 2)
  run(convention.end_step, 2, 2)  # there: never scaled
  assert [line.levelno for line in log] == [logging.WARNING]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
