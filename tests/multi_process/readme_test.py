"""The README's Python runs as a reader would run it and prints what it says."""

# bazel: data=//:sources deps=//tf_cross_shard

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.support import workers

README = pathlib.Path(__file__).parent.parent.parent / "README.md"


def _blocks(language: str) -> list[str]:
  text = README.read_text(encoding="utf-8")
  return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def _run(program: str, **environment: str) -> str:
  """Runs a program in a process of its own; answers what it prints."""
  # From the source tree, like the test itself.
  path = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
  done = subprocess.run(
    [
      sys.executable,
      "-c",
      path + "exec(sys.stdin.read())",
    ],
    input=program,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


def test_first_example() -> None:
  first = _blocks("python")[0]
  lines = [line for line in first.splitlines() if line.strip()]
  assert len(lines) <= 8
  assert "loss:" in _run(first)


def test_first_example_with_tf_keras() -> None:
  program = _blocks("python")[0]
  program += "\nprint(type(model).__module__, len(model.optimizer.variables))"
  printed = _run(program, TF_USE_LEGACY_KERAS="1")
  assert "loss:" in printed
  assert "tf_keras.src" in printed


def test_groups_and_custom_loop() -> None:
  _, groups, _, _, loop, *_ = _blocks("python")
  printed = _run(groups + loop)
  [drawn] = [block for block in _blocks("text") if "group 0" in block]
  assert drawn in printed
  # The gradient of the mean is [1, -1], so one step of 0.1 from [1, -1].
  assert "[ 0.9 -0.9]" in printed


def test_values_that_differ_between_groups(tmp_path: pathlib.Path) -> None:
  program = f"import os\nos.chdir({str(tmp_path)!r})\n" + _blocks("python")[5]
  program += "\nprint('saved', os.listdir('.'))"
  printed = _run(program)
  assert "saved ['groups.npz']" in printed
  [line] = [line for line in printed.splitlines() if "array(" in line]
  first, second = re.findall(r"array\((.*?), dtype", line)
  assert first != second


def test_towers() -> None:
  printed = _run(_blocks("python")[6])
  loss, shape, error = re.findall(r"(\S+) (\(.*\)) (\S+)", printed)[-1]
  assert 0 < float(loss) < 20
  assert shape == "(64, 1)"
  assert 0 < float(error) < 5


def test_from_tensorflow_1() -> None:
  printed = _run(_blocks("python")[7])
  assert printed.splitlines()[-1].split() == [
    "CrossShardOptimizer",
    "V1Momentum",
  ]


def test_virtual_tpu() -> None:
  printed = _run(_blocks("python")[2])
  [report] = [block for block in _blocks("text") if "wire bytes" in block]
  # All but the last line, which is a time.
  expected, seconds = report.rstrip().rsplit("\n", 1)
  assert seconds.startswith("compile seconds")
  assert expected in printed


@pytest.mark.parametrize("count", [1, 2])
def test_several_machines(count: int, tmp_path: pathlib.Path) -> None:
  program = f"import os\nos.chdir({str(tmp_path)!r})\n" + _blocks("python")[3]
  program += "\nprint('weights', [w.sum() for w in model.get_weights()])"
  with concurrent.futures.ThreadPoolExecutor() as threads:
    printed = list(
      threads.map(
        lambda config: _run(
          f"import os\nos.environ['TF_CONFIG'] = {json.dumps(config)!r}\n"
          + program
        ),
        workers.cluster_of(count),
      )
    )
  weights = [text.rsplit("weights", 1)[1] for text in printed]
  assert len(weights) == count
  assert weights == weights[:1] * count
  assert "loss:" in printed[0]


def test_commands_exist() -> None:
  root = README.parent
  commands = re.findall(
    r"(?:bash|python) ([\w/]+\.(?:sh|py))", "".join(_blocks("sh"))
  )
  assert len(commands) >= 2
  assert [c for c in commands if not (root / c).exists()] == []


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
