"""Tests that sharded updates give the same weights as replicated updates."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import (
  fake_engine,
  replica_state_cases,
  testbed,
  training,
)
from tests.support.training import KERASES, state_of
from tf_cross_shard import Models, keras3
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import tf_keras as ours_tf_keras

PAIRS = [[2, 0], [1, 3]]
ALL = [[0, 1, 2, 3]]
STEPS = 4
# 19 elements, not divisible by 2 or 4. Slots of "bias" lie in two parts.
SHAPES = {"kernel": (3, 2), "bias": (7,), "scale": (), "last": (5,)}
RATE = 0.125

# [steps, replicas, ...] of each weight: multiples of 1/8, with exact sums.
_RNG = np.random.default_rng(11)
GRADS = [
  (_RNG.integers(-16, 17, (STEPS, 4, *shape)) / 8).astype("f")
  for shape in SHAPES.values()
]

VALUES = {
  name: np.array(_RNG.integers(-16, 17, shape) / 8, "f")
  for name, shape in SHAPES.items()
}

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
  "SGD": ("SGD", {}),
  "nesterov": ("SGD", {"momentum": 0.5, "nesterov": True}),
  "Adam": ("Adam", {}),
  "amsgrad": ("Adam", {"amsgrad": True}),
  "AdamW": ("AdamW", {"weight_decay": 0.25}),
  "RMSprop": ("RMSprop", {}),
  "centered": ("RMSprop", {"centered": True, "momentum": 0.5}),
  "Adagrad": ("Adagrad", {}),
  "Adadelta": ("Adadelta", {}),
  "Adamax": ("Adamax", {}),
  "Nadam": ("Nadam", {}),
  "Ftrl": ("Ftrl", {}),
  "Lion": ("Lion", {}),
}


def make_plain(name: str, library: Any, **settings: Any) -> Any:
  kind, own = OPTIMIZERS[name]
  return getattr(library.optimizers, kind)(RATE, **{**own, **settings})


def make_weights(which: str) -> list[Any]:
  return training.make_weights(which, VALUES)


def build(
  which: str,
  make: Callable[[Any], Any],
  strategy: Any = None,
  groups: Any = PAIRS,
  **options: Any,
) -> tuple[list[Any], Any]:
  options = {"group_assignment": groups, **options}
  return training.build(which, make, VALUES, strategy, **options)


def train(
  weights: Sequence[Any],
  optimizer: Any,
  steps: range = range(STEPS),
  grads: Sequence[Any] = GRADS,
) -> None:
  training.train(weights, optimizer, grads, steps)


def assert_equal(
  one: Sequence[Any], other: Sequence[Any], bound: float = 0.0
) -> None:
  assert len(one) == len(other) >= len(SHAPES)
  for mine, theirs in zip(one, other, strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=bound, atol=bound)


class _Vouched(keras.optimizers.Adam):
  """A class of the user's."""


def replicas(
  which: str,
  make: Callable[[Any], Any],
  groups: Any = PAIRS,
  values: Any = None,
  **settings: Any,
) -> list[fake_engine.Replica]:
  """Replicas in shards, without a strategy."""
  library, _ = KERASES[which]
  return fake_engine.replicas(
    functools.partial(make, library),
    list(VALUES.values()) if values is None else values,
    library,
    groups_lib.Groups(groups),
    **{"shard_update": True, **settings},
  )


