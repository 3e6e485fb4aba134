"""Compares with TensorFlow 1's CrossShardOptimizer in the same TPU program."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import covering, original, testbed, training
from tf_cross_shard import CrossShardOptimizer

# This test is slow; `equivalence_test.py` checks the numbers every day.
_v1 = tf.compat.v1.train
_keras = tf.keras.optimizers
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
  "SGD": (
    lambda: _v1.GradientDescentOptimizer(0.125),
    lambda: _keras.SGD(0.125),
  ),
  "Momentum": (
    lambda: _v1.MomentumOptimizer(0.125, 0.5),
    lambda: _keras.SGD(0.125, momentum=0.5),
  ),
  "Adam": (
    lambda: _v1.AdamOptimizer(0.01, epsilon=1e-3),
    lambda: _keras.Adam(0.01, epsilon=1e-3),
  ),
}
_reduction = tf.compat.v1.losses.Reduction
GROUPINGS = ("ungrouped", "contiguous", "strided")


def _train(
  task: training.Regression, name: str, is_original: bool, **options: Any
) -> list[list[np.ndarray]]:
  strategy = testbed.virtual(testbed.REPLICAS)
  make_original, make_ours = PAIRS[name]
  with strategy.scope():
    weights = task.variables()
    ours = CrossShardOptimizer(make_ours(), **options)
    ours.build(weights)
  theirs = original.Original(strategy, make_original(), weights, **options)

  def step(x: tf.Tensor, y: tf.Tensor) -> None:
    if is_original:
      theirs.minimize(task.loss(weights, x, y))
    else:
      ours.minimize(lambda: task.loss(weights, x, y), var_list=weights)

  for x, y in zip(task.x, task.y, strict=True):
    data = [testbed.per_replica(strategy, values) for values in (x, y)]
    strategy.run(step, args=data)
  return [[*held] for held in zip(*map(testbed.copies, weights), strict=True)]


@pytest.mark.parametrize(
  ("grouping", "name", "reduction"),
  covering.pairwise(
    [GROUPINGS, list(PAIRS), (_reduction.MEAN, _reduction.SUM)]
  ),
)
def test_weights_equal_those_of_tensorflow_1(
  grouping: str, name: str, reduction: str
) -> None:
  task, table = training.Regression(), testbed.GROUPINGS[grouping]
  options = {"reduction": reduction, "group_assignment": table}
  theirs, mine = (_train(task, name, who, **options) for who in (True, False))
  assert np.abs(theirs[0][0] - task.initial[0]).max() > 1e-2
  groups = testbed.groups_of(table)

  def right(members: Sequence[int]) -> list[np.ndarray]:
    return theirs[members[0]]

  training.check_groups(theirs, groups, right)
  training.check_groups(mine, groups, right, training.near)
