"""The factor of the mean where Keras scales the loss: `fit`, MultiOptimizer.

Custom loops are in equivalence_test.py.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import testbed
from tf_cross_shard import keras3
from tf_cross_shard import tf_keras as ours_tf_keras

SLOPES = tf.constant([1.0, 3.0, 8.0, 16.0])  # Of the loss of each replica.
GROUPS = [[0, 1], [2, 3]]


def train(replica_step: Callable[[], Any]) -> None:
  """One traced step on four replicas."""
  tf.function(lambda: testbed.mirrored().run(replica_step), autograph=False)()


def moved(variable: Any) -> list[float]:
  """Returns each replica's weight after a step; the weights start at 0."""
  return [-float(copy) for copy in testbed.copies(variable)]


# The mean of the group's slopes, for each replica.
MEANS = [2.0, 2.0, 12.0, 12.0]


@pytest.mark.parametrize("package", [keras3, ours_tf_keras])
@pytest.mark.parametrize("scale_gradients", [False, True])
def test_fit_uses_the_right_factor_without_a_warning(
  package: Any, scale_gradients: bool, said: list[str]
) -> None:
  home = keras if package is keras3 else tf_keras
  x = np.array([[1.0], [3.0], [8.0], [16.0]], "float32")
  with testbed.mirrored().scope():
    layers = [home.Input((1,)), home.layers.Dense(1, use_bias=False)]
    model = home.Sequential(layers)
    model.layers[-1].set_weights([np.zeros((1, 1), "float32")])
    optimizer = package.CrossShardOptimizer(
      home.optimizers.SGD(1.0),
      group_assignment=GROUPS,
      scale_gradients=scale_gradients,
    )
    # The gradient of each example is its input.
    model.compile(optimizer, lambda y, prediction: prediction[:, 0])
  model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
  copies = testbed.copies(model.trainable_variables[0])
  assert [-copy.item() for copy in copies] == MEANS
  # Only what Keras would evaluate is warned about.
  assert [line for line in said if "evaluate()" not in line] == []


@pytest.mark.parametrize("scale_gradients", [False, True])
def test_a_multi_optimizer_around_groups(
  scale_gradients: bool, said: list[str]
) -> None:
  """MultiOptimizer does not scale the loss.

  You get a warning, or call `scale_gradients`.
  """
  with testbed.mirrored().scope():
    weight = keras.Variable(0.0)
    ours = keras3.CrossShardOptimizer(
      keras.optimizers.SGD(1.0),
      group_assignment=GROUPS,
      scale_gradients=scale_gradients,
    )
    optimizer = keras.optimizers.MultiOptimizer(
      keras.optimizers.OptimizerMap(ours)
    )
    optimizer.build([weight])

  def step() -> None:
    slope = 0.25 * SLOPES[testbed.replica_id()]
    optimizer.apply_gradients([(slope, weight)])

  train(step)
  if scale_gradients:
    assert moved(weight) == MEANS
    assert said == []
  else:
    [text] = said
    assert "scale_gradients=True, the only way within Keras' Multi" in text


def test_a_variable_from_outside_the_scope_is_refused() -> None:
  weight = tf.Variable(1.0, name="outside")
  with testbed.mirrored().scope():
    optimizer = keras3.CrossShardOptimizer(keras.optimizers.SGD(1.0))
  with pytest.raises(ValueError, match="outside:0 was created outside"):
    train(lambda: optimizer.apply_gradients([(1.0, weight)]))
  assert float(weight.numpy()) == 1.0
