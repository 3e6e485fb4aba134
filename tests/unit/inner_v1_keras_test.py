"""Converted optimizers compute version 1's numbers, in both Kerases.

Each is fed the gradients that the version 1 optimizer itself is fed. Bounds
are absolute, for float32 values of order 1.
"""
# bazel: size=large

import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tf_cross_shard import keras3
from tf_cross_shard import tf_keras as keras2
from tf_cross_shard.migration import v1_keras3, v1_tf_keras

# Every day v1_rules_test has the rules, migration_optimizers_test both Kerases.
pytestmark = pytest.mark.slow
train = tf.compat.v1.train

STEPS = 50
SHAPE = (6, 3)
TOUCHED = 4  # Rows of sparse gradients are among so many.
BOUND = 1e-6

KERASES: dict[str, Any] = {"keras3": keras3, "tf_keras": keras2}
CONVERT = {"keras3": v1_keras3.convert, "tf_keras": v1_tf_keras.convert}

# Whatever takes a learning rate, with settings that leave no term out.
KINDS: dict[str, Callable[[Any], Any]] = {
  "descent": train.GradientDescentOptimizer,
  "momentum": lambda rate: train.MomentumOptimizer(rate, 0.875),
  "nesterov": lambda rate: train.MomentumOptimizer(
    rate, 0.75, use_nesterov=True
  ),
  "momentum_0": lambda rate: train.MomentumOptimizer(rate, 0.0),
  "adam": lambda rate: train.AdamOptimizer(rate, 0.75, 0.9, 1e-3),
  "adam_default": lambda rate: train.AdamOptimizer(),
  "adagrad": train.AdagradOptimizer,
  "adagrad_initial": lambda rate: train.AdagradOptimizer(rate, 2.0),
  "rmsprop": lambda rate: train.RMSPropOptimizer(rate),
  "rmsprop_momentum": lambda rate: train.RMSPropOptimizer(
    rate, 0.75, 0.5, 1e-3
  ),
  "rmsprop_centered": lambda rate: train.RMSPropOptimizer(
    rate, 0.75, 0.5, 1e-3, centered=True
  ),
  "adadelta": lambda rate: train.AdadeltaOptimizer(10.0 * rate, 0.75, 1e-3),
  "adadelta_default": lambda rate: train.AdadeltaOptimizer(200.0 * rate),
  "ftrl": train.FtrlOptimizer,
  "ftrl_l1_l2": lambda rate: train.FtrlOptimizer(
    rate,
    learning_rate_power=-0.75,
    initial_accumulator_value=0.5,
    l1_regularization_strength=0.25,
    l2_regularization_strength=0.125,
  ),
  "ftrl_shrinkage_beta": lambda rate: train.FtrlOptimizer(
    rate,
    l1_regularization_strength=0.125,
    l2_regularization_strength=0.25,
    l2_shrinkage_regularization_strength=0.05,
    beta=0.5,
  ),
}

# Version 1's names of slots, by the two Kerases'.
SLOTS: dict[str, dict[str, str]] = {
  "momentum": {"momentum": "momentum", "m": "momentum"},
  "adam": {"momentum": "m", "velocity": "v", "m": "m", "v": "v"},
  "adagrad": {"accumulator": "accumulator", "accumulators": "accumulator"},
  "rmsprop": {
    "velocity": "rms",
    "momentum": "momentum",
    "average_gradient": "mg",
  },
  "adadelta": {
    "accumulated_grad": "accum",
    "accumulated_delta_var": "accum_update",
  },
  "ftrl": {
    "accumulator": "accum",
    "linear": "linear",
    "accumulators": "accum",  # in Keras 3.8
    "linears": "linear",
  },
}
SLOTS["nesterov"] = SLOTS["momentum"]

