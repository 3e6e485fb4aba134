"""Several logical CPUs in one process, as the replicas of tests need them."""

import tensorflow as tf


def split_cpu(count: int) -> None:
  """Makes `count` logical CPUs of the first physical one.

  Call it before TensorFlow uses a device: afterwards it is an error.
  """
  cpu = tf.config.list_physical_devices("CPU")[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * count
  )
