"""Groups of replicas, batch sizes, and the weights of each replica."""

from typing import Any

import numpy as np

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import replica_state


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
