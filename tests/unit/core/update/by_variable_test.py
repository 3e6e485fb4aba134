"""Tests updates in which each variable has one owner in the group."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import fake_engine, testbed, training
from tests.support.training import state_of
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import keras3, replica_state

GROUPS = [[2, 0], [1, 3]]
STEPS = 3
SHAPES = {"kernel": (4, 3), "embedding": (5, 2), "bias": (7,), "wide": (3, 8)}
_RNG = np.random.default_rng(3)
# Multiples of 1/8, whose sums are exact: in functions, TensorFlow sorts the
# terms of a sum by their names.
GRADS = [
  (_RNG.integers(-16, 17, (STEPS, 4, *shape)) / 8).astype("f")
  for shape in SHAPES.values()
]
VALUES = {
  name: _RNG.normal(size=shape).astype("f") for name, shape in SHAPES.items()
}


class Whitened(keras.optimizers.SGD):
  """A user's class that needs the whole matrix, its shape and its norms."""

  def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
    if len(gradient.shape) == 2:
      gram = tf.matmul(gradient, gradient, transpose_a=True)
      eye = tf.eye(gradient.shape[1], dtype=gradient.dtype)
      gradient = tf.transpose(
        tf.linalg.solve(gram + eye, tf.transpose(gradient))
      )
    super().update_step(gradient / tf.norm(gradient), variable, rate)


class Seen(keras.optimizers.SGD):
  """A user's class with slots in a dict, for some variables only."""

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
  """A class whose slots cannot be assigned to variables."""

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
  options = {"group_assignment": groups, **options}
  return training.build(which, MAKERS[kind], VALUES, **options)


def train(
  weights: Sequence[Any], optimizer: Any, steps: Sequence[int] = range(STEPS)
) -> None:
  training.train(weights, optimizer, GRADS, steps)


def assert_same(state: Sequence[Any], other: Sequence[Any]) -> None:
  assert len(state) == len(other) > 2 * len(SHAPES)
  for value, expected in zip(state, other, strict=True):
    np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(("kind", "which", "options"), CASES)
def test_by_variable_update_equals_replicated_update_bit_for_bit(
  kind: str, which: str, options: dict[str, Any]
) -> None:
  """Covers an overflow in the part of one member, and a constraint."""
  library, _ = training.KERASES[which]
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


@training.in_both
def test_averages_and_names(which: str) -> None:
  """Compares the whole state under a strategy."""
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
def test_finalize_variable_values_runs(shard_update: Any) -> None:
  """Any `finalize_variable_values` runs, not only that of moving averages."""

  class Doubles(keras.optimizers.SGD):
    def finalize_variable_values(self, var_list: Any) -> None:
      for variable in var_list:
        variable.assign(2.0 * variable)

  weights, optimizer = training.build(
    "keras", lambda _: Doubles(0.5), VALUES, shard_update=shard_update
  )
  train(weights, optimizer)
  before = list(map(testbed.copies, weights))
  optimizer.finalize_variable_values(weights)
  for weight, values in zip(weights, before, strict=True):
    np.testing.assert_array_equal(testbed.copies(weight), 2 * np.array(values))


def test_each_update_is_done_once() -> None:
  """Each of four members traces the update of its own variable only."""
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
  """The member that owns none repeats the cheapest, and counts its steps."""
  states = []
  for shard_update in ("by_variable", False):
    weights, optimizer = training.build(
      "keras",
      lambda library: library.optimizers.Lamb(0.1, global_clipnorm=1e3),
      {name: VALUES[name] for name in ("kernel", "embedding")},
      shard_update=shard_update,
    )
    training.train(weights, optimizer, GRADS[:2])
    states.append([*map(testbed.copies, (*weights, optimizer.iterations))])
  np.testing.assert_equal(*states)
  assert states[0][-1] == [STEPS] * testbed.REPLICAS


@pytest.mark.parametrize(
  ("kind", "way"),
  [
    ("Whitened", "keras"),
    ("Whitened", "checkpoint"),
    ("Muon", "replica_state"),
  ],
)
def test_restored_training_equals_uninterrupted_training(
  kind: str, way: str, tmp_path: pathlib.Path
) -> None:
  """The checkpoint can be restored with and without shards."""
  groups = [[0, 1, 2, 3]] if way != "replica_state" else GROUPS
  weights, optimizer = build("keras", kind, groups, shard_update="by_variable")
  train(weights, optimizer, [0, 1])
  path = str(tmp_path / "state")
  values = [weight.numpy() for weight in weights]
  store: dict[str, Any] = {}
  if way == "keras":
    optimizer.save_own_variables(store)
  elif way == "checkpoint":
    checkpoint = tf.train.Checkpoint(weights=weights, optimizer=optimizer)
    path = checkpoint.save(path)
  else:
    replica_state.save(path, optimizer, weights)
  train(weights, optimizer, [2])
  expected = state_of(weights, optimizer)
  for shard_update in ("by_variable", False):
    again, other = build("keras", kind, groups, shard_update=shard_update)
    if way == "keras":
      other.load_own_variables(store)
      for weight, value in zip(again, values, strict=True):
        weight.assign(value)
    elif way == "checkpoint":
      checkpoint = tf.train.Checkpoint(weights=again, optimizer=other)
      checkpoint.restore(path).assert_consumed()
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
    with pytest.raises(ValueError, match="of Listed cannot be matched"):
      optimizer.build(weights)


def test_costly_variables_are_assigned_first() -> None:
  """Twelve vectors of one size, and one that is as large as six."""
  sizes = [4] * 12 + [24]
  with testbed.mirrored(3).scope():
    weights = [keras.Variable(np.ones(size, "f4")) for size in sizes]
    optimizer = keras3.CrossShardOptimizer(
      keras.optimizers.Lamb(0.1), shard_update="by_variable"
    )
    optimizer.build(weights)
  loads = [0, 0, 0]
  for size, row in zip(sizes, optimizer.describe().rows(), strict=True):
    loads[row["owner"]] += size
  assert loads == [24, 24, 24]


def test_a_tpu_is_refused() -> None:
  with testbed.virtual(2).scope(), pytest.raises(NotImplementedError) as e:
    keras3.CrossShardOptimizer(keras.optimizers.Lamb(), shard_update=True)
  assert "all TPU replicas run one program" in str(e.value)
