"""Replicas to train on, groups of them, and each replica's own weights."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import replica_state


def make_strategy(num_replicas: int) -> tf.distribute.Strategy:
  """Returns a strategy over GPUs if there are enough, else over logical CPUs.

  Call it before anything else of TensorFlow runs: its devices are fixed from
  the first operation on.
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
  """Returns at least two groups of neighbours; None for one replica.

  Groups have one size, which divides `num_replicas` and is at most
  `group_size`: of 3 replicas each is a group of its own.
  """
  if num_replicas == 1:
    return None
  sizes = [n for n in range(1, num_replicas) if num_replicas % n == 0]
  return groups_lib.contiguous(
    num_replicas, max(n for n in sizes if n <= max(1, group_size))
  )


def divisible(batch_size: int, num_replicas: int) -> int:
  """Returns the largest batch up to `batch_size` that replicas share evenly."""
  return max(1, batch_size // num_replicas) * num_replicas


def weights_of_replicas(model: Any) -> list[list[np.ndarray]]:
  """Returns one list per replica, as `set_weights` takes it.

  `model.get_weights()` and `variable.numpy()` read replica 0 only.
  """
  copies = [replica_state.values(weight) for weight in model.weights]
  return [list(of_replica) for of_replica in zip(*copies, strict=True)]
