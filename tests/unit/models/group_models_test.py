"""A group as a plain model; copies of groups; ensembles of groups.

In one process; several workers are in multi_worker_replicas_test.py.
"""

import functools
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import replica_state_cases as cases
from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer, Models

N = testbed.REPLICAS
CROSSED = [[3, 0], [1, 2]]
STRATEGIES = testbed.STRATEGIES
LIBRARIES = training.KERASES
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
  """A compiled model, whose values differ between replicas."""
  home, wrapper = LIBRARIES[library]
  with STRATEGIES[where]().scope():
    model = make(home)
    opt = getattr(home.optimizers, optimizer)(0.5)
    optimizer = wrapper.CrossShardOptimizer(
      opt, group_assignment=groups, **options
    )
    model.compile(optimizer, "mse")
  assert len(groups) * len(groups[0]) == N >= len(groups) > 1
  _spread(model, groups)
  return model, optimizer


def _spread(model: Any, groups: Sequence[Sequence[int]]) -> None:
  """Gives each group its own weights, and each replica its own statistics."""
  for i, variable in enumerate(model.variables):
    dtype = getattr(variable, "dtype", None)  # of a vocabulary
    if dtype is None or not tf.as_dtype(dtype).is_floating:
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
  """A network whose arithmetic is exact: whole numbers and powers of two."""
  inputs = home.Input((3,))
  x = home.layers.Dense(4, name="first")(inputs)
  x = home.layers.BatchNormalization(epsilon=0.0)(x)
  x = home.layers.Dropout(0.5)(x)
  return home.Model(inputs, home.layers.Dense(2, name="last")(x))


def _expected(model: Any, members: Sequence[int], x: Any = X) -> Any:
  """Predicts with a group's weights, in NumPy."""
  found = [testbed.copies(variable) for variable in model.weights]
  first = members[0]
  kernel, bias, gamma, beta = (copies[first] for copies in found[:4])
  mean, variance = (
    np.mean([copies[r] for r in members], axis=0, dtype="float64")
    for copies in found[4:6]
  )
  x = (x @ kernel + bias - mean) / np.sqrt(variance) * gamma + beta
  return x @ found[6][first] + found[7][first]


# ------------------------------------------------------------------------ load


@in_both
@everywhere
def test_one_group_as_a_plain_model(where: str, library: str) -> None:
  """Compares with NumPy, inside the scope, as in a callback of `fit`."""
  model, optimizer = _made(where, library, _network)
  before = [testbed.copies(variable) for variable in model.variables]
  right = [_expected(model, members) for members in CROSSED]
  assert np.abs(right[0] - right[1]).max() > 1
  with STRATEGIES[where]().scope():
    plain = [Models(model, optimizer)[i] for i in (0, 1)]
  for one, expected in zip(plain, right, strict=True):
    np.testing.assert_array_equal(one(X), expected)
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
  again = Models(model, optimizer).load(np.int64(1), plain[0])
  assert again is plain[0]
  np.testing.assert_array_equal(again(X), right[1])


