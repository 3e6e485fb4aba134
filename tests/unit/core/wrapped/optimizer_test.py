"""Overrides in the user's own optimizer class run as in plain Keras."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import testbed, training
from tf_cross_shard import TowerSpec, keras3, replicate_model_fn
from tf_cross_shard import tf_keras as ours_tf_keras


class ClipsInApplyGradients(keras.optimizers.SGD):
  """Clips in `apply_gradients`, which Keras' `fit` calls."""

  def apply_gradients(self, grads_and_vars: Any) -> Any:
    return super().apply_gradients(
      [(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in grads_and_vars]
    )


class ClipsInApply(keras.optimizers.SGD):
  """Clips in `apply`, which a custom loop may call."""

  def apply(self, grads: Any, trainable_variables: Any = None) -> None:
    super().apply(
      [tf.clip_by_value(g, -1.0, 1.0) for g in grads], trainable_variables
    )


class Negates(keras.optimizers.SGD):
  """Has an update step of its own."""

  def update_step(
    self, gradient: Any, variable: Any, learning_rate: Any
  ) -> Any:
    super().update_step(-gradient, variable, learning_rate)


def train(which: str, kind: Any, method: str) -> float:
  """A weight of 1 after gradients 50 and 150 on two replicas, sum 200."""
  strategy = testbed.mirrored(2)
  [weight], optimizer = training.build(
    *(which, lambda _: kind(1.0), {"weight": 1.0}, strategy),
    loss_averaged_over="global",
  )

  def replica_step(grad: tf.Tensor) -> None:
    if method == "apply":
      optimizer.apply([grad], [weight])
    else:
      optimizer.apply_gradients([(grad, weight)])

  training.on_rows(strategy, replica_step)([50.0, 150.0])
  first, second = testbed.copies(weight)
  assert first == second
  return float(first)


@pytest.mark.parametrize(
  ("kind", "method", "expected"),
  [
    (ClipsInApplyGradients, "apply_gradients", 1.0 - 1.0),
    (ClipsInApplyGradients, "apply", 1.0 - 200.0),  # As plain Keras' apply.
    (ClipsInApply, "apply_gradients", 1.0 - 1.0),
    (ClipsInApply, "apply", 1.0 - 1.0),
    (Negates, "apply_gradients", 1.0 + 200.0),
  ],
)
def test_overridden_methods_of_keras3_subclass_are_called(
  kind: Any, method: str, expected: float
) -> None:
  assert train("keras", kind, method) == expected


def test_overrides_run_in_towers() -> None:
  """The sum of all towers, 300, is clipped to 1."""
  weight = keras.Variable(10.0)
  optimizer = keras3.TowerOptimizer(ClipsInApplyGradients(1.0))

  def model_fn(features: Any, labels: Any, mode: str) -> Any:
    loss = tf.reduce_sum(features) * weight
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[weight]))

  train = replicate_model_fn(model_fn, devices=["CPU:0", "CPU:1"])
  train(tf.constant([[100.0], [200.0]]), None, mode="train")
  assert float(weight.numpy()) == 9.0


class NewClips(tf_keras.optimizers.SGD):
  """Clips in a hook of the new optimizers."""

  def aggregate_gradients(self, grads_and_vars: Any) -> Any:
    pairs = super().aggregate_gradients(grads_and_vars)
    return [(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in pairs]


class OldSignature(tf_keras.optimizers.SGD):
  """Lacks newer arguments, as older classes of tf-models do."""

  def apply_gradients(self, grads_and_vars: Any, name: Any = None) -> Any:
    return super().apply_gradients(
      [(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in grads_and_vars], name
    )


@pytest.mark.parametrize("kind", [NewClips, OldSignature])
def test_overridden_methods_of_tf_keras_subclass_are_called(kind: Any) -> None:
  assert train("tf_keras", kind, "apply_gradients") == 0.0


def test_tf_keras_fit_with_nothing_to_train() -> None:
  model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
  model.compile(ours_tf_keras.CrossShardOptimizer("sgd"), "mse")
  model.build((None, 1))
  model.trainable = False
  model.compile(model.optimizer, "mse")
  before = model.get_weights()[0]
  losses = model.fit(tf.ones([4, 1]), tf.ones([4, 1]), verbose=0).history
  np.testing.assert_array_equal(model.get_weights()[0], before)
  np.testing.assert_allclose(losses["loss"], np.square(1 - before[0]))


@pytest.mark.parametrize("method", ["minimize", "compute_gradients"])
def test_overrides_that_cannot_run_raise_an_error(method: str) -> None:
  own = {method: lambda self, *args, **kwargs: None}
  kind = type("Own", (tf_keras.optimizers.SGD,), own)
  with pytest.raises(ValueError, match=rf"override {method}.*Own"):
    ours_tf_keras.CrossShardOptimizer(kind(1.0))
  # Keras 3 has no such methods.
  keras3.CrossShardOptimizer(type("Own", (keras.optimizers.SGD,), own)(1.0))
