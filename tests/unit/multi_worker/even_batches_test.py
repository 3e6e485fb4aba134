"""Tests `multi_worker.even` for one worker; multi_worker_test.py has two."""

import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard import multi_worker

STRATEGY = tf.distribute.get_strategy()


def _batches(length: int) -> tf.data.Dataset:
  """Batches of two examples, of which the i-th starts with 2 * i + 1."""
  x = np.arange(1.0, 2 * length + 1).astype("f4")
  return tf.data.Dataset.from_tensor_slices((x, -x)).batch(2)


def test_a_dataset_that_gets_shorter_is_filled_up() -> None:
  epoch = tf.Variable(0)
  data = _batches(3).filter(lambda x, y: (epoch == 0) | (x[0] < 2.0))
  even = multi_worker.even(data, STRATEGY)
  assert [int(x[0]) for x, _ in even] == [1, 3, 5]
  epoch.assign(1)
  assert [int(x[0]) for x, _ in even] == [1, 1, 1]


def test_an_unknown_mode_is_refused() -> None:
  with pytest.raises(ValueError, match="'stop' or 'pad'; got 'join'"):
    multi_worker.even(_batches(2), STRATEGY, "join")
