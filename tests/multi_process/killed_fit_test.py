"""A `fit` that is killed goes on as if it had not been: kill -9, everywhere.

Damage while a file is being written is in archive_test.py; errors that end a
`fit`, in backup_test.py.
"""
# bazel: size=large tags=exclusive,slow

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
  """Also of the one after which all groups have stopped."""
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
  its_history, its_arrays = _outcome(killed)
  assert its_history == history
  assert its_arrays.keys() == arrays.keys()
  assert [name for name in arrays if its_arrays[name] != arrays[name]] == []


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q", "-m", ""]))
