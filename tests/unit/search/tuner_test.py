"""A tuner of KerasTuner: it resumes, and returns its best models."""

import pathlib
from typing import Any

import keras_tuner
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, layers, trials, tuners

PAIRS = [[0, 1], [2, 3]]
X = np.array([[1.0], [3.0], [1.0], [3.0]], "f")
Y = np.array([[2.0], [8.0], [2.0], [8.0]], "f")


def test_a_continued_search_knows_its_files(tmp_path: pathlib.Path) -> None:
  space = keras_tuner.HyperParameters()
  space.Float("learning_rate", 0.1, 1.0)
  before, after = (
    tuners.GroupTuner(
      keras_tuner.oracles.RandomSearchOracle(
        "val_loss", max_trials=1, hyperparameters=space
      ),
      *(lambda _: None, testbed.mirrored(), PAIRS),
      directory=tmp_path / folder,
    )
    for folder in ("a", "b")
  )
  before.files["0"] = "trial_0.npz"
  after.set_state(before.get_state())
  assert after.files == {"0": "trial_0.npz"}


def _build(table: trials.Table) -> Any:
  model = tf.keras.Sequential(
    [
      tf.keras.Input((1,)),
      layers.GroupDropout(table.values("dropout"), table.groups, name="drop"),
      tf.keras.layers.Dense(1, kernel_initializer="ones"),
    ]
  )
  sgd = tf.keras.optimizers.SGD(0.1)
  optimizer = CrossShardOptimizer(sgd, group_assignment=table.groups)
  model.compile(optimizer, "mse")
  return model


def test_best_models(tmp_path: pathlib.Path) -> None:
  """The models are in order, with each trial's weights and dropout rate."""
  space = keras_tuner.HyperParameters()
  space.Choice("learning_rate", [0.001, 0.01, 0.1])
  space.Fixed("dropout", 0.25)
  oracle = keras_tuner.oracles.GridSearchOracle(
    "val_loss", hyperparameters=space
  )
  strategy = testbed.mirrored()
  tuner = tuners.GroupTuner(oracle, _build, strategy, PAIRS, directory=tmp_path)
  data = {"batch_size": 4, "shuffle": False, "verbose": 0}
  tuner.search(X, Y, validation_data=(X, Y), epochs=2, **data)
  best = oracle.get_best_trials(3)
  for trial, model in zip(best, tuner.get_best_models(3), strict=True):
    assert type(model.get_layer("drop")) is tf.keras.layers.Dropout
    assert model.get_layer("drop").rate == 0.25
    loss = float(np.mean((model.predict(X, verbose=0) - Y) ** 2))
    assert loss == pytest.approx(trial.score, 1e-5)
  assert len({trial.score for trial in best}) == 3
  tuner.files[best[0].trial_id] = None
  with pytest.raises(ValueError, match="no finite 'val_loss'"):
    tuner.get_best_models()
