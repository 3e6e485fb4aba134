"""The factor of a loss, against plain Keras on the batch of each group."""

from typing import Any

import keras
import tensorflow as tf

from tests.support import testbed, training

GROUPS = testbed.GROUPINGS["strided"]


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
