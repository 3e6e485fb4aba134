"""`layers.GroupDropout`: each group has its rate, and seeds are saved."""

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import Models, VectorizedStrategy, keras3

PAIRS = [[0, 1], [2, 3]]
RATES = [0.25, 0.75]
X = tf.ones([8, 500])


def _call(layer: Any, inputs: Any = X, is_training: bool = True) -> list[Any]:
  """Returns the outputs of the four replicas."""

  def step() -> Any:
    return layer(inputs, training=is_training)

  return [np.array(out) for out in testbed.run(step)]


def _layer(which: str, rates: Any = RATES, **options: Any) -> Any:
  _, package = training.KERASES[which]
  with testbed.mirrored().scope():
    layer = package.GroupDropout(rates, PAIRS, **options)
    layer.build((None, 500))
  return layer


@training.in_both
def test_each_group_has_its_rate(which: str) -> None:
  layer = _layer(which, seed=1)
  for out, rate in zip(_call(layer), np.repeat(RATES, 2), strict=True):
    assert np.mean(out == 0) == pytest.approx(rate, abs=0.03)
    np.testing.assert_allclose(out[out != 0], 1 / (1 - rate))
  for out in _call(layer, is_training=False):
    np.testing.assert_array_equal(out, X)


@training.in_both
def test_calls_draw_different_numbers(which: str) -> None:
  layer = _layer(which, seed=1)
  assert (_call(layer)[0] != _call(layer)[0]).any()


@training.in_both
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inputs_keep_their_dtype(which: str, dtype: str) -> None:
  layer = _layer(which, [0.0, 0.5], seed=1, dtype=dtype)
  out = _call(layer, tf.cast(X, dtype))
  assert out[0].dtype == tf.as_dtype(dtype).as_numpy_dtype
  np.testing.assert_array_equal(out[0], tf.cast(X, dtype))
  assert 0.4 < np.mean(out[3] == 0) < 0.6


def _model(which: str, rates: Any = RATES) -> tuple[Any, Any]:
  library, package = training.KERASES[which]
  with testbed.mirrored().scope():
    model = library.Sequential(
      [
        library.Input((500,)),
        package.GroupDropout(rates, PAIRS, seed=1, name="dropout"),
        library.layers.Dense(1, kernel_initializer="ones"),
      ]
    )
    optimizer = package.CrossShardOptimizer(
      library.optimizers.SGD(0.125), group_assignment=PAIRS
    )
    model.compile(optimizer, "mse")
  return model, optimizer


@training.in_both
def test_a_restored_model_draws_the_numbers_that_would_have_come(
  which: str, tmp_path: pathlib.Path
) -> None:
  model, optimizer = _model(which)
  optimizer.build(model.trainable_variables)
  first = _call(model)
  Models(model, optimizer).save(tmp_path / "state")
  right = _call(model)
  assert (np.array(first) != np.array(right)).any()
  again, other = _model(which)
  Models(again, other).restore(tmp_path / "state")
  np.testing.assert_array_equal(_call(again), right)


@training.in_both
def test_files_load(which: str, tmp_path: pathlib.Path) -> None:
  library, package = training.KERASES[which]
  with testbed.mirrored().scope():
    rates = tf.Variable(RATES)
  model, _ = _model(which, rates)
  model.save(tmp_path / "model.keras")
  loaded = library.models.load_model(tmp_path / "model.keras", compile=False)
  assert type(loaded.layers[0]) is package.GroupDropout
  assert loaded.layers[0].rates == RATES
  assert loaded.layers[0].groups == PAIRS


@training.in_both
def test_plain_models_have_keras_dropout(which: str) -> None:
  """With rate 0, Keras 3 creates no random number generator."""
  library, _ = training.KERASES[which]
  model, optimizer = _model(which, [0.0, 0.75])
  for group, rate in enumerate([0.0, 0.75]):
    plain = Models(model, optimizer)[group]
    assert type(plain.layers[0]) is library.layers.Dropout
    assert plain.layers[0].rate == rate
    assert float(plain(X)[0, 0]) == 500


@pytest.mark.parametrize(
  ("rates", "error", "message"),
  [
    ([0.1], ValueError, "one number for each of the 2 groups"),
    ([0.1, 1.0], ValueError, "at least 0 and less than 1; got"),
    ([0.1, -0.5], ValueError, "at least 0 and less than 1; got"),
    ([0.1, float("nan")], ValueError, "at least 0 and less than 1; got"),
    (["0.1", 0.5], TypeError, "must contain numbers; got"),
    (0.3, TypeError, r"must be a list .* such as \[0.1, 0.2\]; got 0.3"),
  ],
)
@training.in_both
def test_rates_are_refused(
  which: str, rates: Any, error: Any, message: str
) -> None:
  _, package = training.KERASES[which]
  with pytest.raises(error, match=message):
    package.GroupDropout(rates, PAIRS)


@training.in_both
def test_groups_of_the_optimizer(which: str) -> None:
  """The optimizer is created after the layer, and before the first step."""
  library, package = training.KERASES[which]

  def make(groups: Any) -> Any:
    with testbed.mirrored().scope():
      dropout = package.GroupDropout(RATES, groups, seed=1)
      model = library.Sequential([library.Input((500,)), dropout])
      model.add(library.layers.Dense(1))
      optimizer = package.CrossShardOptimizer("sgd", group_assignment=PAIRS)
      model.compile(optimizer, "mse")
    return model

  data = tf.data.Dataset.from_tensors((X, X[:, :1]))
  model = make([[0, 2], [1, 3]])
  before = model.get_weights()
  with pytest.raises(ValueError, match=r"`groups` is .* Remove `groups`"):
    testbed.fit(model, data)
  np.testing.assert_equal(model.get_weights(), before)
  model = make(None)
  testbed.fit(model, data)
  for out, rate in zip(
    _call(model.layers[0]), np.repeat(RATES, 2), strict=True
  ):
    assert np.mean(out == 0) == pytest.approx(rate, abs=0.03)


def test_masks_are_those_of_keras() -> None:
  rates = [0.25, 0.75]
  strategy = VectorizedStrategy(2)
  with strategy.scope():
    layer = keras3.GroupDropout(rates, seed=1, noise_shape=(None, 1, 5))
  x = tf.ones([3, 4, 5])
  found = strategy.run(tf.function(lambda: layer(x, training=True)))
  for out, rate in zip(
    strategy.experimental_local_results(found), rates, strict=True
  ):
    plain = keras.layers.Dropout(rate, seed=1, noise_shape=(None, 1, 5))
    right = plain(x, training=True)
    np.testing.assert_allclose(out, right, rtol=1e-6)
