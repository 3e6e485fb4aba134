"""Keras' own tests of MirroredStrategy pass with data-parallel replicas.

The wheel of Keras 3.15 contains these tests. `tools/peer_tests.py` runs the
tests of tf_keras, whose wheel does not contain them.
"""

import os
import pathlib

import keras
import pytest
from packaging import version

from tests.support import peer_runs

ROOT = pathlib.Path(keras.__file__).parent
# Tests of Keras that do not pass, each with the reason. All pass with
# MirroredStrategy.
CANNOT_PASS = {
  "DistributeTest::test_strategy_run": (
    "asks whether a variable is a tf.distribute.DistributedValues"
  ),
  "DistributeTest::test_variable_creation": (
    "asks whether a variable is of the class MirroredVariable"
  ),
  "OptimizerDistributeTest::test_ema": (
    "gives all replicas one tensor object, of which Keras makes 1 + 1 = 1"
  ),
}
# Fewer means that tests are gone, or no longer found.
LEAST_PASSED = 14


def test_keras_own_tests_pass(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
  is_listed_for = version.Version(keras.__version__).release[:2] == (3, 15)
  folder = ROOT / "src/backend/tensorflow"
  files = [folder / f"{name}distribute_test.py" for name in ("", "optimizer_")]
  if not is_listed_for and not all(map(os.path.exists, files)):
    pytest.skip(f"the wheel of Keras {keras.__version__} holds no such tests")
  tests = peer_runs.run(
    files, ROOT, "vectorized", environment={"KERAS_BACKEND": "tensorflow"}
  )
  failed = {
    name.split("::", 1)[1]: test["error"]
    for name, test in tests.items()
    if test["outcome"] == "failed"
  }
  unlisted = [name for name in failed if name not in CANNOT_PASS]
  assert not unlisted, "\n".join(failed[name] for name in unlisted)
  if is_listed_for:
    assert set(failed) == set(CANNOT_PASS)
    passed = [test for test in tests.values() if test["outcome"] == "passed"]
    assert len(passed) >= LEAST_PASSED
