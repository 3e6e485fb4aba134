"""PerModelMetrics evaluates each group as plain Keras evaluates a model."""

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import callback_cases as cases
from tests.support import testbed, training
from tests.support.callback_cases import CROSSED, PAIR, VALIDATION
from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  callbacks,
  layers,
  schedules,
)

EPOCHS = 3
RATES = (cases.RATE, 0.03125)  # of the groups


class Subclassed(tf.keras.Model):  # type: ignore[misc]
  """A model that Keras cannot clone before it was called."""

  def __init__(self, units: int, dropout: Any) -> None:
    super().__init__()
    self.dropout = dropout
    self.layer = tf.keras.layers.Dense(units)

  def call(self, x: Any, training: bool = False) -> Any:
    return self.layer(self.dropout(x, training=training))


class _Seen(tf.keras.callbacks.Callback):  # type: ignore[misc]
  """The logs that a later callback sees."""

  def __init__(self) -> None:
    super().__init__()
    self.logs: list[dict[str, float]] = []

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    self.logs.append(dict(logs))


@functools.cache
def _plain(group: int) -> Any:
  """Plain Keras on the group's batches, evaluated after each epoch."""
  adam = tf.keras.optimizers.Adam(RATES[group])
  model = cases.compiled(testbed.network(), adam)
  model.run_eagerly = True  # Less than tracing takes.
  return model.fit(
    cases.data(sorted(CROSSED[group])),
    epochs=EPOCHS,
    verbose=0,
    validation_data=VALIDATION,
    validation_batch_size=4,
  )


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("where", ["mirrored", "virtual"])
def test_metrics_are_those_of_plain_keras(where: str) -> None:
  """Compares each group with plain Keras, and the ensemble with NumPy."""
  model = cases.grouped(where, CROSSED)
  cases.set_groups(model.optimizer.learning_rate, RATES)
  seen = _Seen()
  judge = callbacks.PerModelMetrics(VALIDATION, batch_size=4)
  history = cases.fit(model, judge, seen, epochs=EPOCHS)
  held = training.by_replica(model.weights)
  for i in (0, 1):
    for name in ("val_loss", "val_mae", "val_weighted"):
      mine = history[f"{name}/model_{i}"]
      np.testing.assert_allclose(mine, _plain(i).history[name], rtol=2e-5)
      assert mine == [logs[f"{name}/model_{i}"] for logs in seen.logs]
      other = _plain(1 - i).history[name]
      assert np.abs(np.subtract(mine, other)).min() > 1e-3
    np.testing.assert_allclose(
      history[f"loss/model_{i}"], _plain(i).history["loss"], rtol=2e-5
    )
    weights = _plain(i).model.weights
    for mine, right in zip(held[CROSSED[i][0]], weights, strict=True):
      training.assert_close(mine, right.numpy(), f"group {i}")

  x, y, weight = VALIDATION
  outputs = []
  for members in CROSSED:
    kernel, bias, last, last_bias = held[members[0]]
    outputs.append(np.tanh(x @ kernel + bias) @ last + last_bias)
  errors = np.mean((np.mean(outputs, axis=0) - y) ** 2, axis=-1)
  np.testing.assert_allclose(
    [history[f"val_{name}/ensemble"][-1] for name in ("loss", "weighted")],
    [np.mean(weight * errors), np.sum(weight * errors) / np.sum(weight)],
    rtol=1e-5,
  )


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_arrays_are_evaluated_as_by_keras(dtype: str) -> None:
  """Metrics of float64 and int32 arrays, with one-dimensional targets."""
  with testbed.mirrored().scope():
    model = tf.keras.Sequential(
      [tf.keras.Input((3,)), tf.keras.layers.Dense(1)]
    )
    model.compile(CrossShardOptimizer("sgd"), "mse", metrics=["mae"])
  rng = np.random.default_rng(0)
  x, y = rng.integers(-3, 4, (7, 3)), rng.integers(-3, 4, 7)
  data = x.astype(dtype), y.astype(dtype)
  logs: dict[str, float] = {}
  judge = callbacks.PerModelMetrics(data, batch_size=4)
  judge.set_model(model)
  judge.on_train_begin()
  judge.on_epoch_end(0, logs)
  plain = tf.keras.models.clone_model(model)
  plain.set_weights(model.get_weights())
  plain.compile("sgd", "mse", metrics=["mae"])
  right = plain.evaluate(*data, batch_size=4, verbose=0, return_dict=True)
  for name, value in right.items():
    assert logs[f"val_{name}/model_0"] == pytest.approx(value, rel=1e-6)


