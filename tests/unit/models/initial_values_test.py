"""After `initialize`, group i trains as a plain model with its seed does."""

import random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import (
  CrossShardOptimizer,
  Models,
  VectorizedStrategy,
  keras3,
  per_model,
  schedules,
)

N = 3
SEEDS = (5, 7, 11)
RATES = (0.01, 0.02, 0.005)
_RNG = np.random.default_rng(2)
X = _RNG.normal(size=(24, 4)).astype("float32")
Y = np.sin(X[:, :1])
WEIGHTS = _RNG.integers(0, 3, (24, N)).astype("float32")


def build(units: int = 6) -> Any:
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      tf.keras.Input((4,)),
      layers.Dense(units, "tanh"),
      layers.BatchNormalization(momentum=0.5),
      # In tf_keras, random states of layers are no variables.
      layers.Dropout(0.0 if testbed.IS_TF_KERAS else 0.25),
      layers.Dense(1),
    ]
  )


def _adam(rate: Any) -> Any:
  # A larger epsilon, so that rounding is not made larger.
  return tf.keras.optimizers.Adam(rate, epsilon=1e-3, ema_momentum=0.5)


def _batches(weights: Any) -> tf.data.Dataset:
  return tf.data.Dataset.from_tensor_slices((X, Y, weights)).batch(8)


def _mark(rows: Any) -> Any:
  return per_model(tf.ensure_shape(tf.transpose(rows), [N, None]))


@pytest.mark.tf_keras_mode
def test_an_ensemble_equals_separate_fits() -> None:
  """From different seeds, on different data, after an earlier training."""
  with VectorizedStrategy(N).scope():
    model = build()
    adam = _adam(schedules.PerModel(RATES))
    model.compile(CrossShardOptimizer(adam), "mse")
  data = _batches(WEIGHTS).map(lambda x, y, w: (x, y, _mark(w)))
  model.fit(data, verbose=0)  # Slots and counts that start again.
  Models(model).initialize(build, SEEDS)
  model.fit(data, epochs=2, verbose=0)
  together = Models(model).predict(X, batch_size=7)
  assert together.shape == (N, 24, 1)
  for i, (seed, rate) in enumerate(zip(SEEDS, RATES, strict=True)):
    tf.keras.utils.set_random_seed(seed)
    plain = build()
    plain.compile(_adam(rate), "mse", run_eagerly=True)
    plain.fit(_batches(WEIGHTS[:, i]), epochs=2, verbose=0)
    for own, right in zip(model.weights, plain.weights, strict=True):
      mine = testbed.values(own)[i]
      np.testing.assert_allclose(mine, right.numpy(), rtol=0, atol=5e-7)
    right = plain.predict(X, verbose=0)
    np.testing.assert_allclose(together[i], right, rtol=0, atol=1e-6)
    other = together[(i + 1) % N]
    assert np.abs(other - right).max() > 0.1


@pytest.mark.tf_keras_mode
def test_members_of_a_group_start_alike() -> None:
  """Under MirroredStrategy, with slots and counts of groups."""
  with testbed.mirrored().scope():
    model = build()
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adagrad(0.1), group_assignment=[[3, 0], [1, 2]]
    )
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
  for variable in (*model.weights, *optimizer.variables):
    variable.assign(tf.ones_like(variable.numpy()))
  optimizer.learning_rate = 1.0
  Models(model, optimizer).initialize(build, [5, 7])
  for members, seed in (((3, 0), 5), ((1, 2), 7)):
    tf.keras.utils.set_random_seed(seed)
    for own, right in zip(model.weights, build().weights, strict=True):
      for replica in members:
        np.testing.assert_array_equal(
          testbed.values(own)[replica], right.numpy()
        )
  [rate] = {float(v) for v in testbed.values(optimizer.learning_rate)}
  assert rate == 1.0  # A learning rate is no initial value.
  assert int(optimizer.iterations.numpy()) == 0
  slot = optimizer.get_slot(
    model.trainable_variables[0], optimizer.get_slot_names()[0]
  )
  for copy in testbed.values(slot):
    np.testing.assert_array_equal(copy, np.full_like(copy, 0.1))


