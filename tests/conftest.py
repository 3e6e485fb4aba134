"""What every test starts from: four logical CPU devices and one seed.

Logical devices can only be made before TensorFlow initializes, so this is
done while pytest imports this file, before it imports any test.
"""

import functools
import os
import pathlib
import re
import sys
from collections.abc import Generator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import pytest
import tensorflow as tf
from absl import logging
from tensorflow.python.data.ops import dataset_ops

NUM_DEVICES = 4
_PROCESSES = "multi_process"


def _split_cpu(num_devices: int) -> None:
  """Makes `num_devices` logical CPUs of the first physical one."""
  cpu = tf.config.list_physical_devices("CPU")[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
  )


def _without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Returns a dataset whose iterators start no thread that tunes them."""
  options = tf.data.Options()
  options.autotune.enabled = False
  return dataset_ops.DatasetV2.with_options(dataset, options)


_split_cpu(NUM_DEVICES)

# TensorFlow may idle for seconds when it deletes an iterator that is tuned; see
# docs/limits.md. The public remedy, debug mode, would run what Keras makes of
# arrays in Python and shuffle them otherwise. TensorFlow calls this method for
# every iterator, also for each device's, to apply the options of that mode.
dataset_ops.DatasetV2._apply_debug_options = _without_tuning

# The same examples in every run: a red test stays red until it is mended. No
# deadline, since the first call of each TensorFlow kernel is slow, and no
# database, since Bazel's sandbox cannot be written to.
hypothesis.settings.register_profile(
  "repeatable", derandomize=True, deadline=None, database=None
)
hypothesis.settings.load_profile("repeatable")


@functools.cache
def _tells_bazel(file: pathlib.Path, words: str) -> bool:
  """Whether an expression describes what a test's head asks of Bazel."""
  return bool(re.search(rf"(?m)^# bazel:.*\b({words})\b", file.read_text()))


def _starts_processes(file: pathlib.Path) -> bool:
  """Whether a file's tests start several processes."""
  return file.parent.name == _PROCESSES


def _place(item: pytest.Item) -> tuple[bool, bool]:
  """What takes longest, and mostly waits, comes first, then what is large.

  So the last that a process runs is small, and none waits long for the other.
  """
  is_large = _tells_bazel(item.path, "size=large|timeout=long")
  return not _starts_processes(item.path), not is_large


@pytest.hookimpl(tryfirst=True)  # Before `-m` deselects any.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Marks what Bazel calls slow; with pytest-xdist the order matters too."""
  for item in items:
    if _tells_bazel(item.path, r"tags=(\w+,)*slow"):
      item.add_marker(pytest.mark.slow)
  if "PYTEST_XDIST_WORKER" in os.environ:
    items.sort(key=_place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
  """With pytest-xdist a file stays whole; those of processes are a row.

  Tests of one file share what they compile, launch or prepare. Two files at a
  time that each start several processes would be too much for two cores, while
  one and an ordinary file get on well.
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
  """On Python 3.10 nothing runs that needs jax, which has no release for it."""
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
  """Every test draws the same random numbers, whatever ran before it."""
  tf.keras.utils.set_random_seed(0)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """What is warned of in a test."""
  lines: list[str] = []
  monkeypatch.setattr(
    logging, "warning", lambda text, *args: lines.append(text % args)
  )
  return lines
