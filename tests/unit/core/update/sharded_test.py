"""Tests that sharded updates give the same weights as replicated updates.

Random programs combine them with all other settings.
"""

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

from tests.support import replica_state_cases, testbed, training
from tests.support.training import KERASES, state_of
from tf_cross_shard import Models, keras3
from tf_cross_shard import tf_keras as ours_tf_keras
from tf_cross_shard._src.core.reduce import engine

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
# The only weight of its dtype has no elements.
EMPTY = np.zeros([STEPS, 4, 0])


def build(
  which: str,
  make: Callable[[Any], Any],
  groups: Any = PAIRS,
  values: Any = VALUES,
  **options: Any,
) -> tuple[list[Any], Any]:
  options = {"shard_update": True, "group_assignment": groups, **options}
  return training.build(which, make, values, **options)


def plain(name: str, **settings: Any) -> Callable[[Any], Any]:
  """Returns a function that makes an optimizer of a Keras."""
  own = {"learning_rate": RATE, **settings}
  return lambda library: getattr(library.optimizers, name)(**own)


adam = plain("Adam")


class _Vouched(keras.optimizers.Adam):
  """A class of the user's."""


def _scaled(library: Any, name: str = "Adam", **settings: Any) -> Any:
  scaler = library.mixed_precision.LossScaleOptimizer
  return scaler(plain(name, **settings)(library), initial_scale=4.0)


def _excluding(library: Any) -> Any:
  optimizer = plain("AdamW", weight_decay=0.25)(library)
  optimizer.exclude_from_weight_decay(var_names=["bias"])
  return optimizer


def _schedule(library: Any) -> Any:
  decay = library.optimizers.schedules.PiecewiseConstantDecay
  return library.optimizers.Adam(decay([2], [0.125, 0.0625]))


