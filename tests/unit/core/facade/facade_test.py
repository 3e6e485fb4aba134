"""Tests that the wrapper forwards attributes to the wrapped optimizer."""

import copy
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer, Models

keras = tf.keras
FACADES = pytest.mark.parametrize(
  "facade", ["CrossShardOptimizer", "TowerOptimizer"]
)


@pytest.fixture
def optimizer() -> Any:
  return CrossShardOptimizer(keras.optimizers.Adam(0.5, beta_1=0.75))


def test_settings_live_in_the_encapsulated_optimizer(optimizer: Any) -> None:
  inner = optimizer.inner_optimizer
  assert optimizer.beta_1 == 0.75
  for name, value in (
    ("beta_1", 0.25),
    ("weight_decay", 0.125),
    ("use_ema", True),
    ("ema_momentum", 0.5),
    ("loss_scale_factor", 8.0),
    ("gradient_accumulation_steps", 3),
  ):
    setattr(optimizer, name, value)
    assert getattr(inner, name) == getattr(optimizer, name) == value
  optimizer.learning_rate = 0.25
  assert float(inner.learning_rate) == 0.25
  inner.learning_rate = 0.75
  assert float(optimizer.learning_rate) == 0.75


def test_keras_callbacks_set_the_learning_rate() -> None:
  model = testbed.one_weight()
  model.compile(CrossShardOptimizer(keras.optimizers.SGD(0.5)), "mse")
  schedule = keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2)
  ones = np.ones([1, 1])
  model.fit(ones, ones, verbose=0, callbacks=[schedule])
  assert model.get_weights()[0] == [[0.25 * 2]]  # by the gradient of the square


@pytest.mark.skipif(
  not hasattr(keras.optimizers, "MultiOptimizer"), reason="an older Keras"
)
def test_a_multi_optimizer_inside_is_refused() -> None:
  multi = keras.optimizers.MultiOptimizer(lambda variable: None)
  for optimizer in (multi, keras.optimizers.LossScaleOptimizer(multi)):
    with pytest.raises(
      ValueError, match=r"`opt` .* MultiOptimizer.* Wrap each"
    ):
      CrossShardOptimizer(optimizer)


def test_wrapper_has_its_own_name_limits_and_attributes(optimizer: Any) -> None:
  for name in ("clipnorm", "clipvalue", "global_clipnorm"):
    setattr(optimizer, name, 2.0)
    assert getattr(optimizer.inner_optimizer, name) is None
    setattr(optimizer, name, None)
  assert optimizer.name != optimizer.inner_optimizer.name
  optimizer.note = "mine"
  assert optimizer.note == "mine"
  assert not hasattr(optimizer.inner_optimizer, "note")
  with pytest.raises(AttributeError, match="no_such_thing"):
    _ = optimizer.no_such_thing


def test_weights_and_exclusions(optimizer: Any) -> None:
  for scale in (lambda opt: opt, keras.optimizers.LossScaleOptimizer):
    decayed = keras.optimizers.SGD(0.5, weight_decay=0.5)
    decayed = CrossShardOptimizer(scale(decayed))
    bias = keras.Variable(4.0, name="bias")
    kernel = keras.Variable(4.0, name="kernel")
    decayed.exclude_from_weight_decay(var_names=["bias"])
    decayed.apply_gradients([(tf.constant(0.0), v) for v in (bias, kernel)])
    assert (float(bias.numpy()), float(kernel.numpy())) == (4.0, 3.0)
  optimizer.build([bias])
  values = [np.full(v.shape, 3.0) for v in optimizer.variables]
  optimizer.set_weights(values)
  assert optimizer.iterations.numpy() == 3
  assert optimizer.get_slot(bias, "velocity").numpy() == 3.0


def test_loss_scale_optimizer_inside() -> None:
  weight = keras.Variable([1.0, 2.0], name="weight")
  optimizer = CrossShardOptimizer(
    keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5))
  )
  optimizer.build([weight])
  assert optimizer.get_slot_names() == ["momentum", "velocity"]
  assert optimizer.get_slot(weight, "momentum").shape == (2,)


def test_slots_by_path_where_another_path_is_the_name() -> None:
  class ByPath(keras.optimizers.SGD):  # type: ignore[misc]
    def build(self, variables: Any) -> None:
      super().build(variables)
      add = self.add_variable_from_reference
      self.own = {v.path: add(v, "own") for v in variables}

  layer = keras.layers.Dense(1)
  layer.build((None, 3))
  optimizer = CrossShardOptimizer(ByPath(0.5))
  optimizer.build([keras.Variable([1.0], name="kernel"), layer.kernel])
  assert optimizer.get_slot(layer.kernel, "own").shape == (3, 1)


# -------------------------------------------------------- colliding attributes

# Attributes that the wrapper has not, so it forwards them.
FORWARDED = {"_step", "_checks"}
# Keras' and this package's own names, by which each finds an optimizer inside.
RESERVED = {"inner_optimizer", "_tf_cross_shard_state"}


def _names(which: str) -> list[str]:
  """All names that a wrapper has and that optimizers of Keras do not have."""
  library, package = training.KERASES[which]
  wrapper = package.CrossShardOptimizer(library.optimizers.SGD())
  defined = {
    name
    for kind in type(wrapper).__mro__
    if kind.__module__.startswith("tf_cross_shard")
    for name in vars(kind)
  }
  plain = set(dir(library.optimizers.SGD()))
  names = {*defined, *vars(wrapper), *FORWARDED} - plain - RESERVED
  return sorted(name for name in names if not name.endswith("__"))


