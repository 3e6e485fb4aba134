"""Where the factor of the mean is applied, and what is said about it."""

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
ONE = [[0, 1, 2, 3]]


def train(replica_step: Callable[[], Any]) -> None:
  """One traced step on four replicas."""
  tf.function(lambda: testbed.mirrored().run(replica_step), autograph=False)()


def moved(variable: Any) -> list[float]:
  """What each replica's weight, which was 0, moved by."""
  return [-float(copy) for copy in testbed.copies(variable)]


def run(
  package: Any, groups: Any, way: str, averaged_over: str, **options: Any
) -> list[float]:
  """One step of SGD(1); returns what each replica's weight moved by."""
  share = 0.25 if averaged_over == "global" else 1.0
  with testbed.mirrored().scope():
    weight = tf.Variable(0.0)
    home = keras if package is keras3 else tf_keras
    optimizer = package.CrossShardOptimizer(
      home.optimizers.SGD(1.0), group_assignment=groups, **options
    )
    optimizer.build([weight])

  def step() -> None:
    slope = share * SLOPES[testbed.replica_id()]
    if way == "minimize":
      optimizer.minimize(lambda: slope * weight, var_list=[weight])
      return
    with tf.GradientTape() as tape:
      loss = slope * weight
      if way == "scale_loss":
        loss = optimizer.scale_loss(loss)
    if way == "tape":
      optimizer.minimize(loss, [weight], tape=tape)
      return
    grads = tape.gradient(loss, [weight])
    optimizer.apply_gradients(zip(grads, [weight], strict=True))

  train(step)
  return moved(weight)


def expected(groups: Any, reduction: str) -> list[float]:
  """The mean or the sum of the group's slopes, for each replica."""
  reduce = np.mean if reduction == "mean" else np.sum
  values = {
    r: float(reduce(SLOPES.numpy()[members]))
    for members in groups
    for r in members
  }
  return [values[r] for r in range(4)]


# Every pair of settings, of what is not proved by loss_convention_test.
CELLS = [
  (keras3, False, "bare", "replica", "mean"),
  (ours_tf_keras, True, "bare", "global", "sum"),
  (ours_tf_keras, False, "minimize", "global", "mean"),
  (keras3, True, "tape", "replica", "sum"),
  (ours_tf_keras, True, "scale_loss", "replica", "mean"),
]


@pytest.mark.parametrize(
  ("package", "grouped", "way", "averaged_over", "reduction"), CELLS
)
def test_gradients_are_scaled(
  package: Any,
  grouped: bool,
  way: str,
  averaged_over: str,
  reduction: str,
  said: list[str],
) -> None:
  groups = GROUPS if grouped else ONE
  found = run(
    package,
    groups,
    way,
    averaged_over,
    reduction=reduction,
    loss_averaged_over=averaged_over,
    scale_gradients=True,
  )
  assert found == expected(groups, reduction)
  assert said == []


@pytest.mark.parametrize(
  ("package", "scale_gradients"),
  [(keras3, False), (keras3, True), (ours_tf_keras, False)],
)
def test_fit_guesses_right_and_silently(
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
  assert [-copy.item() for copy in copies] == expected(GROUPS, "mean")
  assert said == []


@pytest.mark.parametrize("scale_gradients", [False, True])
def test_a_multi_optimizer_around_groups(
  scale_gradients: bool, said: list[str]
) -> None:
  """Keras scales no loss for it: a warning, or `scale_gradients`."""
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
    assert moved(weight) == expected(GROUPS, "mean")
    assert said == []
  else:
    [text] = said
    assert "scale_gradients=True, the one way within Keras' Multi" in text


def test_a_variable_from_outside_the_scope_is_refused() -> None:
  weight = tf.Variable(1.0, name="outside")
  with testbed.mirrored().scope():
    optimizer = keras3.CrossShardOptimizer(keras.optimizers.SGD(1.0))
  with pytest.raises(ValueError, match="outside:0 was made outside its scope"):
    train(lambda: optimizer.apply_gradients([(1.0, weight)]))
  assert float(weight.numpy()) == 1.0


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
