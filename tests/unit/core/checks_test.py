"""Tests of the checks that run before a step."""

import threading
from typing import Any

import pytest
import tensorflow as tf

from tests.support import testbed, training

_LIMIT = 20.0  # seconds


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
    match=r"under no strategy \(1 replica\), but .*dense/kernel.* under"
    r" MirroredStrategy \(4 replicas\). .* inside the same `with strategy",
  ):
    model.fit(tf.ones([8, 2]), tf.ones([8, 1]), verbose=0)


@training.in_both
def test_two_threads_at_once_raise_an_error(which: str) -> None:
  keras, package = training.KERASES[which]
  inside, resume = threading.Event(), threading.Event()

  class Slow(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer whose update waits for another thread."""

    def update_step(self, *args: Any) -> None:
      inside.set()
      assert resume.wait(_LIMIT)
      super().update_step(*args)

  weight = testbed.variable([8.0], "weight", keras)
  optimizer = package.CrossShardOptimizer(Slow(0.5))
  optimizer.build([weight])

  def step() -> None:
    optimizer.apply_gradients([(weight * 0 + 2.0, weight)])

  other = threading.Thread(target=step)
  other.start()
  assert inside.wait(_LIMIT)
  with pytest.raises(RuntimeError, match="Two threads called CrossShard"):
    step()
  resume.set()
  other.join(_LIMIT)
  assert weight.numpy().tolist() == [7.0]
  step()  # The threads may take turns.
  assert weight.numpy().tolist() == [6.0]