# A learning rate that follows a global step.
SCHEDULES: dict[str, Callable[[Any], Any]] = {
  "exponential": lambda step: train.exponential_decay(0.25, step, 10, 0.5),
  "staircase": lambda step: train.exponential_decay(
    0.25, step, 10, 0.5, staircase=True
  ),
  "natural_exp": lambda step: train.natural_exp_decay(0.25, step, 10, 0.5),
  "piecewise": lambda step: train.piecewise_constant(
    step, [5, 10, 30], [0.25, 0.125, 0.5, 0.0625]
  ),
  "polynomial": lambda step: train.polynomial_decay(
    0.25, step, 10, 0.01, power=0.5
  ),
  "polynomial_cycle": lambda step: train.polynomial_decay(
    0.25, step, 10, 0.01, power=2.0, cycle=True
  ),
  "inverse_time": lambda step: train.inverse_time_decay(0.25, step, 10, 0.5),
  "inverse_staircase": lambda step: train.inverse_time_decay(
    0.25, step, 10, 0.5, staircase=True
  ),
  "cosine": lambda step: train.cosine_decay(0.25, step, 30, alpha=0.125),
  "restarts": lambda step: train.cosine_decay_restarts(
    0.25, step, 10, t_mul=2.0, m_mul=0.75, alpha=0.125
  ),
  "restarts_even": lambda step: train.cosine_decay_restarts(
    0.25, step, 10, t_mul=1.0
  ),
  "linear_cosine": lambda step: train.linear_cosine_decay(
    0.25, step, 30, num_periods=1.5, alpha=0.125
  ),
}


def _gradients(sparse: bool) -> list[Any]:
  """One per step; sparse ones with duplicate rows and without the last ones."""
  rng = np.random.default_rng(5)
  if not sparse:
    return list(tf.constant(rng.normal(size=(STEPS, *SHAPE)), tf.float32))
  values = rng.normal(size=(STEPS, 3, SHAPE[1])).astype("float32")
  rows = rng.integers(0, TOUCHED, size=(STEPS, 3))
  assert any(len(set(each)) < 3 for each in rows.tolist())
  return [
    tf.IndexedSlices(*(tf.constant(x) for x in (*pair, SHAPE)))
    for pair in zip(values, rows, strict=True)
  ]


def _first() -> np.ndarray:
  return np.random.default_rng(6).normal(size=SHAPE).astype("float32")


def _check(ours: Any, theirs: Any, bound: float = BOUND) -> None:
  """Relative to the largest, where values are larger than 1."""
  ours, theirs = ours.numpy(), theirs.numpy()
  bound *= max(1.0, float(np.abs(theirs).max()))
  assert np.abs(ours - theirs).max() <= bound


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", KERASES)
def test_gradients_of_another_dtype(
  which: str, kind: str, sparse: bool
) -> None:
  results = []
  for dtype in ("float32", "float64"):
    ours = KERASES[which].CrossShardOptimizer(KINDS[kind](0.05))
    variable = tf.Variable(_first())
    for grad in _gradients(sparse)[:3]:
      ours.apply_gradients([(tf.cast(grad, dtype), variable)])
    results.append(variable.numpy())
  np.testing.assert_array_equal(*results)
  assert (results[0] != _first()).any()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", KERASES)
def test_50_steps_equal_version_1(which: str, kind: str, sparse: bool) -> None:
  theirs = KINDS[kind](0.05)
  ours = KERASES[which].CrossShardOptimizer(KINDS[kind](0.05))
  variable, other = tf.Variable(_first()), tf.Variable(_first())
  for grad in _gradients(sparse):
    theirs.apply_gradients([(grad, other)])
    ours.apply_gradients([(grad, variable)])
    _check(variable, other)
  moved = np.abs(variable.numpy() - _first()).max(axis=1)
  assert (moved[:TOUCHED] > 1e-4).all()
  assert (moved[TOUCHED:] == 0.0).all() == sparse
  if kind != "descent":
    _check_slots(kind, (ours, variable), (theirs, other))


