"""Keras' own tests of its optimizers pass when every optimizer is encapsulated.

The wheel of Keras 3.15 holds them, older ones and tf_keras' hold none. They run
in a process of their own; see `tests.support.encapsulating`.
"""
# bazel: size=medium tags=slow

import collections
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from packaging import version

from tests.support import encapsulating, testbed
from tf_cross_shard import CrossShardOptimizer

pytestmark = pytest.mark.slow

KERAS = pathlib.Path(keras.__file__).parent

# What a test became of: {"outcome": ..., "made": ..., "error": ...}.
Tests = Mapping[str, Mapping[str, Any]]

# Tests of Keras that do not pass, each with what it tests instead of training.
# All pass with plain Keras.
_REPLICAS = (
  "backend/tensorflow/optimizer_distribute_test.py::OptimizerDistributeTest"
)
CANNOT_PASS = {
  "optimizers/optimizer_test.py::OptimizerTest::test_get_method": (
    'asks whether get("sgd") is of the class SGD'
  ),
  "optimizers/multi_optimizer_test.py::MultiOptimizerTest"
  "::test_serialization": "asks for the names of classes",
  "optimizers/muon_test.py::MuonTest::test_adamw_weight_decay": (
    "calls the private _apply_weight_decay, which training never calls on ours"
  ),
  f"{_REPLICAS}::test_gradient_accumulation": (
    "reads the private sums, which in Keras are those of one replica;"
    " test_accumulation_as_in_keras has the weights"
  ),
  f"{_REPLICAS}::test_ema": (
    "gives all replicas one tensor object, of which Keras makes 1 + 1 = 1;"
    " test_moving_average_as_in_keras gives each its own"
  ),
}
# Fewer means that tests are gone, or no longer found.
LEAST_PASSED = 234
# The Keras that this is about. With another one the tests listed above may be
# gone, or all of them.
IS_LISTED_FOR = version.Version(keras.__version__).release[:2] == (3, 15)


def _files() -> list[pathlib.Path]:
  """The files with Keras' tests of optimizers."""
  backend = KERAS / "src/backend/tensorflow"
  found = sorted((KERAS / "src/optimizers").glob("*_test.py"))
  if not found and not IS_LISTED_FOR:
    pytest.skip(f"the wheel of Keras {keras.__version__} holds no such tests")
  return [
    *found,
    backend / "optimizer_distribute_test.py",
    backend / "distribute_test.py",
  ]


@functools.cache
def _run() -> dict[str, Any]:
  """Runs Keras' tests, encapsulated; returns their outcomes by id."""
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder, "report.json")
    command = [
      *(sys.executable, "-m", "pytest", "-q", "--tb=short"),
      *("-p", encapsulating.__name__, f"--encapsulation-report={report}"),
      # Nothing of this project's pytest, and nothing left beside Keras.
      *("-c", os.devnull, "--rootdir", str(KERAS.parent)),
      *("--import-mode=importlib", "--assert=plain", "-p", "no:cacheprovider"),
      *map(str, _files()),
    ]
    environment = {
      **os.environ,
      "KERAS_BACKEND": "tensorflow",
      "PYTHONDONTWRITEBYTECODE": "1",
      "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
      "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    # Both would be wrong there: which Keras, and what pytest is told besides.
    for name in ("TF_USE_LEGACY_KERAS", "PYTEST_ADDOPTS"):
      environment.pop(name, None)
    done = subprocess.run(
      command,
      cwd=folder,
      env=environment,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      timeout=270,
    )
    assert report.exists(), done.stdout + done.stderr
    tests = json.loads(report.read_text())
  assert done.returncode in (0, 1), done.stdout + done.stderr
  return {name.removeprefix("keras/src/"): test for name, test in tests.items()}


def _having(tests: Tests, outcome: str) -> set[str]:
  """The tests that passed, failed or were skipped."""
  return {name for name, test in tests.items() if test["outcome"] == outcome}


def _faults(tests: Tests, listed: set[str], least_passed: int) -> list[str]:
  """What is wrong with a run of Keras' tests."""
  failed = _having(tests, "failed")
  found = [
    f"{name} does not pass:\n{tests[name]['error']}"
    for name in sorted(failed - listed)
  ]
  found += [
    f"{name} is listed, but is {tests[name]['outcome']}"
    for name in sorted(listed & set(tests) - failed)
  ]
  passed = len(_having(tests, "passed"))
  if passed < least_passed:
    found.append(f"{passed} tests passed; there are {least_passed} or more")
  made = collections.Counter[str]()
  for name, test in tests.items():
    made[name.split("::")[0]] += test["made"]
  found += [f"{name} encapsulated nothing" for name in made if not made[name]]
  return found


def test_keras_own_tests_pass() -> None:
  least = LEAST_PASSED if IS_LISTED_FOR else 1
  found = _faults(_run(), set(CANNOT_PASS), least)
  assert not found, "\n".join(found)  # All of them, where == [] shows few.
  if IS_LISTED_FOR:
    assert set(CANNOT_PASS) <= set(_run())


def test_tests_that_build_an_optimizer_got_ours() -> None:
  """Those that got none are those that want none, or an error."""
  without = {
    name.split("::")[-1]
    for name in _having(_run(), "passed")
    if not _run()[name]["made"]
  }
  assert {x for x in without if not x.startswith("test_invalid_")} <= {
    "test_weight_decay_is_none",  # an error
    "test_single_step1",  # of tf_keras
    "test_epoch_iterator",
    "test_seed_generator",
    "test_strategy_run",
    "test_variable_aggregation",
    "test_variable_creation",
    "test_variable_synchronization",
  }


# What the two listed tests of several replicas are about, on equal terms.


def _train(encapsulate: bool, **settings: Any) -> list[np.ndarray]:
  """Weights after each of six steps, with unlike gradients per replica."""
  strategy = testbed.mirrored(2)
  with strategy.scope():
    weight = keras.Variable([[3.0, 4.0], [5.0, 6.0]])
    optimizer = keras.optimizers.SGD(learning_rate=0.5, **settings)
    if encapsulate:
      optimizer = CrossShardOptimizer(optimizer, reduction="sum")
    optimizer.build([weight])

  def step() -> None:
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    slope = 1.0 + 3.0 * tf.cast(replica, tf.float32)
    optimizer.apply_gradients([(slope * tf.ones([2, 2]), weight)])

  after = []
  for _ in range(6):
    strategy.run(step)  # Not traced: Keras 3 cannot trace the moving average.
    after.append(weight.numpy())
  return after


def _compare(**settings: Any) -> list[float]:
  """Encapsulated like plain; the first weight after each step."""
  plain, ours = _train(False, **settings), _train(True, **settings)
  np.testing.assert_allclose(ours, plain, rtol=1e-6)
  return [float(weight[0, 0]) for weight in ours]


def test_accumulation_as_in_keras() -> None:
  weights = _compare(gradient_accumulation_steps=3)
  assert weights == [3.0, 3.0, 0.5, 0.5, 0.5, -2.0]  # 0.5 * (1 + 4) a time


def test_moving_average_as_in_keras() -> None:
  settings = {"use_ema": True, "ema_momentum": 0.5}
  weights = _compare(**settings, ema_overwrite_frequency=3)
  # Then -4.5, but for the average: of 0.5 and -2, and of that and -4.5.
  assert weights[:3] == [0.5, -2.0, -2.625]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
