"""The command line, `tf-cross-shard` or `python -m tf_cross_shard`."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tf_cross_shard
from tf_cross_shard import __main__ as command

PROJECT = Path(__file__).absolute().parent.parent.parent

STEPS = """
  import tensorflow as tf

  def total(x):
    return tf.distribute.get_replica_context().all_reduce("SUM", x)

  @tf.function(input_signature=[tf.TensorSpec([3], tf.float32)])
  def signed(x):
    return total(x)

  def masked(x):
    return tf.boolean_mask(x, x > 0)

  def product(x, y):
    return total(tf.matmul(x, y))

  number = 7
"""
COMPILE = ("--topology", "v5e:2x2", "--input")
HALF = ("--input", "half[2]")


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


@pytest.mark.parametrize(
  ("words", "lines"),
  [
    (["--assignment", "[[0, 2], [1, 3]]"], ["o-----o", "   o-----o"]),
    (["--contiguous", "4", "2"], ["o--o", "      o--o"]),
    (["--strided", "4", "2"], ["o-----o", "   o-----o"]),
    (["--singletons", "3"], ["o", "   o", "      o"]),
    (["--along", "y", "--topology", "v5e:2x2"], ["o-----o", "   o-----o"]),
  ],
)
def test_groups(
  words: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
  status, out, err = _main(capsys, "groups", *words)
  assert (status, err) == (0, "")
  assert out.splitlines()[0].startswith("replica  0  1  2")
  assert out.splitlines()[1:] == [
    f"group {i}  {line}" for i, line in enumerate(lines)
  ]


def test_compile_to_table(
  steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
  words = ["compile", f"{steps}:total", *COMPILE, "bfloat16[4, 2]"]
  status, out, err = _main(capsys, *words, "--hlo", "program.txt")
  assert (status, err) == (0, "")
  assert out.startswith("v5e:2x2: 4 replicas on TPU")
  assert "1 x [4, 2]" in out
  assert "all 4" in out
  assert Path("program.txt").read_text().startswith("HloModule")


def test_compile_by_signature_to_json(
  steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
  words = ["compile", f"{steps}:signed", "--topology", "v5e:2x2", "--json"]
  status, out, _ = _main(capsys, *words)
  found = json.loads(out)
  assert (status, found["num_replicas"], found["wire_bytes"]) == (0, 4, 12)
  [collective] = found["collectives"]
  assert collective["shapes"] == [[3]]
  assert collective["groups"] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["groups", "--along", "x"], "--along needs --topology"),
    (["groups", "--assignment", "[[0,1],[1,0]]"], "replica 1 is in it twice"),
    (
      ["groups", "--assignment", "[["],
      "must be a table such as '[[0, 1], [2, 3]]'; got '[['",
    ),
    (["groups", "--contiguous", "4", "3"], "3 does not divide 4"),
    (
      ["groups", "--singletons", "3", "--topology", "v5e:2x2"],
      "v5e:2x2 has 4 devices; the groups hold 3 replicas",
    ),
    (["compile", "step", *COMPILE, "int8[]"], "MODULE:FUNCTION; got 'step'"),
    (["compile", "none_such:f", *COMPILE, "int8[]"], "No module named"),
    (["compile", "STEPS:number", *COMPILE, "int8[]"], "no function 'number'"),
    (
      ["compile", "step", *COMPILE, "int8[]", "--input", "float33[2]"],
      "--input number 2, 'float33[2]', has the dtype 'float33', which there is"
      " not. Did you mean 'float32'?",
    ),
    (
      ["compile", "step", *COMPILE, "half"],
      "--input number 1, 'half', must be a dtype and a shape",
    ),
    (
      ["compile", "STEPS:total", *COMPILE, "half[2]", "--input", "half[2]"],
      "STEPS:total(x) cannot be called with 2 of --input: too many positional",
    ),
    (["compile", "STEPS:total", *COMPILE[:2]], "with 0 of --input: missing"),
    (
      ["compile", "STEPS:signed", *COMPILE, "float32[2]"],
      "--input number 1, 'float32[2]', does not fit the signature of"
      " STEPS:signed, which has float32 of shape (3,) there",
    ),
    (
      ["compile", "STEPS:product", *COMPILE, "half[2, 3]", *HALF],
      "STEPS:product fails for TensorSpec(shape=(2, 3), dtype=tf.float16,",
    ),
    (["compile", "STEPS:masked", *COMPILE, "half[2]"], "must not depend on da"),
  ],
)
def test_errors(
  words: list[str], said: str, steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
  words = [word.replace("STEPS", steps) for word in words]
  said = said.replace("STEPS", steps)
  status, out, err = _main(capsys, *words)
  assert (status, out) == (2, "")
  assert err.startswith("python -m tf_cross_shard: ")
  assert said in err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
  words = ["groups", "--singletons", "2", "--strided", "4", "2"]
  with pytest.raises(SystemExit) as error:
    command.main(words)
  assert error.value.code == 2
  assert "not allowed" in capsys.readouterr().err


# What pip makes of an entry point.
SCRIPT = """
import sys
from tf_cross_shard.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
  ("words", "status", "said"),
  [
    (["-m", "tf_cross_shard", "--help"], 0, "convert-checkpoint"),
    (["-m", "tf_cross_shard.multi_worker.launch", "--help"], 0, "--workers"),
    (["tf-cross-shard", "--version"], 0, "tf-cross-shard "),
    (["tf-cross-shard", "groups", "--strided", "4"], 2, "expected 2 argum"),
    (["tf-cross-shard", "groups", "--strided", "4", "3"], 2, "not divide 4"),
    (
      ["tf-cross-shard", "compile", "f", *COMPILE, "x"],
      2,
      "tf-cross-shard: --",
    ),
    (["tf-cross-shard", "launch", "none.py"], 2, "none.py does not exist"),
    (["-m", "tf_cross_shard", "launch", "-m", "this"], 0, "The Zen of Python"),
  ],
)
def test_no_command_waits_for_tensorflow_in_vain(
  words: list[str], status: int, said: str, tmp_path: Path
) -> None:
  (tmp_path / "tf-cross-shard").write_text(SCRIPT)
  path = os.pathsep.join([str(PROJECT), *sys.path])
  done = subprocess.run(
    [sys.executable, "-X", "importtime", *words],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": path},
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  lines = done.stderr.splitlines()
  imported = [x.split("|")[-1].strip() for x in lines if "import time:" in x]
  assert "tf_cross_shard" in imported
  # What importlib.import_module imports is not listed, but what that does is.
  assert not [name for name in imported if name.startswith("tensorflow.")]
  words_of_its_own = [line for line in lines if "import time:" not in line]
  assert said in done.stdout + "\n".join(words_of_its_own)
  assert done.returncode == status, done.stderr


def test_what_a_command_loads_finds_the_whole_package(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  """Left out for the command line, the optimizers come with the module."""
  optimizer = tf_cross_shard.CrossShardOptimizer
  monkeypatch.setattr(tf_cross_shard, "_IS_DEFERRED", True)
  monkeypatch.delattr(tf_cross_shard, "CrossShardOptimizer")
  assert _main(capsys, "compile", "none_such:f", *COMPILE, "int8[]")[0] == 2
  assert vars(tf_cross_shard)["CrossShardOptimizer"] is optimizer


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
