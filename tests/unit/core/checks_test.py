"""Tests of the checks that run before a step."""

import pytest
import tensorflow as tf

from tests.support import testbed, training


def test_compile_outside_the_scope_of_the_model() -> None:
  """Without the check, TensorFlow fails while slots are created.

  tf_keras itself refuses this.
  """
  keras, package = training.KERASES["keras"]
  strategy = testbed.mirrored()
  with strategy.scope():
    layers = [keras.Input((2,)), keras.layers.Dense(1, name="dense")]
    model = keras.Sequential(layers)
  model.compile(package.CrossShardOptimizer(keras.optimizers.SGD()), "mse")
  with pytest.raises(
    RuntimeError,
    match=r"under no strategy, but .*dense/kernel.* under"
    r" MirroredStrategy \(4 replicas\). .* inside the same `with strategy",
  ):
    model.fit(tf.ones([8, 2]), tf.ones([8, 1]), verbose=0)
