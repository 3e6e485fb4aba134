"""The same numbers everywhere: against plain Keras and against NumPy.

{groupings} x {mean, sum} x {whose examples the loss is averaged over}
  x {custom loop, minimize, minimize with a tape, fit} x {optimizers}
  x {eager, tf.function}, pairwise.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import covering, oracle, testbed
from tf_cross_shard import CrossShardOptimizer

# loss_convention_test has the factor of every combination.
FACTORS = [
  ("mean", None),
  ("sum", None),
  ("mean", "replica"),
  ("sum", "global"),
]
# Each way, and over whose examples the loss is averaged that it hands in.
WAYS = {
  "custom_loop": "replica",
  "minimize": "replica",
  "keras_minimize": "global",
  "fit": "global",
}
UPDATES = ("SGD", "Momentum", "Adam")
STRIDED = testbed.groups_of(testbed.GROUPINGS["strided"])
CELLS = covering.pairwise(
  [list(testbed.GROUPINGS), FACTORS, list(WAYS), UPDATES, ("function", "eager")]
)


def _train_by_fit(
  task: testbed.Regression, optimizer: Any, run_eagerly: bool
) -> list[Any]:
  """`model.fit` of the same regression; the strategy cuts the batches."""
  model = tf.keras.Sequential(
    [tf.keras.layers.Input((3,)), tf.keras.layers.Dense(2)]
  )
  model.set_weights(task.initial)
  # The mean over two outputs is the task's half of the sum.
  model.compile(optimizer, "mse", run_eagerly=run_eagerly)
  data = tf.data.Dataset.from_tensor_slices(
    (task.x.reshape(-1, 3), task.y.reshape(-1, 2))
  )
  batch = testbed.REPLICAS * task.examples
  testbed.fit(model, data.batch(batch))
  return list(model.trainable_variables)


def _train_by_loop(
  task: testbed.Regression, optimizer: Any, way: str, run_eagerly: bool
) -> list[Any]:
  """A loop of one's own under MirroredStrategy."""
  strategy = testbed.mirrored()
  with strategy.scope():
    variables = task.variables()
    optimizer.build(variables)

  def replica_step(x: tf.Tensor, y: tf.Tensor) -> None:
    mine = testbed.replica_id()

    def loss() -> tf.Tensor:
      return task.loss(variables, x[mine], y[mine])

    if way == "custom_loop":
      pairs = optimizer.compute_gradients(loss, variables)
      optimizer.apply_gradients(pairs)
    elif way == "minimize":
      optimizer.minimize(loss, var_list=variables)
    else:
      with tf.GradientTape() as tape:
        value = loss() / testbed.REPLICAS
      optimizer.minimize(value, variables, tape=tape)

  def step(x: tf.Tensor, y: tf.Tensor) -> None:
    strategy.run(replica_step, args=(x, y))

  run = step if run_eagerly else tf.function(step, autograph=False)
  for x, y in zip(task.x, task.y, strict=True):
    run(tf.constant(x), tf.constant(y))
  assert run_eagerly or run.experimental_get_tracing_count() == 1
  return variables


def _train(
  task: testbed.Regression,
  update: str,
  grouping: str,
  way: str,
  mode: str = "function",
  **options: Any,
) -> list[list[np.ndarray]]:
  """What each replica holds of all variables after training."""
  with testbed.mirrored().scope():
    optimizer = CrossShardOptimizer(
      testbed.OPTIMIZERS[update](),
      group_assignment=testbed.GROUPINGS[grouping],
      **options,
    )
    if way == "fit":
      variables = _train_by_fit(task, optimizer, mode == "eager")
  if way != "fit":
    variables = _train_by_loop(task, optimizer, way, mode == "eager")
  return [[*held] for held in zip(*map(testbed.copies, variables), strict=True)]


@pytest.mark.parametrize(
  ("grouping", "factor", "way", "update", "mode"),
  [
    pytest.param(*cell, id="-".join(map(str, (*cell[1], *cell[::2], cell[3]))))
    for cell in CELLS
  ],
)
def test_against_plain_keras_and_the_oracle(
  grouping: str,
  factor: tuple[str, str | None],
  way: str,
  update: str,
  mode: str,
) -> None:
  """On the group's batch, and by hand; both judge the same run."""
  task = testbed.Regression()
  reduction, averaged_over = factor
  held = _train(
    task,
    update,
    grouping,
    way,
    mode,
    reduction=reduction,
    loss_averaged_over=averaged_over,
  )
  # How often the loss counts, if it is not averaged as the user said.
  surplus = {
    (None, WAYS[way]): 1.0,
    ("replica", "global"): 1 / testbed.REPLICAS,
    ("global", "replica"): float(testbed.REPLICAS),
  }.get((averaged_over, WAYS[way]), 1.0)
  bounds = [testbed.near] if update == "Adam" else []
  groups = testbed.groups_of(testbed.GROUPINGS[grouping])

  def plain(members: Sequence[int]) -> list[np.ndarray]:
    count = 1.0 if reduction == "mean" else float(len(members))
    optimizer = testbed.OPTIMIZERS[update]()
    return testbed.train_plain(task, members, optimizer, count * surplus)

  def by_hand(members: Sequence[int]) -> list[np.ndarray]:
    return oracle.train(
      task.x, task.y, task.initial, members, reduction, update, surplus
    )

  testbed.check_groups(held, groups, plain, *bounds)
  testbed.check_groups(held, groups, by_hand, *bounds)


@pytest.mark.parametrize(
  "optimizer", sorted(set(testbed.OPTIMIZERS) - set(UPDATES))
)
def test_every_other_optimizer(optimizer: str) -> None:
  if testbed.IS_TF_KERAS and optimizer == "Nadam":
    pytest.skip("tf_keras' counts in Python how often it was traced")
  task = testbed.Regression()
  held = _train(task, optimizer, "strided", "custom_loop")

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    plain = testbed.OPTIMIZERS[optimizer]()
    return testbed.train_plain(task, members, plain)

  testbed.check_groups(held, STRIDED, expected, testbed.near)


@pytest.mark.tf_keras_mode
@pytest.mark.skipif(not testbed.IS_TF_KERAS, reason="the cells have all ways")
@pytest.mark.parametrize("way", WAYS)
def test_each_way_where_tf_keras_is_tf_dot_keras(way: str) -> None:
  task = testbed.Regression()
  held = _train(task, "Momentum", "strided", way, reduction="sum")

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    return oracle.train(
      task.x, task.y, task.initial, members, "sum", "Momentum"
    )

  testbed.check_groups(held, STRIDED, expected)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
