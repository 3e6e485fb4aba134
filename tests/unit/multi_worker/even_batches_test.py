"""Tests `multi_worker.even` for one worker's dataset."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard import multi_worker
from tf_cross_shard._src.core.workers import agreement

STRATEGY = tf.distribute.get_strategy()


def _batches(length: int) -> tf.data.Dataset:
  """Batches of two examples, of which the i-th starts with 2 * i + 1."""
  x = np.arange(1.0, 2 * length + 1).astype("f4")
  return tf.data.Dataset.from_tensor_slices((x, -x)).batch(2)


def _with_others(
  monkeypatch: pytest.MonkeyPatch, *others: str
) -> list[tuple[Any, ...]]:
  """Fakes the texts of other workers; returns the texts of this one."""
  told: list[tuple[Any, ...]] = []

  def exchange(*args: Any) -> list[str]:
    told.append(args)
    return [args[2], *others]

  monkeypatch.setattr(agreement, "of_strategy", lambda _: "workers")
  monkeypatch.setattr(agreement, "exchange", exchange)
  return told


@pytest.mark.parametrize("is_known", [True, False])
def test_the_shorter_repeats_its_first_batch_without_weight(
  is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
  told = _with_others(monkeypatch, "pad 4")
  data = _batches(2)
  if not is_known:
    data = data.filter(lambda x, y: True)
  even = multi_worker.even(data, STRATEGY, "pad")
  assert told == [("workers", "even()", "pad 2")]
  assert len(even) == 4
  for _ in range(2):  # epochs
    found = [[each.numpy().tolist() for each in batch] for batch in even]
    assert found == [
      [[1.0, 2.0], [-1.0, -2.0], [1.0, 1.0]],
      [[3.0, 4.0], [-3.0, -4.0], [1.0, 1.0]],
      *[[[1.0, 2.0], [-1.0, -2.0], [0.0, 0.0]]] * 2,
    ]
  policy = even.options().experimental_distribute.auto_shard_policy
  assert policy == tf.data.experimental.AutoShardPolicy.OFF


def test_sample_weights_of_the_user_are_kept(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  _with_others(monkeypatch, "pad 2")
  data = _batches(1).map(lambda x, y: ({"a": x}, y, [0.5, 2.0]))
  weights = [w for _, _, w in multi_worker.even(data, STRATEGY, "pad")]
  np.testing.assert_array_equal(weights, [[0.5, 2.0], [0.0, 0.0]])


def test_a_dataset_that_gets_shorter_is_filled_up() -> None:
  epoch = tf.Variable(0)
  data = _batches(3).filter(lambda x, y: (epoch == 0) | (x[0] < 2.0))
  even = multi_worker.even(data, STRATEGY)
  assert [int(x[0]) for x, _ in even] == [1, 3, 5]
  epoch.assign(1)
  assert [int(x[0]) for x, _ in even] == [1, 1, 1]


@pytest.mark.parametrize(
  ("data", "mode", "others", "words"),
  [
    (_batches(2), "join", [], "'stop' or 'pad'; got 'join'"),
    (_batches(2), "stop", ["stop 0"], r"an end and a batch .* got \[2, 0\]"),
    (_batches(2).repeat(), "stop", ["stop 3"], r"got \[-1, 3\] batches"),
    (_batches(2), "stop", ["pad 2"], "same on all workers"),
  ],
)
def test_errors(
  data: tf.data.Dataset,
  mode: str,
  others: list[str],
  words: str,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  _with_others(monkeypatch, *others)
  with pytest.raises(ValueError, match=words):
    multi_worker.even(data, STRATEGY, mode)
