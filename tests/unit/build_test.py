"""`tools/update_build.py --check` finds what is wrong in a BUILD file.

`tools/test.sh` runs it on this project.
"""
# bazel: size=small data=//:sources

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Not resolved: under Bazel the files are links, and lead out of the sandbox.
PROJECT = Path(__file__).absolute().parent.parent.parent


def _update(project: Path, *arguments: str) -> tuple[int, str]:
  """The exit status and the words of the program in a project of its own."""
  done = subprocess.run(
    [sys.executable, project / "tools/update_build.py", *arguments],
    capture_output=True,
    text=True,
    check=False,
  )
  return done.returncode, done.stdout + done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
  """`b` importing `a`, a test of `b`, a tool of it, and their BUILD files."""
  for name, text in {
    "tf_cross_shard/a.py": "",
    "tf_cross_shard/b.py": "from tf_cross_shard import a\n",
    "tools/c.py": "from tests import b_test\n",
    "tests/b_test.py": (
      "# bazel: tags=exclusive,slow\n"
      "def test_b():\n  from tf_cross_shard.b import a\npytest.main([])\n"
    ),
  }.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
  shutil.copy(PROJECT / "tools/update_build.py", tmp_path / "tools")
  assert _update(tmp_path)[0] == 0
  assert _update(tmp_path, "--check") == (0, "")
  return tmp_path


def test_what_is_written(project: Path) -> None:
  library = (project / "tf_cross_shard/BUILD").read_text()
  assert 'srcs = ["b.py"],\n    deps = [":a"],' in library
  test = (project / "tests/BUILD").read_text()
  assert 'tags = [\n        "exclusive",\n        "slow",\n    ],' in test
  assert 'deps = ["//tf_cross_shard:b"],' in test
  # What imports tests may only be part of tests itself.
  tools = (project / "tools/BUILD").read_text()
  assert 'name = "c",\n    testonly = True,' in tools
  assert "testonly" not in library


@pytest.mark.parametrize(
  ("file", "old", "new"),
  [
    ("tf_cross_shard/BUILD", '    deps = [":a"],\n', ""),
    ("tf_cross_shard/b.py", "import a", "import a, c"),
  ],
  ids=["missing", "no module"],
)
def test_a_fault_is_found(project: Path, file: str, old: str, new: str) -> None:
  text = (project / file).read_text()
  assert old in text
  (project / file).write_text(text.replace(old, new, 1))
  status, words = _update(project, "--check")
  assert status == 1
  assert "update_build: run" in words or "imports tf_cross_shard, but" in words


def test_the_package_is_not_an_installed_copy() -> None:
  spec = importlib.util.find_spec("tf_cross_shard")
  assert spec is not None
  assert spec.origin == str(PROJECT / "tf_cross_shard" / "__init__.py")


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
