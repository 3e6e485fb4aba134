"""PerModelEarlyStopping stops each model as EarlyStopping stops one."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import callback_cases as cases
from tests.support import testbed
from tests.support.callback_cases import CROSSED, SERIES
from tf_cross_shard import (
  CrossShardOptimizer,
  Models,
  VectorizedStrategy,
  callbacks,
  schedules,
)


def _keras_stops(series: Any, min_delta: float) -> tuple[int, int, float]:
  """The best epoch, the last epoch, and the best value, by Keras."""
  keras = tf.keras.callbacks.EarlyStopping(patience=2, min_delta=min_delta)
  model = cases.compiled(testbed.network(), "sgd")
  cases.begin(model, keras)
  for epoch, value in enumerate(series):
    keras.on_epoch_end(epoch, {"val_loss": value})
    if model.stop_training:
      break
  return keras.best_epoch, keras.stopped_epoch, float(keras.best)


@pytest.mark.parametrize(("min_delta", "restores"), [(0.0, True), (1.0, False)])
def test_each_group_stops_as_keras_would_stop_it(
  min_delta: float, restores: bool
) -> None:
  """Best weights, and the state with which it stopped, are restored exactly."""
  model = cases.grouped("mirrored", CROSSED)
  [stop] = cases.begin(
    model,
    callbacks.PerModelEarlyStopping(
      patience=2, min_delta=min_delta, restore_best_weights=restores
    ),
  )
  for epoch in range(len(SERIES[0])):
    cases.mark(model, epoch)
    stop.on_epoch_end(epoch, cases.logs_of(epoch))
    if model.stop_training:
      break
  stop.on_train_end()
  ours = zip(stop.best_epoch, stop.stopped_epoch, stop.best, strict=True)
  assert list(ours) == [_keras_stops(series, min_delta) for series in SERIES]
  assert epoch == max(stop.stopped_epoch) > min(stop.stopped_epoch)
  kept = stop.best_epoch if restores else stop.stopped_epoch
  for variables, epochs in (
    (model.weights, kept),
    (model.optimizer.variables, stop.stopped_epoch),
  ):
    for variable in variables:
      found = testbed.copies(variable)
      for i, members in enumerate(CROSSED):
        for replica in members:
          assert set(found[replica].ravel()) == {10 * epochs[i] + i}


# The best in epochs 1 and 0; with a patience of 1 they stop in epochs 2 and 1.
KNOWN = ([1.0, 3.0, 2.0], [9.0, 8.0, 8.5])


class _Known(tf.keras.callbacks.Callback):  # type: ignore[misc]
  """Overwrites metrics by known ones; records the weights of each epoch."""

  def __init__(self) -> None:
    super().__init__()
    self.weights: list[list[Any]] = []

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    self.weights.append(list(map(testbed.copies, self.model.weights)))
    for i, series in enumerate(KNOWN):
      logs[f"val_mae/model_{i}"] = series[epoch]


@pytest.mark.tf_keras_mode
def test_fit_ends_with_each_group_at_its_best(said: list[str]) -> None:
  """`fit` restores each group's best weights, and logs no warning."""
  model, known = cases.grouped("mirrored", CROSSED), _Known()
  stop = callbacks.PerModelEarlyStopping("val_mae", mode="max", patience=1)
  judge = callbacks.PerModelMetrics(cases.VALIDATION)
  history = cases.fit(model, judge, known, stop, epochs=6)
  assert len(history["loss"]) == len(KNOWN[0])
  assert stop.best_epoch == [1, 0]
  for i, found in enumerate(map(testbed.copies, model.weights)):
    for epoch, members in zip(stop.best_epoch, CROSSED, strict=True):
      for replica in members:
        right = known.weights[epoch][i][replica]
        np.testing.assert_array_equal(found[replica], right)
    assert (found[0] != found[1]).any()
  cases.fit(model)
  assert said == []


@pytest.mark.parametrize("restores", [True, False])
def test_a_second_fit_continues_each_model(restores: bool) -> None:
  """Weights, slots, moving averages and random states are those of its stop."""
  keras, rates = tf.keras, [0.5, 0.03125]
  options = {"patience": 1, "restore_best_weights": restores}

  def trained(rate: Any, stop: Any) -> Any:
    model = testbed.network(dropout=0.25)
    adam = keras.optimizers.Adam(rate, use_ema=True, ema_momentum=0.5)
    cases.compiled(model, adam)
    model.run_eagerly = isinstance(rate, float)  # plain Keras
    for epochs, used in (9, [stop]), (1, []):
      model.fit(
        cases.data(),
        validation_data=cases.VALIDATION,
        epochs=epochs,
        verbose=0,
        callbacks=used,
      )
    return model

  stops = [keras.callbacks.EarlyStopping(**options) for _ in rates]
  plain = list(map(trained, rates, stops))
  stop = callbacks.PerModelEarlyStopping(**options)
  with VectorizedStrategy(2).scope():
    model = trained(schedules.PerModel(rates), stop)
  assert stop.stopped_epoch == [each.stopped_epoch for each in stops]
  assert stop.stopped_epoch[0] != stop.stopped_epoch[1]
  for variable, *right in zip(
    model.weights, *(each.weights for each in plain), strict=True
  ):
    found = Models(model).values(variable)
    np.testing.assert_allclose(found, np.stack(right), rtol=1e-4, atol=1e-5)


def test_models_stop_at_different_calls_of_a_window(said: list[str]) -> None:
  """After epochs 2 and 1, of one call each: all windows begin again."""
  with VectorizedStrategy(2).scope():
    sgd = CrossShardOptimizer("sgd", accumulate_steps=2)
    model = cases.compiled(testbed.network(), sgd)
  stop = callbacks.PerModelEarlyStopping("val_mae", mode="max", patience=1)
  data = cases.data().take(1)
  model.fit(
    data,
    validation_data=cases.VALIDATION,
    epochs=6,
    verbose=0,
    callbacks=[_Known(), stop],
  )
  assert stop.stopped_epoch == [2, 1]
  assert "different calls of an accumulation window" in said[-1]
  model.fit(data, verbose=0)
  steps = Models(model).values(model.optimizer.iterations)
  assert steps.tolist() == [1, 1]
