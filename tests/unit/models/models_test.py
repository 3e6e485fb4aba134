"""What differs between models is a variable, which `Models` sets and reads."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, Models, VectorizedStrategy

N = 3
X = np.float32([[1, 2], [3, 4], [5, 6]])


class Scale(keras.layers.Layer):  # type: ignore[misc]
  def build(self, shape: Any) -> None:
    del shape
    self.scale = self.add_weight(
      name="scale", shape=(), initializer="ones", trainable=False
    )

  def call(self, x: Any) -> Any:
    return x * self.scale


def _build() -> Any:
  return keras.Sequential(
    [keras.Input((2,)), Scale(), keras.layers.Dense(1, use_bias=False)]
  )


def _strategy(where: str) -> Any:
  return VectorizedStrategy(N) if where == "models" else testbed.mirrored(N)


def _compiled(where: str) -> Any:
  with _strategy(where).scope():
    model = _build()
    sgd = keras.optimizers.SGD(0.125)
    groups = [[i] for i in range(N)]
    model.compile(CrossShardOptimizer(sgd, group_assignment=groups), "mse")
    model.optimizer.build(model.trainable_variables)
  return model


@pytest.mark.parametrize("where", ["models", "groups"])
def test_assigned_numbers_are_part_of_each_model(where: str) -> None:
  """In training, predictions, plain models and after `initialize`."""
  model = _compiled(where)
  models = Models(model)
  scales = [1.0, 2.0, 4.0]
  models.assign(model.layers[0].scale, scales)
  models.assign(model.optimizer.learning_rate, [0.0, 0.125, 0.25])
  models.initialize(_build, seeds=[0, 0, 0])
  assert models.values(model.layers[0].scale).tolist() == scales
  start = models.values(model.trainable_variables[0])
  x = tf.data.Dataset.from_tensors(tf.ones([N * 4, 2]))
  model.fit(x.map(lambda x: (x, x[:, :1])), verbose=0)
  for i, plain in enumerate(models):
    assert type(plain) is keras.Sequential
    assert float(plain.layers[0].scale) == scales[i]
    other = _build()
    other.compile(keras.optimizers.SGD(0.125 * i), "mse", run_eagerly=True)
    other.set_weights([np.float32(scales[i]), start[i]])
    other.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
    for found, right in zip(
      plain.get_weights(), other.get_weights(), strict=True
    ):
      np.testing.assert_allclose(found, right, rtol=1e-6)
    np.testing.assert_allclose(
      models.predict(X)[i], other.predict(X, verbose=0), rtol=1e-6
    )


@pytest.mark.parametrize("where", ["models", "groups"])
def test_weights_of_one_model(where: str) -> None:
  model = _compiled(where)
  models = Models(model)
  before = models.values(model.trainable_variables[0])
  models.set_weights(-1, [2.0, [[3.0], [4.0]]])
  plain = _build()
  plain.set_weights([np.float32(8.0), np.float32([[5.0], [6.0]])])
  models.set_weights(0, plain)
  assert models.values(model.layers[0].scale).tolist() == [8.0, 1.0, 2.0]
  found = models.values(model.trainable_variables[0])
  assert found[[0, 2]].tolist() == [[[5.0], [6.0]], [[3.0], [4.0]]]
  np.testing.assert_array_equal(found[1], before[1])
  with pytest.raises(ValueError, match=r"`weights` must have the shapes"):
    models.set_weights(0, [1.0])
  with pytest.raises(ValueError, match="`i` must be an integer from 0 to 2"):
    models.set_weights(3, plain)
  np.testing.assert_array_equal(
    models.values(model.trainable_variables[0]), found
  )


def test_it_is_a_sequence() -> None:
  model = _compiled("models")
  models = Models(model)
  models.assign(model.layers[0].scale, [1.0, 2.0, 4.0])
  assert len(models) == N
  assert float(models[-1].layers[0].scale) == 4.0
  assert [float(m.layers[0].scale) for m in models[1:]] == [2.0, 4.0]
  assert [float(m.layers[0].scale) for m in reversed(models)] == [4.0, 2.0, 1.0]
  with pytest.raises(IndexError, match="`i` must be"):
    models[N]
  with pytest.raises(ValueError, match=r"`i` must be .* got <class 'list'>"):
    models.set_weights(model.get_weights(), 0)
  assert len(Models(_build())) == 1
  assert "3 models of sequential" in repr(models)


@pytest.mark.parametrize(
  ("values", "words"),
  [
    ([1.0, 2.0], r"must be float32 \[3\], .*; got float64 \[2\]"),
    ([[1.0]] * N, r"got float64 \[3, 1\]"),
    (["a"] * N, "must be float32"),
    ([1j] * N, "got complex128"),
  ],
)
def test_values_that_do_not_fit(values: Any, words: str) -> None:
  model = _compiled("models")
  scale = model.layers[0].scale
  with pytest.raises(ValueError, match=words):
    Models(model).assign(scale, values)
  assert Models(model).values(scale).tolist() == [1.0] * N


def test_a_variable_outside_of_the_scope_has_one_value() -> None:
  models, outside = Models(_compiled("models")), tf.Variable(1.0)
  with pytest.raises(ValueError, match="outside of the strategy's scope"):
    models.assign(outside, [1.0, 2.0, 3.0])
  models.assign(outside, [2.0] * N)
  assert models.values(outside).tolist() == [2.0] * N
