"""Tests the example of several workers, and that its documentation is right.

Every worker is a separate process, which is killed at the end of the test.
"""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import pages, programs
from tf_cross_shard_cli import __main__ as command_line
from tf_cross_shard_cli import launch

EXAMPLE = programs.PROJECT / "examples" / "multi_worker.py"
PAGE = "docs/multi_worker.md"


class Row(NamedTuple):
  """A line of the table that the example ends with."""

  replica: int
  group: int
  accuracy: float  # in percent
  digest: str


def read_table(output: str) -> list[Row]:
  """Parses the rows of the table that the first worker prints."""
  found = re.findall(
    r"^(?:\[worker 0\] )?(\d+) +(\d+) +([\d.]+)% +[\d.]+ +([0-9a-f]{8})$",
    output,
    re.MULTILINE,
  )
  return [Row(int(r), int(g), float(a), d) for r, g, a, d in found]


def run_both(
  arguments: list[str], variables: list[dict[str, str]], folder: Path
) -> list[str]:
  """Runs one program as two workers, and returns the output of each worker."""
  with contextlib.ExitStack() as stack:
    both = [
      stack.enter_context(programs.started(arguments, folder, **each))
      for each in variables
    ]
    return [finish() for finish in both]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Returns a folder with the prepared digits, which the tests share."""
  folder = tmp_path_factory.mktemp("data")
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(EXAMPLE.parent)
    import digits_dataset

    digits_dataset.load(1, str(folder))
  return folder


def command(data_dir: Path, *arguments: str) -> list[str]:
  """Returns the command line of the example."""
  return [str(EXAMPLE), f"--data_dir={data_dir}", *arguments]


def test_one_command_and_slurm_train_alike(
  data_dir: Path, tmp_path: Path
) -> None:
  """Compares digests of the groups' weights."""
  arguments = command(data_dir, "--epochs=3", "--groups=2")
  output = programs.run([*arguments, "--workers=2"], tmp_path)
  rows = read_table(output)
  assert "retracing" not in output
  assert [row[:2] for row in rows] == [(0, 0), (1, 1)]
  assert min(row.accuracy for row in rows) >= 80
  assert rows[0].digest != rows[1].digest
  slurm = {
    "SLURM_JOB_ID": str(os.getpid()),  # The port follows from it.
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
  }
  first, second = run_both(
    arguments, [{**slurm, "SLURM_PROCID": str(i)} for i in range(2)], tmp_path
  )
  assert read_table(first) == rows
  assert read_table(second) == []


# The page.


def run_shell(script: str, variables: Mapping[str, str] | None = None) -> str:
  """Returns what sh prints."""
  environment = {"PATH": os.environ["PATH"], **(variables or {})}
  return subprocess.run(
    ["sh", "-euc", script],
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
    check=True,
  ).stdout


def test_programs_of_the_page_run(tmp_path: Path) -> None:
  """Uses the page's TF_CONFIG with other hosts. `even` follows `fit`."""
  training, on_gpus, evening = pages.blocks(PAGE, "python")
  compile(on_gpus, PAGE, "exec")
  batches = "batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)\n"
  by_hand, _, _ = pages.blocks(PAGE, "sh")
  assert by_hand.rstrip().endswith("python train.py")
  show = by_hand.replace("python train.py", 'printf %s "$TF_CONFIG"')
  text = run_shell(show)
  for i, port in enumerate(launch.free_ports(2)):
    text = text.replace(f"host{i}:12345", f"localhost:{port}")
  config = json.loads(text)
  assert len(config["cluster"]["worker"]) == 2
  assert config["task"] == {"type": "worker", "index": 0}
  other = {**config, "task": {"type": "worker", "index": 1}}

  program = tmp_path / "train.py"
  program.write_text(training + batches + evening)
  said = run_both(
    [str(program)],
    [{"TF_CONFIG": json.dumps(each)} for each in (config, other)],
    tmp_path,
  )
  losses = [re.findall(r"loss: ([\d.]+)", each)[-1] for each in said]
  assert losses[0] == losses[1]
  # `fit` ended, and so nothing is left to resume from.
  assert not list((tmp_path / "backup").iterdir())


def test_the_command_of_the_page_prints_what_is_set_by_hand(
  capsys: pytest.CaptureFixture[str],
) -> None:
  by_hand, commands, _ = pages.blocks(PAGE, "sh")
  _, prints, _ = commands.splitlines()
  assert prints.startswith("tf-cross-shard launch ")
  assert command_line.main(prints.split()[1:]) == 0
  assert by_hand in capsys.readouterr().out


def test_slurm_script_of_the_page_is_a_script(tmp_path: Path) -> None:
  """The script starts training again after each of two failures of srun."""
  _, _, script = pages.blocks(PAGE, "sh")
  srun = tmp_path / "srun"
  srun.write_text(
    f'#!/bin/sh\necho "srun $@"; echo x >> {tmp_path}/n\n'
    f"[ $(wc -l < {tmp_path}/n) -ge 3 ]\n"
  )
  srun.chmod(0o755)
  path = f"{tmp_path}:{os.environ['PATH']}"
  assert run_shell(script, {"PATH": path}) == "srun python train.py\n" * 3


def test_kubernetes_shell_sets_tf_config() -> None:
  index = 2
  (manifest,) = pages.blocks(PAGE, "yaml")
  _, _, lines = manifest.partition("args:\n        - |\n")
  lines = lines.replace("exec python train.py", 'printf %s "$TF_CONFIG"')
  variables = {"WORKERS": "3", "JOB_COMPLETION_INDEX": str(index)}
  assert json.loads(run_shell(lines, variables)) == {
    "cluster": {"worker": [f"train-{i}.train:12345" for i in range(3)]},
    "task": {"type": "worker", "index": index},
  }


def test_arguments_and_files_on_the_page_exist() -> None:
  """The names of the example."""
  text = pages.text(PAGE)
  example = EXAMPLE.read_text()
  for name in ("slurm_resolver", "batches", "report"):
    assert f"`{name}`" in text
    assert re.search(rf"^(def|class) {name}\b", example, re.MULTILINE), name
