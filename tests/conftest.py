"""Prepares every test: four logical devices, and one random seed.

Logical devices can only be made before TensorFlow uses a device. So this file
makes them while pytest imports it, before pytest imports any test.
"""

import ast
import gc
import os
import pathlib
import sys
from collections.abc import Generator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import pytest
import tensorflow as tf
from absl import logging
from tensorflow.python.data.ops import dataset_ops

from tests.support import logical_devices

NUM_DEVICES = 4
_PROCESSES = "multi_process"


def _without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Returns a dataset whose iterators start no thread that tunes them."""
  options = tf.data.Options()
  options.autotune.enabled = False
  return dataset_ops.DatasetV2.with_options(dataset, options)


# The garbage collector leaves out TensorFlow's modules, and runs less often: it
# took 6% of the time of all tests.
gc.collect()
gc.freeze()
gc.set_threshold(20_000, 20, 20)

logical_devices.split_cpu(NUM_DEVICES)
if logical_devices.KIND == "GPU":
  logical_devices.split_gpu(NUM_DEVICES)

# TensorFlow may idle for seconds when it deletes an iterator that is tuned; see
# docs/limits.md. TensorFlow calls this method for every iterator, also for each
# device's, to apply the options of debug mode.
dataset_ops.DatasetV2._apply_debug_options = _without_tuning

# The same examples in every run: a test that fails keeps failing until it is
# fixed. No deadline, since the first call of each TensorFlow kernel is slow. No
# database, since Bazel's sandbox is read-only.
hypothesis.settings.register_profile(
  "repeatable", derandomize=True, deadline=None, database=None
)
hypothesis.settings.load_profile("repeatable")


def _read_options() -> dict[str, set[pathlib.Path]]:
  """Returns a dictionary from each list's name in options.bzl to its tests."""
  folder = pathlib.Path(__file__).absolute().parent
  # A list in Starlark is a list in Python.
  tree = ast.parse((folder / "options.bzl").read_text())
  lists = [node for node in tree.body if isinstance(node, ast.Assign)]
  return {
    ast.unparse(node.targets[0]): {
      folder / name for name in ast.literal_eval(node.value)
    }
    for node in lists
  }


_OPTIONS = _read_options()


def _starts_processes(file: pathlib.Path) -> bool:
  """Whether a file's tests start several processes."""
  return file.parent.name == _PROCESSES


def _place(item: pytest.Item) -> tuple[bool, bool]:
  """Sorts tests of several processes first, then large ones.

  Small tests run last, so that both pytest processes end at about the same
  time.
  """
  is_large = item.path in _OPTIONS["LARGE"]
  return not _starts_processes(item.path), not is_large


@pytest.hookimpl(tryfirst=True)  # Before `-m` deselects any.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Marks slow tests; with pytest-xdist, also sorts all tests."""
  for item in items:
    if item.path in _OPTIONS["SLOW"] and not item.get_closest_marker("fast"):
      item.add_marker("slow")
  if "PYTEST_XDIST_WORKER" in os.environ:
    items.sort(key=_place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
  """Returns a scheduler that runs all tests of a file on one worker.

  Tests of one file share models and processes. Files that start several
  processes run one after the other: two such files at a time are too much for
  two cores.
  """
  from xdist.scheduler import LoadScopeScheduling

  class ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
      file = nodeid.split("::")[0]
      is_many = _starts_processes(config.rootpath / file)
      return _PROCESSES if is_many else file

  config.option.loadscopereorder = False  # Not the file with most tests first.
  return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
  """Skips tests that need jax on Python 3.10, for which jax has no release."""
  del item
  try:
    yield
  except Exception as error:
    no_jax = "(It has no release for Python 3.10" in str(error)
    if no_jax and sys.version_info < (3, 11):
      pytest.skip("jax has no release for Python 3.10")
    raise


@pytest.fixture(autouse=True)
def _same_seed() -> None:
  """Sets the random seed, so that every test draws the same numbers."""
  tf.keras.utils.set_random_seed(0)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """Collects the warnings that a test logs."""
  lines: list[str] = []
  monkeypatch.setattr(
    logging, "warning", lambda text, *args: lines.append(text % args)
  )
  return lines
