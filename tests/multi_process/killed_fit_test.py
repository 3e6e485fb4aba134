"""Tests that `fit` resumes exactly after SIGKILL and SIGTERM.

archive_test.py tests damage while a file is written, and backup_test.py tests
errors that end a `fit`.
"""

import pathlib
import signal
from typing import Any

import numpy as np
import pytest

from tests.support import fit_outcome, killed_fit


@pytest.mark.parametrize(
  ("patience", "min_delta", "epochs"),
  [(9, 0.0, killed_fit.EPOCHS), (1, 9.0, 2)],
)
def test_killed_at_every_place_of_every_epoch(
  patience: int, min_delta: float, epochs: int, tmp_path: pathlib.Path
) -> None:
  """Includes the epoch after which all groups have stopped."""
  undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
  for folder in (undisturbed, killed):
    folder.mkdir()
  assert killed_fit.run(undisturbed, None, patience, min_delta) == 0
  right = fit_outcome.of(undisturbed)
  history = {key for key in right if key.startswith("history")}
  assert history == {f"history/epoch {epoch}" for epoch in range(epochs)}
  for epoch in range(epochs):
    for place in killed_fit.PLACES:
      code = killed_fit.run(killed, (epoch, place), patience, min_delta)
      assert code == -signal.SIGKILL, (epoch, place)
  assert killed_fit.run(killed, None, patience, min_delta) == 0
  _assert_same(killed, right)


def test_killed_and_signalled_at_batches(tmp_path: pathlib.Path) -> None:
  """`fit` is killed at random batches, and at the last batch of an epoch."""
  undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
  for folder in (undisturbed, killed):
    folder.mkdir()
  assert killed_fit.run(undisturbed, None, 9, 0.0) == 0
  rng = np.random.default_rng(4)
  count = killed_fit.EPOCHS * killed_fit.STEPS
  places = sorted({*rng.permutation(count)[:8].tolist(), count - 1})
  codes = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}
  for i, place in enumerate(places):
    number = list(codes)[i % 2]
    at = divmod(place, killed_fit.STEPS)
    code = killed_fit.run(killed, at, 9, 0.0, number, every=3)
    assert code == codes[number], (at, number)
  assert killed_fit.run(killed, None, 9, 0.0, every=3) == 0
  _assert_same(killed, fit_outcome.of(undisturbed))


def _assert_same(killed: pathlib.Path, right: dict[str, Any]) -> None:
  found = fit_outcome.of(killed)
  assert found.keys() == right.keys()
  assert [name for name in right if found[name] != right[name]] == []
