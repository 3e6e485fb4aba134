"""The contract and the equivalence matrix where `tf.keras` is tf_keras.

TF_USE_LEGACY_KERAS=1 has to be set before TensorFlow is imported, so that each
file whose head says `# keras: both` runs once more, in a process of its own.
"""
# bazel: size=large timeout=eternal data=//:sources deps=//tests:oracle

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import pytest

from tests.support import contract, testbed
from tf_cross_shard import tf_keras

pytestmark = pytest.mark.slow

PROJECT = pathlib.Path(__file__).absolute().parent.parent.parent
# At least so many tests pass in each; fewer means that something is left out.
LEAST = {
  "contract_test.py": 480,
  "equivalence_test.py": 200,
  "migration_checkpoints_test.py": 200,
  "migration_optimizers_test.py": 40,
  "migration_sources_test.py": 15,
  "tower_test.py": 165,
  "towers_errors_test.py": 105,
  "towers_property_test.py": 65,
  "towers_replicate_test.py": 60,
  "towers_sharing_test.py": 30,
  "towers_steps_test.py": 33,
}


def test_files_that_say_so_are_run() -> None:
  say_so = {
    file.name
    for file in (PROJECT / "tests").glob("*_test.py")
    if "\n# keras: both\n" in file.read_text()
  }
  assert say_so == set(LEAST)
  for module in (contract, testbed, tf_keras):  # what those files test
    assert module.__file__


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("file", LEAST)
def test_with_tf_keras(file: str, tmp_path: pathlib.Path) -> None:
  environment = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PYTEST_", "KERAS_"))
  }
  report = tmp_path / "report.xml"
  run = subprocess.run(
    [
      *(sys.executable, "-m", "pytest", f"tests/{file}", "-q"),
      *("-p", "no:cacheprovider", f"--junitxml={report}"),
    ],
    cwd=PROJECT,
    env={**environment, "TF_USE_LEGACY_KERAS": "1"},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=1400,
    check=False,
  )
  assert run.returncode == 0, run.stdout[-8000:]
  [suite] = xml.etree.ElementTree.parse(report).getroot()
  count = {
    name: int(suite.get(name, 0))
    for name in ("tests", "failures", "errors", "skipped")
  }
  assert count["failures"] == count["errors"] == 0
  assert count["tests"] - count["skipped"] >= LEAST[file], count


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