def _check_slots(
  kind: str, ours: tuple[Any, Any], theirs: tuple[Any, Any]
) -> None:
  """Slots hold what version 1's hold, given as optimizer and variable."""
  names = SLOTS[kind.split("_")[0]]
  seen = set()
  for name in ours[0].get_slot_names():
    slot = theirs[0].get_slot(theirs[1], names[name])
    assert (slot.numpy() != 0.0).any()
    _check(ours[0].get_slot(ours[1], name), slot)
    seen.add(names[name])
  # Version 1 has a slot for a momentum of 0 as well.
  optional = {"momentum"} if kind in ("rmsprop", "momentum_0") else set()
  assert set(theirs[0].get_slot_names()) - seen <= optional


@pytest.mark.parametrize(
  "kind",
  [
    "momentum",
    "adagrad",
    "rmsprop_centered",
    "adadelta",
    "ftrl_shrinkage_beta",
  ],
)
@pytest.mark.parametrize("which", KERASES)
def test_duplicate_rows_without_cross_shard(which: str, kind: str) -> None:
  """Which adds rows up before; the optimizer within is one in its own right."""
  theirs, ours = KINDS[kind](0.05), CONVERT[which](KINDS[kind](0.05))
  variable, other = tf.Variable(_first()), tf.Variable(_first())
  for grad in _gradients(sparse=True):
    theirs.apply_gradients([(grad, other)])
    ours.apply_gradients([(grad, variable)])
  _check(variable, other)
  assert np.abs(variable.numpy() - _first()).max() > 0.01


@pytest.mark.parametrize("within", ["eager", "graph", "compiled"])
@pytest.mark.parametrize(
  ("dtype", "initial"), [("float32", 1e-40), ("float16", 1e-8)]
)
@pytest.mark.parametrize("which", KERASES)
def test_adagrad_with_an_accumulator_of_0(
  which: str, dtype: str, initial: float, within: str
) -> None:
  """It is rounded to that. Divided by its root, rows not touched are NaN."""
  theirs = train.AdagradOptimizer(0.1, initial)
  ours = KERASES[which].CrossShardOptimizer(
    train.AdagradOptimizer(0.1, initial)
  )
  variable, other = (tf.Variable(tf.ones([4, 1], dtype)) for _ in range(2))
  ours.build([variable])

  def step(values: tf.Tensor, rows: tf.Tensor) -> None:
    grad = tf.IndexedSlices(values, rows, tf.constant([4, 1]))
    ours.apply_gradients([(grad, variable)])

  if within != "eager":
    step = tf.function(step, jit_compile=within == "compiled")
  for rows in ([1], [1, 3, 1]):
    values = tf.ones([len(rows), 1], dtype)
    grad = tf.IndexedSlices(values, tf.constant(rows), tf.constant([4, 1]))
    theirs.apply_gradients([(grad, other)])
    step(values, tf.constant(rows))
    _check(variable, other, 1e-3 if dtype == "float16" else BOUND)
  assert np.isfinite(other.numpy()).all()
  assert (other.numpy() != 1.0).ravel().tolist() == [False, True, False, True]


@pytest.mark.parametrize(
  ("kind", "clipnorm"),
  # Clipping merges before any of them does.
  [(kind, None) for kind in KINDS] + [("momentum", 1e6), ("adagrad", 1e6)],
)
@pytest.mark.parametrize(
  "rows", [[0], [0, 0, 1, 2], [3, 3, 1, 3, 1, 3]], ids=str
)
@pytest.mark.parametrize("which", KERASES)
def test_compiled_sparse_gradients(
  which: str, kind: str, rows: list[int], clipnorm: float | None
) -> None:
  """Rows are merged here, by clipping, and by tf_keras: XLA lost them."""
  theirs = KINDS[kind](0.05)
  ours = KERASES[which].CrossShardOptimizer(
    KINDS[kind](0.05), clipnorm=clipnorm
  )
  variable, other = tf.Variable(_first()), tf.Variable(_first())
  ours.build([variable])

  @tf.function(jit_compile=True)
  def step(values: tf.Tensor, indices: tf.Tensor) -> None:
    grad = tf.IndexedSlices(values, indices, tf.constant(SHAPE))
    ours.apply_gradients([(grad, variable)])

  rng = np.random.default_rng(7)
  indices = tf.constant(rows)
  for _ in range(5):
    values = tf.constant(rng.normal(size=(len(rows), SHAPE[1])), tf.float32)
    grad = tf.IndexedSlices(values, indices, tf.constant(SHAPE))
    theirs.apply_gradients([(grad, other)])
    step(values, indices)
  _check(variable, other, 5 * BOUND)
  moved = np.abs(variable.numpy() - _first()).max(axis=1) > 1e-4
  assert np.flatnonzero(moved).tolist() == sorted(set(rows))


