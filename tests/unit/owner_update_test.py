"""Variables with one owner each: the unsharded numbers, to the bit."""

import functools
import pathlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import fake_engine, group_training, testbed
from tests.support.group_training import state_of
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import keras3, replica_state
from tf_cross_shard.gradients import layout

GROUPS = [[2, 0], [1, 3]]
STEPS = 3
SHAPES = {"kernel": (4, 3), "embedding": (5, 2), "bias": (7,), "wide": (3, 8)}
_RNG = np.random.default_rng(3)
# Eighths, whose sums are exact: in functions TensorFlow sorts terms of a sum
# by their names.
GRADS = [
  (_RNG.integers(-16, 17, (STEPS, 4, *shape)) / 8).astype("f")
  for shape in SHAPES.values()
]
VALUES = {
  name: _RNG.normal(size=shape).astype("f") for name, shape in SHAPES.items()
}


class Whitened(keras.optimizers.SGD):
  """A user's class: the whole matrix, its shape and its norms."""

  def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
    if len(gradient.shape) == 2:
      gram = tf.matmul(gradient, gradient, transpose_a=True)
      eye = tf.eye(gradient.shape[1], dtype=gradient.dtype)
      gradient = tf.transpose(
        tf.linalg.solve(gram + eye, tf.transpose(gradient))
      )
    super().update_step(gradient / tf.norm(gradient), variable, rate)


class Seen(keras.optimizers.SGD):
  """A user's class with slots in a dict, and only of some variables."""

  def build(self, variables: Any) -> None:
    super().build(variables)
    new = self.add_variable_from_reference
    self.seen = {v.path: new(v, "seen") for v in variables if v.ndim == 2}

  def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
    index = self._get_variable_index(variable)
    seen = self.seen.get(self._trainable_variables[index].path)
    if seen is not None:
      seen.assign_add(gradient)
      gradient += seen.value
    super().update_step(gradient, variable, rate)


class Listed(Seen):
  """Nobody can tell whose slots these are."""

  def build(self, variables: Any) -> None:
    super().build(variables)
    self.seen = list(self.seen.values())


MAKERS: dict[str, Callable[[Any], Any]] = {
  "Muon": lambda library: library.optimizers.Muon(0.1, weight_decay=0.01),
  "Lamb": lambda library: library.optimizers.Lamb(0.1),
  "Adafactor": lambda library: library.optimizers.Adafactor(0.1),
  "ScheduleFreeAdamW": lambda library: library.optimizers.ScheduleFreeAdamW(
    0.1
  ),
  "Seen": lambda library: Seen(0.1),
  "Whitened": lambda library: Whitened(0.1, momentum=0.5),
  "Adam": lambda library: library.optimizers.Adam(
    0.1, use_ema=True, ema_overwrite_frequency=2
  ),
  "clipped": lambda library: library.optimizers.Lamb(0.1, clipnorm=0.5),
  "scaled": lambda library: library.optimizers.LossScaleOptimizer(
    library.optimizers.Lamb(0.1), initial_scale=4.0
  ),
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
  ("Muon", "keras", {"accumulate_steps": 2}),
  ("Lamb", "keras", {"wire_dtype": "bfloat16"}),
  ("Adafactor", "keras", {"clipnorm": 0.5}),
  ("Adafactor", "tf_keras", {}),
  ("ScheduleFreeAdamW", "keras", {"skip_nonfinite": True}),
  ("Whitened", "keras", {"shard_update": "by_variable"}),
  ("Seen", "keras", {"shard_update": "by_variable"}),
  ("clipped", "keras", {}),
  ("scaled", "keras", {}),
]


def build(
  which: str, kind: str, groups: Any = GROUPS, **options: Any
) -> tuple[list[Any], Any]:
  """Weights and a built optimizer of sums over groups."""
  options = {"group_assignment": groups, **options}
  return group_training.build(which, MAKERS[kind], VALUES, **options)


def train(
  weights: Sequence[Any], optimizer: Any, steps: Sequence[int] = range(STEPS)
) -> None:
  """Steps with each replica's gradients."""
  group_training.train(weights, optimizer, GRADS, steps)


def assert_same(state: Sequence[Any], other: Sequence[Any]) -> None:
  assert len(state) == len(other) > 2 * len(SHAPES)
  for value, expected in zip(state, other, strict=True):
    np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(("kind", "which", "options"), CASES)
def test_to_the_bit(kind: str, which: str, options: dict[str, Any]) -> None:
  """Also where one member's part alone overflows, and a weight has a limit."""
  library, _ = group_training.KERASES[which]
  grads, states = [rows.copy() for rows in GRADS], []
  if kind == "scaled":
    grads[2][1, 3] = np.inf
  for shard_update in (options.get("shard_update", True), False):
    trained = fake_engine.replicas(
      functools.partial(MAKERS[kind], library),
      list(VALUES.values()),
      library,
      groups_lib.Groups(GROUPS),
      **{**options, "shard_update": shard_update},
    )
    for replica in trained if kind == "scaled" else ():
      replica.variables[0].constraint = keras.constraints.UnitNorm()
    fake_engine.train(trained, grads)
    counts = [int(replica.inner.iterations()) for replica in trained]
    states.append([counts, *(v for replica in trained for v in replica.values)])
  for value, expected in zip(*states, strict=True):
    np.testing.assert_array_equal(value, expected)
  kernels = [replica.values[0] for replica in trained]
  assert np.abs(kernels[0] - kernels[1]).max() > 1e-3  # groups
  assert np.abs(kernels[0] - VALUES["kernel"]).max() > 1e-3
  if kind == "scaled":
    scales = [float(replica.opt.dynamic_scale.numpy()) for replica in trained]
    assert scales == [4.0, 2.0, 4.0, 2.0]
    np.testing.assert_allclose(np.linalg.norm(kernels[0], axis=0), 1.0, 1e-5)