def _colliding(library: Any, names: Sequence[str]) -> type[Any]:
  """Returns a user's class that has attributes with these names.

  The attributes are numbers, because Keras tracks lists. Some names are methods
  of CrossShardOptimizer.
  """

  class Colliding(library.optimizers.SGD):  # type: ignore[misc,name-defined]
    def __init__(self, *args: Any, **settings: Any) -> None:
      super().__init__(*args, **settings)
      for i, name in enumerate(names):
        setattr(self, name, i + 0.5)

  return Colliding


@training.in_both
@pytest.mark.parametrize("shard_update", [False, "elementwise"])
def test_a_class_with_all_names_of_the_wrapper(
  which: str, shard_update: Any, tmp_path: pathlib.Path
) -> None:
  """Weights equal plain Keras'; the class keeps all of its attributes."""
  library, _ = training.KERASES[which]
  names = _names(which)
  assert {"_wrapped", "_pipeline", "groups", "_argument"} <= {*names}
  kind = _colliding(library, names)
  strategy = testbed.mirrored(2)
  grads = [np.array([[[1, 2], [3, 4]], [[2, 1], [4, 3]]])]
  weights, optimizer = training.build(
    *(which, lambda _: kind(0.5, momentum=0.5), {"w": [8.0, 16.0]}, strategy),
    shard_update=shard_update,
    accumulate_steps=None,
    skip_nonfinite=True,
    global_clipnorm=100.0,
  )
  training.train(weights, optimizer, grads, strategy=strategy)
  # The sums are (4, 6) and (6, 4). Velocities: -(2, 3), then -(4, 3.5).
  expected = [[8.0 - 6.0, 16.0 - 6.5]] * 2
  assert [list(v) for v in testbed.copies(weights[0])] == expected
  config = {"custom_objects": {"Colliding": kind}}
  again = type(optimizer).from_config(optimizer.get_config(), **config)
  with library.saving.custom_object_scope(config["custom_objects"]):
    copied = copy.deepcopy(again)
  Models(weights, optimizer).save(tmp_path / "state")
  Models(weights, optimizer).restore(tmp_path / "state")
  tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "checkpoint")
  slot = optimizer.get_slot_names()[-1]
  velocity = optimizer.get_slot(weights[0], slot).numpy()
  np.testing.assert_array_equal(velocity, [-4.0, -3.5])
  for each in (optimizer, again, copied):
    held = [getattr(each.inner_optimizer, name) for name in names]
    assert held == [i + 0.5 for i in range(len(names))]
  for name in FORWARDED:
    setattr(optimizer, name, 7.0)
    assert getattr(optimizer, name) == 7.0
    assert getattr(optimizer.inner_optimizer, name) == 7.0


def test_an_optimizer_around_ours_must_not_mix_the_groups() -> None:
  """It sums over all replicas, and calls `update_step` with the sum."""
  with testbed.mirrored().scope():
    grouped = CrossShardOptimizer("sgd", group_assignment=[[0, 1], [2, 3]])
  with pytest.raises(RuntimeError, match=r"mixes the groups.*apply_gradients"):
    grouped.update_step(tf.constant(1.0), tf.Variable(1.0), 0.1)


@training.in_both
@FACADES
@pytest.mark.parametrize("way", ["minimize", "minimize_tape", "apply", "fit"])
def test_a_subclass_changes_gradients_once(
  which: str, facade: str, way: str
) -> None:
  library, ours = training.KERASES[which]

  class Doubling(getattr(ours, facade)):  # type: ignore[misc]
    def __init__(self, opt: Any) -> None:
      super().__init__(opt)
      self._package = "an attribute of the user's"

    def apply_gradients(self, pairs: Any, *args: Any, **options: Any) -> Any:
      doubled = [(2 * g, v) for g, v in pairs]
      return super().apply_gradients(doubled, *args, **options)

  optimizer = Doubling(library.optimizers.SGD(1.0))
  dense = library.layers.Dense(1, use_bias=False)
  model = library.Sequential([library.Input((1,)), dense])
  [weight] = model.trainable_variables
  weight.assign([[8.0]])
  if way == "fit":
    model.compile(optimizer, lambda y, x: x)
    model.fit(np.ones([1, 1]), np.ones([1, 1]), verbose=0)
  elif way == "apply":
    optimizer.apply([tf.constant([[1.0]])], [weight])
  else:
    training.take_step(optimizer, lambda: weight[0, 0] * 1.0, [weight], way)
  assert model.get_weights()[0] == 6.0


@training.in_both
@FACADES
def test_a_subclass_must_not_call_apply(which: str, facade: str) -> None:
  library, ours = training.KERASES[which]

  class Mine(getattr(ours, facade)):  # type: ignore[misc]
    def apply_gradients(self, pairs: Any, *args: Any, **options: Any) -> None:
      super().apply(*zip(*pairs, strict=True))

  pairs = [(tf.constant(1.0), tf.Variable(1.0))]
  with pytest.raises(RuntimeError, match=r"of Mine calls apply\(\).*super\(\)"):
    Mine(library.optimizers.SGD(1.0)).apply_gradients(pairs)


@training.in_both
@FACADES
@pytest.mark.parametrize(
  "name",
  ["apply", "compute_gradients", "aggregate_gradients", "update_step"],
)
def test_a_subclass_must_not_override(
  which: str, facade: str, name: str
) -> None:
  """Not every way to take a step calls these; a mixin may define them, too."""
  library, ours = training.KERASES[which]
  mixin = type("Mixin", (), {name: lambda self, *args: None})
  mine = type("Mine", (mixin, getattr(ours, facade)), {})
  words = rf"Mine must not override {name}\(\).* Override apply_gradients\(\)"
  with pytest.raises(ValueError, match=words):
    mine(library.optimizers.SGD(1.0))
