"""Groups as models: taken out, copied to another, joined in one.

In one process; several workers are in replica_state_workers_test.py.
"""
# bazel: size=large

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard import keras3, replica_state
from tf_cross_shard import tf_keras as sharded

N = testbed.REPLICAS
CROSSED = [[3, 0], [1, 2]]
STRATEGIES: dict[str, Callable[[], Any]] = {
  "mirrored": testbed.mirrored,
  "virtual": functools.partial(testbed.virtual, N),
}
LIBRARIES = {"keras": (keras, keras3), "tf_keras": (tf_keras, sharded)}
X = np.random.default_rng(3).integers(-4, 5, (8, 3)).astype("float32")
in_both = pytest.mark.parametrize("library", LIBRARIES)
everywhere = pytest.mark.parametrize("where", STRATEGIES)


def _made(
  where: str,
  library: str,
  make: Callable[[Any], Any],
  groups: Any = CROSSED,
  optimizer: str = "SGD",
  **options: Any,
) -> tuple[Any, Any]:
  """A model of which each replica has its own, and a compiled optimizer."""
  home, wrapper = LIBRARIES[library]
  with STRATEGIES[where]().scope():
    model = make(home)
    opt = getattr(home.optimizers, optimizer)(0.5)
    optimizer = wrapper.CrossShardOptimizer(
      opt, group_assignment=groups, **options
    )
    model.compile(optimizer, "mse")
  assert len(groups) * len(groups[0]) == N > len(groups) > 1
  _spread(model, groups)
  return model, optimizer


def _spread(model: Any, groups: Sequence[Sequence[int]]) -> None:
  """Gives groups other weights, and replicas other statistics."""
  for i, variable in enumerate(model.variables):
    if not tf.as_dtype(variable.dtype).is_floating:
      continue
    rng = np.random.default_rng(i)
    whole = rng.integers(1, 5, (N, *variable.shape)).astype("float32")
    if variable.trainable:
      for members in groups:
        whole[members] = whole[members[0]]
    elif "variance" in variable.name:  # Means of a group: 4 and 16.
      for j, variances in enumerate(([1, 10], [7, 22])):
        for members, value in zip(groups, variances, strict=True):
          whole[members[j]] = value
    cases.spread(variable, list(whole))


def _network(home: Any) -> Any:
  """Whole numbers in, and powers of two from the statistics: exact."""
  inputs = home.Input((3,))
  x = home.layers.Dense(4, name="first")(inputs)
  x = home.layers.BatchNormalization(epsilon=0.0)(x)
  x = home.layers.Dropout(0.5)(x)
  return home.Model(inputs, home.layers.Dense(2, name="last")(x))


def _expected(model: Any, members: Sequence[int], x: Any = X) -> Any:
  """What the network predicts with a group's weights, in NumPy."""
  found = [testbed.copies(variable) for variable in model.weights]
  first = members[0]
  kernel, bias, gamma, beta = (copies[first] for copies in found[:4])
  mean, variance = (
    np.mean([copies[r] for r in members], axis=0, dtype="float64")
    for copies in found[4:6]
  )
  x = (x @ kernel + bias - mean) / np.sqrt(variance) * gamma + beta
  return x @ found[6][first] + found[7][first]


# ------------------------------------------------------------------ load_group


@in_both
@everywhere
def test_one_group_as_a_plain_model(where: str, library: str) -> None:
  """Against NumPy; also inside of the scope, where `fit` calls callbacks."""
  model, optimizer = _made(where, library, _network)
  before = [testbed.copies(variable) for variable in model.variables]
  right = [_expected(model, members) for members in CROSSED]
  assert np.abs(right[0] - right[1]).max() > 1
  with STRATEGIES[where]().scope():
    plain = [replica_state.load_group(model, i, optimizer) for i in (0, 1)]
  for one, expected in zip(plain, right, strict=True):
    np.testing.assert_array_equal(one.predict(X, verbose=0), expected)
    assert [layer.name for layer in one.layers] == [
      layer.name for layer in model.layers
    ]
    assert one.distribute_strategy is tf.distribute.get_strategy()
    assert getattr(one, "optimizer", None) is None
    for variable in one.variables:
      assert len(testbed.copies(variable)) == 1
  assert model.optimizer is not None
  for variable, copies in zip(model.variables, before, strict=True):
    np.testing.assert_array_equal(testbed.copies(variable), copies)
  again = replica_state.load_group(model, np.int64(1), optimizer, plain[0])
  assert again is plain[0]
  np.testing.assert_array_equal(
    again.predict(X, verbose=0), plain[1].predict(X, verbose=0)
  )


@in_both
def test_subclassed_and_nested_models(library: str) -> None:
  """Those that Keras makes again from their configuration, local classes too.

  What a layer computes of its variables is computed again.
  """
  home = LIBRARIES[library][0]

  class Scale(home.layers.Layer):
    def build(self, shape: Any) -> None:
      self.scale = self.add_weight(
        shape=(shape[-1],), name="scale", initializer="ones"
      )

    def call(self, inputs: Any) -> Any:
      return inputs * self.scale

  class Net(home.Model):
    def __init__(self, units: int, **options: Any) -> None:
      super().__init__(**options)
      self.units = units
      self.layer = home.layers.Dense(units)

    def call(self, inputs: Any) -> Any:
      return self.layer(inputs)

    def get_config(self) -> dict[str, Any]:
      return {"units": self.units}

  def nested(home: Any) -> Any:
    adapted = home.layers.Normalization()
    adapted.adapt(np.array([[1.0, 2.0, 3.0], [3.0, 6.0, 7.0]], "float32"))
    inner = home.Sequential([home.Input((3,)), adapted, Scale()])
    inputs = {"x": home.Input((3,), name="x"), "y": home.Input((3,), name="y")}
    return home.Model(
      inputs, {"sum": inner(inputs["x"]) + Scale()(inputs["y"])}
    )

  model, optimizer = _made("mirrored", library, nested)
  for variable, value in zip(
    model.weights[:2], ([2, 4, 5], [1, 4, 4]), strict=True
  ):
    variable.assign(np.array(value, "float32"))
  plain = replica_state.load_group(model, 1, optimizer)
  first, second = (testbed.copies(v)[1] for v in model.trainable_variables)
  right = (X - [2, 4, 5]) / [1, 2, 2] * first + X * second
  data = {"x": X, "y": X}
  np.testing.assert_allclose(
    plain.predict(data, verbose=0)["sum"], right, rtol=1e-6
  )

  model, optimizer = _made("mirrored", library, lambda home: Net(2))
  with pytest.raises(ValueError, match="`model` has no variables yet"):
    replica_state.load_group(model, 0, optimizer)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
