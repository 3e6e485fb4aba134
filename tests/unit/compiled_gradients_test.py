"""`compiled_gradients` trains as Keras' own training step does."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_cross_shard
from tests.support import testbed
from tf_cross_shard.keras3 import CrossShardOptimizer

PAIRS = [[0, 1], [2, 3]]


def _layers(policy: str) -> list[Any]:
  return [
    keras.layers.Dense(8, "tanh", dtype=policy, kernel_regularizer="l2"),
    keras.layers.BatchNormalization(dtype=policy),
    keras.layers.ActivityRegularization(0.01),
    keras.layers.Dense(3),
  ]


class Subclassed(keras.Model):
  """A model that Keras cannot split into layers."""

  def __init__(self, policy: str) -> None:
    super().__init__()
    self.parts = _layers(policy)

  def call(self, inputs: Any, training: bool = False) -> Any:
    first, normalization, regularization, last = self.parts
    return last(regularization(normalization(first(inputs), training=training)))


def _functional(policy: str) -> Any:
  outputs = inputs = keras.Input((4,))
  for layer in _layers(policy):
    outputs = layer(outputs)
  return keras.Model(inputs, outputs)


def _sequential(policy: str) -> Any:
  return keras.Sequential(_layers(policy))


def _train(
  make_model: Any, policy: str, is_compiled: bool, **settings: Any
) -> tuple[dict[str, Any], list[Any]]:
  """Trains on different data in each replica; returns logs and variables."""
  strategy = testbed.mirrored()
  keras.utils.set_random_seed(3)
  with strategy.scope():
    model = make_model(policy)
    if is_compiled:
      assert tf_cross_shard.compiled_gradients(model) is model
    optimizer: Any = keras.optimizers.SGD(0.05, momentum=0.5)
    if policy == "mixed_float16":
      optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 64.0)
    model.compile(
      CrossShardOptimizer(optimizer, **settings),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=["accuracy"],
      weighted_metrics=["accuracy"],
    )
  rng = np.random.default_rng(5)
  history = model.fit(
    rng.normal(size=(64, 4)).astype("float32"),
    rng.integers(0, 3, 64),
    batch_size=16,
    epochs=2,
    shuffle=False,
    class_weight={0: 0.5, 1: 1.0, 2: 2.0},  # Keras makes sample weights of it.
    verbose=0,
  )
  return history.history, [testbed.copies(each) for each in model.variables]


@pytest.mark.parametrize(
  ("make_model", "policy", "settings"),
  [
    (
      _sequential,
      "float32",
      {"accumulate_steps": 2, "group_assignment": PAIRS},
    ),
    (_functional, "float32", {"shard_update": True}),
    (Subclassed, "float32", {}),
    (_functional, "mixed_float16", {"group_assignment": PAIRS}),
  ],
)
def test_trains_as_without(
  make_model: Any, policy: str, settings: dict[str, Any], said: list[str]
) -> None:
  compiled = _train(make_model, policy, True, **settings)
  assert not said or "group_assignment" in settings  # Notes about groups.
  plain = _train(make_model, policy, False, **settings)
  # XLA rounds half precision where it likes.
  bound = 1e-5 if policy == "float32" else 1e-2
  assert compiled[0].keys() == plain[0].keys()
  for name, values in plain[0].items():
    np.testing.assert_allclose(compiled[0][name], values, rtol=bound)
  for ours, theirs in zip(compiled[1], plain[1], strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)
  if "group_assignment" in settings:  # What is compared is grouped.
    assert np.abs(plain[1][0][0] - plain[1][0][3]).max() > 1e-3


def _with_python() -> Any:
  """A model with an operation that XLA cannot compile."""

  def double(inputs: Any) -> Any:
    outputs = tf.numpy_function(lambda x: 2 * x, [inputs], tf.float32)
    return tf.ensure_shape(outputs, inputs.shape)

  layer = keras.layers.Lambda(double, output_shape=lambda shape: shape)
  model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
  model.compile("sgd", "mse")
  return model


def test_xla_compiles() -> None:
  model = _with_python()
  data = np.ones([4, 1], np.float32)
  model.fit(data, data, verbose=0)
  # `fit` traces the step again, although it has traced Keras' own.
  tf_cross_shard.compiled_gradients(model)
  with pytest.raises(tf.errors.InvalidArgumentError, match="XLA"):
    model.fit(data, data, verbose=0)
  model.compile("sgd", "mse", run_eagerly=True)
  model.fit(data, data, verbose=0)


class OwnStep(keras.Model):
  def train_step(self, data: Any) -> Any:
    return super().train_step(data)


def test_own_train_step() -> None:
  with pytest.raises(ValueError, match="OwnStep, which has its own `train_"):
    tf_cross_shard.compiled_gradients(OwnStep())


def test_no_model_of_keras3() -> None:
  tf_keras = pytest.importorskip("tf_keras")
  with pytest.raises(TypeError, match="needs a model of Keras 3; got a Seq"):
    tf_cross_shard.compiled_gradients(tf_keras.Sequential())
  with pytest.raises(TypeError, match="`model` must be a Keras model; got int"):
    tf_cross_shard.compiled_gradients(1)