@pytest.mark.parametrize(
  ("name", "which"),
  [(name, list(KERASES)[(i + 1) % 2]) for i, name in enumerate(OPTIMIZERS)],
)
def test_sharded_update_equals_plain_keras(name: str, which: str) -> None:
  groups = PAIRS if list(OPTIMIZERS).index(name) % 2 else ALL
  # SGD is exact here; kernels round otherwise than operations.
  bound = 0.0 if name in ("SGD", "nesterov") else 5e-6
  library, _ = KERASES[which]
  trained = replicas(which, functools.partial(make_plain, name), groups)
  fake_engine.train(trained, GRADS)
  for members in groups:
    alone, plain = make_weights(which), make_plain(name, library)
    training.train_plain(alone, plain, GRADS, members)
    expected = [weight.numpy() for weight in alone]
    for member in members:
      assert_equal(trained[member].values, expected, bound)
  part = -(-19 // len(groups[0]))
  assert {tuple(v.shape) for v in trained[0].opt.variables} <= {(), (part,)}
  if groups == PAIRS:
    difference = np.subtract(*(each.values[0] for each in trained[:2]))
    assert np.abs(difference).max() > 0.01


def test_buckets_of_last_layers_are_reduced_first() -> None:
  """The weights equal plain Keras', also if gradients are clipped."""
  limits = {"clipvalue": 4.0, "weight_decay": 0.25}
  make = functools.partial(make_plain, "AdamW", **limits)
  whole = replicas("keras", make)
  with mock.patch.object(fake_engine.FakeEngine, "scatter_bytes", 40):
    rows = replicas("keras", make)
  for trained in (whole, rows):
    fake_engine.train(trained, GRADS)
  for one, other in zip(rows, whole, strict=True):
    assert_equal(one.values, other.values, 1e-6)
  # Of 6, of 7 and 1, and of 5 elements; 40 bytes are ten.
  kept = {tuple(v.shape) for v in rows[0].opt.variables} - {()}
  assert kept == {(3,), (4,)}
  reduced = [2 * 3, 2 * 4, 2 * 3]
  sent = [t.shape.num_elements() for t in rows[0].engine.sent]
  assert sent[:3] == reduced[::-1]
  names = [v.path for v in rows[0].opt.variables]
  assert len(set(names)) == len(names)


def _loss_scaled(library: Any, **settings: Any) -> Any:
  inner = make_plain("Adam", library, **settings)
  if library is keras:
    return keras.optimizers.LossScaleOptimizer(inner, 4.0)
  return tf_keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0)


def _excluding(library: Any) -> Any:
  optimizer = make_plain("AdamW", library)
  optimizer.exclude_from_weight_decay(var_names=["bias"])
  return optimizer


def _schedule(library: Any) -> Any:
  decay = library.optimizers.schedules.PiecewiseConstantDecay
  return library.optimizers.Adam(decay([2], [0.5, 0.125]))


# The optimizer to wrap; settings of our optimizer; the groups.
SETTINGS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], Any]] = {
  "clipvalue, nonfinite": (
    functools.partial(make_plain, "Adam", clipvalue=1.0),
    {"skip_nonfinite": True},
    PAIRS,
  ),
  "global_clipnorm": (
    functools.partial(make_plain, "SGD", global_clipnorm=2.0),
    {"clipvalue": 1.5},
    PAIRS,
  ),
  # Some norms are above it, some below; each spans the members' parts.
  "clipnorm": (
    functools.partial(make_plain, "SGD", clipnorm=2.0),
    {"wire_dtype": "float16"},
    PAIRS,
  ),
  "decay": (_excluding, {"accumulate_steps": 2}, PAIRS),
  "schedule": (_schedule, {"wire_dtype": "bfloat16"}, ALL),
  "scaled and clipped": (
    functools.partial(_loss_scaled, global_clipnorm=2.0),
    {},
    PAIRS,
  ),
  "scaled and each clipped": (
    functools.partial(_loss_scaled, clipnorm=0.5),
    {},
    ALL,
  ),
}


@pytest.mark.parametrize(
  ("name", "which"),
  [(name, list(KERASES)[i % 2]) for i, name in enumerate(SETTINGS)],
)
def test_settings_equal_those_of_replicated_updates(
  name: str, which: str
) -> None:
  make, options, groups = SETTINGS[name]
  grads = [each.copy() for each in GRADS]
  if name in ("scaled and clipped", "clipvalue, nonfinite"):
    # Of the second group only, in the part of its second member.
    grads[3][1, 1, 4] = np.inf
  values = []
  for sharded in (False, True):
    trained = replicas(which, make, groups, shard_update=sharded, **options)
    fake_engine.train(trained, grads)
    counts = [int(each.inner.iterations()) for each in trained]
    values.append([counts, *(v for each in trained for v in each.values)])
  assert_equal(*values, 2e-6)