@in_both
def test_subclassed_and_nested_models(library: str) -> None:
  """Models that Keras makes again from their configuration.

  Local classes are among them, and a layer that computes with its variables.
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
  plain = Models(model, optimizer)[1]
  first, second = (testbed.copies(v)[1] for v in model.trainable_variables)
  right = (X - [2, 4, 5]) / [1, 2, 2] * first + X * second
  data = {"x": X, "y": X}
  np.testing.assert_allclose(plain(data)["sum"], right, rtol=1e-6)

  model, optimizer = _made("mirrored", library, lambda home: Net(2))
  with pytest.raises(ValueError, match="`model` has no variables yet"):
    Models(model, optimizer)[0]


@in_both
def test_clones_have_functions_vocabularies_and_seeds(
  library: str, tmp_path: pathlib.Path
) -> None:
  """Clones keep random states, although Keras renumbers these variables."""

  def thrice(t: Any) -> Any:
    return 3 * t

  def make(home: Any) -> Any:
    words = home.layers.TextVectorization(output_sequence_length=2)
    words.adapt(["a b c", "b c", "c"])
    inputs = home.Input((1,), dtype="string")
    x = home.layers.Embedding(8, 3)(words(inputs))
    x = home.layers.Lambda(lambda t: tf.add(t, t))(x)  # A name of this file.
    x = home.layers.Lambda(thrice)(home.Sequential([home.layers.ReLU()])(x))
    lstm = home.layers.LSTM(2, return_sequences=True)
    both = home.layers.Bidirectional(lstm)(x)
    return home.Model(inputs, home.layers.Concatenate()([x, both]))

  model, optimizer = _made("mirrored", library, make)
  texts = tf.constant([["a b"], ["b c"], ["c d"], ["d"]])
  right = model(texts).numpy()  # with the first replica's weights
  random.seed(1)
  plain = [Models(model, optimizer)[i] for i in (0, 1)]
  assert random.random() == random.Random(1).random()
  first = plain[[0 in members for members in CROSSED].index(True)]
  np.testing.assert_allclose(first.predict(texts, verbose=0), right, rtol=1e-6)
  one, other = (np.asarray(each(texts)) for each in plain)
  assert np.abs(one - other).max() > 1
  optimizer.build(model.trainable_variables)
  Models(model, optimizer).save(tmp_path / "state")
  Models(model, optimizer).restore(tmp_path / "state")
  Models.read(tmp_path / "state", 0, plain[1])
  np.testing.assert_array_equal(plain[1](texts), one)


# ------------------------------------------------------------------------ copy

# The strategy, Keras, groups, optimizer, and arguments of the wrapper. The test
# compares bits, so replicas are not one program, where a place in the stack
# decides how activations are rounded.
COPIES: dict[str, tuple[str, str, Any, Any, dict[str, Any]]] = {
  "alone": ("mirrored", "keras", [[3], [1], [0], [2]], "Adam", {}),
  "shards": ("mirrored", "keras", CROSSED, "Adam", {"shard_update": True}),
  "window": (
    *("mirrored", "keras", CROSSED, "Adam"),
    {"accumulate_steps": 2, "shard_update": True, "skip_nonfinite": True},
  ),
  "scaled": ("mirrored", "keras", CROSSED, "scaled", {}),
  "tf_keras": ("mirrored", "tf_keras", CROSSED, "Adam", {}),
}


def _optimizer(home: Any, name: str) -> Callable[[float], Any]:
  if name == "scaled":
    return lambda rate: home.optimizers.LossScaleOptimizer(
      home.optimizers.SGD(rate, momentum=0.5, use_ema=True)
    )
  return getattr(home.optimizers, name)


def _state(training: cases.Training) -> dict[str, list[bytes]]:
  """Returns each replica's bits of all variables that are saved."""
  found = cases.saved(training.optimizer, training.model)
  return {name: [own[name].tobytes() for own in found] for name in found[0]}


def _differing(
  one: dict[str, list[bytes]],
  mine: Sequence[int],
  other: dict[str, list[bytes]],
  theirs: Sequence[int],
) -> set[str]:
  """Returns the variables whose bits differ between replicas."""
  pairs = list(zip(mine, theirs, strict=True))
  return {n for n in one if any(one[n][a] != other[n][b] for a, b in pairs)}


