"""`layers.TunableDropout`: Keras' Dropout, whose rate is a weight."""

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import Models, VectorizedStrategy, keras3

PAIRS = [[0, 1], [2, 3]]
RATES = [0.0, 0.25, 0.75]
X = tf.ones([8, 500])
Y = X[:, :1]


def _model(which: str) -> tuple[Any, Any]:
  """Returns a model that is three models with other rates."""
  library, package = training.KERASES[which]
  with VectorizedStrategy(3).scope():
    model = library.Sequential(
      [
        library.Input((500,)),
        package.TunableDropout(0.5, seed=1, name="dropout"),
        library.layers.Dense(1, kernel_initializer="ones"),
      ]
    )
    model.compile(library.optimizers.SGD(2.0**-9), "mse")
  models = Models(model)
  models.assign(model.layers[0].rate, RATES)
  return model, models


def _call(model: Any, is_training: bool = True) -> list[Any]:
  """Returns the outputs of all models."""
  strategy = model.distribute_strategy
  layer = model.layers[0]
  found = strategy.run(tf.function(lambda: layer(X, training=is_training)))
  return list(map(np.array, strategy.experimental_local_results(found)))


@training.in_both
def test_each_model_has_its_rate(which: str) -> None:
  model, _ = _model(which)
  for out, again, rate in zip(_call(model), _call(model), RATES, strict=True):
    assert np.mean(out == 0) == pytest.approx(rate, abs=0.03)
    np.testing.assert_allclose(out[out != 0], 1 / (1 - rate))
    assert (out != again).any() == (rate > 0)
  for out in _call(model, is_training=False):
    np.testing.assert_array_equal(out, X)


@pytest.mark.parametrize("shape", [None, (None, 1, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "mixed_float16"])
@pytest.mark.parametrize("rate", [0.3, 0.5, 1.0])
def test_numbers_are_those_of_keras(dtype: str, shape: Any, rate: Any) -> None:
  options = {"seed": 1, "noise_shape": shape, "dtype": dtype}
  mine = keras3.TunableDropout(rate, **options)
  plain = keras.layers.Dropout(rate, **options)
  x = np.random.default_rng(0).normal(size=(30, 4, 5))
  for _ in range(2):
    found, right = mine(x, training=True), plain(x, training=True)
    assert found.dtype == right.dtype
    np.testing.assert_allclose(found, right, rtol=1e-7)


@training.in_both
def test_a_restored_model_draws_the_numbers_that_would_have_come(
  which: str, tmp_path: pathlib.Path
) -> None:
  model, models = _model(which)
  model.optimizer.build(model.trainable_variables)
  first = _call(model)
  models.save(tmp_path / "state")
  right = _call(model)
  assert (np.array(first) != np.array(right)).any()
  again, restored = _model(which)
  restored.assign(again.layers[0].rate, [0.5] * 3)
  restored.restore(tmp_path / "state")
  np.testing.assert_array_equal(_call(again), right)


@training.in_both
def test_files_load(which: str, tmp_path: pathlib.Path) -> None:
  library, package = training.KERASES[which]
  layer = package.TunableDropout(0.25, noise_shape=(None, 1))
  model = library.Sequential([library.Input((500,)), layer])
  layer.rate.assign(0.1)
  model.save(tmp_path / "model.keras")
  loaded = library.models.load_model(tmp_path / "model.keras")
  assert type(loaded.layers[0]) is package.TunableDropout
  assert loaded.layers[0].get_config()["rate"] == 0.1


@training.in_both
def test_plain_models_have_keras_dropout(which: str) -> None:
  """They train on as the model would, where Keras' layer has such a state."""
  library, package = training.KERASES[which]
  model, models = _model(which)
  model.fit(X, Y, verbose=0)
  for i, rate in enumerate(RATES):
    plain = models[i]
    assert type(plain.layers[0]) is library.layers.Dropout
    assert plain.layers[0].rate == rate
    np.testing.assert_allclose(
      plain.predict(X, verbose=0), models.predict(X)[i], rtol=1e-5
    )
    tunable = library.Sequential(
      [
        library.Input((500,)),
        package.TunableDropout(0.5, seed=1),
        library.layers.Dense(1),
      ]
    )
    models.load(i, tunable)
    assert float(tunable.layers[0].rate) == rate
    if which == "keras" or not rate:
      for other in (plain, tunable):
        sgd = library.optimizers.SGD(2.0**-9)
        other.compile(sgd, "mse", run_eagerly=True)
        other.fit(X, Y, verbose=0)
      np.testing.assert_allclose(
        plain.predict(X, verbose=0), tunable.predict(X, verbose=0), rtol=1e-5
      )
  models.set_weights(0, models[1])
  assert models[0].layers[0].rate == RATES[1]
  with pytest.raises(ValueError, match="`build` returns a model that has"):
    models.initialize(lambda: models[0], [0, 1, 2])


@training.in_both
def test_files_are_read_into_keras_dropout(
  which: str, tmp_path: pathlib.Path
) -> None:
  library, _ = training.KERASES[which]
  model, models = _model(which)
  model.fit(X, Y, verbose=0)
  models.save(tmp_path / "state")
  plain = library.Sequential(
    [
      library.Input((500,)),
      library.layers.Dropout(0),
      library.layers.Dense(1),
    ]
  )
  for i, rate in enumerate(RATES):
    Models.read(tmp_path / "state", i, plain)
    assert plain.layers[0].rate == rate
    np.testing.assert_array_equal(plain(X), models[i](X))


@training.in_both
def test_rates_are_refused(which: str) -> None:
  _, package = training.KERASES[which]
  for rate in (1.5, -0.5):
    with pytest.raises(ValueError, match="between 0 and 1"):
      package.TunableDropout(rate)


def test_groups_of_replicas() -> None:
  with testbed.mirrored().scope():
    model = keras.Sequential([keras.Input((500,)), keras3.TunableDropout(0.5)])
    model.compile(keras3.CrossShardOptimizer("sgd", group_assignment=PAIRS))
  models = Models(model)
  models.assign(model.layers[0].rate, [0.25, 0.75])
  layer = model.layers[0]
  found = testbed.run(lambda: layer(X, training=True))
  rates = [float(np.mean(np.array(out) == 0)) for out in found]
  assert rates == pytest.approx([0.25, 0.25, 0.75, 0.75], abs=0.03)
  assert [plain.layers[0].rate for plain in models] == [0.25, 0.75]