@training.in_both
def test_averages_equal_those_of_replicated_updates(which: str) -> None:
  """They are written into the weights after two steps, and at the end."""
  own = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
  make = functools.partial(make_plain, "nesterov", **own)
  states = []
  for sharded in (False, True):
    weights, optimizer = build(which, make, shard_update=sharded)
    training.train(weights, optimizer, GRADS, range(3), mode="eager")
    with testbed.mirrored().scope():
      optimizer.finalize_variable_values(weights)
    states.append(state_of(weights, optimizer))
  assert_equal(*states)


@training.in_both
def test_rows_and_constraints(which: str) -> None:
  """A skipped step does not apply the constraint."""
  library, _ = KERASES[which]
  tables = []
  for engine in fake_engine.engines():
    table = testbed.variable([[1.0], [1.0], [-1.0], [1.0]], "table", library)
    limit = library.constraints.NonNeg()
    if library is keras:
      table.constraint = limit
    else:
      table = tf.Variable(table, constraint=limit)
    tables.append(
      fake_engine.Replica(
        engine,
        make_plain("SGD", library),
        [table],
        shard_update=True,
        skip_nonfinite=True,
      )
    )

  def step(replica: fake_engine.Replica, factor: float) -> None:
    rows = tf.IndexedSlices(
      tf.ones([2, 1]) * factor,
      tf.stack([replica.engine.replica, 0]),
      tf.constant([4, 1]),
    )
    replica.apply([rows])

  fake_engine.run(functools.partial(step, factor=np.nan), tables)
  first, second, *_ = (each.values[0].ravel().tolist() for each in tables)
  assert first == second == [1.0, 1.0, -1.0, 1.0]
  fake_engine.run(functools.partial(step, factor=5.0), tables)
  first, second, *others = (each.values[0].ravel().tolist() for each in tables)
  assert others == [first, second]
  # Of replicas 0 and 2 rows 0, 0, 2 and 0; of 1 and 3 rows 1, 0, 3 and 0.
  assert first == [0.0, 1.0, 0.0, 1.0]
  assert second == [0.0, 0.375, 0.0, 0.375]


def test_weights_set_from_outside_count() -> None:
  trained = replicas("keras", functools.partial(make_plain, "SGD"))
  fake_engine.train(trained, [grads[:1] for grads in GRADS])
  for replica in trained:
    for weight in replica.variables:
      weight.assign(np.zeros(weight.shape))
  fake_engine.train(trained, [grads[1:2] for grads in GRADS])
  for members in PAIRS:
    for i, grads in enumerate(GRADS):
      expected = -RATE * grads[1, members].sum(0)
      for member in members:
        np.testing.assert_array_equal(trained[member].values[i], expected)


def test_weights_without_elements() -> None:
  trained = replicas(
    "tf_keras",
    functools.partial(make_plain, "nesterov", clipnorm=9.0),
    values=[np.zeros(0, "f"), np.ones(3)],
  )
  fake_engine.train(trained, [np.zeros([1, 4, 0], "f"), np.ones([1, 4, 3])])
  # Nesterov: half of the velocity, and the gradient, 2, once more.
  expected = [1 - 1.5 * RATE * 2] * 3
  np.testing.assert_array_equal(trained[0].values[1], expected)
  buckets = trained[0].step.update.buckets
  assert [bucket.layout.part_size for bucket in buckets] == [1, 2]


def test_groups_of_one_are_not_sharded() -> None:
  [replica] = replicas(
    "keras", functools.partial(make_plain, "Adam"), groups=[[0]]
  )
  assert (3, 2) in {tuple(v.shape) for v in replica.opt.variables}


def test_a_class_that_the_user_calls_elementwise() -> None:
  values = []
  for make, vouched in (
    (lambda _: _Vouched(RATE), "elementwise"),
    (functools.partial(make_plain, "Adam"), True),
  ):
    trained = replicas("keras", make, shard_update=vouched, fused_update=False)
    fake_engine.train(trained, GRADS)
    values.append([v for each in trained for v in each.values])
  assert_equal(*values, 1e-6)


@pytest.mark.parametrize("shard_update", [False, "elementwise"])
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


