"""Against TensorFlow 1's own CrossShardOptimizer, in the same TPU program."""
# bazel: size=medium tags=slow

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from benchmarks import original
from tests.support import covering, testbed, tpu_tasks
from tf_cross_shard import CrossShardOptimizer

# Every day equivalence_test has the numbers.
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


def _original(
  task: tpu_tasks.Task, name: str, **options: Any
) -> tuple[Any, Any, Any]:
  """Strategy, model and step of the original."""
  strategy = testbed.virtual(4)
  with strategy.scope():
    model = task.model()
  optimizer = original.Original(
    strategy, PAIRS[name][0](), model.trainable_variables, **options
  )

  def step(x: tf.Tensor, y: tf.Tensor) -> None:
    optimizer.minimize(tpu_tasks.loss(model, x, y))

  return strategy, model, step


def _ours(
  task: tpu_tasks.Task, name: str, **options: Any
) -> tuple[Any, Any, Any]:
  """Strategy, model and step of ours."""
  strategy = testbed.virtual(4)
  with strategy.scope():
    model = task.model()
    optimizer = CrossShardOptimizer(PAIRS[name][1](), **options)
    optimizer.build(model.trainable_variables)

  def step(x: tf.Tensor, y: tf.Tensor) -> None:
    pairs = optimizer.compute_gradients(
      lambda: tpu_tasks.loss(model, x, y), model.trainable_variables
    )
    optimizer.apply_gradients(pairs)

  return strategy, model, step


def _train(task: tpu_tasks.Task, made: tuple[Any, Any, Any]) -> Any:
  """Every replica's weights after all steps."""
  strategy, model, step = made
  for x, y in zip(task.x, task.y, strict=True):
    data = [testbed.per_replica(strategy, values) for values in (x, y)]
    strategy.run(step, args=data)
  return tpu_tasks.weights_of(model, 4)


@pytest.mark.parametrize(
  ("grouping", "name", "reduction"),
  covering.pairwise(
    [GROUPINGS, list(PAIRS), (_reduction.MEAN, _reduction.SUM)]
  ),
)
def test_the_same_weights(grouping: str, name: str, reduction: str) -> None:
  task = tpu_tasks.task(tpu_tasks.dense, 4, steps=10)
  table = testbed.GROUPINGS[grouping]
  options = {"reduction": reduction, "group_assignment": table}
  theirs = _train(task, _original(task, name, **options))
  mine = _train(task, _ours(task, name, **options))
  start = [v.numpy() for v in task.model().variables]
  for replica in range(4):
    bound = 1e-6 * tpu_tasks.largest(theirs[replica])
    assert tpu_tasks.furthest(mine[replica], theirs[replica]) <= bound
    assert tpu_tasks.furthest(theirs[replica], start) > 1e-2
  for members in testbed.groups_of(table):
    for replica in members:
      assert tpu_tasks.furthest(theirs[replica], theirs[members[0]]) == 0
  if table is not None:
    first, other = table[0][0], table[1][0]
    assert tpu_tasks.furthest(theirs[first], theirs[other]) > 1e-3


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
