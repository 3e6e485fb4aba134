"""A strategy for replicas on this machine, created in one call."""

import tensorflow as tf

from tf_cross_shard._src.core import validation


def local_strategy(num_replicas: int) -> tf.distribute.MirroredStrategy:
  """Returns a MirroredStrategy with a number of replicas on this machine.

  Use it to try a data-parallel program without several GPUs. If this machine
  has a GPU for each replica, the replicas are on GPUs. Otherwise, each replica
  is a thread on its own logical CPU, even if there are some GPUs.

  >>> import tensorflow as tf
  >>> import tf_cross_shard
  >>> strategy = tf_cross_shard.local_strategy(4)
  >>> with strategy.scope():
  ...   optimizer = tf_cross_shard.CrossShardOptimizer(
  ...     tf.keras.optimizers.Adam(0.01), group_assignment=[[0, 1], [2, 3]]
  ...   )
  >>> strategy.num_replicas_in_sync
  4

  TensorFlow fixes its logical devices when it runs its first operation, so make
  this call at the start of the program. If TensorFlow has already started with
  enough devices, the function uses the first `num_replicas` of them.

  Args:
    num_replicas: The number of replicas, at least 1.

  Returns:
    A `tf.distribute.MirroredStrategy`.

  Raises:
    ValueError: `num_replicas` is not a positive integer.
    RuntimeError: TensorFlow has already started with fewer devices.
  """
  num_replicas = validation.check_integer(
    "num_replicas", num_replicas, "Pass, for example, 4."
  )
  kind = "GPU" if _count("GPU") >= num_replicas else "CPU"
  if _count(kind) < num_replicas:
    _divide_cpu(num_replicas)
  devices = [f"{kind}:{i}" for i in range(num_replicas)]
  return tf.distribute.MirroredStrategy(devices)


def _count(kind: str) -> int:
  """Returns how many logical devices there are, without starting TensorFlow."""
  divided = tf.config.get_logical_device_configuration
  visible = tf.config.get_visible_devices(kind)
  # A device that nobody has divided is one logical device.
  return sum(len(divided(device) or [device]) for device in visible)


def _divide_cpu(count: int) -> None:
  [cpu, *_] = tf.config.list_physical_devices("CPU")
  try:
    tf.config.set_logical_device_configuration(
      cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )
  except RuntimeError:
    raise RuntimeError(
      f"local_strategy({count}) needs {count} devices, but TensorFlow has"
      f" already started with only {_count('CPU')}. Call it before all other"
      " TensorFlow operations; in a notebook, restart the kernel first."
    ) from None