def test_gradients_of_all_weights_once() -> None:
  [replica, _] = replicas(
    "keras", functools.partial(make_plain, "SGD"), groups=[[0, 1]]
  )
  ones = [tf.ones(weight.shape) for weight in replica.variables]
  first = replica.variables[0]
  with pytest.raises(ValueError, match="must contain each variable once"):
    replica.apply([*ones, ones[0]], [*replica.variables, first])
  with pytest.raises(ValueError, match="must contain a gradient for every"):
    replica.apply([*ones[:-1], None])
  for value, first in zip(replica.values, VALUES.values(), strict=True):
    np.testing.assert_array_equal(value, first)


# ------------------------------------------------------------------ saved ways


def _by_store(source: Any, target: Any, folder: pathlib.Path) -> None:
  del folder
  store: dict[str, Any] = {}
  source.save_own_variables(store)
  target.load_own_variables(store)


def _by_checkpoint(source: Any, target: Any, folder: pathlib.Path) -> None:
  saved = tf.train.Checkpoint(optimizer=source).save(str(folder / "saved"))
  status = tf.train.Checkpoint(optimizer=target).restore(saved)
  status.assert_existing_objects_matched()


WAYS = {"file": _by_store, "checkpoint": _by_checkpoint}


@pytest.mark.parametrize(
  ("way", "which"), [("file", "tf_keras"), ("checkpoint", "keras")]
)
def test_training_continues_with_plain_keras(
  which: str, way: str, tmp_path: pathlib.Path
) -> None:
  """Trains sharded over 4, then plain, then sharded over 2."""
  library, _ = KERASES[which]
  make = functools.partial(make_plain, "Adam")
  alone, expected = make_weights(which), make(library)
  training.train_plain(alone, expected, GRADS, range(4))

  weights, first = build(
    which, make, groups=ALL, shard_update=True, fused_update=False
  )
  train(weights, first, range(1))
  middle_weights = make_weights(which)
  middle = make(library)
  middle.build(middle_weights)
  for mine, theirs in zip(middle_weights, weights, strict=True):
    mine.assign(theirs.numpy())
  WAYS[way](first, middle, tmp_path)
  training.train_plain(middle_weights, middle, GRADS, range(4), [1])
  last_weights, last = build(
    which, make, groups=PAIRS, shard_update=True, fused_update=False
  )
  for mine, theirs in zip(last_weights, middle_weights, strict=True):
    mine.assign(theirs.numpy())
  (tmp_path / "second").mkdir()
  WAYS[way](middle, last, tmp_path / "second")
  # Each member of a pair has half of the sum over all four.
  halves = [
    np.broadcast_to(each.sum(1, keepdims=True) / 2, each.shape)
    for each in GRADS
  ]
  train(last_weights, last, range(2, STEPS), grads=halves)
  for mine, theirs in zip(
    (*last_weights, *last.variables),
    (*alone, *expected.variables),
    strict=True,
  ):
    for value in Models(optimizer=last).values(mine):
      np.testing.assert_array_equal(value, theirs.numpy(), str(mine.name))


@pytest.mark.parametrize(
  ("which", "make"),
  [
    ("keras", functools.partial(make_plain, "Adam", use_ema=True)),
    ("tf_keras", _loss_scaled),
  ],
)
def test_checkpoint_before_it_is_built(
  which: str, make: Callable[[Any], Any], tmp_path: pathlib.Path
) -> None:
  """Values are restored when the slots are created, as in plain Keras."""
  weights, first = build(which, make, groups=ALL, shard_update=True)
  train(weights, first, range(2))
  first.learning_rate = 0.5
  saved = tf.train.Checkpoint(optimizer=first).save(str(tmp_path / "saved"))
  _, package = KERASES[which]
  for groups in (ALL, PAIRS):
    with testbed.mirrored().scope():
      second = package.CrossShardOptimizer(
        make(KERASES[which][0]),
        "sum",
        group_assignment=groups,
        shard_update=True,
      )
    status = tf.train.Checkpoint(optimizer=second).restore(saved)
    assert int(second.iterations.numpy()) == 2
    with testbed.mirrored().scope():
      second.build(weights)
    status.assert_consumed()
    # Also what `variables` lacks: the rate and the loss scale of tf_keras.
    [right, *_], found = map(replica_state_cases.saved, (first, second))
    for mine in found:
      for name, value in right.items():
        np.testing.assert_array_equal(mine[name], value, name)
    again = tf.train.Checkpoint(optimizer=second).save(str(tmp_path / "again"))
    assert dict(tf.train.list_variables(again)) == dict(
      tf.train.list_variables(saved)
    )


