"""The command line, `tf-cross-shard` or `python -m tf_cross_shard`."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tf_cross_shard_cli import __main__ as command

PROJECT = Path(__file__).absolute().parent.parent.parent.parent

STEPS = """
  import tensorflow as tf

  def total(x):
    return tf.distribute.get_replica_context().all_reduce("SUM", x)

  @tf.function(input_signature=[tf.TensorSpec([3], tf.float32)])
  def signed(x):
    return total(x)

  def masked(x):
    return tf.boolean_mask(x, x > 0)

  number = 7
"""
COMPILE = ("--topology", "v5e:2x2", "--input")


def _main(
  capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
  status = command.main(words)
  captured = capsys.readouterr()
  return status, captured.out, captured.err


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
  """A module in the folder where the command is run."""
  name = f"steps_in_{tmp_path.name}"
  (tmp_path / f"{name}.py").write_text(textwrap.dedent(STEPS))
  monkeypatch.chdir(tmp_path)
  return name


def test_compile_to_table(
  steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
  words = ["compile", f"{steps}:total", *COMPILE, "bfloat16[4, 2]"]
  status, out, err = _main(capsys, *words, "--hlo", "program.txt")
  assert (status, err) == (0, "")
  assert out.startswith("v5e:2x2: 4 replicas on TPU")
  assert "all-reduce of bf16: 16 bytes in 1 arrays, within 1 groups of 4" in out
  assert Path("program.txt").read_text().startswith("HloModule")


def test_compile_by_signature_to_json(
  steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
  words = ["compile", f"{steps}:signed", "--topology", "v5e:2x2", "--json"]
  status, out, _ = _main(capsys, *words)
  report = json.loads(out)
  assert "hlo_text" not in report
  assert (status, report["num_replicas"], report["wire_bytes"]) == (0, 4, 12)
  [collective] = report["collectives"]
  assert collective["shapes"] == [[3]]
  assert collective["groups"] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["compile", "STEPS:number", *COMPILE, "int8[]"], "no function 'number'"),
    (["compile", "STEPS:total", *COMPILE, "float33[2]"], "'float33' to a"),
    (["compile", "STEPS:total", *COMPILE[:2]], "missing 1 required positional"),
    (
      ["compile", "STEPS:signed", *COMPILE, "float32[2]"],
      "dtype=tf.float32, name=None) does not fit TensorSpec(shape=(3,)",
    ),
    (["compile", "STEPS:masked", *COMPILE, "half[2]"], "must not depend on da"),
  ],
)
def test_errors(
  words: list[str], said: str, steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
  words = [word.replace("STEPS", steps) for word in words]
  status, out, err = _main(capsys, *words)
  assert (status, out) == (2, "")
  assert err.startswith("tf-cross-shard: ")
  assert said.replace("STEPS", steps) in err


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["compile", "step", *COMPILE, "x"], "MODULE:FUNCTION; got 'step'"),
    (["compile", "a:b", *COMPILE, "half"], "and a shape, such as 'float32[8"),
    (["convert-checkpoint", "a", "b", "--program", "c"], "got 'c'"),
    (["convert-checkpoint", "--names", "no.json"], "must be a JSON file"),
    (["convert-checkpoint", "--names", "list"], "got list: "),
  ],
)
def test_usage(
  words: list[str],
  said: str,
  capsys: pytest.CaptureFixture[str],
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.chdir(tmp_path)
  Path("list").write_text("[1]")
  with pytest.raises(SystemExit) as error:
    command.main(words)
  assert error.value.code == 2
  assert said in capsys.readouterr().err


@pytest.mark.parametrize(
  ("words", "status", "said"),
  [
    (["--help"], 0, "convert-checkpoint"),
    (["compile", "--help"], 0, "--topology"),
    (["--version"], 0, "tf-cross-shard "),
    (["launch", "--help"], 0, "--nodes"),
    (["doctor", "--help"], 0, "TF_CONFIG"),
    (["launch", "--workers=1", "-m", "this"], 0, "[worker 0] The Zen of"),
    (["compile", "none_such:f", *COMPILE, "x[]"], 2, "No module named"),
    (["convert-checkpoint", "a", "b", "--program", "none_such:f"], 2, "No mod"),
  ],
)
def test_arguments_are_read_before_tensorflow_is_imported(
  words: list[str], status: int, said: str
) -> None:
  path = os.pathsep.join([str(PROJECT), *sys.path])
  done = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "tf_cross_shard_cli", *words],
    env={**os.environ, "PYTHONPATH": path},
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  lines = done.stderr.splitlines()
  imported = {x.split("|")[-1].strip() for x in lines if "import time:" in x}
  assert "argparse" in imported
  assert not {"tf_cross_shard", "tensorflow"} & imported
  prints = [line for line in lines if "import time:" not in line]
  assert said in done.stdout + "\n".join(prints)
  assert done.returncode == status, done.stderr
