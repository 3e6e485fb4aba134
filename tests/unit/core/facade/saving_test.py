"""Saving or setting weights in ways that lose the values of groups warns."""

import copy
import pathlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import covering, testbed, training
from tests.support import replica_state_cases as cases
from tests.support.training import KERASES
from tf_cross_shard import Models

PAIR = [[0], [1]]


def _adam(home: Any) -> Any:
  return home.Adam(0.01, epsilon=1e-3)


def _model(
  kind: str, groups: Any = PAIR, make: Callable[[Any], Any] = _adam
) -> Any:
  """A compiled and built model of two replicas."""
  library, package = KERASES[kind]
  library.utils.set_random_seed(1)
  with testbed.mirrored(2).scope():
    layers = [library.layers.Dense(4, "tanh"), library.layers.Dense(2)]
    model = library.Sequential([library.Input((3,)), *layers])
    opt = make(library.optimizers)
    optimizer = package.CrossShardOptimizer(opt, group_assignment=groups)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
  return model


def _data() -> tf.data.Dataset:
  """Three batches of eight; replicas see different rows."""
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(24, 3)), rng.normal(size=(24, 2))
  data = tf.data.Dataset.from_tensor_slices(
    (x.astype("float32"), y.astype("float32"))
  )
  return data.batch(8)


def _ways(model: Any, folder: pathlib.Path) -> dict[str, Callable[[], Any]]:
  optimizer = model.optimizer
  return {
    "checkpoint": lambda: tf.train.Checkpoint(optimizer=optimizer).save(
      str(folder / "checkpoint")
    ),
    "model": lambda: model.save(str(folder / "model.keras")),
    "pickle": lambda: pickle.dumps(optimizer),
  }


@pytest.mark.parametrize(
  ("kind", "way"),
  [
    ("keras", "checkpoint"),
    ("keras", "pickle"),
    ("tf_keras", "model"),
  ],
)
def test_groups_are_warned_about_once(
  kind: str, way: str, said: list[str], tmp_path: pathlib.Path
) -> None:
  model = _model(kind)
  save = _ways(model, tmp_path)[way]
  save()
  assert said == []  # Groups are equal.
  bias = model.weights[-1]  # A single variable.
  cases.spread(bias, [np.full(2, i, "f4") for i in range(2)])
  save()
  save()
  [line] = said
  assert "trains 2 groups, which differ in weights and slots" in line
  assert "tf_cross_shard.Models(model).save()" in line


COPIES: dict[str, Callable[[Any], Any]] = {
  "pickle": lambda original: pickle.loads(pickle.dumps(original)),
  "copy": copy.copy,
  "deepcopy": copy.deepcopy,
}


def _contents(optimizer: Any) -> list[Any]:
  return [np.asarray(v.numpy()).tolist() for v in optimizer.variables]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("shard_update", [False, "elementwise"])
def test_copies_are_those_of_keras_3(
  shard_update: Any, is_built: bool, way: str
) -> None:
  """A copy has the values that a copy of the plain optimizer has."""
  contents = []
  for is_plain in (True, False):
    with testbed.mirrored(2).scope():
      weight = keras.Variable([1.0, 2.0])
      optimizer: Any = keras.optimizers.AdamW(0.5)
      if not is_plain:
        optimizer = KERASES["keras"][1].CrossShardOptimizer(
          optimizer, shard_update=shard_update
        )
      if is_built:
        optimizer.build([weight])
      optimizer.iterations.assign(7)
      optimizer.learning_rate = 0.25
      with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = COPIES[way](optimizer)
      # Keras skips the variables of an optimizer that has slots.
      words = [str(warning.message) for warning in caught]
      assert ["Skipping variable loading" in text for text in words] == (
        [True] * is_built
      )
      assert again.get_config() == optimizer.get_config()
      contents.append(_contents(again))
      again.build([weight])  # It can be trained.
  assert contents[0] == contents[1] == [0 if is_built else 7, 0.25]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("is_built", [False, True])
def test_copies_in_tf_keras_have_the_configuration(
  is_built: bool, way: str
) -> None:
  weight = tf.Variable([1.0, 2.0])
  adam = tf_keras.optimizers.Adam(0.5)
  optimizer = KERASES["tf_keras"][1].CrossShardOptimizer(adam)
  if is_built:
    optimizer.build([weight])
  optimizer.learning_rate = 0.25
  again = COPIES[way](optimizer)
  assert type(again.inner_optimizer) is tf_keras.optimizers.Adam
  assert again.get_config() == optimizer.get_config()
  assert float(again.learning_rate) == 0.25
  again.apply_gradients([(tf.constant([1.0, 1.0]), weight)])
  assert (int(again.iterations), int(optimizer.iterations)) == (1, 0)