def test_files_of_variables_that_are_not_of_keras(
  tmp_path: pathlib.Path,
) -> None:
  """Keras 3 names the slots of these variables differently."""
  names, path = [], tmp_path / "state"
  for shard_update in (False, True, False):
    with testbed.mirrored().scope():
      weights = [tf.Variable([1.0, 2.0, 3.0], name=f"net/w{i}") for i in (1, 2)]
      optimizer = keras3.CrossShardOptimizer("adam", shard_update=shard_update)
      optimizer.build(weights)
    if names:
      Models(weights, optimizer).restore(path)
    Models(weights, optimizer).save(path)
    names.append([variable.name for variable in optimizer.variables])
  assert names[0] == names[1] == names[2]


def test_slots_are_whole() -> None:
  which = "keras"
  make = functools.partial(make_plain, "Adam")
  slots = []
  for sharded in (False, True):
    weights, optimizer = build(which, make, groups=ALL, shard_update=sharded)
    train(weights, optimizer)
    names = optimizer.get_slot_names()
    assert len(names) == 2
    slots.append(
      [np.asarray(optimizer.get_slot(w, n)) for w in weights for n in names]
    )
    assert optimizer.get_slot(weights[0], "none") is None
  with pytest.raises(TypeError, match=r"is read-only.* optimizer.variables"):
    optimizer.get_slot(weights[0], names[0]).assign(np.ones([3, 2]))
  for one, other in zip(*slots, strict=True):
    assert one.dtype == np.float32
    np.testing.assert_array_equal(one, other)
  slot = optimizer.get_slot(weights[0], names[0])
  np.testing.assert_array_equal(tf.convert_to_tensor(slot), slots[0][0])


def test_replicas_start_in_functions() -> None:
  """TensorFlow would warn users about replicas that run eagerly."""
  strategy, is_eager = testbed.mirrored(), []
  run = strategy.run

  def record(step: Callable[[], None]) -> Any:
    is_eager.append(tf.executing_eagerly())
    return run(step)

  make = functools.partial(make_plain, "SGD", use_ema=True)
  with mock.patch.object(strategy, "run", record):
    weights, optimizer = build("keras", make, shard_update=True)
    optimizer.finalize_variable_values(weights)
  assert is_eager == [False] * 2  # averages, and at the end


