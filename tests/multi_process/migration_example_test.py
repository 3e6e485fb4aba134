"""The examples that come from TensorFlow 1 do what TensorFlow 1 did.

`before.py` uses sessions of TensorFlow 1, in its own process. `after.py` must
print the losses that `before.py` prints if it continues by itself.
"""

import functools
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support import programs

EXAMPLES = programs.PROJECT / "examples"
MIGRATION = EXAMPLES / "migration"
CONVERTED_AT, END = 30, 40
# Two replicas or four sum float32 in another order than one.
ROUNDING = 2e-5


run = functools.partial(programs.run, path=[MIGRATION])
fork = functools.partial(programs.fork, path=[MIGRATION])


def before(folder: Path, steps: int) -> dict[int, float]:
  """Runs `before.py`, and returns the losses by step."""
  script = str(MIGRATION / "before.py")
  return losses_in(
    fork([script, f"--folder={folder}", f"--steps={steps}"], folder)
  )


def after(folder: Path, *arguments: str, **variables: str) -> str:
  """Runs `after.py`, which continues the training, and returns its output."""
  script = str(MIGRATION / "after.py")
  command = [script, f"--folder={folder}", f"--steps={END}", *arguments]
  return run(command, folder, **variables)


def losses_in(output: str) -> dict[int, float]:
  """Returns the losses that a program printed, by step."""
  lines = re.findall(r"^step (\d+): loss ([\d.]+)$", output, re.MULTILINE)
  return {int(step): float(loss) for step, loss in lines}


@pytest.fixture(scope="module")
def trained(
  tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[int, float]]:
  """Runs `before.py`; returns its folder, and the losses that follow.

  The folder has a checkpoint. The losses are those of `before.py` when it
  continues from this checkpoint.
  """
  folder = tmp_path_factory.mktemp("checkpoint")
  first = before(folder, CONVERTED_AT)
  assert list(first) == list(range(CONVERTED_AT))
  itself = tmp_path_factory.mktemp("itself")
  shutil.copytree(folder, itself, dirs_exist_ok=True)
  text = (itself / "checkpoint").read_text()
  (itself / "checkpoint").write_text(text.replace(str(folder), str(itself)))
  losses = before(itself, END)
  assert list(losses) == list(range(CONVERTED_AT, END))
  assert max(losses.values()) < min(list(first.values())[:5])
  return folder, losses


@pytest.fixture
def checkpoint(trained: tuple[Path, dict[int, float]], tmp_path: Path) -> Path:
  """Returns a copy of the checkpoint of `before.py`, not yet converted."""
  folder = tmp_path / "copy"
  shutil.copytree(trained[0], folder)
  text = (folder / "checkpoint").read_text()
  (folder / "checkpoint").write_text(text.replace(str(trained[0]), str(folder)))
  return folder


def assert_continues(output: str, expected: dict[int, float]) -> None:
  """Compares the losses, number by number."""
  losses = losses_in(output)
  assert list(losses) == list(expected), output
  assert "these are the losses of before.py: 10 steps" in output
  np.testing.assert_allclose(
    list(losses.values()), list(expected.values()), atol=ROUNDING, rtol=0
  )


def test_after_py_continues_the_training_of_before_py(
  trained: tuple[Path, dict[int, float]], checkpoint: Path
) -> None:
  output = after(checkpoint, "--strategy=mirrored")
  assert_continues(output, trained[1])
  assert "converted: 9 variables" in output
  assert "WARNING:absl" not in output
  assert re.search(r"kernel/momentum +hidden/kernel/Momentum", output)


@pytest.mark.parametrize("keras", ["0", "1"])
def test_converted_checkpoint_is_restored(
  trained: tuple[Path, dict[int, float]], checkpoint: Path, keras: str
) -> None:
  command = ["-m", "tf_cross_shard", "convert-checkpoint"]
  paths = [str(checkpoint), str(checkpoint / "converted")]
  output = run(
    [*command, *paths, "--program", "after:program"],
    checkpoint,
    TF_USE_LEGACY_KERAS=keras,
  )
  assert "converted: 9 variables" in output
  output = after(
    checkpoint, "--strategy=virtual_tpu", TF_USE_LEGACY_KERAS=keras
  )
  assert "9 variables" not in output  # It only reads.
  assert_continues(output, trained[1])


def test_towers_learn_what_one_device_learns(tmp_path: Path) -> None:
  """Towers reach the stated accuracy, whatever their number."""
  script = str(EXAMPLES / "towers.py")
  outputs = {}
  for towers in ("4", "1"):
    arguments = [f"--towers={towers}", f"--data_dir={tmp_path}", "--epochs=5"]
    outputs[towers] = fork([script, *arguments], tmp_path)
    assert f"{towers} towers on " in outputs[towers]
  pattern = r"loss ([\d.]+), test accuracy ([\d.]+)%"
  found = {
    towers: np.array(re.findall(pattern, output), float)
    for towers, output in outputs.items()
  }
  assert found["4"].shape == (5, 2)
  assert found["4"][-1, 1] >= 95, outputs["4"]
  # An image of the 364 is 0.27 %.
  np.testing.assert_allclose(
    found["4"], found["1"], atol=0.3, rtol=0, err_msg=outputs["1"]
  )
  np.testing.assert_allclose(found["4"][:, 0], found["1"][:, 0], atol=1e-3)
