"""The metrics of groups are printed below the progress bar of Keras."""

import re

import pytest

from tests.support import callback_cases as cases
from tests.support import testbed
from tests.support.callback_cases import VALIDATION
from tf_cross_shard import callbacks, groups


def _fit(verbose: int) -> dict[str, list[float]]:
  named = groups.Groups(cases.PAIR, names=["low rate", "high rate"])
  model = cases.grouped(groups=named)
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
  capsys: pytest.CaptureFixture[str], verbose: int
) -> None:
  history = _fit(verbose)
  printed = capsys.readouterr().out
  assert "/low rate" not in printed  # Keras' line has Keras' metrics alone.
  assert "/ensemble" not in printed
  assert len(re.findall(r"- loss: \d", printed)) >= 2
  for epoch in (0, 1):
    low, high, both = (
      history[f"val_loss/{run}"][epoch]
      for run in ("low rate", "high rate", "ensemble")
    )
    line = f"\nval_loss: ensemble {both:.4g}, low rate {low:.4g}"
    assert f"{line}, high rate {high:.4g}\n" in printed
  names = re.findall(r"^(\w+): (?:ensemble|low rate) ", printed, re.MULTILINE)
  own = ["loss", "val_loss", "val_mae", "val_weighted"]
  own += ["test_loss", "test_mae", "test_weighted"]
  assert sorted(names) == sorted(2 * own)
  assert {f"{name}/high rate" for name in own} <= history.keys()


@pytest.mark.tf_keras_mode
def test_a_silent_fit_prints_nothing(
  capsys: pytest.CaptureFixture[str],
) -> None:
  assert testbed.mirrored(2).num_replicas_in_sync == 2
  _fit(verbose=0)
  assert not capsys.readouterr().out
