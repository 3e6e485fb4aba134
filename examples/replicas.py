"""Batch sizes that replicas can divide."""


def divisible(batch_size: int, num_replicas: int) -> int:
  """Returns the largest multiple of `num_replicas` up to `batch_size`.

  The result is at least `num_replicas`.
  """
  return max(1, batch_size // num_replicas) * num_replicas