@training.in_both
def test_fit_and_model_files(which: str, tmp_path: pathlib.Path) -> None:
  """Compares with plain Keras on the whole batch, without a strategy."""
  library, package = KERASES[which]
  rng = np.random.default_rng(1)
  x, y = (rng.normal(size=(16, n)).astype("f") for n in (3, 1))
  data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
  results = []
  for strategy in (tf.distribute.get_strategy(), testbed.mirrored(2)):
    with strategy.scope():
      model = library.Sequential(
        [library.Input((3,)), library.layers.Dense(1, name="dense")]
      )
      model.set_weights([np.ones((3, 1)), np.zeros(1)])
      optimizer = _loss_scaled(library)
      is_sharded = strategy.num_replicas_in_sync > 1
      if is_sharded:
        optimizer = package.CrossShardOptimizer(optimizer, shard_update=True)
      model.compile(optimizer, "mse", run_eagerly=not is_sharded)
    testbed.fit(model, data)
    model.save(tmp_path / "model.keras")
    if is_sharded:
      tf.saved_model.save(model, str(tmp_path / "program"))  # without slots
      tf.saved_model.load(str(tmp_path / "program"))
    with strategy.scope():
      again = library.models.load_model(tmp_path / "model.keras")
    testbed.fit(again, data)
    results.append([*model.get_weights(), *again.get_weights()])
  for one, other in zip(*results, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
  assert np.abs(results[0][0] - results[0][2]).max() > 0.01


# ---------------------------------------------------------------------- errors


VOUCHED = {"shard_update": "elementwise"}


@pytest.mark.parametrize(
  ("package", "make", "options", "words"),
  [
    (keras3, _Vouched, {"shard_update": True}, "but _Vouched may use norms"),
    (
      *(keras3, lambda: keras.optimizers.Adam(gradient_accumulation_steps=2)),
      *({"shard_update": True}, "Use `accumulate_steps`"),
    ),
    *(
      (package, getattr(library.optimizers, kind), options, f"but {kind} uses")
      for options in ({"shard_update": True}, VOUCHED)
      for package, library, kinds in (
        (keras3, keras, ("Adafactor", "Lamb", "Muon", "ScheduleFreeAdamW")),
        (ours_tf_keras, tf_keras, ("Adafactor",)),
      )
      for kind in kinds
      if hasattr(library.optimizers, kind)
    ),
    (keras3, lambda: _Vouched(clipnorm=1.0), VOUCHED, "uses clipnorm=1"),
    (
      *(keras3, lambda: _Vouched(global_clipnorm=1.0)),
      *(VOUCHED, "uses global_clipnorm=1"),
    ),
  ],
)
def test_unsupported_optimizers_raise_an_error(
  package: Any, make: Any, options: Any, words: str
) -> None:
  with pytest.raises(ValueError, match=words):
    package.CrossShardOptimizer(make(), **options)


@pytest.mark.parametrize(
  ("package", "library"), [(keras3, keras), (ours_tf_keras, tf_keras)]
)
def test_decay_set_after_build_leaves_out_what_is_excluded(
  package: Any, library: Any
) -> None:
  with testbed.mirrored().scope():
    weights = [tf.Variable(tf.ones(3)), tf.Variable(tf.ones(3), name="bias")]
    opt = library.optimizers.SGD(0.5)
    opt.exclude_from_weight_decay(var_names=["bias"])
    optimizer = package.CrossShardOptimizer(opt, shard_update=True)
    optimizer.build(weights)
  optimizer.weight_decay = 0.5
  testbed.run(
    lambda: optimizer.apply_gradients([(tf.zeros(3), w) for w in weights])
  )
  for weight, value in zip(weights, (0.75, 1.0), strict=True):
    for value_of_replica in testbed.copies(weight):
      np.testing.assert_array_equal(value_of_replica, np.full(3, value))


@pytest.mark.parametrize(
  ("package", "library"), [(keras3, keras), (ours_tf_keras, tf_keras)]
)
@pytest.mark.parametrize("by", ["var_names", "var_list"])
def test_exclusions_of_two_dtypes_and_of_tables(
  package: Any, library: Any, by: str
) -> None:
  """A second exclusion replaces the first one, as in Keras."""
  dtypes = {"scale": tf.float32, "bias": tf.float64, "table": tf.float32}
  with testbed.mirrored().scope():
    weights = [
      tf.Variable(tf.ones([2, 2], dtype), name=name)
      for name, dtype in dtypes.items()
    ]
    opt = library.optimizers.SGD(0.5, weight_decay=0.5)
    excluded = {"var_names": list(dtypes), "var_list": weights}
    opt.exclude_from_weight_decay(**{by: excluded[by]})
    optimizer = package.CrossShardOptimizer(
      opt, shard_update=True, lazy_rows=True
    )
    optimizer.update_by_rows(var_list=weights[2:])
    optimizer.build(weights)
  dense = [tf.zeros([2, 2], weight.dtype) for weight in weights[:2]]
  rows = tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([1]), [2, 2])
  testbed.run(
    lambda: optimizer.apply_gradients(
      list(zip([*dense, rows], weights, strict=True))
    )
  )
  for weight in weights:
    for value in testbed.copies(weight):
      np.testing.assert_array_equal(value, np.ones([2, 2]), weight.name)


def test_averages_are_built_before_the_first_step() -> None:
  with testbed.mirrored().scope():
    weight = tf.Variable(tf.ones(3))
    optimizer = ours_tf_keras.CrossShardOptimizer(
      tf_keras.optimizers.Adam(use_ema=True), shard_update=True
    )
  with pytest.raises(RuntimeError, match=r"Call optimizer.build"):
    testbed.run(lambda: optimizer.apply_gradients([(tf.ones(3), weight)]))
