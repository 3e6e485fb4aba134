"""Runs each example once, as a user runs it, and checks what it prints."""

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import programs

PROJECT = programs.PROJECT
EXAMPLES = PROJECT / "examples"
PNG_START = b"\x89PNG\r\n\x1a\n"


def run_example(name: str, data_dir: Path, *arguments: str) -> str:
  """Runs an example in a different folder.

  Returns the output, and checks that this package has logged no warning.
  """
  command = [str(EXAMPLES / name), f"--data_dir={data_dir}", *arguments]
  return checked(programs.fork(command, data_dir))


def checked(output: str) -> str:
  """Returns `output`. Checks that it has no warning of this package."""
  own = "|".join(x.name for x in PROJECT.glob("tf_cross_shard/**/*.py"))
  warned = rf"(?m)^(W\d{{4}} .* ({own}):|WARNING:absl)(?!.*evaluate\(\))"
  assert not re.search(warned, output), output
  return output


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Returns a folder for the prepared digits, which the tests share."""
  return tmp_path_factory.mktemp("data")


def test_digits_trains_one_model_and_many(data_dir: Path) -> None:
  output = run_example(
    "digits.py",
    data_dir,
    *("--replicas=2", "--epochs=3", "--learning_rates=0.0001,0.004,0.004"),
  )
  rows = re.findall(r"(?m)^(.*?) {2,}([\d.]*) +([\d.]+)%", output)
  assert [row[:2] for row in rows] == [
    ("one model, 2 replicas", "0.004"),
    ("model 0 of 3", "0.0001"),
    ("model 1 of 3", "0.004"),
    ("model 2 of 3", "0.004"),
    ("their mean prediction", ""),
  ]
  one, slow, best, same, _ = (float(row[2]) for row in rows)
  assert min(one, best) >= 85 > slow, output
  # All models start with the same weights, and see the same batches.
  assert same == best, output
  one_fit, separate = re.findall(r"(?m)^3 .* fits? +([\d.]+) s$", output)
  assert float(one_fit) > 0
  assert float(separate) > 0
  assert "The best learning rate is 0.004." in output
  content = (data_dir / "digits.png").read_bytes()
  assert content.startswith(PNG_START)
  assert len(content) > 10_000


def test_custom_loop_clips_and_learns(data_dir: Path) -> None:
  output = run_example("custom_loop.py", data_dir, "--epochs=3")
  last = re.findall(r"epoch 3: .* accuracy ([\d.]+)% ([\d.]+)%", output)
  [(first, second)] = last
  assert min(float(first), float(second)) >= 85, output
  assert first != second
  # The clipping was at work, on some replicas and not on others.
  assert re.search(r": [1-9]\d?% of the gradients clipped", output)


def test_recommender_learns(data_dir: Path) -> None:
  flags = ["--replicas=2", "--groups=2", "--items=2000", "--epochs=2"]
  output = checked(
    programs.fork([str(EXAMPLES / "recommender.py"), *flags], data_dir)
  )
  assert "59,500 clicks of 200 queries on 2,000 items" in output
  [(plain, first, second)] = re.findall(
    r"plain Keras: .* recall@10 ([\d.]+)%; .*\n(?:.*\n)*"
    r"ours: .* recall@10 ([\d.]+)%, ([\d.]+)%; ",
    output,
  )
  # Ten items at random are right in 0.5 %, the ten most popular in 4 %.
  assert min(float(plain), float(first), float(second)) >= 15, output


def test_tpu_reports_and_trains(data_dir: Path) -> None:
  arguments = ["--virtual=8", "--groups=2", "--epochs=3"]
  output = run_example("tpu.py", data_dir, *arguments)
  found = dict(re.findall(r"(?m)^val_accuracy/(\w+) ([\d.]+)%$", output))
  assert set(found) == {"model_0", "model_1", "ensemble"}
  assert min(map(float, found.values())) >= 80, output
  assert found["model_0"] != found["model_1"]
  # The report of the compiler has one merged sum; tpu_program_test.py has more.
  assert "v5e:4x2: 8 replicas on TPU v5 lite\n" in output
  assert output.count(" arrays, within ") == 1


def test_towers_learn(data_dir: Path) -> None:
  output = run_example("towers.py", data_dir, "--towers=4", "--epochs=5")
  assert "4 towers on " in output
  losses, accuracies = zip(
    *re.findall(r"loss ([\d.]+), test accuracy ([\d.]+)%", output), strict=True
  )
  assert float(losses[-1]) < float(losses[0])
  assert len(accuracies) == 5
  assert float(accuracies[-1]) >= 95, output


class Row(NamedTuple):
  """A line of the table that examples/multi_worker.py ends with."""

  group: int
  accuracy: float  # in percent
  digest: str  # of the group's weights


def read_table(output: str) -> list[Row]:
  """Parses the rows of the table that the first worker prints."""
  found = re.findall(
    r"^(?:\[worker 0\] )?(\d+) +([\d.]+)% +[\d.]+ +([0-9a-f]{8})$",
    output,
    re.MULTILINE,
  )
  return [Row(int(g), float(a), d) for g, a, d in found]


def test_workers_of_one_command_and_of_slurm_train_alike(
  data_dir: Path, tmp_path: Path
) -> None:
  arguments = [
    *(str(EXAMPLES / "multi_worker.py"), f"--data_dir={data_dir}"),
    *("--epochs=3", "--groups=2"),
  ]
  output = programs.run([*arguments, "--workers=2"], tmp_path)
  rows = read_table(output)
  assert "retracing" not in output
  assert [row.group for row in rows] == [0, 1]
  assert min(row.accuracy for row in rows) >= 80
  assert rows[0].digest != rows[1].digest
  slurm = {
    "SLURM_JOB_ID": str(os.getpid()),  # The port follows from it.
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
  }
  with contextlib.ExitStack() as stack:
    both = [
      stack.enter_context(
        programs.started(arguments, tmp_path, **slurm, SLURM_PROCID=str(i))
      )
      for i in range(2)
    ]
    first, second = (finish() for finish in both)
  assert read_table(first) == rows
  assert read_table(second) == []


def test_after_py_continues_the_training_of_before_py(tmp_path: Path) -> None:
  """It compares the losses itself, and exits with 1 if they differ."""
  migration = EXAMPLES / "migration"
  for name, flag in (("before.py", "--steps=30"), ("after.py", "--steps=40")):
    command = [str(migration / name), f"--folder={tmp_path}", flag]
    output = checked(programs.fork(command, tmp_path, path=[migration]))
  assert "converted: 13 variables" in output
  assert re.search(r"kernel/momentum +hidden/kernel/Adam", output)
  assert "these are the losses of before.py: 10 steps" in output
