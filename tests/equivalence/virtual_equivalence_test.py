"""The TPU program run as virtual replicas, against plain Keras.

{2, 4, 8 replicas} x {ungrouped, groups} x {SGD, Adam, AdamW}
  x {dense, convolution, embedding}, 20 steps each
"""
# bazel: size=large

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, tpu_tasks
from tf_cross_shard import CrossShardOptimizer, groups

SHAPES: dict[str, tuple[int, list[list[int]] | None]] = {
  "2": (2, None),
  "4": (4, None),
  "4 strided": (4, [[0, 2], [1, 3]]),
  "8": (8, None),
  "8 in halves": (8, groups.contiguous(8, 4).to_lists()),
}
BOUND = 1e-6  # of the largest weight


def _cells() -> Iterator[Any]:
  """All; of every day are those of a Latin square, which holds each pair."""
  for (i, shape), (j, optimizer), (k, model) in itertools.product(
    enumerate(SHAPES),
    enumerate(tpu_tasks.OPTIMIZERS),
    enumerate(tpu_tasks.MODELS),
  ):
    marks = [pytest.mark.slow] if (i + j + k) % 3 else []
    yield pytest.param(shape, optimizer, model, marks=marks)


@functools.cache
def _weights(shape: str, optimizer: str, model: str) -> list[list[np.ndarray]]:
  """What each replica of a virtual TPU learns; two tests judge some of it."""
  num_replicas, grouping = SHAPES[shape]
  trained = tpu_tasks.train(
    tpu_tasks.task(tpu_tasks.MODELS[model], num_replicas),
    tpu_tasks.virtual(num_replicas),
    lambda: CrossShardOptimizer(
      tpu_tasks.OPTIMIZERS[optimizer](), group_assignment=grouping
    ),
  )
  return tpu_tasks.weights_of(trained, num_replicas)


@pytest.mark.parametrize(("shape", "optimizer", "model"), _cells())
def test_against_plain_keras_on_the_groups_batch(
  shape: str, optimizer: str, model: str
) -> None:
  num_replicas, grouping = SHAPES[shape]
  task = tpu_tasks.task(tpu_tasks.MODELS[model], num_replicas)
  replicas = _weights(shape, optimizer, model)
  start = [v.numpy() for v in task.model().variables]
  for members in testbed.groups_of(grouping, num_replicas):
    expected = tpu_tasks.train_plain(
      task, members, tpu_tasks.OPTIMIZERS[optimizer]()
    )
    assert tpu_tasks.furthest(expected, start) > 1e-2, "nothing was learned"
    for replica in members:
      difference = tpu_tasks.furthest(replicas[replica], expected)
      assert difference <= BOUND * tpu_tasks.largest(expected)
      assert tpu_tasks.furthest(replicas[replica], replicas[members[0]]) == 0
  if grouping is not None:
    first, other = grouping[0][0], grouping[1][0]
    assert tpu_tasks.furthest(replicas[first], replicas[other]) > 1e-3


