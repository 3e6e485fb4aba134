"""The Python in README.md and docs/ runs, and prints what the pages say.

Each block of Python runs as it stands, in a namespace of its own. All blocks
run in this process, which has the four logical CPUs that they need. Blocks for
several machines run as two workers on this machine. The blocks of
docs/migration.md build on each other.
"""

import contextlib
import json
import os
import pathlib
import re
import subprocess
from collections.abc import Mapping

import pytest

from tests.support import pages, programs, workers
from tf_cross_shard_cli import __main__ as command_line
from tf_cross_shard_cli import launch

EXPECTED = {  # The blocks of Python, or the change of a line, of each page.
  "README.md": 2,
  "docs/callbacks.md": 2,
  "docs/coming_from.md": 1,
  "docs/embeddings.md": 1,
  "docs/ensembles.md": 4,
  "docs/groups.md": 3,
  "docs/limits.md": 1,
  "docs/quickstart.md": 1,
  "docs/saving.md": 1,
  "docs/search.md": 1,
  "docs/training.md": 2,
  "docs/updates.md": 4,
  "docs/virtual_tpu.md": 1,
}
MIGRATION, MULTI_WORKER = "docs/migration.md", "docs/multi_worker.md"
ELSEWHERE = {MIGRATION, MULTI_WORKER}
WORKERS = {  # What two workers print, by page and number.
  ("docs/coming_from.md", 0): ["trained to 2.0", "trained to 2.0"],
}


def test_every_program_is_found() -> None:
  names = [f"docs/{x.name}" for x in pages.PROJECT.glob("docs/*.md")]
  found = {n: len(pages.programs(n)) for n in ["README.md", *names]}
  assert {
    name: count
    for name, count in found.items()
    if count and name not in ELSEWHERE
  } == EXPECTED


@pytest.mark.parametrize(
  ("page", "number"),
  [(page, i) for page, count in EXPECTED.items() for i in range(count)],
)
def test_program_runs_and_prints_what_the_page_says(
  page: str,
  number: int,
  tmp_path: pathlib.Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.chdir(tmp_path)
  program = pages.programs(page)[number]
  if (page, number) not in WORKERS:
    pages.check(page, program, tmp_path)
    return
  path = tmp_path / "program.py"
  path.write_text(program)
  printed = workers.run("program", 2, arguments={"path": path})
  for worker, line in zip(printed, WORKERS[page, number], strict=True):
    assert re.search(rf"^{line}$", worker.output, re.MULTILINE)
    assert line in pages.text(page)


def test_migration_continues_from_the_checkpoint_and_runs_twice(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.chdir(tmp_path)
  before, after, towers, read = pages.blocks(MIGRATION, "python")
  # The printed lines are shown below `after`, so nothing may follow it.
  pages.check(MIGRATION, before + after, tmp_path, shown_after=after)
  pages.check(MIGRATION, before + after + read, tmp_path, shown_after=after)
  pages.check(MIGRATION, towers, tmp_path)


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


def test_programs_of_several_machines_run(tmp_path: pathlib.Path) -> None:
  """Uses the page's TF_CONFIG with other hosts. `even` follows `fit`."""
  training, on_gpus, evening = pages.blocks(MULTI_WORKER, "python")
  compile(on_gpus, MULTI_WORKER, "exec")
  batches = "batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)\n"
  by_hand, _, _ = pages.blocks(MULTI_WORKER, "sh")
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
  with contextlib.ExitStack() as stack:
    both = [
      stack.enter_context(
        programs.started([str(program)], tmp_path, TF_CONFIG=json.dumps(each))
      )
      for each in (config, other)
    ]
    said = [finish() for finish in both]
  losses = [re.findall(r"loss: ([\d.]+)", each)[-1] for each in said]
  assert losses[0] == losses[1]
  # `fit` ended, and so nothing is left to resume from.
  assert not list((tmp_path / "backup").iterdir())


def test_the_command_prints_what_is_set_by_hand(
  capsys: pytest.CaptureFixture[str],
) -> None:
  by_hand, commands, _ = pages.blocks(MULTI_WORKER, "sh")
  _, prints, _ = commands.splitlines()
  assert prints.startswith("tf-cross-shard launch ")
  assert command_line.main(prints.split()[1:]) == 0
  assert by_hand in capsys.readouterr().out


def test_slurm_script_starts_training_again(tmp_path: pathlib.Path) -> None:
  """After each of two failures of srun."""
  _, _, script = pages.blocks(MULTI_WORKER, "sh")
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
  (manifest,) = pages.blocks(MULTI_WORKER, "yaml")
  _, _, lines = manifest.partition("args:\n        - |\n")
  lines = lines.replace("exec python train.py", 'printf %s "$TF_CONFIG"')
  variables = {"WORKERS": "3", "JOB_COMPLETION_INDEX": str(index)}
  assert json.loads(run_shell(lines, variables)) == {
    "cluster": {"worker": [f"train-{i}.train:12345" for i in range(3)]},
    "task": {"type": "worker", "index": index},
  }
