"""Predictions of all groups, as each group's plain model predicts."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import callback_cases as cases
from tests.support import replica_state_cases, testbed, training
from tf_cross_shard import Models, VectorizedStrategy

X = np.random.default_rng(1).normal(size=(7, 3)).astype("float32")


def _two_outputs(home: Any) -> Any:
  inputs = {"a": home.Input((3,), name="a"), "b": home.Input((3,), name="b")}
  hidden = home.layers.Dense(4, "tanh")(inputs["a"] - inputs["b"])
  outputs = {"large": home.layers.Dense(2)(hidden), "small": hidden}
  return home.Model(inputs, outputs)


def _spread(model: Any, count: int) -> None:
  for i, variable in enumerate(model.trainable_variables):
    rng = np.random.default_rng(i)
    values = rng.normal(size=(count, *variable.shape)).astype("float32")
    replica_state_cases.spread(variable, values)


@training.in_both
@pytest.mark.parametrize("where", ["models", "mirrored"])
def test_each_group_predicts_as_its_plain_model(where: str, which: str) -> None:
  home, package = training.KERASES[which]
  strategy = VectorizedStrategy(2) if where == "models" else testbed.mirrored(2)
  with strategy.scope():
    model = _two_outputs(home)
    optimizer = package.CrossShardOptimizer("sgd", group_assignment=cases.PAIR)
  _spread(model, 2)
  x = {"a": X, "b": X[::-1].copy()}
  found = Models(model, optimizer).predict(x, batch_size=3)
  data = tf.data.Dataset.from_tensor_slices(x).batch(4)
  again = Models(model, optimizer).predict(data)
  assert {name: v.shape for name, v in found.items()} == {
    "large": (2, 7, 2),
    "small": (2, 7, 4),
  }
  for i in (0, 1):
    plain = Models(model, optimizer)[i]
    right = plain.predict(x, verbose=0)
    for name, value in right.items():
      for mine in (found, again):
        np.testing.assert_allclose(mine[name][i], value, rtol=1e-5, atol=1e-6)
  assert np.abs(found["large"][0] - found["large"][1]).max() > 0.1


@training.in_both
def test_a_stack_of_all_predictions_in_a_plain_model(
  tmp_path: pathlib.Path, which: str
) -> None:
  """Also saved and loaded by Keras."""
  home, package = training.KERASES[which]
  with VectorizedStrategy(3).scope():
    model = _two_outputs(home)
    optimizer = package.CrossShardOptimizer("sgd")
  _spread(model, 3)
  x = {"a": X, "b": X[::-1].copy()}
  right = Models(model, optimizer).predict(x)
  stacked = Models(model, optimizer).ensemble(stack=True)
  stacked.save(tmp_path / "all.keras")
  loaded = home.models.load_model(tmp_path / "all.keras")
  for plain in (stacked, loaded):
    found = plain.predict(x, verbose=0)
    for name, value in right.items():
      expected = np.swapaxes(value, 0, 1)
      assert found[name].shape == expected.shape
      np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


def test_models_that_keras_cannot_clone(said: list[str]) -> None:
  """In one program, without the warning about Keras' `predict`."""

  class Own(tf.keras.Model):  # type: ignore[misc]
    def __init__(self, layer: Any) -> None:
      super().__init__()
      self.layer = layer

    def call(self, x: Any) -> Any:
      return self.layer(x)

  with VectorizedStrategy(2).scope():
    model = Own(tf.keras.layers.Dense(2, kernel_initializer="ones"))
    model(X)
    optimizer = tf.keras.optimizers.SGD()
  kernel = model.layer.kernel.value
  replica_state_cases.spread(kernel, [np.ones([3, 2]), np.full([3, 2], 2.0)])
  found = Models(model, optimizer).predict(X)
  sums = np.repeat(X.sum(1, keepdims=True), 2, axis=1)
  np.testing.assert_allclose(found, [sums, 2 * sums], rtol=1e-5)
  assert not said
  for x in (X[:0], tf.data.Dataset.from_tensors(X).repeat()):
    with pytest.raises(ValueError, match="`x` must be of one row at least"):
      Models(model, optimizer).predict(x)


def test_inputs_that_are_no_arrays() -> None:
  with VectorizedStrategy(2).scope():
    model = testbed.network()
  sgd = tf.keras.optimizers.SGD()
  for x in (iter([X]), X.tolist(), [], None):
    words = rf"`x` must be an array.*; got {type(x).__name__}\. .*np\.asarray"
    with pytest.raises(TypeError, match=words):
      Models(model, sgd).predict(x)
