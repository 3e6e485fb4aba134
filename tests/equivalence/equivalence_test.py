"""One feature at a time, against plain Keras and NumPy on the group's batch.

Each run differs in the grouping, the reduction, the examples that the loss is
averaged over, the way to train, the optimizer, eager execution or a function,
and whether the loss or the gradients are scaled. Every pair of settings occurs.

`random_programs_test.py` combines these settings with all others;
`mixed_precision_test.py` has mixed precision and loss scaling in both Keras
versions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import (
  covering,
  oracle,
  random_programs,
  testbed,
  training,
)
from tf_cross_shard import CrossShardOptimizer

# `loss_convention_test.py` has the factor of every combination.
FACTORS = [
  ("mean", None),
  ("sum", None),
  ("mean", "replica"),
  ("sum", "global"),
]
UPDATES = ("SGD", "Momentum", "Adam")
STRIDED = testbed.GROUPINGS["strided"]
CELLS = covering.pairwise(
  [
    *(list(testbed.GROUPINGS), FACTORS, list(training.WAYS), UPDATES),
    *(("function", "eager"), (False, True)),
  ],
  # With `apply_gradients` alone, only `scale_gradients` applies a factor.
  lambda row: row[2] != "bare" or row[-1],
)


def _fit(
  task: training.Regression, optimizer: Any, run_eagerly: bool
) -> list[Any]:
  """Trains the regression with `fit`; the strategy divides the batches."""
  model = tf.keras.Sequential(
    [tf.keras.layers.Input((3,)), tf.keras.layers.Dense(2)]
  )
  model.set_weights(task.initial)
  # The mean over two outputs is the task's half of the sum.
  model.compile(optimizer, "mse", run_eagerly=run_eagerly)
  data = tf.data.Dataset.from_tensor_slices(
    (task.x.reshape(-1, 3), task.y.reshape(-1, 2))
  )
  testbed.fit(model, data.batch(testbed.REPLICAS * task.examples))
  return list(model.trainable_variables)


def _train(
  task: training.Regression,
  update: str,
  grouping: str,
  way: str,
  mode: str = "function",
  **options: Any,
) -> list[list[np.ndarray]]:
  """Returns each replica's values of all variables after training."""
  strategy = testbed.mirrored()
  with strategy.scope():
    optimizer = CrossShardOptimizer(
      testbed.OPTIMIZERS[update](),
      group_assignment=testbed.GROUPINGS[grouping],
      **options,
    )
    if way == "fit":
      return training.by_replica(_fit(task, optimizer, mode == "eager"))
    variables = task.variables()
    optimizer.build(variables)
  task.train_replicas(strategy, optimizer, variables, mode == "eager", way)
  return training.by_replica(variables)


@pytest.mark.parametrize(
  ("grouping", "factor", "way", "update", "mode", "scale_gradients"),
  [pytest.param(*cell, id="-".join(map(str, cell))) for cell in CELLS],
)
def test_against_plain_keras_and_the_oracle(
  grouping: str,
  factor: tuple[str, str | None],
  way: str,
  update: str,
  mode: str,
  scale_gradients: bool,
) -> None:
  task = training.Regression()
  reduction, averaged_over = factor
  held = _train(
    task,
    update,
    grouping,
    way,
    mode,
    reduction=reduction,
    loss_averaged_over=averaged_over,
    scale_gradients=scale_gradients,
  )
  if scale_gradients:
    averaged_over = averaged_over or "global"
  # The factor of a loss that is not averaged as the user said.
  surplus = {
    ("replica", "global"): 1 / testbed.REPLICAS,
    ("global", "replica"): float(testbed.REPLICAS),
  }.get((averaged_over, training.WAYS[way]), 1.0)
  # A quarter of the loss needs more bits than float32 has.
  is_exact = update != "Adam" and surplus >= 1.0
  bounds = [] if is_exact else [training.near]
  groups = testbed.groups_of(testbed.GROUPINGS[grouping])

  def plain(members: Sequence[int]) -> list[np.ndarray]:
    count = 1.0 if reduction == "mean" else float(len(members))
    optimizer = testbed.OPTIMIZERS[update]()
    return task.train_alone(members, optimizer, count * surplus)

  def by_hand(members: Sequence[int]) -> list[np.ndarray]:
    return oracle.train(
      task.x, task.y, task.initial, members, reduction, update, surplus
    )

  training.check_groups(held, groups, plain, *bounds)
  training.check_groups(held, groups, by_hand, *bounds)


@pytest.mark.parametrize(
  "optimizer",
  sorted({*testbed.OPTIMIZERS} - {*UPDATES} - {*random_programs.OPTIMIZERS}),
)
def test_every_other_optimizer(optimizer: str) -> None:
  task = training.Regression()
  held = _train(task, optimizer, "strided", "compute_gradients")

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    return task.train_alone(members, testbed.OPTIMIZERS[optimizer]())

  training.check_groups(held, STRIDED, expected, training.near)


@pytest.mark.tf_keras_mode
@pytest.mark.skipif(not testbed.IS_TF_KERAS, reason="the cells have all ways")
@pytest.mark.parametrize("way", ["compute_gradients", "minimize", "fit"])
def test_each_way_where_tf_keras_is_tf_dot_keras(way: str) -> None:
  task = training.Regression()
  held = _train(task, "Momentum", "strided", way, reduction="sum")

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    return oracle.train(
      task.x, task.y, task.initial, members, "sum", "Momentum"
    )

  training.check_groups(held, STRIDED, expected)
