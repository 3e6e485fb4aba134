"""Groups as models: taken out, copied to another, joined in one.

In one process; several workers are in replica_state_workers_test.py.
"""
# bazel: size=large

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl import logging

from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard import keras3, replica_state
from tf_cross_shard import tf_keras as sharded
from tf_cross_shard.replica_state import group_state

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


# ------------------------------------------------------------------ copy_group

# Where, the groups, and arguments of the training and of the wrapper.
COPIES: dict[str, tuple[str, str, Any, Any, dict[str, Any]]] = {
  "mirrored": ("mirrored", "keras", CROSSED, "Adam", {}),
  "alone": ("mirrored", "keras", [[3], [1], [0], [2]], "Adam", {}),
  "virtual": ("virtual", "keras", CROSSED, "Adam", {"shard_update": True}),
  "window": (
    *("mirrored", "keras", CROSSED, "Adam"),
    {"accumulate_steps": 2, "shard_update": True, "skip_nonfinite": True},
  ),
  "scaled": ("mirrored", "keras", CROSSED, "scaled", {}),
  "tf_keras": ("mirrored", "tf_keras", CROSSED, "Adam", {}),
  "legacy": ("virtual", "tf_keras", CROSSED, "legacy", {}),
}


def _optimizer(home: Any, name: str) -> Callable[[float], Any]:
  """A maker of optimizers."""
  if name == "legacy":
    return functools.partial(home.optimizers.legacy.SGD, momentum=0.5)
  if name == "scaled":
    return lambda rate: home.optimizers.LossScaleOptimizer(
      home.optimizers.SGD(rate, momentum=0.5, use_ema=True)
    )
  return getattr(home.optimizers, name)


def _state(training: cases.Training) -> dict[str, list[bytes]]:
  """What each replica has of everything that is saved."""
  found = group_state.GroupCopies(training.optimizer, training.model)
  return {
    part.name: [v.tobytes() for v in replica_state.values(part.variable)]
    for part in found.parts
  }


def _differing(
  one: dict[str, list[bytes]],
  mine: Sequence[int],
  other: dict[str, list[bytes]],
  theirs: Sequence[int],
) -> set[str]:
  """The variables of which some replicas have other bits than others."""
  pairs = list(zip(mine, theirs, strict=True))
  return {n for n in one if any(one[n][a] != other[n][b] for a, b in pairs)}


@pytest.mark.parametrize("case", COPIES)
def test_a_copy_is_trained_as_the_source_would_be(
  case: str, tmp_path: pathlib.Path
) -> None:
  """With the target's data and learning rate, bit for bit.

  The same state is then trained without the copy, where the source is given
  the target's data and learning rate.
  """
  where, library, groups, optimizer, options = COPIES[case]
  home, wrapper = LIBRARIES[library]
  training = cases.Training(
    STRATEGIES[where](),
    groups,
    seed=1,
    optimizer=_optimizer(home, optimizer),
    library=home,
    wrapper=functools.partial(wrapper.CrossShardOptimizer, **options),
  )
  if library == "tf_keras":  # Its random numbers belong to the process.
    training.model.layers[2].rate = 0.0
  source, target = groups[0], groups[1]
  assert training.replicas == N > len(source)
  rate = training.optimizer.learning_rate
  rates = np.full(N, 0.0625, "float32")
  rates[target] = 0.25
  cases.spread(rate, list(rates))
  seeds = [v for v in training.model.variables if "seed" in v.name]
  assert len(seeds) == (library == "keras")
  for seed in seeds:
    values = testbed.copies(seed)
    cases.spread(seed, [value + i for i, value in enumerate(values)])
  training.steps(0, 3)
  training.save(tmp_path / "before")
  before = _state(training)
  own = {name for name in before if "learning_rate" in name or "seed" in name}
  own &= _differing(before, source, before, target)
  assert len(own) == 1 + len(seeds)

  replica_state.copy_group(0, 1, training.optimizer, training.model)
  after = _state(training)
  rest = [replica for replica in range(N) if replica not in target]
  assert not _differing(before, rest, after, rest)
  changed = _differing(before, target, after, target)
  assert not changed & own
  assert len(changed) > 8
  assert _differing(after, source, after, target) == own
  x = np.random.default_rng(5).normal(size=(N, cases.EXAMPLES, 4))
  for _ in range(3):
    training.run(tf.constant(x, "float32"))
  copied = _state(training)

  training.restore(tmp_path / "before")
  rates[source] = 0.25
  cases.spread(rate, list(rates))
  for seed in seeds:
    values = testbed.copies(seed)
    for one, other in zip(source, target, strict=True):
      values[one] = values[other]
    cases.spread(seed, values)
  x[source] = x[target]
  for _ in range(3):
    training.run(tf.constant(x, "float32"))
  assert not _differing(copied, target, _state(training), source)
  assert len(_differing(copied, target, after, target)) > 8


@in_both
def test_a_copy_is_no_reason_to_warn(
  library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Groups are equal after it, and the next steps part them again."""
  said: list[str] = []
  monkeypatch.setattr(
    logging, "warning", lambda text, *args: said.append(text % args)
  )
  home = LIBRARIES[library][0]
  model, optimizer = _made(
    "mirrored",
    library,
    lambda home: home.Sequential([home.Input((3,)), home.layers.Dense(2)]),
  )
  y = np.arange(16, dtype="float32").reshape(8, 2)

  class Copy(home.callbacks.Callback):  # type: ignore[misc,name-defined]
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
      if epoch != 1:
        replica_state.copy_group(1, 0, optimizer, model)

  model.fit(X, y, batch_size=8, epochs=3, verbose=0, callbacks=[Copy()])
  kernel = model.trainable_variables[0]
  one, other = replica_state.group_values(kernel, optimizer)
  np.testing.assert_array_equal(one, other)
  assert said == []


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
