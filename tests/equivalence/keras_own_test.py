"""Keras' own tests of its optimizers pass when every optimizer is wrapped.

The wheel of Keras 3.15 contains these tests. The wheels of older versions and
of tf_keras do not. They run in a process of their own; see
`tests.support.wrapping`.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import keras
import pytest
from packaging import version

from tests.support import wrapping

KERAS = pathlib.Path(keras.__file__).parent

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
  "optimizers/multi_optimizer_test.py::MultiOptimizerTest"
  "::test_multi_optimizer_blocks_nested_optimizers": (
    "asks whether an optimizer is of the class LossScaleOptimizer"
  ),
  "optimizers/loss_scale_optimizer_test.py::LossScaleOptimizerTest"
  "::test_serialization": "counts the settings of a LossScaleOptimizer",
  "optimizers/muon_test.py::MuonTest::test_adamw_weight_decay": (
    "calls _apply_weight_decay of our optimizer, which training never calls"
  ),
  **{
    "optimizers/optimizer_sparse_test.py::OptimizerSparseTest"
    f"::test_sparse_gradients_{name}": (
      "counts calls of assign with tf.IndexedSlices; our optimizer gathers"
      " rows, which the update step takes for a whole variable"
    )
    for name in ("adagrad", "sgd", "loss_scale_optimizer_sgd")
  },
  **{
    f"optimizers/{name}": "has float8 scales, which are refused"
    for name in (
      "loss_scale_optimizer_test.py::LossScaleOptimizerTest"
      "::test_finite_step_with_overwrite_stateful",
      "optimizer_test.py::OptimizerTest::test_overwrite_with_gradient",
      "optimizer_test.py::OptimizerTest"
      "::test_overwrite_with_gradient_with_gradient_accumulation",
    )
  },
  f"{_REPLICAS}::test_gradient_accumulation": (
    "reads the accumulated gradients, which are sums over replicas here"
  ),
  f"{_REPLICAS}::test_ema": (
    "gives all replicas one tensor object, of which Keras makes 1 + 1 = 1;"
    " keras3/classes_test.py gives each its own"
  ),
}
# Fewer means that tests are gone, or no longer found.
LEAST_PASSED = 226
# The Keras that this is about. With another one the tests listed above may be
# gone, or all of them.
IS_LISTED_FOR = version.Version(keras.__version__).release[:2] == (3, 15)


def _files() -> list[pathlib.Path]:
  backend = KERAS / "src/backend/tensorflow"
  found = sorted((KERAS / "src/optimizers").glob("*_test.py"))
  if not found and not IS_LISTED_FOR:
    pytest.skip(f"the wheel of Keras {keras.__version__} holds no such tests")
  return [
    *found,
    backend / "optimizer_distribute_test.py",
    backend / "distribute_test.py",
  ]


def _run() -> dict[str, Any]:
  """Runs Keras' tests, wrapped; returns {"outcome": ..., "made": ...}."""
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder, "report.json")
    command = [
      *(sys.executable, "-m", "pytest", "-q", "--tb=short"),
      *("-p", wrapping.__name__, f"--encapsulation-report={report}"),
      # Use no pytest settings of this project, and write no files next to
      # Keras.
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
    # Both variables would be wrong in this process: the first one selects the
    # Keras, and the second one has options of pytest.
    for name in ("TF_USE_LEGACY_KERAS", "PYTEST_ADDOPTS"):
      environment.pop(name, None)
    done = subprocess.run(
      command,
      cwd=folder,
      env=environment,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      timeout=1200,
    )
    assert report.exists(), done.stdout + done.stderr
    tests = json.loads(report.read_text())
  assert done.returncode in (0, 1), done.stdout + done.stderr
  return {name.removeprefix("keras/src/"): test for name, test in tests.items()}


def test_keras_own_tests_pass() -> None:
  tests = _run()
  failed = {
    name: test["error"]
    for name, test in tests.items()
    if test["outcome"] == "failed"
  }
  unlisted = [name for name in failed if name not in CANNOT_PASS]
  assert not unlisted, "\n".join(failed[name] for name in unlisted)
  made = collections.Counter[str]()
  for name, test in tests.items():
    made[name.split("::")[0]] += test["made"]
  assert all(made.values()), f"nothing was wrapped in one of {made}"
  if IS_LISTED_FOR:
    assert set(failed) == set(CANNOT_PASS)
    passed = [test for test in tests.values() if test["outcome"] == "passed"]
    assert len(passed) >= LEAST_PASSED
