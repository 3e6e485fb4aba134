"""The factor of a loss, and the warnings about it."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard._src.core import loss_convention
from tf_cross_shard._src.core import settings as settings_lib


def _convention(
  reduction: str,
  averaged_over: str | None,
  replicas: int,
  group_size: int,
  scale_gradients: bool = False,
) -> loss_convention.LossConvention:
  settings = settings_lib.Settings(
    reduction,
    loss_averaged_over=averaged_over,
    scale_gradients=scale_gradients,
  )
  groups = groups_lib.contiguous(replicas, group_size)
  return loss_convention.LossConvention(settings, groups)


@pytest.mark.parametrize(
  ("reduction", "taken", "factor"),
  [
    ("mean", "replica", 1 / 2),
    ("mean", "global", 4.0),
    ("sum", "replica", 1.0),
    ("sum", "global", 8.0),
  ],
)
def test_factor_follows_argument_or_calling_method(
  reduction: str, taken: str, factor: float
) -> None:
  """8 replicas in groups of 2; `loss_factor_test.py` has all factors."""
  other = "global" if taken == "replica" else "replica"
  for averaged_over, default in ((None, taken), (taken, other), (taken, taken)):
    convention = _convention(reduction, averaged_over, 8, 2)
    assert convention.for_loss(default) == factor
    assert convention.for_gradients() == 1.0
    scaled = _convention(reduction, averaged_over, 8, 2, True)
    assert scaled.for_loss(default) == 1.0
    assert scaled.for_gradients() == factor


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
  """Returns the log of a test, including INFO lines."""
  caplog.set_level("INFO", "absl")
  return caplog


@pytest.mark.parametrize("default", ["replica", "global"])
def test_default_factor_is_logged_once_per_optimizer(
  log: pytest.LogCaptureFixture, default: str
) -> None:
  whose = "this replica's" if default == "replica" else "all replicas'"
  for count in (1, 2):
    convention = _convention("mean", None, 4, 2)
    for _ in range(3):
      convention.for_loss(default)
      convention.check_was_scaled(False, False)
    assert len(log.messages) == count
    assert log.records[-1].levelname == "WARNING"
    assert f"averaged over {whose} examples" in log.messages[-1]
    assert "loss_averaged_over=" in log.messages[-1]


@pytest.mark.parametrize(
  ("averaged_over", "group_size", "local", "over_all"),
  [
    (None, 1, 1, 4),
    (None, 4, 0.25, 1),
    (None, 2, 0.5, 2),
  ],
)
def test_a_step_that_never_scaled_is_warned_about_once(
  log: pytest.LogCaptureFixture,
  averaged_over: str | None,
  group_size: int,
  local: float,
  over_all: float,
) -> None:
  convention = _convention("mean", averaged_over, 4, group_size)
  for _ in range(3):
    convention.check_was_scaled(False, False)
  [line] = log.messages
  assert log.records[0].levelname == "WARNING"
  assert 'reduction="mean" is wrong by a constant factor' in line
  assert f"{local:g} if the loss is averaged over this replica's" in line
  assert f"{over_all:g} if over all replicas'" in line
  assert "scale_loss(loss)" in line


@pytest.mark.parametrize(
  ("averaged_over", "group_size", "words"),
  [
    ("replica", 4, 'with loss_averaged_over="replica" .* 4 times too large'),
    ("global", 2, 'with loss_averaged_over="global" .* 2 times too small'),
  ],
)
def test_a_declared_loss_that_was_never_scaled(
  log: pytest.LogCaptureFixture,
  averaged_over: str,
  group_size: int,
  words: str,
) -> None:
  convention = _convention("mean", averaged_over, 4, group_size)
  convention.check_was_scaled(False, False)
  [line] = log.messages
  assert re.search(words, line)
  assert "Call scale_loss(loss)" in line
  assert "Pass loss_averaged_over" not in line


def test_one_trace_scales_all_steps(log: pytest.LogCaptureFixture) -> None:
  convention = _convention("mean", "replica", 4, 2)
  tf.function(lambda: convention.for_loss("replica"), autograph=False)()
  for _ in range(2):
    convention.check_was_scaled(False, False)
  assert log.messages == []


@pytest.mark.parametrize(
  ("reduction", "group_size", "warns"),
  [("sum", 2, True), ("mean", 2, True), ("mean", 4, False)],
)
def test_a_step_that_keras_applies(
  log: pytest.LogCaptureFixture, reduction: str, group_size: int, warns: bool
) -> None:
  """Keras applies gradients of its own losses, so "sum" needs a factor, too."""
  convention = _convention(reduction, None, 4, group_size)
  keras_calls = {"__name__": "keras.src.example", "convention": convention}
  exec("convention.check_was_scaled(True, False)", keras_calls)
  assert bool(log.messages) == warns


@pytest.mark.parametrize(
  ("arguments", "through_apply"),
  [
    (("mean", "global", 4, 4, False), False),
    (("mean", "replica", 4, 1, False), False),
    (("mean", None, 4, 2, True), False),
    (("sum", None, 4, 2, False), False),
    (("mean", None, 1, 1, False), False),
  ],
)
def test_scaled_steps_do_not_warn(
  log: pytest.LogCaptureFixture, arguments: tuple[Any, ...], through_apply: bool
) -> None:
  _convention(*arguments).check_was_scaled(through_apply, False)
  assert log.messages == []


def test_no_warning_with_explicit_setting_or_one_replica(
  log: pytest.LogCaptureFixture,
) -> None:
  _convention("mean", "global", 4, 2).for_loss("replica")
  _convention("mean", None, 1, 1).for_loss("replica")
  assert log.messages == []


def test_each_function_has_a_default_of_its_own() -> None:
  """Each function keeps its default if one thread traces all of them."""
  convention = _convention("mean", None, 4, 2, scale_gradients=True)
  factors = []

  def run(*calls: Callable[[], Any]) -> None:
    @tf.function(autograph=False)
    def trace() -> None:
      for call in calls:
        call()

    trace()

  def scale() -> None:
    factors.append(convention.for_gradients())

  def within() -> None:
    run(lambda: convention.for_loss("replica"))

  run(within, scale, scale)
  run(scale)
  assert factors == [0.5, 0.5, 2.0]


def test_each_thread_has_a_step_of_its_own(
  log: pytest.LogCaptureFixture,
) -> None:
  """A loss that was scaled in one thread does not count in another."""
  convention = _convention("mean", "replica", 2, 2)

  def run(call: Callable[..., Any], *args: Any) -> None:
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()

  convention.for_loss("replica")  # here
  run(convention.for_loss, "replica")  # ends without a check
  convention.check_was_scaled(False, False)  # here: scaled
  assert log.messages == []
  convention.for_loss("replica")
  run(convention.check_was_scaled, False, False)  # there: never scaled
  assert len(log.messages) == 1