@training.in_both
@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_copies_of_models_keep_slots(which: str, way: str) -> None:
  """As copies of plain models do."""
  library, package = KERASES[which]
  contents = []
  for is_plain in (True, False):
    library.utils.set_random_seed(1)
    optimizer = library.optimizers.Adam(0.5)
    if not is_plain:
      optimizer = package.CrossShardOptimizer(optimizer, fused_update=False)
    model = library.Sequential([library.Input((3,)), library.layers.Dense(2)])
    model.compile(optimizer, "mse")
    testbed.fit(model, _data())
    again = COPIES[way](model)
    assert type(again.optimizer) is type(optimizer)
    state = [*model.get_weights(), *_contents(optimizer)]
    copied = [*again.get_weights(), *_contents(again.optimizer)]
    for mine, theirs in zip(copied, state, strict=True):
      np.testing.assert_array_equal(mine, theirs)
    contents.append(copied)
  for mine, theirs in zip(*contents, strict=True):
    np.testing.assert_array_equal(mine, theirs)


def test_one_group_needs_no_warning(
  said: list[str], tmp_path: pathlib.Path
) -> None:
  model = _model("keras", None)
  for save in _ways(model, tmp_path).values():
    save()
  assert said == []


def _set_weights(model: Any, folder: pathlib.Path) -> None:
  """Sets weights when the last epoch of `fit` ends."""
  library = keras if isinstance(model, keras.Model) else tf_keras

  class Set(library.callbacks.Callback):  # type: ignore[misc,name-defined]
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
      if epoch == 1:
        self.model.set_weights(self.model.get_weights())

  testbed.fit(model, _data(), 2, callbacks=[Set()])


def _restore_and_save(model: Any, folder: pathlib.Path) -> None:
  checkpoint = tf.train.Checkpoint(model=model)
  testbed.fit(model, _data())
  checkpoint.restore(checkpoint.save(str(folder / "a")))
  pickle.dumps(model.optimizer)


COLLAPSED = "or a checkpoint, gave all groups the same weights"


@pytest.mark.parametrize(
  ("kind", "collapse"),
  [
    ("tf_keras", _set_weights),
    ("keras", _restore_and_save),
  ],
)
def test_warning_if_callbacks_make_groups_equal(
  kind: str, collapse: Any, said: list[str], tmp_path: pathlib.Path
) -> None:
  model = _model(kind)
  model.set_weights([w + 1.0 for w in model.get_weights()])
  testbed.fit(model, _data())
  one, other = testbed.values(model.weights[-1])
  assert (one != other).any()
  assert not [line for line in said if COLLAPSED in line]
  collapse(model, tmp_path)
  [line] = [line for line in said if COLLAPSED in line]
  collapse(model, tmp_path)
  assert [each for each in said if COLLAPSED in each] == [line]
  assert "CrossShardOptimizer trains 2 groups" in line
  assert "tf_cross_shard.Models(model).save()" in line


def test_functions_that_keep_or_equalize_groups_do_not_warn(
  said: list[str], tmp_path: pathlib.Path
) -> None:
  model = _model("keras")
  models = Models(model)
  models.save(tmp_path / "equal")
  for make_equal in (models.average, lambda: models.copy(1, 0)):
    testbed.fit(model, _data())
    make_equal()
  testbed.fit(model, _data())
  models.save(tmp_path / "different")
  for name in ("equal", "different"):
    models.restore(tmp_path / name)
    testbed.fit(model, _data())
  # Only what Keras would evaluate is warned about.
  assert [line for line in said if "evaluate()" not in line] == []


def _nadam_within(library: Any) -> Any:
  home = keras.optimizers if library is keras else tf_keras.mixed_precision
  return home.LossScaleOptimizer(
    library.optimizers.Nadam(0.5, beta_1=0.5),
    initial_scale=2.0,
    dynamic_growth_steps=2,
  )


def _nadam(library: Any) -> Any:
  return library.optimizers.Nadam(0.5, beta_1=0.5)