@pytest.mark.parametrize("case", COPIES)
def test_copied_group_trains_like_its_source(
  case: str, tmp_path: pathlib.Path
) -> None:
  """The copy trains with the target's data and learning rate.

  The test then trains the same state without the copy, but gives the source the
  target's data and learning rate, and compares both.
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

  Models(training.model, training.optimizer).copy(0, 1)
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
@everywhere
def test_slots_that_begin_as_weights_are_the_groups_own(
  where: str, library: str
) -> None:
  """The optimizer is created when the groups already differ."""
  home, wrapper = LIBRARIES[library]
  kind = {
    "keras": lambda: home.optimizers.ScheduleFreeAdamW(),
    "tf_keras": lambda: home.optimizers.SGD(use_ema=True),
  }[library]
  with STRATEGIES[where]().scope():
    weights = training.make_weights(library, {"a": [0.0, 0.0], "b": 0.0})
    for variable in weights:
      shape = tuple(variable.shape)
      cases.spread(variable, [np.full(shape, r % 2, "f4") for r in range(N)])
    optimizer = wrapper.CrossShardOptimizer(
      kind(), group_assignment=[[0, 2], [1, 3]]
    )
    optimizer.build(weights)
  name = {"keras": "momentum", "tf_keras": "average"}[library]
  for variable in weights:
    slot = optimizer.get_slot(variable, name)
    for replica, copy in enumerate(testbed.copies(slot)):
      np.testing.assert_array_equal(copy, np.full(copy.shape, replica % 2))


@pytest.mark.parametrize(
  "notice",
  [
    lambda model, path: Models(model).save(path),
    lambda model, _: Models(model)[1],
    lambda model, _: Models(model).ensemble(),
    lambda model, _: Models(optimizer=model.optimizer).values(
      model.trainable_variables[0]
    ),
    lambda model, _: Models(model).copy(0, 1),
  ],
)
def test_groups_that_are_equal_are_warned_about(
  notice: Callable[[Any, Any], Any], said: list[str], tmp_path: pathlib.Path
) -> None:
  """EarlyStopping sets the weights after the last check within `fit`."""
  model, _ = _made("mirrored", "keras", lambda home: _dense(home, "a"))
  stop = keras.callbacks.EarlyStopping(
    "loss", min_delta=1e9, patience=1, restore_best_weights=True
  )
  model.fit(X, X, 8, 3, verbose=0, callbacks=[stop])
  kernel = model.trainable_variables[0]
  assert len({value.tobytes() for value in testbed.values(kernel)}) == 1
  [line] = said
  assert "EarlyStopping" in line
  said.clear()
  for _ in range(2):
    notice(model, tmp_path / "state")
  [line] = said
  assert "gave all groups the same weights" in line


# -------------------------------------------------------------------- ensemble


@in_both
def test_an_ensemble(library: str) -> None:
  """It predicts the mean of the groups' predictions, by Keras' own layers.

  `group_models_loaded_test.py` loads it where this package is not installed.
  """
  home = LIBRARIES[library][0]
  model, optimizer = _made("mirrored", library, cases.two_in_two_out)
  with testbed.mirrored().scope():
    ensemble = Models(model, optimizer).ensemble()
  data = {"x": X, "y": X[::-1]}
  found = {key: np.asarray(value) for key, value in ensemble(data).items()}
  assert found.keys() == {"sum", "probabilities"}
  each = [testbed.copies(v) for v in model.weights]
  totals = [
    X @ each[0][r] + each[1][r] + X[::-1] @ each[2][r] + each[3][r]
    for r in (CROSSED[0][0], CROSSED[1][0])
  ]
  np.testing.assert_array_equal(found["sum"], sum(totals) / 2)
  np.testing.assert_allclose(found["probabilities"].sum(-1), 1.0, rtol=1e-6)
  kinds = {type(layer).__module__.split(".")[0] for layer in ensemble.layers}
  assert kinds == {home.__name__}


@in_both
def test_an_ensemble_of_a_list_of_outputs(library: str) -> None:

  def make(home: Any) -> Any:
    inner = home.Sequential([home.Input((3,)), home.layers.Dense(2)])
    inner.compile("sgd", "mse")  # Not again in a clone.
    inputs = home.Input((3,))
    return home.Model(inputs, [inner(inputs), home.layers.Dense(1)(inputs)])

  groups = [[2], [0], [3], [1]]
  model, optimizer = _made("virtual", library, make, groups)
  plain = Models(model, optimizer)[0]
  for layer in plain.layers:
    assert getattr(layer, "optimizer", None) is None
  ensemble = Models(model, optimizer).ensemble()
  names = [layer.name for layer in ensemble.layers]
  assert [n for n in names if "model" in n] == [f"model_{i}" for i in range(4)]
  found = ensemble(X)
  for output, (kernel, bias) in zip(found, ((0, 1), (2, 3)), strict=True):
    kernels, biases = (testbed.copies(model.weights[i]) for i in (kernel, bias))
    right = np.mean([X @ kernels[r] + biases[r] for r in range(4)], axis=0)
    np.testing.assert_allclose(output, right, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------- errors


def _dense(home: Any, *names: str) -> Any:
  layers = [home.layers.Dense(3, name=name) for name in names]
  return home.Sequential([home.Input((3,)), *layers])


@in_both
def test_errors_change_nothing(library: str, tmp_path: pathlib.Path) -> None:
  home = LIBRARIES[library][0]
  model, optimizer = _made(
    "mirrored", library, lambda home: _dense(home, "one", "two")
  )
  plain = _dense(home, "one", "two")

  def state() -> list[bytes]:
    variables = [*model.variables, *plain.variables, *other.variables]
    return [c.tobytes() for v in variables for c in testbed.copies(v)]

  other = plain
  before = state()
  optimizer.build(model.trainable_variables)
  for wrong in (-3, 2, True, 1.0, "0", None):
    words = "must be an integer from 0 to 1; got"
    with pytest.raises(ValueError, match=f"`i` {words}"):
      Models(model, optimizer).load(wrong, plain)
    with pytest.raises(ValueError, match=f"`source` {words}"):
      Models(model, optimizer).copy(wrong, 0)
    with pytest.raises(ValueError, match=f"`target` {words}"):
      Models(model, optimizer).copy(0, wrong)
  for wrong in (2, "sgd", model):
    with pytest.raises(TypeError, match="`optimizer` must be a Keras optim"):
      Models(model, wrong)
  with pytest.raises(IndexError, match="`i` must be"):
    Models(model)[2]
  with pytest.raises(TypeError, match="`model` must be a built model or"):
    Models(1, optimizer)
  with pytest.raises(TypeError, match=r"Call Models\(model, optimizer\)"):
    Models(optimizer, model)
  with pytest.raises(TypeError, match="Pass at least one"):
    Models()
  for method in ("predict", "set_weights", "initialize"):
    with pytest.raises(TypeError, match="This method needs the model"):
      getattr(Models(optimizer=optimizer), method)(0, [])
  assert state() == before
  for other, words in (
    (_dense(home, "two", "one"), "but `model` has .*one/kernel"),
    (_dense(home, "one"), "`twin` has 2 variables, but `model` has 4"),
    (model, "`twin` has replicas"),
    (
      home.Sequential(
        [home.Input((2,)), home.layers.Dense(3), home.layers.Dense(3)]
      ),
      r"float32 \[2, 3\], but `model` has .*float32 \[3, 3\]",
    ),
  ):
    before = state()
    with pytest.raises(ValueError, match=words):
      Models(model, optimizer).load(0, other)
    assert state() == before


@in_both
def test_models_that_cannot_be_cloned_or_combined(library: str) -> None:
  home = LIBRARIES[library][0]

  class Net(home.Model):  # type: ignore[misc,name-defined]
    def __init__(self, layer: Any) -> None:
      super().__init__()
      self.layer = layer

    def call(self, inputs: Any) -> Any:
      return self.layer(inputs)

  def make(home: Any) -> Any:
    net = Net(home.layers.Dense(2))
    net(tf.zeros([1, 3]))
    return net

  model, optimizer = _made("mirrored", library, make)
  with pytest.raises(ValueError, match=r"to Models\.load as `into`.* `twin`\."):
    Models(model, optimizer)[1]
  plain = Models(model, optimizer).load(1, make(home))
  kernel, bias = (testbed.copies(v)[1] for v in model.variables)
  np.testing.assert_array_equal(plain(X), X @ kernel + bias)

  def with_integers(home: Any) -> Any:
    inputs = home.Input((3,))
    outputs = home.layers.Dense(2)(inputs)
    whole = home.Input((3,), dtype="int32")
    return home.Model([inputs, whole], [outputs, whole])

  model, optimizer = _made("mirrored", library, with_integers)
  with pytest.raises(ValueError, match="an output of dtype int32"):
    Models(model, optimizer).ensemble()
  with pytest.raises(
    TypeError, match="`model` must be a Keras model; got list"
  ):
    Models(model.variables, optimizer)[0]


class _NoArgument(tf.keras.layers.Layer):
  """A layer whose `get_config` has an argument that it does not take."""

  def call(self, inputs: Any) -> Any:
    return inputs

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), "strength": 2}


def test_errors_of_cloning_contain_the_error_of_keras() -> None:
  with testbed.mirrored().scope():
    model = tf.keras.Sequential(
      [tf.keras.Input((1,)), _NoArgument(), tf.keras.layers.Dense(1)]
    )
    optimizer = CrossShardOptimizer("sgd")
  words = r"from its get_config\(\): .*strength.*\. Create and build a second"
  with pytest.raises(ValueError, match=words) as error:
    Models(model, optimizer)[0]
  assert "\n" not in str(error.value)