_AVERAGES = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
# The Keras, the groups, what makes the optimizer, and our settings. Some norms
# are above a limit, some below; each spans the members' parts.
CASES: dict[str, tuple[str, Any, Callable[[Any], Any], dict[str, Any]]] = {
  "nesterov": (
    *("tf_keras", PAIRS, plain("SGD", momentum=0.5, nesterov=True)),
    {},
  ),
  "clipnorm": ("keras", PAIRS, plain("SGD", clipnorm=2.0), {}),
  "averages": ("keras", PAIRS, plain("SGD", **_AVERAGES), {}),
  "averages of tf_keras": ("tf_keras", ALL, plain("SGD", **_AVERAGES), {}),
  "rounded": ("keras", ALL, plain("SGD"), {"wire_dtype": "bfloat16"}),
  "amsgrad": ("tf_keras", PAIRS, plain("Adam", amsgrad=True), {}),
  "decay": ("keras", PAIRS, _excluding, {"accumulate_steps": 2}),
  "schedule": ("tf_keras", ALL, _schedule, {"wire_dtype": "float16"}),
  "centered": (
    *("keras", ALL, plain("RMSprop", centered=True, momentum=0.5)),
    {},
  ),
  "Adagrad": ("tf_keras", PAIRS, plain("Adagrad", clipvalue=1.0), {}),
  "Adadelta": ("keras", ALL, plain("Adadelta"), {}),
  "Adamax": ("tf_keras", PAIRS, plain("Adamax"), {}),
  "Nadam": ("keras", PAIRS, plain("Nadam"), {}),
  "Ftrl": ("tf_keras", ALL, plain("Ftrl"), {}),
  "Lion": ("keras", PAIRS, plain("Lion"), {}),
  "loss scale": ("keras", PAIRS, functools.partial(_scaled, clipnorm=0.5), {}),
  "elementwise": (
    *("keras", PAIRS, lambda _: _Vouched(RATE)),
    {"shard_update": "elementwise"},
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_sharded_update_equals_plain_keras(case: str) -> None:
  which, groups, make, options = CASES[case]
  values, grads = {**VALUES, "empty": np.zeros(0)}, [*GRADS, EMPTY]
  if case == "loss scale":  # Of the second group, in the part of one member.
    grads[3] = grads[3].copy()
    grads[3][1, 1, 4] = np.inf
  weights, optimizer = build(which, make, groups, values, **options)
  training.train(weights, optimizer, grads, mode="eager")
  with testbed.mirrored().scope():
    optimizer.finalize_variable_values(weights)
  window = options.get("accumulate_steps", 1)

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    alone, other = training.make_weights(which, values), make(KERASES[which][0])
    means = [sum(g[i::window] for i in range(window)) / window for g in grads]
    training.train_plain(alone, other, means, members)
    other.finalize_variable_values(alone)
    return [weight.numpy() for weight in alone]

  # SGD is exact here; kernels round otherwise than operations.
  is_exact = list(CASES).index(case) in (0, 2, 3, 4)
  bounds = [] if is_exact else [lambda value, *_: 5e-6 + 5e-6 * abs(value)]
  held = training.by_replica(weights)
  training.check_groups(held, groups, expected, *bounds)
  shapes = {tuple(v.shape) for v in testbed.base_optimizer(optimizer).variables}
  assert max(map(sum, shapes)) <= -(-19 // len(groups[0]))


def test_weights_of_several_buckets() -> None:
  """As between machines. The weights equal plain Keras', also if clipped."""
  make = plain("AdamW", clipvalue=4.0, weight_decay=0.25)
  with mock.patch.object(engine.Engine, "scatter_bytes", 40):
    weights, optimizer = build("keras", make)
  training.train(weights, optimizer, GRADS, mode="eager")
  whole = build("keras", make)
  training.train(*whole, GRADS, mode="eager")
  for one, other in zip(
    state_of(*whole), state_of(weights, optimizer), strict=True
  ):
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
  # Of 6, of 7 and 1, and of 5 elements; 40 bytes are ten.
  slots = optimizer.inner_optimizer.variables
  assert {tuple(v.shape) for v in slots} - {()} == {(3,), (4,)}
  assert len({v.path for v in slots}) == len(slots)


@training.in_both
def test_rows_and_constraints(which: str) -> None:
  """A step that is skipped does not apply the constraint of an embedding."""
  library, package = KERASES[which]
  limit = library.constraints.NonNeg()
  start = [[1.0], [1.0], [-1.0], [1.0]]
  with testbed.mirrored().scope():
    if which == "keras":
      table: Any = library.Variable(start)
      table.constraint = limit
    else:
      table = tf.Variable(start, constraint=limit)
    optimizer = package.CrossShardOptimizer(
      plain("SGD")(library),
      *("sum", "ours", PAIRS),
      shard_update=True,
      skip_nonfinite=True,
    )
    optimizer.build([table])
  for factor in (np.nan, 5.0):
    before = testbed.copies(table)

    def step(factor: float = factor) -> None:
      ids = tf.stack([testbed.replica_id(), 0])
      rows = tf.IndexedSlices(tf.ones([2, 1]) * factor, ids, [4, 1])
      optimizer.apply_gradients([(rows, table)])

    testbed.run(lambda: [step(), None][1], "eager")
    if np.isnan(factor):
      np.testing.assert_array_equal(testbed.copies(table), before)
  # Of replicas 0 and 2 rows 0, 0, 2 and 0; of 1 and 3 rows 1, 0, 3 and 0.
  found = [copy.ravel().tolist() for copy in testbed.copies(table)]
  assert found == [[0.0, 1.0, 0.0, 1.0], [0.0, 0.375, 0.0, 0.375]] * 2


def test_weights_set_from_outside_count() -> None:
  weights, optimizer = build("keras", plain("SGD"))
  training.train(weights, optimizer, GRADS, [0], mode="eager")
  for weight in weights:
    weight.assign(tf.zeros(weight.shape))
  training.train(weights, optimizer, GRADS, [1], mode="eager")
  training.check_groups(
    training.by_replica(weights),
    PAIRS,
    lambda members: [-RATE * rows[1, members].sum(0) for rows in GRADS],
  )


def test_groups_of_one_are_not_sharded() -> None:
  _, optimizer = build("keras", adam, testbed.GROUPINGS["singletons"])
  assert (3, 2) in {tuple(v.shape) for v in optimizer.inner_optimizer.variables}


@pytest.mark.parametrize("shard_update", [False, "elementwise"])
def test_finalize_variable_values_runs(shard_update: Any) -> None:
  """Any `finalize_variable_values` runs, not only that of moving averages."""

  class Doubles(keras.optimizers.SGD):
    def finalize_variable_values(self, var_list: Any) -> None:
      for variable in var_list:
        variable.assign(2.0 * variable)

  weights, optimizer = build(
    "keras", lambda _: Doubles(0.5), shard_update=shard_update
  )
  before = list(map(testbed.copies, weights))
  optimizer.finalize_variable_values(weights)
  for weight, values in zip(weights, before, strict=True):
    np.testing.assert_array_equal(testbed.copies(weight), 2 * np.array(values))


def test_gradients_of_all_weights_once() -> None:
  weights, optimizer = build("keras", plain("SGD"))
  pairs = [(tf.ones(weight.shape), weight) for weight in weights]
  for wrong, words in (
    ([*pairs, pairs[0]], "must contain each variable once"),
    ([*pairs[:-1], (None, weights[-1])], "must contain a gradient for every"),
  ):
    with pytest.raises(ValueError, match=words):
      testbed.run(lambda wrong=wrong: optimizer.apply_gradients(wrong))
  for weight, first in zip(weights, VALUES.values(), strict=True):
    np.testing.assert_array_equal(weight.numpy(), first)


# ----------------------------------------------------------------- saved state


def _by_store(source: Any, target: Any, folder: pathlib.Path) -> None:
  del folder
  store: dict[str, Any] = {}
  source.save_own_variables(store)
  target.load_own_variables(store)


def _by_checkpoint(source: Any, target: Any, folder: pathlib.Path) -> None:
  saved = tf.train.Checkpoint(optimizer=source).save(str(folder / "saved"))
  status = tf.train.Checkpoint(optimizer=target).restore(saved)
  status.assert_existing_objects_matched()


@pytest.mark.parametrize(
  ("hand_over", "which"), [(_by_store, "tf_keras"), (_by_checkpoint, "keras")]
)
def test_training_continues_with_plain_keras(
  which: str, hand_over: Any, tmp_path: pathlib.Path
) -> None:
  """Trains sharded over 4, then plain, then sharded over 2."""
  alone, expected = (
    training.make_weights(which, VALUES),
    adam(KERASES[which][0]),
  )
  training.train_plain(alone, expected, GRADS, range(4))

  weights, first = build(which, adam, ALL, fused_update=False)
  training.train(weights, first, GRADS, [0], mode="eager")
  middle = adam(KERASES[which][0])
  here = {w.name.split(":")[0]: w.numpy() for w in weights}
  middle_weights = training.make_weights(which, here)
  middle.build(middle_weights)
  hand_over(first, middle, tmp_path)
  training.train_plain(middle_weights, middle, GRADS, range(4), [1])
  here = {name: w.numpy() for name, w in zip(here, middle_weights, strict=True)}
  last_weights, last = build(which, adam, PAIRS, here, fused_update=False)
  hand_over(middle, last, tmp_path)
  # Each member of a pair has half of the sum over all four.
  halves = [
    np.broadcast_to(each.sum(1, keepdims=True) / 2, each.shape)
    for each in GRADS
  ]
  training.train(last_weights, last, halves, range(2, STEPS), mode="eager")
  for mine, theirs in zip(
    (*last_weights, *last.variables),
    (*alone, *expected.variables),
    strict=True,
  ):
    for value in Models(optimizer=last).values(mine):
      np.testing.assert_array_equal(value, theirs.numpy(), str(mine.name))


@pytest.mark.parametrize(
  ("which", "make"),
  [("keras", plain("Adam", use_ema=True)), ("tf_keras", _scaled)],
)
def test_checkpoint_before_it_is_built(
  which: str, make: Callable[[Any], Any], tmp_path: pathlib.Path
) -> None:
  """Values are restored when the slots are created, as in plain Keras."""
  weights, first = build(which, make, ALL)
  training.train(weights, first, GRADS, range(2), mode="eager")
  first.learning_rate = 0.5
  saved = tf.train.Checkpoint(optimizer=first).save(str(tmp_path / "saved"))
  library, package = KERASES[which]
  for groups in (ALL, PAIRS):
    with testbed.mirrored().scope():
      second = package.CrossShardOptimizer(
        make(library), "sum", group_assignment=groups, shard_update=True
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
  slots = []
  for sharded in (False, True):
    weights, optimizer = build("keras", adam, ALL, shard_update=sharded)
    training.train(weights, optimizer, GRADS, mode="eager")
    names = optimizer.get_slot_names()
    assert len(names) == 2
    slots.append(
      [np.asarray(optimizer.get_slot(w, n)) for w in weights for n in names]
    )
    assert optimizer.get_slot(weights[0], "none") is None
  slot = optimizer.get_slot(weights[0], names[0])
  with pytest.raises(TypeError, match=r"is read-only.* optimizer.variables"):
    slot.assign(np.ones([3, 2]))
  for one, other in zip(*slots, strict=True):
    assert one.dtype == np.float32
    np.testing.assert_array_equal(one, other)
  np.testing.assert_array_equal(tf.convert_to_tensor(slot), slots[0][0])


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
      optimizer = _scaled(library)
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


@pytest.mark.parametrize(
  ("which", "make", "vouched", "words"),
  [
    ("keras", lambda _: _Vouched(), True, "but _Vouched may use norms"),
    (
      *("keras", plain("Adam", gradient_accumulation_steps=2), True),
      "Use `accumulate_steps`",
    ),
    ("keras", plain("Lamb"), True, "but Lamb uses"),
    ("keras", plain("Muon"), "elementwise", "but Muon uses"),
    ("keras", plain("ScheduleFreeAdamW"), True, "but ScheduleFreeAdamW uses"),
    ("tf_keras", plain("Adafactor"), "elementwise", "but Adafactor uses"),
    (
      *("keras", lambda _: _Vouched(clipnorm=1.0), "elementwise"),
      "uses clipnorm=1",
    ),
    (
      *("keras", lambda _: _Vouched(global_clipnorm=1.0), "elementwise"),
      "uses global_clipnorm=1",
    ),
  ],
)
def test_unsupported_optimizers_raise_an_error(
  which: str, make: Any, vouched: Any, words: str
) -> None:
  library, package = KERASES[which]
  with pytest.raises(ValueError, match=words):
    package.CrossShardOptimizer(make(library), shard_update=vouched)


@pytest.mark.parametrize(
  ("which", "by"),
  [("keras", "var_names"), ("keras", "var_list"), ("tf_keras", "var_list")],
)
def test_exclusions_of_two_dtypes_and_of_tables(which: str, by: str) -> None:
  """A second exclusion replaces the first one, as in Keras.

  The decay is set after `build`.
  """
  library, package = KERASES[which]
  dtypes = {"scale": "float32", "bias": "float64", "table": "float32"}
  with testbed.mirrored().scope():
    weights = [
      tf.Variable(tf.ones([2, 2], dtype), name=name)
      for name, dtype in {**dtypes, "kernel": "float32"}.items()
    ]
    opt = library.optimizers.SGD(0.5)
    excluded = {"var_names": list(dtypes), "var_list": weights[:3]}
    opt.exclude_from_weight_decay(**{by: excluded[by]})
    optimizer = package.CrossShardOptimizer(
      opt, shard_update=True, lazy_rows=True
    )
    optimizer.update_by_rows(var_list=weights[2:3])
    optimizer.build(weights)
  optimizer.weight_decay = 0.5
  grads: list[Any] = [tf.zeros([2, 2], weight.dtype) for weight in weights]
  grads[2] = tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([1]), [2, 2])
  testbed.run(
    lambda: optimizer.apply_gradients(list(zip(grads, weights, strict=True)))
  )
  for weight, value in zip(weights, (1.0, 1.0, 1.0, 0.75), strict=True):
    for copy in testbed.copies(weight):
      np.testing.assert_array_equal(copy, np.full([2, 2], value), weight.name)


def test_averages_are_built_before_the_first_step() -> None:
  with testbed.mirrored().scope():
    weight = tf.Variable(tf.ones(3))
    optimizer = ours_tf_keras.CrossShardOptimizer(
      tf_keras.optimizers.Adam(use_ema=True), shard_update=True
    )
  with pytest.raises(RuntimeError, match=r"Call optimizer.build"):
    testbed.run(lambda: optimizer.apply_gradients([(tf.ones(3), weight)]))
