"""The command line, `python -m tf_cross_shard`."""

import json
import textwrap
from pathlib import Path

import pytest

from tf_cross_shard import __main__ as command

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
    (["compile", "STEPS:total", *COMPILE, "float33[2]"], "got 'float33[2]'"),
    (["compile", "STEPS:total", *COMPILE, "half"], "must be a dtype and a sha"),
    (["compile", "STEPS:masked", *COMPILE, "half[2]"], "must not depend on da"),
  ],
)
def test_errors(
  words: list[str], said: str, steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
  words = [word.replace("STEPS", steps) for word in words]
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


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
