"""Tests that `fit` resumes exactly after SIGKILL and SIGTERM.

Damage while a file is being written is in archive_test.py; errors that end a
`fit`, in backup_test.py.
"""

import json
import pathlib
import signal
from typing import Any

import numpy as np
import pytest

from tests.support import killed_fit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _outcome(folder: pathlib.Path) -> tuple[dict[int, Any], dict[str, Any]]:
  """Returns the history, and what was written at the end, as bytes.

  An epoch that was trained twice has the same history both times.
  """
  history: dict[int, Any] = {}
  for line in (folder / "history").read_text().splitlines():
    epoch, numbers = json.loads(line)
    assert history.setdefault(epoch, numbers) == numbers, epoch
  with np.load(folder / "end.npz") as end, np.load(folder / "best.npz") as best:
    arrays = {f"end/{name}": end[name].tobytes() for name in end}
    arrays |= {f"best/{name}": best[name].tobytes() for name in best}
  return history, arrays


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
  history, arrays = _outcome(undisturbed)
  assert sorted(history) == [*range(epochs)]
  for epoch in range(epochs):
    for place in killed_fit.PLACES:
      code = killed_fit.run(killed, (epoch, place), patience, min_delta)
      assert code == -signal.SIGKILL, (epoch, place)
  assert killed_fit.run(killed, None, patience, min_delta) == 0
  _assert_same(killed, history, arrays)


def test_killed_and_signalled_at_batches(tmp_path: pathlib.Path) -> None:
  """Stops at random batches, including the last batch of an epoch."""
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
  _assert_same(killed, *_outcome(undisturbed))


def _assert_same(
  killed: pathlib.Path, history: dict[int, Any], arrays: dict[str, Any]
) -> None:
  its_history, its_arrays = _outcome(killed)
  assert its_history == history
  assert its_arrays.keys() == arrays.keys()
  assert [name for name in arrays if its_arrays[name] != arrays[name]] == []
