"""Replicas to train on, groups of them, and each replica's own weights."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import replica_state


def make_strategy(num_replicas: int) -> tf.distribute.Strategy:
  """Mirrors variables over GPUs if there are enough, else over logical CPUs.

  Call it before anything else of TensorFlow runs: its devices are fixed from
  the first operation on.

  Args:
    num_replicas: How many devices to train on, at least 1.

  Returns:
    A strategy with `num_replicas` replicas.
  """
  if len(tf.config.list_physical_devices("GPU")) >= num_replicas:
    kind = "GPU"
  else:
    kind = "CPU"
    tf.config.set_visible_devices([], "GPU")
    tf.config.set_logical_device_configuration(
      tf.config.list_physical_devices("CPU")[0],
      [tf.config.LogicalDeviceConfiguration()] * num_replicas,
    )
  return tf.distribute.MirroredStrategy(
    [f"{kind}:{i}" for i in range(num_replicas)]
  )


def choose_groups(
  num_replicas: int, group_size: int
) -> groups_lib.Groups | None:
  """Groups of neighbours, as large as wanted if that gives several groups.

  Groups have one size, so it divides `num_replicas`: of 3 replicas each is a
  group of its own, whatever is wanted.

  Args:
    num_replicas: Replicas in the strategy.
    group_size: The largest size that is wanted.

  Returns:
    At least two groups; None for one replica, which cannot be divided.
  """
  if num_replicas == 1:
    return None
  sizes = [n for n in range(1, num_replicas) if num_replicas % n == 0]
  return groups_lib.contiguous(
    num_replicas, max(n for n in sizes if n <= max(1, group_size))
  )


def divisible(batch_size: int, num_replicas: int) -> int:
  """The largest batch up to `batch_size` that replicas share evenly."""
  return max(1, batch_size // num_replicas) * num_replicas


def weights_of_replicas(model: Any) -> list[list[np.ndarray]]:
  """Reads every replica's own copy of the weights.

  `model.get_weights()` and `variable.numpy()` read replica 0 only.

  Args:
    model: A built Keras model.

  Returns:
    One list per replica, as `set_weights` takes it.
  """
  copies = [replica_state.values(weight) for weight in model.weights]
  return [list(of_replica) for of_replica in zip(*copies, strict=True)]