@group_training.in_both
def test_averages_and_names(which: str) -> None:
  """All state, which replicas make together, so under a strategy."""
  states, names = [], []
  for shard_update in ("by_variable", False):
    weights, optimizer = build(which, "Adam", shard_update=shard_update)
    train(weights, optimizer)
    states.append(state_of(weights, optimizer))
    replica_state.assert_in_sync(optimizer, weights)
    names.append(optimizer.get_slot_names())
  assert_same(*states)
  assert names[0] == names[1]


@pytest.mark.parametrize("shard_update", [False, "elementwise", "by_variable"])
def test_what_a_class_does_when_fit_ends(shard_update: Any) -> None:
  """Not only averages."""

  class Doubles(keras.optimizers.SGD):
    def finalize_variable_values(self, var_list: Any) -> None:
      for variable in var_list:
        variable.assign(2.0 * variable)

  weights, optimizer = group_training.build(
    "keras", lambda _: Doubles(0.5), VALUES, shard_update=shard_update
  )
  train(weights, optimizer)
  before = list(map(testbed.copies, weights))
  optimizer.finalize_variable_values(weights)
  for weight, values in zip(weights, before, strict=True):
    np.testing.assert_array_equal(testbed.copies(weight), 2 * np.array(values))


def test_each_update_is_done_once() -> None:
  """Of four members each traces its own variable's update, and no other."""
  traced = []

  class Noting(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
      context = tf.distribute.get_replica_context()
      replica = int(tf.get_static_value(context.replica_id_in_sync_group))
      traced.append((replica, variable.name.partition("/")[0].rstrip(":0")))
      super().update_step(gradient, variable, rate)

  MAKERS["Noting"] = lambda library: Noting(1.0)
  weights, optimizer = build(
    "keras", "Noting", [[0, 1, 2, 3]], shard_update="by_variable"
  )
  train(weights, optimizer, [0])
  assert sorted(name for _, name in traced) == sorted(SHAPES)
  assert len({replica for replica, _ in traced}) == 4


def test_more_members_than_variables() -> None:
  """The one without any repeats the cheapest, and counts its steps."""
  states = []
  for shard_update in ("by_variable", False):
    weights, optimizer = group_training.build(
      "keras",
      lambda library: library.optimizers.Lamb(0.1, global_clipnorm=1e3),
      {name: VALUES[name] for name in ("kernel", "embedding")},
      shard_update=shard_update,
      noise_scale=1,
    )
    group_training.train(weights, optimizer, GRADS[:2])
    states.append([*map(testbed.copies, (*weights, optimizer.iterations))])
    states[-1].append(testbed.copies(optimizer.noise_scale))
  *values, noise = zip(*states, strict=True)
  for copies, expected in values:
    np.testing.assert_array_equal(copies, expected)
  np.testing.assert_allclose(*noise, rtol=1e-4)
  assert states[0][-2] == [STEPS] * testbed.REPLICAS


@pytest.mark.parametrize("way", ["keras", "checkpoint", "replica_state"])
def test_files_hold_the_owners_slots(way: str, tmp_path: pathlib.Path) -> None:
  """They go on, with owners and without, as if nothing had happened."""
  groups = [[0, 1, 2, 3]] if way != "replica_state" else GROUPS
  weights, optimizer = build("keras", "Muon", groups, shard_update=True)
  train(weights, optimizer, [0, 1])
  path = str(tmp_path / "state")
  checkpoint = functools.partial(tf.train.Checkpoint, weights=weights)
  if way == "keras":
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    pickled = pickle.dumps([weight.numpy() for weight in weights])
  elif way == "checkpoint":
    path = checkpoint(optimizer=optimizer).save(path)
  else:
    replica_state.save(path, optimizer, weights)
  train(weights, optimizer, [2])
  expected = state_of(weights, optimizer)
  for shard_update in (True, False):
    again, other = build("keras", "Muon", groups, shard_update=shard_update)
    if way == "keras":
      other.load_own_variables(store)
      for weight, value in zip(again, pickle.loads(pickled), strict=True):
        weight.assign(value)
    elif way == "checkpoint":
      tf.train.Checkpoint(weights=again, optimizer=other).restore(
        path
      ).assert_consumed()
    else:
      replica_state.restore(path, other, again)
    train(again, other, [2])
    assert_same(state_of(again, other), expected)


def test_slots_without_an_owner() -> None:
  with testbed.mirrored().scope():
    weights = [keras.Variable(value) for value in VALUES.values()]
    optimizer = keras3.CrossShardOptimizer(
      Listed(0.1), shard_update="by_variable"
    )
    with pytest.raises(ValueError, match="of Listed belongs to no variable"):
      optimizer.build(weights)


def test_dear_variables_go_first() -> None:
  """Twelve matrices of one cost, and one as dear as six of them."""
  costs = [1.0] * 12 + [6.0]
  cuts = layout.Layout.whole([4] * 13, costs, 3).cuts
  loads = [sum(costs[cut.index] for cut in own) for own in cuts]
  assert loads == [6.0, 6.0, 6.0]


def test_tpus_do_the_same_on_all_members() -> None:
  with testbed.virtual(2).scope(), pytest.raises(NotImplementedError) as e:
    keras3.CrossShardOptimizer(keras.optimizers.Lamb(), shard_update=True)
  assert "replicas of a TPU are one program" in str(e.value)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