def _train_by_hand(
  task: tpu_tasks.Task, members: tuple[int, ...]
) -> list[list[np.ndarray]]:
  """Plain Keras once per replica, with the gradients averaged by hand."""
  models = [task.model() for _ in members]
  optimizers = [tpu_tasks.OPTIMIZERS["Adam"]() for _ in members]
  for model, optimizer in zip(models, optimizers, strict=True):
    optimizer.build(model.trainable_variables)

  @tf.function(autograph=False)
  def step(x: tf.Tensor, y: tf.Tensor) -> None:
    gradients = []
    for index, model in enumerate(models):
      with tf.GradientTape() as tape:
        value = tpu_tasks.loss(model, x[index], y[index])
      gradients.append(tape.gradient(value, model.trainable_variables))
    mean = [tf.add_n(each) / len(each) for each in zip(*gradients, strict=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
      optimizer.apply(mean, model.trainable_variables)

  rows = list(members)
  for x, y in zip(task.x[:, rows], task.y[:, rows], strict=True):
    step(tf.constant(x), tf.constant(y))
  return [[v.numpy() for v in model.variables] for model in models]


@pytest.mark.parametrize("grouping", [None, [[0, 3], [1, 2]]])
def test_batch_normalization_keeps_the_replicas_own_statistics(
  grouping: list[list[int]] | None,
) -> None:
  task = tpu_tasks.task(tpu_tasks.batch_norm, 4)
  trained = tpu_tasks.train(
    task,
    tpu_tasks.virtual(4),
    lambda: CrossShardOptimizer(
      tpu_tasks.OPTIMIZERS["Adam"](), group_assignment=grouping
    ),
  )
  replicas = tpu_tasks.weights_of(trained, 4)
  for members in testbed.groups_of(grouping):
    by_hand = _train_by_hand(task, members)
    for replica, expected in zip(members, by_hand, strict=True):
      difference = tpu_tasks.furthest(replicas[replica], expected)
      assert difference <= BOUND * tpu_tasks.largest(expected)
  assert tpu_tasks.furthest(replicas[0], replicas[3]) > 1e-3, "own statistics"


@pytest.mark.parametrize("shape", ["4", "4 strided"])
@pytest.mark.parametrize("model", tpu_tasks.MODELS)
def test_mirrored_replicas_learn_the_same(model: str, shape: str) -> None:
  trained = tpu_tasks.train(
    tpu_tasks.task(tpu_tasks.MODELS[model], 4),
    testbed.mirrored(),
    lambda: CrossShardOptimizer(
      tpu_tasks.OPTIMIZERS["Adam"](), group_assignment=SHAPES[shape][1]
    ),
  )
  mirrored = tpu_tasks.weights_of(trained, 4)
  for mine, theirs in zip(
    _weights(shape, "Adam", model), mirrored, strict=True
  ):
    difference = tpu_tasks.furthest(mine, theirs)
    assert difference <= BOUND * tpu_tasks.largest(theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("grouping", testbed.GROUPINGS)
def test_exact_arithmetic(grouping: str, reduction: str) -> None:
  """Integers and powers of two: not a bit may differ."""
  task = testbed.Regression()
  strategy = tpu_tasks.virtual(testbed.REPLICAS)
  with strategy.scope():
    variables = task.variables()
    optimizer = CrossShardOptimizer(
      testbed.OPTIMIZERS["SGD"](),
      reduction,
      group_assignment=testbed.GROUPINGS[grouping],
    )
    optimizer.build(variables)
  testbed.train_replicas(task, strategy, optimizer, variables, eager=True)
  for members in testbed.groups_of(testbed.GROUPINGS[grouping]):
    factor = 1.0 if reduction == "mean" else float(len(members))
    plain = testbed.train_plain(
      task, members, testbed.OPTIMIZERS["SGD"](), factor
    )
    for variable, expected in zip(variables, plain, strict=True):
      copies = testbed.copies(variable)
      assert len(copies) == testbed.REPLICAS > 1
      for replica in members:
        np.testing.assert_array_equal(copies[replica], expected)


@pytest.mark.parametrize("way", ["while_loop", "cond", "host_loop"])
def test_steps_inside_control_flow(way: str) -> None:
  """All steps in one call; in a loop of the TPU's, or of the host's."""
  task = testbed.Regression()
  strategy = tpu_tasks.virtual(testbed.REPLICAS)
  grouping = [[0, 2], [1, 3]]
  with strategy.scope():
    variables = task.variables()
    optimizer = CrossShardOptimizer(
      testbed.OPTIMIZERS["SGD"](), group_assignment=grouping
    )
    optimizer.build(variables)
  x, y = tf.constant(task.x), tf.constant(task.y)

  def one_step(step: tf.Tensor) -> tf.Tensor:
    mine = testbed.replica_id()
    optimizer.minimize(
      lambda: task.loss(variables, x[step, mine], y[step, mine]),
      var_list=variables,
    )
    return step + 1

  def replica_fn(start: tf.Tensor) -> tf.Tensor:
    if way == "while_loop":
      [end] = tf.while_loop(
        lambda step: step < task.steps, lambda step: [one_step(step)], [start]
      )
      return end
    if way == "cond":
      return tf.cond(start < task.steps, lambda: one_step(start), lambda: start)
    return one_step(start)

  @tf.function(autograph=False)
  def train() -> None:
    if way == "while_loop":
      strategy.run(replica_fn, args=(tf.constant(0),))
    else:

      def body(step: tf.Tensor) -> list[tf.Tensor]:
        strategy.run(replica_fn, args=(step,))
        return [step + 1]

      # A round too many for the condition to matter.
      rounds = task.steps + (way == "cond")
      tf.while_loop(lambda step: step < rounds, body, [tf.constant(0)])

  train()
  assert int(optimizer.iterations.numpy()) == task.steps
  for members in grouping:
    plain = testbed.train_plain(task, members, testbed.OPTIMIZERS["SGD"]())
    for variable, expected in zip(variables, plain, strict=True):
      copies = testbed.copies(variable)
      for replica in members:
        np.testing.assert_array_equal(copies[replica], expected)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
