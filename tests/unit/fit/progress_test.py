"""The metrics of groups are printed below the progress bar of Keras."""

import re

import pytest

from tests.support import callback_cases as cases
from tests.support import testbed
from tests.support.callback_cases import VALIDATION
from tf_cross_shard import callbacks
from tf_cross_shard._src.fit import group_callback


def _fit(verbose: int) -> dict[str, list[float]]:
  """Trains two epochs with two sets of validation data."""
  model = cases.grouped()
  metrics = [
    callbacks.GroupMetrics(VALIDATION),
    callbacks.GroupMetrics(VALIDATION, ensemble=False, name="test"),
  ]
  found: dict[str, list[float]] = model.fit(
    cases.data(), epochs=2, verbose=verbose, callbacks=metrics
  ).history
  return found


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("verbose", [1, 2])
def test_each_metric_has_a_line_with_the_names_of_the_groups(
  capsys: pytest.CaptureFixture[str],
  monkeypatch: pytest.MonkeyPatch,
  verbose: int,
) -> None:
  monkeypatch.setattr(
    group_callback, "group_names", lambda _: ["low rate", "high rate"]
  )
  history = _fit(verbose)
  printed = capsys.readouterr().out
  assert "/group" not in printed  # Keras' line has Keras' metrics alone.
  assert "/ensemble" not in printed
  assert len(re.findall(r"- loss: \d", printed)) >= 2
  for epoch in (0, 1):
    low, high, both = (
      history[f"val_loss/{run}"][epoch]
      for run in ("group_0", "group_1", "ensemble")
    )
    line = f"\nval_loss: ensemble {both:.4g}, low rate {low:.4g}"
    assert f"{line}, high rate {high:.4g}\n" in printed
  names = re.findall(r"^(\w+): (?:ensemble|low rate) ", printed, re.MULTILINE)
  own = ["loss", "val_loss", "val_mae", "val_weighted"]
  own += ["test_loss", "test_mae", "test_weighted"]
  assert sorted(names) == sorted(2 * own)
  assert {f"{name}/group_1" for name in own} <= history.keys()


class _Trials(group_callback.GroupCallback):
  """Group 0 trains trial 7, and group 1 trains none."""

  def names_of_trials(self) -> list[str]:
    return ["trial 7", ""]


def test_lines_have_the_numbers_of_trials(
  capsys: pytest.CaptureFixture[str],
) -> None:
  model = cases.grouped()
  metrics = callbacks.GroupMetrics(VALIDATION, ensemble=False)
  history = model.fit(
    cases.data(), verbose=2, callbacks=[metrics, _Trials()]
  ).history
  value = history["val_mae/group_0"][0]
  assert f"\nval_mae: trial 7 {value:.4g}\n" in capsys.readouterr().out


@pytest.mark.tf_keras_mode
def test_a_silent_fit_prints_nothing(
  capsys: pytest.CaptureFixture[str],
) -> None:
  assert testbed.mirrored(2).num_replicas_in_sync == 2
  _fit(verbose=0)
  assert not capsys.readouterr().out
