"""Tests the warnings about groups that an optimizer logs once."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer, Models

PAIRS = [[0, 1], [2, 3]]
CROSSED = [[0, 2], [1, 3]]
SINGLES = [[0], [1], [2], [3]]


def _train(weights: Any, which: str, groups: Any) -> Any:
  """Trains with a new optimizer; the gradients of the replicas differ."""
  library, package = training.KERASES[which]
  with testbed.mirrored().scope():
    optimizer = package.CrossShardOptimizer(
      library.optimizers.SGD(0.5), "sum", group_assignment=groups
    )
    optimizer.build(weights)
  grads = np.arange(4, dtype="f").reshape(1, 4)
  training.train(weights, optimizer, [grads])
  return optimizer


@training.in_both
@pytest.mark.parametrize("second", [None, CROSSED])
def test_members_that_other_groups_trained_differently(
  which: str, second: Any
) -> None:
  with testbed.mirrored().scope():
    weights = training.make_weights(which, {"weight": 1.0})
  first = _train(weights, which, PAIRS)
  before = [copy.tolist() for copy in testbed.copies(weights[0])]
  with pytest.raises(
    ValueError, match=r"\[\[0, 1\], \[2, 3\]\] has trained it"
  ):
    _train(weights, which, second)
  assert [copy.tolist() for copy in testbed.copies(weights[0])] == before
  Models(weights, first).average()
  _train(weights, which, second)


@training.in_both
def test_groups_may_be_divided_later(which: str) -> None:
  with testbed.mirrored().scope():
    weights = training.make_weights(which, {"weight": 1.0})
  for groups in (None, PAIRS, SINGLES):
    _train(weights, which, groups)
  assert len({float(copy) for copy in testbed.copies(weights[0])}) == 4


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize(
  ("shards", "swaps"), [(True, True), (True, False), (False, True)]
)
def test_averages_in_shards_warn_at_evaluation(
  shards: bool, swaps: bool, caplog: pytest.LogCaptureFixture
) -> None:
  swap = getattr(tf.keras.callbacks, "SwapEMAWeights", None)
  if swap is None:
    pytest.skip("tf_keras has no SwapEMAWeights")
  library = training.KERASES["keras"]
  with testbed.mirrored(2).scope():
    model = testbed.one_weight()
    optimizer = library[1].CrossShardOptimizer(
      library[0].optimizers.SGD(0.5, use_ema=True), shard_update=shards
    )
    model.compile(optimizer, "mse")
  x = np.ones([4, 1], "f")
  for _ in range(2):
    model.fit(x, x, batch_size=4, verbose=0, callbacks=[swap()] * swaps)
  found = [r.message for r in caplog.records if "SwapEMAWeights" in r.message]
  assert len(found) == (shards and swaps)


@pytest.mark.tf_keras_mode
def test_early_stopping_warns_before_it_overwrites_groups(
  said: list[str],
) -> None:
  with testbed.mirrored().scope():
    model = testbed.one_weight()
    optimizer = CrossShardOptimizer("sgd", group_assignment=SINGLES)
    model.compile(optimizer, "mse")
  x = np.ones([4, 1], "f")
  stop = tf.keras.callbacks.EarlyStopping("loss")
  model.fit(x, x, batch_size=4, verbose=0, callbacks=[stop])
  found = [line for line in said if "EarlyStopping" in line]
  assert not found
  stop.restore_best_weights = True
  for _ in range(2):
    model.fit(x, x, batch_size=4, verbose=0, callbacks=[stop])
  [line] = [line for line in said if "EarlyStopping" in line]
  assert "callbacks.PerModelEarlyStopping" in line