def _resume(
  way: str, optimizer: Any, weights: Any, make: Any, path: Any
) -> Any:
  """Returns weights and an optimizer that continue where others stopped."""
  values = [weight.numpy() for weight in weights]
  new_weights, again = make()
  if way == "checkpoint":
    saved = tf.train.Checkpoint(optimizer=optimizer).save(path)
    tf.train.Checkpoint(optimizer=again).restore(saved).assert_consumed()
  else:
    Models(weights, optimizer).save(path)
    Models(new_weights, again).restore(path)
  for weight, value in zip(new_weights, values, strict=True):
    weight.assign(value)
  return new_weights, again


_NADAMS = [
  ("keras", _nadam_within),
  ("tf_keras", _nadam),
  ("tf_keras", _nadam_within),
]


@pytest.mark.parametrize(
  ("nadam", "shard_update", "way"),
  covering.pairwise(
    [
      _NADAMS,
      (False, "elementwise"),
      ("checkpoint", "Models"),
    ]
  ),
)
def test_variables_that_keras_does_not_list_are_saved(
  nadam: tuple[str, Any],
  shard_update: Any,
  way: str,
  tmp_path: pathlib.Path,
) -> None:
  """Tests Nadam's product of momentums, and a loss scale that grows once.

  Resumed training has the bits of training that nobody interrupted.
  """
  strategy = testbed.mirrored(2)
  grads = [np.array([[[1, 2], [2, 4]], [[2, 1], [4, 1]], [[1, 3], [1, 9]]])]
  # A loss scale divides by 2, and by 4 after two steps.

  def make() -> Any:
    return training.build(
      *(*nadam, {"weight": [1.0, 2.0]}, strategy),
      shard_update=shard_update,
    )

  weights, optimizer = make()
  training.train(weights, optimizer, grads, [0, 1], strategy)
  new_weights, again = _resume(
    way, optimizer, weights, make, tmp_path / "saved"
  )
  products = [
    testbed.copies(testbed.base_optimizer(each)._u_product)
    for each in (optimizer, again)
  ]
  assert products[0] == products[1]
  assert len(products[0]) == 2
  assert 0 < products[0][0] == products[0][1] < 1
  before = [weight.numpy() for weight in weights]
  training.train(weights, optimizer, grads, [2], strategy)
  expected = training.state_of(weights, optimizer)
  training.train(new_weights, again, grads, [2], strategy)
  for mine, theirs in zip(
    training.state_of(new_weights, again), expected, strict=True
  ):
    np.testing.assert_array_equal(mine, theirs)
  assert np.isfinite(expected[0]).all()
  assert (expected[0] != before[0]).all()


@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize("which", KERASES)
def test_slots_that_begin_as_weights_wait_for_build(
  which: str, shard_update: bool, tmp_path: pathlib.Path
) -> None:
  """`build` does not overwrite restored slots with the weights."""
  library, home = KERASES[which]
  strategy = testbed.mirrored(2)

  def make() -> tuple[Any, Any, Any]:
    with strategy.scope():
      weight = tf.Variable([1.0, 2.0], name="weight")
      inner = (
        library.optimizers.ScheduleFreeAdamW(0.5)
        if which == "keras" and not shard_update
        else library.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
      )
      ours = home.CrossShardOptimizer(inner, shard_update=shard_update)
    checkpoint = tf.train.Checkpoint(weight=weight, optimizer=ours)
    return weight, ours, checkpoint

  def step(weight: Any, optimizer: Any) -> None:
    gradient = tf.constant([2.0, -1.0])
    strategy.run(lambda: optimizer.apply_gradients([(gradient, weight)]))

  def build(weight: Any, optimizer: Any) -> None:
    with strategy.scope():
      optimizer.build([weight])

  weight, optimizer, checkpoint = make()
  build(weight, optimizer)
  step(weight, optimizer)
  step(weight, optimizer)
  path = checkpoint.save(tmp_path / "saved")
  again, other, checkpoint = make()
  status = checkpoint.restore(path)
  if shard_update:  # Each replica would restore its own slots only.
    with pytest.raises(RuntimeError, match=r"not built.*strategy\.scope\(\)"):
      step(again, other)
  build(again, other)
  status.assert_existing_objects_matched()
  for _ in range(2):
    state = [[v.numpy() for v in o.variables] for o in (optimizer, other)]
    for mine, theirs in zip(*state, strict=True):
      np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(weight.numpy(), again.numpy())
    step(weight, optimizer)
    step(again, other)