def test_evaluation_changes_no_state() -> None:
  """The random states of layers and of NumPy are unchanged, too."""
  with testbed.mirrored(2).scope():
    layers = tf.keras.layers
    model = tf.keras.Sequential(
      [tf.keras.Input((3,)), layers.Dropout(0.5), layers.Dense(2)]
    )
    optimizer = CrossShardOptimizer("sgd", group_assignment=PAIR)
    model.compile(optimizer, "mse")
  before = [testbed.copies(variable) for variable in model.variables]
  assert len(before) == 3  # With the state of the random numbers.
  numbers = np.random.get_state()[1]
  [used] = cases.begin(model, callbacks.PerModelMetrics(VALIDATION))
  used.on_epoch_end(0, {})
  np.testing.assert_array_equal(np.random.get_state()[1], numbers)
  after = [testbed.copies(variable) for variable in model.variables]
  np.testing.assert_equal(after, before)


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("is_compiled", [False, True])
def test_datasets_and_models_that_keras_cannot_clone(is_compiled: bool) -> None:
  """A dataset; a model that Keras cannot clone; `fit` inside of the scope.

  A compiled twin is evaluated as it is. Its Dropout stands for a
  TunableDropout.
  """
  made = []

  def twin() -> Any:
    made.append(Subclassed(2, tf.keras.layers.Dropout(0.5)))
    made[-1](VALIDATION[0])
    if is_compiled:
      made[-1].compile(loss="mae", run_eagerly=True)
    return made[-1]

  with testbed.mirrored(2).scope():
    model = Subclassed(2, layers.TunableDropout(0.25))
    optimizer = CrossShardOptimizer("sgd", group_assignment=PAIR)
    model.compile(optimizer, "mse", metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices(VALIDATION).batch(4)
    used = callbacks.PerModelMetrics(data, is_compiled, every=2, twin=twin)
    history = cases.fit(model, used, epochs=5)
  assert len(made) == (3 if is_compiled else 1)
  assert {twin.dropout.rate for twin in made} == {0.25}
  assert len(history["loss"]) == 5
  assert len(history["val_loss/model_1"]) == 3  # epochs 1, 2 and 4
  names = {"val_loss"} if is_compiled else {"val_loss", "val_mae"}
  assert {name.split("/")[0] for name in history if "val" in name} == names
  assert ("val_loss/ensemble" in history) == is_compiled
  assert history["val_loss/model_0"][0] != history["val_loss/model_1"][0]


def test_a_model_that_was_never_compiled_is_an_error() -> None:
  class Own(tf.keras.Model):  # type: ignore[misc]
    def compile(self, optimizer: Any) -> None:
      self.optimizer = optimizer

  inputs = tf.keras.Input((3,))
  with testbed.mirrored().scope():
    model = Own(inputs, tf.keras.layers.Dense(2)(inputs))
    model.compile(CrossShardOptimizer("sgd", group_assignment=CROSSED))
  with pytest.raises(ValueError, match=r"compile\(\) of Keras was not called"):
    cases.begin(model, callbacks.PerModelMetrics(VALIDATION))


@pytest.mark.tf_keras_mode
def test_two_sets_of_data_have_two_names() -> None:
  model = cases.grouped()
  test = tuple(array[:3] for array in VALIDATION)
  used = [
    callbacks.PerModelMetrics(VALIDATION, False),
    callbacks.PerModelMetrics(test, False, name="test"),
    callbacks.PerModelEarlyStopping("test_mae", patience=9),
  ]
  history = testbed.fit(
    model, cases.data(), validation_data=cases.data(), callbacks=used
  ).history
  # Losses of training, although `fit` has evaluated since.
  losses = [history[f"loss/model_{i}"][0] for i in (0, 1)]
  assert np.mean(losses) == pytest.approx(history["loss"][0], rel=1e-6)
  assert losses[0] != losses[1]
  assert history["val_loss/model_0"] != history["test_loss/model_0"]
  twice = [callbacks.PerModelMetrics(VALIDATION) for _ in range(2)]
  with pytest.raises(ValueError, match=r"`name` must not be .*'val' twice"):
    cases.fit(model, *twice)
  # The callbacks of another `fit` are not asked.
  assert used[2].same_fit() == used
  assert twice[0].same_fit() == twice


def test_data_of_another_shape_end_fit_before_it_trains() -> None:
  model = cases.grouped()
  wrong = callbacks.PerModelMetrics((cases.X[0, 0, :, :2], cases.Y[0, 0]))
  with pytest.raises(Exception, match=r"shape|dimension|incompatible"):
    cases.fit(model, wrong)
  assert int(model.optimizer.iterations.numpy()) == 0


class OwnStep(tf.keras.Model):  # type: ignore[misc]
  """Trains by its own `train_step`, and reports the loss by its own metric."""

  def train_step(self, data: Any) -> dict[str, Any]:
    x, y = data
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
      scaled = self.optimizer.scale_loss(loss)
    weights = self.trainable_variables
    grads = tape.gradient(scaled, weights)
    self.optimizer.apply_gradients(zip(grads, weights, strict=True))
    self.tracker.update_state(loss)
    return {self.tracker.name: self.tracker.result()}


@pytest.mark.parametrize("name", ["loss", "error"])
def test_training_losses_of_an_own_training_step(name: str) -> None:
  """Keras' own metric, which the step does not update, says nothing."""
  x = np.arange(8, dtype="float32").reshape(8, 1)
  with VectorizedStrategy(2).scope():
    inputs = tf.keras.Input((1,))
    zeros = tf.keras.layers.Dense(1, kernel_initializer="zeros")
    model = OwnStep(inputs, zeros(inputs))
    model.tracker = tf.keras.metrics.Mean(name=name)
    model.compile(
      CrossShardOptimizer(
        tf.keras.optimizers.SGD(schedules.PerModel([0.0, 0.01])),
        group_assignment=[[0], [1]],
        loss_averaged_over="replica",
      ),
      "mse",
    )
  metrics = callbacks.PerModelMetrics((x, x), ensemble=False)
  history = model.fit(
    x, x, batch_size=4, shuffle=False, verbose=0, callbacks=[metrics]
  ).history
  if name == "loss":
    [first], [second] = history["loss/model_0"], history["loss/model_1"]
    assert first == np.mean(x**2) > second > 0
  else:
    assert not [key for key in history if key.startswith("loss/")]
