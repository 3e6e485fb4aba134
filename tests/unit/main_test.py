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
"""


def _main(
  capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
  status = command.main(words)
  captured = capsys.readouterr()
  return status, captured.out, captured.err


@pytest.fixture
def steps(
  request: pytest.FixtureRequest,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> str:
  """A module in the folder where the command is run."""
  name = "steps_of_" + request.node.name.split("[")[0]
  (tmp_path / f"{name}.py").write_text(textwrap.dedent(STEPS))
  monkeypatch.chdir(tmp_path)
  return name


class TestGroups:
  @pytest.mark.parametrize(
    ("words", "lines"),
    [
      (["--assignment", "[[0, 2], [1, 3]]"], ["o-----o", "   o-----o"]),
      (["--contiguous", "4", "2"], ["o--o", "      o--o"]),
      (["--strided", "4", "2"], ["o-----o", "   o-----o"]),
      (["--singletons", "3"], ["o", "   o", "      o"]),
      (["--along", "x", "--topology", "v5e:2x2"], ["o--o", "      o--o"]),
      (["--along", "y", "--topology", "v5e:2x2"], ["o-----o", "   o-----o"]),
    ],
  )
  def test_drawn(
    self,
    words: list[str],
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
  ) -> None:
    status, out, err = _main(capsys, "groups", *words)
    assert (status, err) == (0, "")
    assert out.splitlines()[0].startswith("replica  0  1  2")
    assert out.splitlines()[1:] == [
      f"group {i}  {line}" for i, line in enumerate(lines)
    ]

  def test_picture(
    self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
  ) -> None:
    path = tmp_path / "groups.png"
    words = ["groups", "--along", "x", "--topology", "v5e:2x2"]
    status, _, err = _main(capsys, *words, "--picture", str(path))
    assert (status, err) == (0, "")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

  @pytest.mark.parametrize(
    ("words", "said"),
    [
      (["--along", "x"], "--along needs --topology"),
      (["--assignment", "[[0,1],[1,0]]"], "replica 1 is in it twice"),
      (["--assignment", "[["], "must be a table such as '[[0, 1], [2, 3]]'"),
      (["--contiguous", "4", "3"], "3 does not divide 4"),
      (["--singletons", "0"], "must be a positive integer; got 0"),
      (
        ["--singletons", "3", "--topology", "v5e:2x2"],
        "v5e:2x2 has 4 devices; the groups hold 3 replicas",
      ),
      (["--along", "x", "--topology", "moon"], "got 'moon'"),
      (["--singletons", "2", "--picture", "/no/where.png"], "/no/where.png"),
    ],
  )
  def test_errors(
    self, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
  ) -> None:
    status, out, err = _main(capsys, "groups", *words)
    assert (status, out) == (2, "")
    assert err.startswith("python -m tf_cross_shard: ")
    assert said in err

  def test_two_kinds_at_once(self, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
      command.main(["groups", "--singletons", "2", "--strided", "4", "2"])
    assert error.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


class TestCompile:
  def test_table(self, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _main(
      capsys,
      *("compile", f"{steps}:total", "--topology", "v5e:2x2"),
      *("--input", "bfloat16[4, 2]", "--hlo", "program.txt"),
    )
    assert (status, err) == (0, "")
    assert out.startswith("v5e:2x2: 4 replicas on TPU")
    assert "1 x [4, 2]" in out
    assert "all 4" in out
    assert Path("program.txt").read_text().startswith("HloModule")

  def test_json_and_signature(
    self, steps: str, capsys: pytest.CaptureFixture[str]
  ) -> None:
    words = ["compile", f"{steps}:signed", "--topology", "v5e:2x2", "--json"]
    status, out, _ = _main(capsys, *words)
    found = json.loads(out)
    assert (status, found["num_replicas"], found["wire_bytes"]) == (0, 4, 12)
    [collective] = found["collectives"]
    assert collective["shapes"] == [[3]]
    assert collective["groups"] == [[0, 1, 2, 3]]

  @pytest.mark.parametrize(
    ("step", "spec", "said"),
    [
      ("total", "float33[2]", "must be a dtype and a shape"),
      ("total", "float32", "such as 'float32[8, 64]'; got 'float32'"),
      ("total", "float32[None]", "got 'float32[None]'"),
      ("missing", "float32[2]", "has no function 'missing'"),
      ("masked", "float32[2]", "must not depend on data"),
    ],
  )
  def test_errors(
    self,
    step: str,
    spec: str,
    said: str,
    steps: str,
    capsys: pytest.CaptureFixture[str],
  ) -> None:
    words = ["compile", f"{steps}:{step}", "--topology", "v5e:2x2"]
    status, out, err = _main(capsys, *words, "--input", spec)
    assert (status, out) == (2, "")
    assert err.startswith("python -m tf_cross_shard: ")
    assert said in err

  @pytest.mark.parametrize(
    ("step", "said"),
    [
      ("no_colon", "must be named MODULE:FUNCTION; got 'no_colon'"),
      ("no_such_module:step", "No module named 'no_such_module'"),
    ],
  )
  def test_names(
    self, step: str, said: str, capsys: pytest.CaptureFixture[str]
  ) -> None:
    status, _, err = _main(capsys, "compile", step, "--topology", "v5e:2x2")
    assert status == 2
    assert said in err


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(SystemExit) as error:
    command.main([])
  assert error.value.code == 2
  assert "COMMAND" in capsys.readouterr().err


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
