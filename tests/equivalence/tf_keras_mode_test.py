"""Runs some tests again in a process in which `tf.keras` is tf_keras.

TF_USE_LEGACY_KERAS=1 has to be set before TensorFlow is imported, so the tests
with the mark `tf_keras_mode` run a second time, in a separate process. All
other tests of tf_keras import `tf_cross_shard.tf_keras` together with Keras 3.
"""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

from tests.support import contract, testbed
from tf_cross_shard import tf_keras

PROJECT = pathlib.Path(__file__).absolute().parent.parent.parent
MARK = "pytest.mark." + "tf_keras_mode"
# More are welcome; fewer passed tests mean that some are left out.
LEAST = 15


def test_marked_tests_pass(tmp_path: pathlib.Path) -> None:
  for module in (contract, testbed, tf_keras):  # what those files test
    assert module.__file__
  files = [
    str(file)
    for file in sorted((PROJECT / "tests").rglob("*_test.py"))
    if MARK in file.read_text()
  ]
  assert len(files) >= 3
  environment = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PYTEST_", "KERAS_"))
  }
  report = tmp_path / "report.xml"
  run = subprocess.run(
    [
      *(sys.executable, "-m", "pytest", "-q", "-m", "tf_keras_mode"),
      *("-p", "no:cacheprovider", f"--junitxml={report}", *files),
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
  names = {case.get("classname", "") for case in suite.iter("testcase")}
  for file in files:
    assert any(pathlib.Path(file).stem in name for name in names), file
  assert count["tests"] - count["skipped"] >= LEAST, count
