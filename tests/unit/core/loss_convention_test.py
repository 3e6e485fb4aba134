"""The factor of a loss, and the warnings about it."""

import re
from typing import Any

import pytest

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
  return loss_convention.LossConvention(settings, replicas, group_size)


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
  other = "global" if taken == "replica" else "replica"
  for averaged_over, default in ((None, taken), (taken, other), (taken, taken)):
    convention = _convention(reduction, averaged_over, 8, 2)
    assert convention.for_loss(default) == factor
    assert convention.for_gradients() == 1.0
    scaled = _convention(reduction, averaged_over, 8, 2, True)
    assert scaled.for_loss(default) == 1.0
    over = averaged_over or "global"
    assert scaled.for_gradients() == scaled.factors[over]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
  """Returns the log of a test, including INFO lines."""
  caplog.set_level("INFO", "absl")
  return caplog


@pytest.mark.parametrize("default", ["replica", "global"])
def test_warning_of_a_default_names_both_factors_and_the_argument(
  log: pytest.LogCaptureFixture, default: str
) -> None:
  kinds = {"replica": ("this replica's", 0.5), "global": ("all replicas'", 2)}
  whose, factor = kinds.pop(default)
  [(other, (others, factor_of_other))] = kinds.items()
  for count in (1, 2):  # Once per optimizer.
    convention = _convention("mean", None, 4, 2)
    for _ in range(3):
      convention.for_loss(default)
      convention.check_was_scaled(False)
    assert len(log.messages) == count
    assert log.records[-1].levelname == "WARNING"
    for words in (
      f"averaged over {whose} examples, and multiplies it by {factor:g}",
      f'pass loss_averaged_over="{default}"',
      f"averaged over {others} examples",
      f'pass loss_averaged_over="{other}"; the factor is then',
      f"is then {factor_of_other:g}",
    ):
      assert words in log.messages[-1]


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (("mean", None, 4, 1), "is 1 if .* this replica's .* and 4 if .* all rep"),
    (("mean", None, 4, 4), "is 0.25 if .* this rep.* and 1 if .* all rep"),
    (("mean", "replica", 4, 4), r"is 0.25 if .* this replica's examples\."),
    (("mean", "global", 4, 2), r"is 2 if .* all replicas' examples\."),
    (("mean", "global", 4, 4), None),
    (("mean", "replica", 4, 1), None),
    (("mean", None, 4, 2, True), None),
    (("sum", None, 4, 2), None),
    (("mean", None, 1, 1), None),
  ],
)
def test_a_step_that_never_scaled_is_warned_about_once(
  log: pytest.LogCaptureFixture, arguments: tuple[Any, ...], words: str | None
) -> None:
  convention = _convention(*arguments)
  for _ in range(3):
    convention.check_was_scaled(False)
  assert len(log.messages) == (words is not None)
  if words is not None:
    assert log.records[0].levelname == "WARNING"
    assert re.search(f"{words}.* call scale_loss\\(loss\\)", log.text)


@pytest.mark.parametrize(
  ("reduction", "group_size", "warns"),
  [("sum", 2, True), ("mean", 2, True), ("mean", 4, False)],
)
def test_a_step_that_keras_applies(
  log: pytest.LogCaptureFixture, reduction: str, group_size: int, warns: bool
) -> None:
  """Keras applies gradients of its own losses, so "sum" needs a factor, too."""
  convention = _convention(reduction, None, 4, group_size)
  convention.is_in_fit = True
  convention.check_was_scaled(False)
  assert bool(log.messages) == warns


def test_no_warning_with_explicit_setting_or_one_replica(
  log: pytest.LogCaptureFixture,
) -> None:
  _convention("mean", "global", 4, 2).for_loss("replica")
  _convention("mean", None, 1, 1).for_loss("replica")
  assert log.messages == []
