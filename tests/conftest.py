"""What every test starts from: four logical CPU devices and one seed.

Logical devices can only be made before TensorFlow initializes, so this is
done while pytest imports this file, before it imports any test.
"""

import os
import sys
from collections.abc import Generator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import pytest
import tensorflow as tf

NUM_DEVICES = 4


def _split_cpu(num_devices: int) -> None:
  """Makes `num_devices` logical CPUs of the first physical one."""
  cpu = tf.config.list_physical_devices("CPU")[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
  )


_split_cpu(NUM_DEVICES)

# The same examples in every run: a red test stays red until it is mended. No
# deadline, since the first call of each TensorFlow kernel is slow, and no
# database, since Bazel's sandbox cannot be written to.
hypothesis.settings.register_profile(
  "repeatable", derandomize=True, deadline=None, database=None
)
hypothesis.settings.load_profile("repeatable")


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
