"""Several logical devices in one process, as the replicas of tests need them.

Tests run on logical CPUs. `TEST_DEVICE=GPU` makes the tests that use
`testbed.mirrored` run on GPUs.
"""

import os
from typing import Final

import tensorflow as tf

KIND: Final = os.environ.get("TEST_DEVICE", "CPU")
_MEMORY_OF_LOGICAL_GPU: Final = 2048  # Megabytes; the models are tiny.


def split_cpu(count: int) -> None:
  """Divides the first physical CPU into `count` logical CPUs.

  Call this function before TensorFlow uses a device; afterwards it raises an
  error.
  """
  _split("CPU", [tf.config.LogicalDeviceConfiguration()] * count)


def split_gpu(count: int) -> None:
  """Divides the first GPU into `count` logical GPUs, if there are fewer GPUs.

  Call this function before TensorFlow uses a device. Without a GPU it raises an
  error.
  """
  # Tests compare float32 numbers, and TensorFloat-32 has 10 bits of mantissa.
  tf.config.experimental.enable_tensor_float_32_execution(False)
  if len(tf.config.list_physical_devices("GPU")) < count:
    memory = _MEMORY_OF_LOGICAL_GPU
    part = tf.config.LogicalDeviceConfiguration(memory_limit=memory)
    _split("GPU", [part] * count)


def _split(
  kind: str, parts: list[tf.config.LogicalDeviceConfiguration]
) -> None:
  first = tf.config.list_physical_devices(kind)[0]
  tf.config.set_logical_device_configuration(first, parts)
