"""A pytest plugin that gives tests of other projects one of our strategies.

    python -m pytest -p tests.support.peers --peer-strategy=vectorized \
        --peer-report=report.json .../keras/src/backend/.../distribute_test.py

Use this plugin for test files of other projects, such as Keras' own. Where a
test creates a MirroredStrategy, it gets `VectorizedStrategy(n,
split_batches=True)`, with `--peer-strategy=vectorized`. With
`--peer-strategy=mirrored`, it gets a MirroredStrategy on logical CPUs, also
where it asks for GPUs: what passes then must pass with ours.

Do not import this module in other tests. It must run in a separate process.
"""

import contextlib
import json
import pathlib
from collections.abc import Generator
from typing import Any, Final
from unittest import mock

import pytest
import tensorflow as tf
from absl import flags
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.distribute import strategy_combinations

from tf_cross_shard import VectorizedStrategy

# The strategies that TensorFlow's tests ask for by name, and ours replaces. If
# a test is there for several of these, it runs for the first one.
_NAMES: Final = (
  "mirrored_strategy_with_gpu_and_cpu",
  "mirrored_strategy_with_two_cpus",
  "mirrored_strategy_with_cpu_1_and_2",
  "mirrored_strategy_with_two_gpus",
)
_BY_NAME: Final = [getattr(strategy_combinations, name) for name in _NAMES]
_TITLES: Final = list(map(repr, _BY_NAME))


def _vectorized(devices: Any = ("", ""), **kwargs: Any) -> VectorizedStrategy:
  del kwargs
  return VectorizedStrategy(len(devices), split_batches=True)


class Plugin:
  """Replaces strategies, and writes the report."""

  def __init__(self, kind: str, report: pathlib.Path) -> None:
    self._is_ours = kind == "vectorized"
    self._report = report
    # The outcome of each test, its duration in seconds, and the error.
    self._tests: dict[str, dict[str, Any]] = {}

  def replace_by_name(self) -> None:
    """Replaces the strategies that tests ask for by name."""
    two_cpus = _BY_NAME[1]._distribution_fn
    for named in _BY_NAME:
      named._distribution_fn = _vectorized if self._is_ours else two_cpus

  def pytest_collection_modifyitems(
    self, config: pytest.Config, items: list[pytest.Item]
  ) -> None:
    """Selects the tests of the strategies that are replaced."""
    # Tests that were imported before may ask whether a strategy needs a GPU.
    for named in _BY_NAME:
      named.required_gpus = named.required_physical_gpus = 0
    if config.getoption("--peer-folder") is None:
      return  # Keras 3's tests do not ask for strategies by name.
    ids = {item.nodeid for item in items}
    kept = [item for item in items if _is_replaced(item.nodeid, ids)]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_call(self) -> Generator[None, None, None]:
    with contextlib.ExitStack() as stack:
      if self._is_ours:
        stack.enter_context(
          mock.patch.object(tf.distribute, "MirroredStrategy", _vectorized)
        )
      yield

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    test = self._tests.setdefault(
      report.nodeid, {"outcome": "passed", "seconds": 0.0}
    )
    test["seconds"] += report.duration
    if not report.passed:
      test.update(outcome=report.outcome, error=report.longreprtext)
    if report.when == "teardown":  # A later test may end the process.
      self._report.write_text(json.dumps(self._tests))

  def pytest_collectreport(self, report: pytest.CollectReport) -> None:
    if report.failed:  # a file that cannot be imported
      self._tests[report.nodeid] = {
        "outcome": "failed",
        "error": report.longreprtext,
      }

  def pytest_sessionfinish(self) -> None:
    self._report.write_text(json.dumps(self._tests))


def _is_replaced(nodeid: str, ids: set[str]) -> bool:
  """Whether a test runs under a replaced strategy, and not twice."""
  titles = [title for title in _TITLES if f"_{title}_" in f"{nodeid}_"]
  if not titles:
    return False
  before = _TITLES[: _TITLES.index(titles[0])]
  return not any(nodeid.replace(titles[0], title) in ids for title in before)


def _prepare_tf_keras(folder: pathlib.Path) -> None:
  """Lets the tests of tf_keras in a folder run in pytest."""
  import tf_keras
  from tf_keras.src.testing_infra import test_utils

  # Tests import each other.
  for package in (tf_keras.src, tf_keras.src.distribute):
    name = package.__name__.removeprefix("tf_keras.src").replace(".", "/")
    package.__path__.append(f"{folder}{name}")
  # A decorator that loses the class of which it is a decorator.
  test_utils.run_v2_only = lambda test=None: test or (lambda test: test)
  flags.FLAGS(["peers"])
  # TensorFlow may wait for minutes when it deletes an iterator that is tuned;
  # see docs/limits.md.
  dataset_ops.DatasetV2._apply_debug_options = _without_tuning


def _without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
  options = tf.data.Options()
  options.autotune.enabled = False
  return dataset_ops.DatasetV2.with_options(dataset, options)


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--peer-strategy", choices=["mirrored", "vectorized"])
  parser.addoption("--peer-report", type=pathlib.Path)
  parser.addoption("--peer-folder", type=pathlib.Path)


def pytest_configure(config: pytest.Config) -> None:
  plugin = Plugin(
    config.getoption("--peer-strategy"), config.getoption("--peer-report")
  )
  plugin.replace_by_name()
  folder = config.getoption("--peer-folder")
  if folder is not None:
    _prepare_tf_keras(folder)
  config.pluginmanager.register(plugin)