@pytest.mark.parametrize("kind", ["momentum", "rmsprop_centered", "ftrl"])
@pytest.mark.parametrize("which", KERASES)
def test_compiled_after_it_was_traced(which: str, kind: str) -> None:
  """The inner function keeps its trace, which knows nothing of XLA."""
  theirs = KINDS[kind](0.05)
  ours = KERASES[which].CrossShardOptimizer(KINDS[kind](0.05), clipnorm=1e6)
  variable, other = tf.Variable(_first()), tf.Variable(_first())
  ours.build([variable])

  @tf.function
  def step(values: tf.Tensor, indices: tf.Tensor) -> None:
    grad = tf.IndexedSlices(values, indices, tf.constant(SHAPE))
    ours.apply_gradients([(grad, variable)])

  compiled = tf.function(step, jit_compile=True)
  for i, grad in enumerate(_gradients(sparse=True)[:6]):
    theirs.apply_gradients([(grad, other)])
    (compiled if i % 2 else step)(grad.values, grad.indices)
    _check(variable, other, 5 * BOUND)


@pytest.mark.parametrize("rate", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("which", KERASES)
def test_adam_rounds_its_powers_as_version_1(which: str, rate: float) -> None:
  """Plain Keras is 2e-5 off after 50 steps at a rate of 1."""
  theirs = train.AdamOptimizer(rate)
  ours = KERASES[which].CrossShardOptimizer(train.AdamOptimizer(rate))
  variable, other = tf.Variable(_first()), tf.Variable(_first())
  for grad in _gradients(sparse=False):
    theirs.apply_gradients([(grad, other)])
    ours.apply_gradients([(grad, variable)])
  np.testing.assert_allclose(variable, other, rtol=1e-6, atol=1e-6)
  assert np.abs(variable.numpy() - _first()).max() > rate


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", [k for k in KINDS if "default" not in k])
@pytest.mark.parametrize("which", KERASES)
def test_a_learning_rate_that_changes(
  which: str, kind: str, sparse: bool
) -> None:
  rate, other_rate = tf.Variable(0.05), tf.Variable(0.05)
  theirs = KINDS[kind](other_rate)
  ours = KERASES[which].CrossShardOptimizer(KINDS[kind](rate))
  variable, other = tf.Variable(_first()), tf.Variable(_first())
  step = tf.function(
    lambda grad: ours.apply_gradients([(grad, variable)]), autograph=False
  )
  for i, grad in enumerate(_gradients(sparse)):
    for each in (rate, other_rate):
      each.assign(0.05 / (1 + i % 5))
    theirs.apply_gradients([(grad, other)])
    step(grad)
  _check(variable, other)
  assert np.abs(variable.numpy() - _first()).max() > 0.02


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("which", KERASES)
def test_schedules(which: str, schedule: str) -> None:
  make = SCHEDULES[schedule]
  count, start = tf.Variable(3), tf.Variable(3)
  theirs = train.MomentumOptimizer(make(count), 0.5)
  ours = KERASES[which].CrossShardOptimizer(
    train.MomentumOptimizer(make(start), 0.5)
  )
  assert int(ours.iterations) == 3
  assert float(ours.learning_rate) == pytest.approx(float(make(count)()))
  variable, other = tf.Variable(_first()), tf.Variable(_first())
  rates = []
  for grad in _gradients(sparse=False):
    rates.append(float(make(count)()))
    theirs.apply_gradients([(grad, other)], global_step=count)
    ours.apply_gradients([(grad, variable)])
    if which == "tf_keras":  # There it is the last step's.
      assert float(ours.learning_rate) == pytest.approx(rates[-1], abs=1e-7)
    else:
      now = float(make(count)())
      assert float(ours.learning_rate) == pytest.approx(now, abs=1e-7)
    _check(variable, other)
  assert len(set(rates)) > 3
  assert int(ours.iterations) == int(count) == 3 + STEPS
  assert int(start) == 3  # Keras counts from here on.


@pytest.mark.parametrize("which", KERASES)
def test_noisy_schedule(which: str) -> None:
  """Random in version 1: what can be compared is the noise's absence."""
  count = tf.Variable(0)
  make = train.noisy_linear_cosine_decay
  calm, noisy = (
    CONVERT[which](
      train.GradientDescentOptimizer(
        make(0.25, count, 30, initial_variance=variance)
      )
    )
    for variance in (1e-12, 4.0)
  )
  linear = train.linear_cosine_decay(0.25, count, 30)
  assert float(calm.learning_rate) == pytest.approx(float(linear()), abs=1e-5)
  assert abs(float(noisy.learning_rate) - float(linear())) > 1e-3


@pytest.mark.parametrize("compiled", [None, False, True], ids=str)
@pytest.mark.parametrize("which", KERASES)
def test_large_boundaries(which: str, compiled: bool | None) -> None:
  """As float32, the boundary and the next step would be one number."""
  last = 30000001
  count = tf.Variable(last - 1, dtype=tf.int64)
  schedule = train.piecewise_constant(count, [5, last], [4.0, 1.0, 0.25])
  opt = train.GradientDescentOptimizer(schedule)
  first = KERASES[which].CrossShardOptimizer(opt)
  for ours in (first, pickle.loads(pickle.dumps(first))):
    weight = tf.Variable(0.0, name="weight")
    ours.build([weight])

    def apply(ours: Any = ours, weight: Any = weight) -> None:
      ours.apply_gradients([(-tf.ones([]), weight)])

    step = apply
    if compiled is not None:
      step = tf.function(apply, jit_compile=compiled)
    moved = []
    for _ in range(4):
      weight.assign(0.0)
      step()
      moved.append(float(weight.numpy()))
    # Version 1 changes after the boundary itself.
    expected = []
    for steps in range(last - 1, last + 3):
      count.assign(steps)
      expected.append(float(schedule()))
    assert moved == expected == [1.0, 1.0, 0.25, 0.25]


@pytest.mark.parametrize(
  "wrap", [float, tf.constant, lambda x: tf.minimum(x, 1.0)]
)
@pytest.mark.parametrize("which", KERASES)
def test_a_function_is_called_in_every_step(
  which: str, wrap: Callable[[float], Any]
) -> None:
  rates = {"now": 0.5}
  opt = train.GradientDescentOptimizer(lambda: wrap(rates["now"]))
  ours = KERASES[which].CrossShardOptimizer(opt)
  weight = tf.Variable(0.0)
  step = tf.function(lambda: ours.apply_gradients([(tf.ones([]), weight)]))
  step()
  assert float(weight.numpy()) == -0.5
  rates["now"] = 0.25
  step()
  assert float(weight.numpy()) == -0.75


@pytest.mark.parametrize("which", KERASES)
def test_a_function_is_called_in_every_step_of_fit(which: str) -> None:
  library = {"keras3": keras, "tf_keras": tf_keras}[which]
  rates = {"now": 0.25}
  opt = train.GradientDescentOptimizer(lambda: tf.constant(rates["now"]))
  model = library.Sequential(
    [library.Input((1,)), library.layers.Dense(1, use_bias=False)]
  )
  ours = KERASES[which].CrossShardOptimizer(opt)
  # Keras 3 would compile on a GPU, and Python is not compiled.
  model.compile(ours, "mse", jit_compile=False)
  before = model.get_weights()[0]
  x = np.ones((4, 1), "float32")
  model.fit(x, x + 1.0, epochs=2, verbose=0)
  after = model.get_weights()[0]
  assert (after != before).any()
  rates["now"] = 0.0
  model.fit(x, x + 1.0, epochs=2, verbose=0)
  np.testing.assert_array_equal(model.get_weights()[0], after)


@pytest.mark.parametrize("which", KERASES)
def test_what_follows_a_function_cannot_be_saved(which: str) -> None:
  opt = train.AdamOptimizer(tf.Variable(0.5))
  ours = KERASES[which].CrossShardOptimizer(opt)
  words = r"`learning_rate` is .*cannot be saved\. Set `optimizer\.learning_ra"
  for save in (ours.get_config, lambda: pickle.dumps(ours)):
    with pytest.raises(TypeError, match=words):
      save()
  schedules = {
    "keras3": keras.optimizers.schedules,
    "tf_keras": tf_keras.optimizers.schedules,
  }[which]
  # The remedy is one.
  ours.learning_rate = schedules.ExponentialDecay(0.25, 10, 0.5)
  again = type(ours).from_config(ours.get_config())
  assert float(again.learning_rate) == 0.25


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", KERASES)
@pytest.mark.parametrize("way", ["config", "pickle"])
def test_round_trip(way: str, which: str, kind: str) -> None:
  """What comes back goes on as the first would have."""
  ours = KERASES[which].CrossShardOptimizer(KINDS[kind](0.05))
  variable = tf.Variable(_first(), name="weight")
  gradients = _gradients(sparse=True)
  if way == "pickle":
    for grad in gradients[:5]:
      ours.apply_gradients([(grad, variable)])
  other = tf.Variable(variable, name="weight")
  again = (
    pickle.loads(pickle.dumps(ours))
    if way == "pickle"
    else type(ours).from_config(ours.get_config())
  )
  assert type(again.inner_optimizer) is type(ours.inner_optimizer)
  assert again.inner_optimizer.name == KINDS[kind](0.05).get_name()
  for grad in gradients[5:10]:
    ours.apply_gradients([(grad, variable)])
    again.apply_gradients([(grad, other)])
  assert variable.numpy().tolist() == other.numpy().tolist()
  assert (variable.numpy() != _first()).any()
  assert again.get_config() == ours.get_config()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("which", KERASES)
def test_schedules_come_back(which: str, schedule: str) -> None:
  opt = train.RMSPropOptimizer(SCHEDULES[schedule](tf.Variable(7)))
  ours = KERASES[which].CrossShardOptimizer(opt)
  again = pickle.loads(pickle.dumps(ours))
  assert int(again.iterations) == 7
  weights = [tf.Variable(1.0, name="weight") for _ in range(2)]
  for each, weight in zip((ours, again), weights, strict=True):
    each.apply_gradients([(tf.ones([]), weight)])
  assert float(weights[0].numpy()) == float(weights[1].numpy()) < 1.0


@pytest.mark.parametrize(
  "kind",
  [
    "nesterov",
    "adagrad",
    "rmsprop_centered",
    "adadelta",
    "ftrl_shrinkage_beta",
  ],
)
@pytest.mark.parametrize(
  ("which", "file"),
  # What Keras 3 loads from HDF5 cannot be trained on, the plain one neither.
  [
    ("keras3", "model.keras"),
    ("tf_keras", "model.keras"),
    ("tf_keras", "model.h5"),
  ],
)
def test_keras_file(
  which: str, file: str, kind: str, tmp_path: pathlib.Path
) -> None:
  library = {"keras3": keras, "tf_keras": tf_keras}[which]
  rng = np.random.default_rng(8)
  x, y = (rng.normal(size=(8, n)).astype("float32") for n in (3, 2))
  model = library.Sequential([library.Input((3,)), library.layers.Dense(2)])
  decay = train.exponential_decay(0.05, tf.Variable(0), 10, 0.5)
  rate = 0.05 if kind.startswith("ftrl") else decay
  if kind == "adadelta":
    opt = train.AdadeltaOptimizer(decay, 0.75, 1e-3)
  else:
    opt = KINDS[kind](rate)
  model.compile(KERASES[which].CrossShardOptimizer(opt), "mse")
  model.fit(x, y, epochs=2, verbose=0)
  model.save(tmp_path / file)
  again = library.models.load_model(tmp_path / file)
  kind_of_inner = type(model.optimizer.inner_optimizer)
  assert type(again.optimizer.inner_optimizer) is kind_of_inner
  assert kind_of_inner.__name__.startswith("V1")
  before = model.get_weights()[0]
  for each in (model, again):
    each.fit(x, y, epochs=2, verbose=0, shuffle=False)
  assert (model.get_weights()[0] != before).any()
  for ours, theirs in zip(
    model.get_weights(), again.get_weights(), strict=True
  ):
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("which", KERASES)
def test_names_with_slashes(which: str) -> None:
  made = CONVERT[which](train.MomentumOptimizer(0.5, 0.5, name="train/Mom"))
  assert made.name == "train_Mom"


@pytest.mark.parametrize("beta", [0.999, 0.9999])
@pytest.mark.parametrize("which", KERASES)
def test_graphs_of_adam_stay_small(which: str, beta: float) -> None:
  """The powers stand there once, and not once per variable."""
  opt = KERASES[which].CrossShardOptimizer(train.AdamOptimizer(0.5, beta2=beta))
  variables = [tf.Variable(1.0, name=f"v{i}") for i in range(30)]
  opt.build(variables)
  step = tf.function(
    lambda: opt.apply_gradients([(tf.ones([]), v) for v in variables]),
    autograph=False,
  )
  size = step.get_concrete_function().graph.as_graph_def().ByteSize()
  table = 4 * 17.4 / (1.0 - beta)  # bytes
  assert table < size < 2 * table + 1e6


@pytest.mark.parametrize("which", KERASES)
def test_keras_own_classes_where_they_do(which: str) -> None:
  library = {"keras3": keras, "tf_keras": tf_keras}[which].optimizers
  assert type(CONVERT[which](KINDS["descent"](0.05))) is library.SGD
  for kind, derived in (
    ("momentum", library.SGD),
    ("adam", library.Adam),
    ("adagrad", library.Adagrad),
    ("rmsprop", library.RMSprop),
    ("adadelta", library.Adadelta),
    ("ftrl", library.Ftrl),
  ):
    made = CONVERT[which](KINDS[kind](0.05))
    assert isinstance(made, derived)
    assert type(made) is not derived
  opt = library.Adam(0.5)
  assert CONVERT[which](opt) is opt


@pytest.mark.parametrize("kind", ["momentum", "rmsprop", "adadelta", "ftrl"])
@pytest.mark.parametrize("which", KERASES)
def test_plain_keras_has_other_numbers(which: str, kind: str) -> None:
  """The reason for the classes; if this passes, one of them can go."""
  library = {"keras3": keras, "tf_keras": tf_keras}[which].optimizers
  made = CONVERT[which](KINDS[kind](0.05))
  base = next(
    each
    for each in type(made).__mro__
    if each.__module__ != type(made).__module__
  )
  config = made.get_config()
  theirs = getattr(library, base.__name__).from_config(config)
  results = []
  for opt in (made, theirs):
    variable = tf.Variable(_first())
    for i, grad in enumerate(_gradients(sparse=True)):
      opt.learning_rate.assign(0.05 / (1 + i % 5))
      opt.apply_gradients([(grad, variable)])
    results.append(variable.numpy())
  assert np.abs(results[0] - results[1]).max() > 1e-3


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
