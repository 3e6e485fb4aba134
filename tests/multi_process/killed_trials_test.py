"""The program of docs/callbacks.md prints the same table after kills."""

import os
import pathlib
import subprocess
import sys
import time

from tests.support import pages

# The program is killed when one of these files exists: in the middle of the
# first rung, and after a later rung has begun.
PLACES = ("trials/trial_5.npz", "trials/states/trial_*_rung_1.npz")


def _start(folder: pathlib.Path) -> subprocess.Popen[str]:
  """Starts the page's program in a folder."""
  program = pages.programs("docs/callbacks.md")[1]
  folder.mkdir(exist_ok=True)
  return subprocess.Popen(
    [sys.executable, "-c", program],
    cwd=folder,
    env={**os.environ, "PYTHONPATH": str(pages.PROJECT)},
    stdout=subprocess.PIPE,
    text=True,
  )


def test_killed_program_prints_the_same_table(tmp_path: pathlib.Path) -> None:
  killed = tmp_path / "killed"
  for place in PLACES:
    with _start(killed) as process:
      while process.poll() is None and not list(killed.glob(place)):
        time.sleep(0.02)
      assert process.poll() is None, "The program ended before it was killed."
      process.kill()
  with _start(killed) as process:
    resumed, _ = process.communicate()
  with _start(tmp_path / "undisturbed") as process:
    undisturbed, _ = process.communicate()
  assert len(undisturbed.splitlines()) == 17
  assert resumed == undisturbed
