"""Tests population-based training against NumPy, and its backups."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, callbacks, schedules
from tf_cross_shard._src.fit import group_rates

RATES = [0.25, 0.125, 0.03125, 0.0009765625]
X = np.ones([4, 1], "f")
DATA = (X, 5 * X)  # one example for each replica


def _model(rates: Any = RATES) -> Any:
  with testbed.mirrored().scope():
    model = testbed.one_weight()
    sgd = tf.keras.optimizers.SGD(schedules.PerGroup(rates))
    optimizer = CrossShardOptimizer(
      sgd, group_assignment=[[0], [1], [2], [3]], loss_averaged_over="global"
    )
    model.compile(optimizer, "mse")
  return model


def _fit(model: Any, epochs: int, *own: Any, **metrics: Any) -> None:
  judge = callbacks.GroupMetrics(DATA, ensemble=False, **metrics)
  model.fit(
    *DATA,
    batch_size=4,
    epochs=epochs,
    shuffle=False,
    verbose=0,
    callbacks=[judge, *own],
  )


def _weights(model: Any) -> list[float]:
  return [float(copy[0, 0]) for copy in testbed.copies(model.weights[0])]


def _oracle(
  epochs: int, every: int, factor: float | None, replaced: int
) -> tuple[np.ndarray, np.ndarray]:
  """Weights and rates; SGD of (w - 5)^2 for each group by itself."""
  weights, rates = np.zeros(4), np.array(RATES)
  for epoch in range(epochs):
    weights -= rates * 2 * (weights - 5)
    if (epoch + 1) % every == 0 and epoch + 1 < epochs:
      order = np.argsort(-((weights - 5) ** 2), kind="stable")
      for best, worst in zip(
        order[::-1][:replaced], order[:replaced], strict=True
      ):
        weights[worst] = weights[best]
        if factor is not None:
          rates[worst] = rates[best] * factor
  return weights, rates


@pytest.mark.parametrize(
  ("every", "explore", "share", "replaced"),
  [(2, [0.5], 0.5, 2), (1, None, 0.3, 1)],
)
def test_worst_groups_copy_best_groups(
  every: int, explore: Any, share: float, replaced: int
) -> None:
  model = _model()
  population = callbacks.Population(every=every, explore=explore, share=share)
  _fit(model, 5, population)
  factor = explore and explore[0]
  weights, rates = _oracle(5, every, factor, replaced)
  np.testing.assert_allclose(_weights(model), weights, rtol=1e-6)
  assert len(population.copied) == replaced * (4 // every)
  if explore:
    np.testing.assert_allclose(population.learning_rates, rates, rtol=1e-6)
  else:
    assert population.learning_rates == []


def test_resumed_population_equals_uninterrupted_one(
  tmp_path: pathlib.Path,
) -> None:
  """Weights, learning rates and later random choices are the same."""
  found = []
  for crashes in (False, "the process", "fit"):
    model = _model()
    population = callbacks.Population(explore=[0.5, 0.75, 1.25], seed=3)
    if crashes:
      backup = callbacks.BackupAndRestore(str(tmp_path / "backup"))
      with pytest.raises(KeyboardInterrupt):
        _fit(model, 6, population, testbed.Interruption(3), backup)
      if crashes == "the process":
        model = _model()
      population = callbacks.Population(explore=[0.5, 0.75, 1.25], seed=3)
      backup = callbacks.BackupAndRestore(str(tmp_path / "backup"))
      _fit(model, 6, population, backup)
    else:
      _fit(model, 6, population)
    found.append(
      (population.copied, population.learning_rates, _weights(model))
    )
  assert found[0] == found[1] == found[2]
  assert len(found[0][0]) == 5
  factors = {copy["learning_rate"] for copy in found[0][0]}
  assert len(factors) > 1


def test_groups_without_a_number_are_the_worst_and_equal_ones_stay() -> None:
  population = callbacks.Population(explore=None)
  population._numbers = {"best": np.zeros(4)}
  population._sign = -1.0
  logs = {f"val_loss/group_{i}": v for i, v in enumerate([2, 1, np.nan, 3])}
  assert population._pairs(logs) == [(1, 2)]
  assert population._pairs(dict.fromkeys(logs, 2.0)) == []


@pytest.mark.parametrize(
  ("explore", "copied"),
  [
    # 0.9 * 1.25 would be no momentum.
    ({"momentum": [1.25]}, [0.9, 0.9, 0.9]),
    ({"momentum": ([1.25], 0.0, 0.95)}, [0.95, 0.95, 0.95]),
    ({"momentum": ([0.5], 0.3, 0.95)}, [0.45, 0.3, 0.3]),
    ({"momentum": [0.5]}, [0.45, 0.225, 0.1125]),
  ],
)
def test_settings_stay_within_bounds(
  explore: Any, copied: Sequence[float]
) -> None:
  with testbed.mirrored().scope():
    model = tf.keras.Sequential(
      [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
    )
    sgd = tf.keras.optimizers.SGD(schedules.PerGroup(RATES), momentum=0.9)
    # In each epoch, the worst group copies a group with the latest setting.
    optimizer = CrossShardOptimizer(
      sgd,
      group_assignment=[[0], [1], [2], [3]],
      group_settings={"momentum": [0.9] * 4},
    )
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
  population = callbacks.Population(explore=explore)
  population.set_model(model)
  population.params = {"epochs": 9}
  population.on_train_begin()
  for epoch in range(3):
    # Group `epoch` is the best one and group `epoch + 1` the worst one.
    numbers = {f"val_loss/group_{i}": 1.0 for i in range(4)}
    numbers[f"val_loss/group_{epoch}"] = 0.0
    numbers[f"val_loss/group_{epoch + 1}"] = 2.0
    population.on_epoch_end(epoch, numbers)
  found = [copy["momentum"] for copy in population.copied]
  np.testing.assert_allclose(found, copied, rtol=1e-6)


@pytest.mark.parametrize(
  ("explore", "message"),
  [
    ({"momentum": ([1.25], 0.9, 0.1)}, "`lowest` must not exceed `highest`"),
    ([0.0, 1.25], "must contain positive factors"),
    ({"momentum": []}, "positive factors"),
  ],
)
def test_explore_is_refused(explore: Any, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    callbacks.Population(explore=explore)


@pytest.mark.parametrize("is_around", [False, True])
def test_rates_under_loss_scaling(is_around: bool) -> None:
  """The learning rate of Keras 3's LossScaleOptimizer is not changed."""
  scaled = tf.keras.mixed_precision.LossScaleOptimizer
  with testbed.mirrored().scope():
    model = tf.keras.Sequential(
      [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
    )
    opt = tf.keras.optimizers.SGD(schedules.PerGroup(RATES))
    options = {"group_assignment": [[0], [1], [2], [3]]}
    if is_around:
      model.compile(scaled(CrossShardOptimizer(opt, **options)), "mse")
    else:
      model.compile(CrossShardOptimizer(scaled(opt), **options), "mse")
  population = callbacks.Population()
  population.set_model(model)
  group_rates.write(model, [rate / 2 for rate in RATES])
  population.on_train_begin()
  assert population.learning_rates == pytest.approx([r / 2 for r in RATES])


def test_tables_show_the_settings_of_each_epoch() -> None:
  model = _model()
  population = callbacks.Population(explore=[0.5])
  with pytest.raises(ValueError, match="No group has a finite 'val_loss'"):
    population.best_model()
  _fit(model, 4, population)
  table = population.table
  rates = np.transpose([t.history["learning_rate"] for t in table])
  for epoch in range(4):
    _, right = _oracle(epoch + 1, 1, 0.5, 1)
    np.testing.assert_allclose(rates[epoch], right, rtol=1e-6)
  assert any(len(set(own)) > 1 for own in rates.T)
  for row in table.rows():
    best = row["best_epoch"]
    assert row["learning_rate"] == rates[best, row["trial"]]


def test_the_best_model_has_the_weights_of_the_last_epoch() -> None:
  model = _model()
  population = callbacks.Population(explore=[0.5])
  _fit(model, 4, population)
  losses = (np.array(_weights(model)) - 5) ** 2
  last = [trial.history["val_loss"][-1] for trial in population.table]
  np.testing.assert_allclose(last, losses, rtol=1e-5)
  winner = population.best_model()
  best = int(np.argmin(losses))
  assert float(winner(X)[0, 0]) == _weights(model)[best]
  rate = population.settings[best]["learning_rate"]
  np.testing.assert_allclose(population.table.values("learning_rate"), rate)


def test_errors_about_settings_name_explore() -> None:
  model = _model()
  with testbed.mirrored().scope():
    sgd = tf.keras.optimizers.SGD(0.1)
    sgd.loss_scale_factor = 2.0
    groups = [[0], [1], [2], [3]]
    model.compile(CrossShardOptimizer(sgd, group_assignment=groups), "mse")
  population = callbacks.Population(explore={"loss_scale_factor": [0.5]})
  with pytest.raises(
    ValueError, match="`explore` contains 'loss_scale_factor'"
  ):
    _fit(model, 1, population)
