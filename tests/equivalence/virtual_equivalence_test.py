"""The TPU program run as virtual replicas, against plain Keras."""
# bazel: size=large tags=slow

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, tpu_tasks
from tf_cross_shard import CrossShardOptimizer, TowerOptimizer, towers


def test_rows_that_two_towers_look_up() -> None:
  strategy = tpu_tasks.virtual(2)
  with strategy.scope():
    table = tf.Variable(tf.zeros([6, 1]))
    optimizer = TowerOptimizer(
      CrossShardOptimizer(tf.keras.optimizers.SGD(1.0), "sum")
    )

  def model_fn(features: Any, labels: Any, mode: Any) -> Any:
    del labels

    def loss() -> tf.Tensor:
      return tf.reduce_sum(tf.gather(table, features))

    train = optimizer.minimize(loss, var_list=[table])
    return towers.TowerSpec(mode=mode, loss=loss(), train_op=train)

  replicated = towers.replicate_model_fn(model_fn, devices=["/cpu:0"] * 2)

  def step(ids: tf.Tensor) -> None:
    replicated(ids, None, "train")

  ids = testbed.per_replica(strategy, [[0, 0, 0, 3], [1, 1, 3, 3]])
  strategy.run(step, (ids,))
  for copy in testbed.copies(table):
    assert copy[:, 0].tolist() == [-3.0, -2.0, 0.0, -3.0, 0.0, 0.0]


@pytest.mark.parametrize(
  ("grouping", "reduction", "way"),
  [
    ("ungrouped", "sum", "host_loop"),
    ("contiguous", "mean", "cond"),
    ("strided", "sum", "while_loop"),
    ("singletons", "mean", "host_loop"),
  ],
)
def test_exact_arithmetic(grouping: str, reduction: str, way: str) -> None:
  """Integers and powers of two: not a bit may differ.

  All steps are in one call; in a loop of the TPU's, or of the host's.
  """
  table = testbed.GROUPINGS[grouping]
  task, strategy = testbed.Regression(), tpu_tasks.virtual(testbed.REPLICAS)
  with strategy.scope():
    variables = task.variables()
    optimizer = CrossShardOptimizer(
      testbed.OPTIMIZERS["SGD"](), reduction, group_assignment=table
    )
    optimizer.build(variables)
  x, y = tf.constant(task.x), tf.constant(task.y)

  def train_step(step: tf.Tensor) -> tf.Tensor:
    replica = testbed.replica_id()
    optimizer.minimize(
      lambda: task.loss(variables, x[step, replica], y[step, replica]),
      var_list=variables,
    )
    return step + 1

  def replica_fn(start: tf.Tensor) -> tf.Tensor:
    if way == "while_loop":
      [end] = tf.while_loop(
        lambda step: step < task.steps, lambda step: [train_step(step)], [start]
      )
      return end
    if way == "cond":
      is_due = start < task.steps
      return tf.cond(is_due, lambda: train_step(start), lambda: start)
    return train_step(start)

  @tf.function(autograph=False)
  def train() -> None:
    def body(step: tf.Tensor) -> list[tf.Tensor]:
      strategy.run(replica_fn, args=(step,))
      return [step + 1]

    # A round too many for the condition to matter.
    rounds = {"while_loop": 1, "cond": task.steps + 1}.get(way, task.steps)
    tf.while_loop(lambda step: step < rounds, body, [tf.constant(0)])

  train()
  assert int(optimizer.iterations.numpy()) == task.steps
  for members in testbed.groups_of(table):
    factor = 1.0 if reduction == "mean" else float(len(members))
    plain = testbed.train_plain(
      task, members, testbed.OPTIMIZERS["SGD"](), factor
    )
    for variable, expected in zip(variables, plain, strict=True):
      copies = testbed.copies(variable)
      assert len(copies) == testbed.REPLICAS > 1
      for replica in members:
        np.testing.assert_array_equal(copies[replica], expected)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
