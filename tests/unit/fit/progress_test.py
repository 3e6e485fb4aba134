"""The metrics of groups are printed below the progress bar of Keras."""

import pathlib
import re

import pytest
import tensorflow as tf

from tests.support import callback_cases as cases
from tests.support import testbed
from tests.support.callback_cases import VALIDATION
from tf_cross_shard import callbacks, groups, schedules, trials


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


def test_lines_have_the_numbers_of_trials(
  capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
  """Three trials train in two groups, so one group of a wave trains none."""
  rates = [{"learning_rate": rate} for rate in (0.5, 0.25, 0.125)]
  table = trials.Table(rates, cases.PAIR)
  model = cases.with_rates(schedules.PerGroup([1.0, 1.0]), [])
  ones = tf.ones([2, 1])
  halving = callbacks.Halving(table, tmp_path, epochs=3, factor=3)
  model.fit(
    tf.data.Dataset.from_tensors((ones, ones)),
    epochs=halving.total_epochs,
    verbose=2,
    callbacks=[callbacks.GroupMetrics((ones, ones), ensemble=False), halving],
  )
  lines = capsys.readouterr().out.splitlines()
  names = [re.findall(r"trial \d", x) for x in lines if "val_loss: " in x]
  assert ["trial 0", "trial 1"] in names
  assert ["trial 2"] in names


@pytest.mark.tf_keras_mode
def test_a_silent_fit_prints_nothing(
  capsys: pytest.CaptureFixture[str],
) -> None:
  assert testbed.mirrored(2).num_replicas_in_sync == 2
  _fit(verbose=0)
  assert not capsys.readouterr().out
