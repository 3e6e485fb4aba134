"""The factor of a loss, against plain Keras on the batch of each group."""

import itertools
from typing import Any

import keras
import tensorflow as tf

from tests.support import testbed, training

GROUPS = testbed.GROUPINGS["strided"]


@training.in_both
def test_each_cell_of_the_table(which: str) -> None:
  """Both reductions, each with a replica's mean and with a global mean."""
  library, package = training.KERASES[which]
  task, strategy = training.Regression(), testbed.mirrored()
  sgd = library.optimizers.SGD
  for reduction, way in itertools.product(
    ("mean", "sum"), ("minimize", "minimize_tape")
  ):
    with strategy.scope():
      variables = task.variables(library)
      optimizer = package.CrossShardOptimizer(
        sgd(0.125), reduction, group_assignment=GROUPS
      )
      optimizer.build(variables)
    task.train_replicas(strategy, optimizer, variables, True, way)
    count = 1.0 if reduction == "mean" else 2.0
    training.check_groups(
      training.by_replica(variables),
      GROUPS,
      lambda members, count=count: task.train_alone(
        members, sgd(0.125), count, library
      ),
    )


def test_loss_objects_of_keras_3_are_global_in_a_loop() -> None:
  """Keras divides their values by the number of replicas."""
  task, strategy = training.Regression(), testbed.mirrored()
  error = keras.losses.MeanSquaredError()
  with strategy.scope():
    variables = task.variables(keras)
    optimizer = training.KERASES["keras"][1].CrossShardOptimizer(
      keras.optimizers.SGD(0.125),
      group_assignment=GROUPS,
      loss_averaged_over="global",
    )
    optimizer.build(variables)

  def step(x: Any, y: Any) -> None:
    kernel, bias = variables
    optimizer.minimize(
      # The mean over two outputs is the task's half of the sum.
      lambda: error(y, tf.matmul(x, kernel) + bias),
      var_list=variables,
    )

  run = training.on_rows(strategy, step, eager=True)
  for x, y in zip(task.x, task.y, strict=True):
    run(x, y)
  training.check_groups(
    training.by_replica(variables),
    GROUPS,
    lambda members: task.train_alone(
      members, keras.optimizers.SGD(0.125), library=keras
    ),
  )
