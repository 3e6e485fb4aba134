"""Devices to train on, groups of replicas, and the weights of each replica."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import replica_state


def make_strategy(num_replicas: int) -> tf.distribute.Strategy:
  """Returns a strategy over GPUs if there are enough, or over logical CPUs.

  Call this before any other TensorFlow operation: the first operation fixes the
  devices.
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
  """Returns at least two groups of neighbors, or None for one replica.

  The size of the groups is the largest divisor of `num_replicas` that is at
  most `group_size`. With 3 replicas, for example, each replica is a group.
  """
  if num_replicas == 1:
    return None
  sizes = [n for n in range(1, num_replicas) if num_replicas % n == 0]
  return groups_lib.contiguous(
    num_replicas, max(n for n in sizes if n <= max(1, group_size))
  )


def divisible(batch_size: int, num_replicas: int) -> int:
  """Returns the largest multiple of `num_replicas` up to `batch_size`.

  The result is at least `num_replicas`.
  """
  return max(1, batch_size // num_replicas) * num_replicas


def weights_of_replicas(model: Any) -> list[list[np.ndarray]]:
  """Returns the weights of each replica, as a list for `set_weights`.

  `model.get_weights()` and `variable.numpy()` read only replica 0.
  """
  copies = [replica_state.values(weight) for weight in model.weights]
  return [list(of_replica) for of_replica in zip(*copies, strict=True)]
