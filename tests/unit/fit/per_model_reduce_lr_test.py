"""PerModelReduceLROnPlateau lowers each model's rate as Keras does."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import callback_cases as cases
from tests.support import testbed
from tests.support.callback_cases import SERIES
from tf_cross_shard import CrossShardOptimizer, Models, callbacks, schedules

OPTIONS = {
  **{"patience": 1, "factor": 0.5, "min_delta": 1.0},
  **{"cooldown": 1, "min_lr": 0.125},
}


def _keras_rates(series: list[float], rate: float) -> list[float]:
  """The learning rates of a model alone, by Keras."""
  keras = tf.keras.callbacks.ReduceLROnPlateau("val_loss", **OPTIONS)
  sgd = tf.keras.optimizers.SGD(rate)
  cases.begin(cases.compiled(testbed.network(), sgd), keras)
  rates = []
  for epoch, value in enumerate(series):
    keras.on_epoch_end(epoch, {"val_loss": value})
    rates.append(float(sgd.learning_rate.numpy()))
  return rates


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("per_group", [True, False])
def test_rates_are_lowered_as_keras_lowers_them(
  per_group: bool, tmp_path: pathlib.Path
) -> None:
  """The next steps use the new rates, and nothing is traced again."""
  traces: list[None] = []
  given = (0.5, 0.25) if per_group else (0.5, 0.5)
  model = cases.with_rates(
    schedules.PerModel(given) if per_group else given[0], traces
  )
  data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1])))
  for _ in "12":  # `fit` traces a step when it first sees the callback.
    testbed.fit(model, data)
    [lower] = cases.begin(model, callbacks.PerModelReduceLROnPlateau(**OPTIONS))
  count = len(traces)
  right = [
    _keras_rates(series, rate)
    for series, rate in zip(SERIES, given, strict=True)
  ]
  for epoch in range(len(SERIES[0])):
    lower.on_epoch_end(epoch, cases.logs_of(epoch))
    assert lower.learning_rates == [row[epoch] for row in right]
  assert lower.learning_rates == [0.125, 0.125] != list(given)
  Models(model).save(tmp_path / "state")
  [kernel] = model.trainable_variables
  before = testbed.copies(kernel)
  testbed.fit(model, data)
  moved = np.subtract(before, testbed.copies(kernel))
  np.testing.assert_allclose(moved, np.full_like(moved, 0.125), rtol=1e-6)
  assert len(traces) == count
  if per_group:
    with pytest.raises(TypeError, match="PerModelReduceLROnPlateau"):
      model.optimizer.learning_rate = 0.1


@pytest.mark.tf_keras_mode
def test_rates_in_the_logs_and_in_the_schedule() -> None:
  """The logs have the rates of the epoch, `values` those of the next."""
  rates = schedules.PerModel([0.5, 0.25])
  model = cases.with_rates(rates, [])
  lower = callbacks.PerModelReduceLROnPlateau(
    patience=1, factor=0.5, min_delta=1e6
  )
  x = np.ones([4, 1], "float32")
  data = tf.data.Dataset.from_tensors((x, x))
  used = [callbacks.PerModelMetrics((x, x)), lower]
  history = testbed.fit(model, data, 3, callbacks=used).history
  assert history["learning_rate/model_0"] == [0.5, 0.5, 0.25]
  assert history["learning_rate/model_1"] == [0.25, 0.25, 0.125]
  assert rates.values(0) == lower.learning_rates == [0.125, 0.0625]


def test_rates_under_loss_scaling() -> None:
  """The learning rate of Keras 3's LossScaleOptimizer is not changed."""
  scaled = tf.keras.mixed_precision.LossScaleOptimizer
  rates = [0.5, 0.25]
  with testbed.mirrored(2).scope():
    model = testbed.one_weight()
    opt = tf.keras.optimizers.SGD(schedules.PerModel(rates))
    ours = CrossShardOptimizer(scaled(opt), group_assignment=[[0], [1]])
    model.compile(ours, "mse")
  [lower] = cases.begin(
    model, callbacks.PerModelReduceLROnPlateau(factor=0.5, patience=1)
  )
  for epoch in range(2):
    lower.on_epoch_end(epoch, {f"val_loss/model_{i}": 1.0 for i in range(2)})
  assert lower.learning_rates == [rate / 2 for rate in rates]


def test_rates_that_cannot_be_lowered() -> None:
  decay = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
  for rates, error, words in (
    (decay, TypeError, "Plateau needs an optimizer with one learning rate"),
    (schedules.PerModel([decay, 0.1]), TypeError, "PerModel holds schedules"),
  ):
    model = cases.with_rates(rates, [])
    with pytest.raises(error, match=words):
      cases.begin(model, callbacks.PerModelReduceLROnPlateau())


@pytest.mark.tf_keras_mode
def test_files_before_and_after_the_first_change(
  tmp_path: pathlib.Path,
) -> None:
  """A program restores both, before and after its own first change."""
  x = np.ones([4, 1], "float32")
  data = tf.data.Dataset.from_tensors((x, x))
  given = [0.5, 0.25]

  def make() -> Any:
    rates = schedules.PerModel(given)
    model = cases.with_rates(rates, [])
    with model.distribute_strategy.scope():
      model.optimizer.build(model.trainable_variables)
    return rates, model

  lower = callbacks.PerModelReduceLROnPlateau(
    patience=1, factor=0.5, min_delta=1e6
  )
  rates, model = make()
  Models(model).save(tmp_path / "before")
  used = [callbacks.PerModelMetrics((x, x)), lower]
  testbed.fit(model, data, 2, callbacks=used)
  Models(model).save(tmp_path / "after")
  [kernel] = model.trainable_variables
  trained = testbed.copies(kernel)
  testbed.fit(model, data)
  right = testbed.copies(kernel)

  other_rates, other = make()
  testbed.fit(other, data)  # Its step is traced with the rates as constants.
  for restored, values in (
    ("after", [rate / 2 for rate in given]),
    ("before", given),
  ):
    for own, changed in ((rates, model), (other_rates, other)):
      path = tmp_path / restored
      Models(changed).restore(path)
      assert own.values(0) == values
      if restored == "after":
        [weight] = changed.trainable_variables
        np.testing.assert_array_equal(testbed.copies(weight), trained)
        testbed.fit(changed, data)
        np.testing.assert_array_equal(testbed.copies(weight), right)