def test_random_states_of_the_program_are_as_before() -> None:
  with VectorizedStrategy(2).scope():
    model = build()

  def draw() -> list[Any]:
    layer = tf.keras.layers.Dense(2)
    layer.build((None, 2))
    return [
      random.random(),
      np.random.normal(),
      float(tf.random.normal([])),
      float(layer.kernel.numpy()[0, 0]),
    ]

  tf.keras.utils.set_random_seed(3)
  draw()
  right = draw()
  tf.keras.utils.set_random_seed(3)
  draw()
  Models(model).initialize(build, [1, 2])
  assert draw() == right


@pytest.mark.tf_keras_mode
def test_what_does_not_fit_changes_nothing() -> None:
  with VectorizedStrategy(2).scope():
    model = build()
    model.compile(CrossShardOptimizer("adam"), "mse")
  before = [testbed.values(v) for v in model.variables]
  for made, seeds, error, words in (
    (build, [1], ValueError, r"`seeds` must have .* 2 models; got 1: \[1\]"),
    (build, 1, TypeError, r"`seeds` must be a list .* got 1\. Pass .*range"),
    (build, [1, "a"], ValueError, "`seeds` must be an integer"),
    (lambda: build(5), [1, 2], ValueError, r"`build` returns .*\[4, 5\]"),
    (build(), [1, 2], TypeError, "`build` must be a function .* got Seq"),
    (lambda: None, [1, 2], TypeError, "`build` must return .* got NoneType"),
    (lambda: model, [1, 2], ValueError, "has replicas"),
  ):
    with pytest.raises(error, match=words):
      Models(model).initialize(made, seeds)
  np.testing.assert_equal([testbed.values(v) for v in model.variables], before)


@pytest.mark.parametrize(
  ("where", "is_built"),
  [("plain", False), ("own", True), ("wrapped", True), ("groups", False)],
)
def test_slots_begin_as_the_new_weights(where: str, is_built: bool) -> None:
  """Those of ScheduleFreeAdamW are weights: at a rate of 0, none may move."""

  def build() -> Any:
    one = keras.layers.Dense(1, use_bias=False)  # of one element
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), one])

  mirrored = where == "groups"
  with (testbed.mirrored(2) if mirrored else VectorizedStrategy(2)).scope():
    model = build()
    kind = keras.optimizers.ScheduleFreeAdamW
    if where == "own":
      kind = type("Own", (kind,), {})
    optimizer = kind(0.0)
    if where in ("wrapped", "groups"):
      optimizer = keras3.CrossShardOptimizer(
        optimizer, group_assignment=[[0], [1]]
      )
    model.compile(optimizer, "mse")
    if is_built:
      model.set_weights([1 + weight for weight in model.get_weights()])
      optimizer.build(model.trainable_variables)
  models = Models(model)
  models.initialize(build, seeds=[0, 1])
  before = [models.values(weight) for weight in model.weights]
  model.fit(X, Y, batch_size=8, verbose=0)
  for weight, values in zip(model.weights, before, strict=True):
    assert (np.abs(values[0] - values[1]).max() > 0.1) == (values.ndim > 2)
    np.testing.assert_allclose(models.values(weight), values, atol=1e-6)


def test_an_optimizer_that_names_its_slots_as_weights() -> None:

  def build() -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

  with VectorizedStrategy(2).scope():
    other, model = build(), build()
    model.compile(keras.optimizers.Adafactor(), "mse")
    both = [*other.trainable_variables, *model.trainable_variables]
    model.optimizer.build(both)
  Models(model).initialize(build, seeds=[0, 1])
  first, second = Models(model).values(model.weights[0])
  assert np.abs(first - second).max() > 0.1


@pytest.mark.tf_keras_mode
def test_what_adapt_has_learned_stays() -> None:

  def build() -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
      [tf.keras.Input((4,)), layers.Normalization(), layers.Dense(1)]
    )

  with VectorizedStrategy(2).scope():
    model = build()
    model.layers[0].adapt(3.0 + X)
  models = Models(model)
  models.initialize(build, seeds=[0, 1])
  for plain in models:
    mean = np.ravel(plain.layers[0].mean)
    np.testing.assert_allclose(mean, 3.0 + X.mean(axis=0), rtol=1e-5)
