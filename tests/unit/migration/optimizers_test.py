"""Optimizers of TensorFlow 1 in both Keras versions.

The oracle is the optimizer of `tf.compat.v1.train` itself, which receives the
group's sum. Both run the same kernels, so the numbers have the same bits
wherever a test has no tolerance.
"""

import importlib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import keras3, migration
from tf_cross_shard import tf_keras as keras2

train = tf.compat.v1.train
tpu = tf.compat.v1.tpu

SHAPE = (5, 2)
TOUCHED = 4  # Sparse gradients have rows among the first four.
STEPS = 6
KERASES: dict[str, Any] = {"keras3": keras3, "tf_keras": keras2}
every_keras = pytest.mark.parametrize("which", KERASES)
every_form = pytest.mark.parametrize(
  "sparse", [False, True], ids=["dense", "sparse"]
)

# All optimizers with a learning rate; their settings use every term.
KINDS: dict[str, Callable[[Any], Any]] = {
  "descent": train.GradientDescentOptimizer,
  "momentum": lambda rate: train.MomentumOptimizer(rate, 0.5),
  "momentum 0": lambda rate: train.MomentumOptimizer(rate, 0.0),
  "nesterov": lambda rate: train.MomentumOptimizer(
    rate, 0.75, use_nesterov=True
  ),
  "adam": lambda rate: train.AdamOptimizer(rate, 0.75, 0.99, 1e-3),
  "adagrad": lambda rate: train.AdagradOptimizer(rate, 0.5),
  "rmsprop": lambda rate: train.RMSPropOptimizer(rate, 0.75),
  "rmsprop centered": lambda rate: train.RMSPropOptimizer(
    rate, 0.75, 0.5, 1e-3, centered=True
  ),
  "adadelta": lambda rate: train.AdadeltaOptimizer(10 * rate, 0.75, 1e-3),
  "ftrl": lambda rate: train.FtrlOptimizer(
    rate,
    learning_rate_power=-0.75,
    initial_accumulator_value=0.5,
    l1_regularization_strength=0.125,
    l2_regularization_strength=0.25,
    l2_shrinkage_regularization_strength=0.05,
    beta=0.5,
  ),
}
# TensorFlow 1's names of slots, by those of both Keras versions.
SLOTS: dict[str, dict[str, str]] = {
  "descent": {"m": "m"},  # of tf_keras, which does not use it
  "momentum": {"momentum": "momentum", "m": "momentum"},
  "adam": {"momentum": "m", "velocity": "v", "m": "m", "v": "v"},
  "adagrad": {"accumulator": "accumulator"},
  "rmsprop": {
    "velocity": "rms",
    "momentum": "momentum",
    "average_gradient": "mg",
  },
  "adadelta": {
    "accumulated_grad": "accum",
    "accumulated_delta_var": "accum_update",
  },
  "ftrl": {"accumulator": "accum", "linear": "linear"},
}
SLOTS["nesterov"] = SLOTS["momentum"]


def _first() -> np.ndarray:
  return np.linspace(-1.0, 1.0, 10).reshape(SHAPE).astype("float32")


def _gradient(step: int, replica: int, sparse: bool) -> Any:
  """Whole numbers; a sparse gradient has duplicate rows, but not the last."""
  rng = np.random.default_rng([step, replica])
  values = rng.integers(-2, 5, size=SHAPE).astype("float32")
  if not sparse:
    return tf.constant(values)
  rows = [replica, (replica + step) % TOUCHED, replica]
  return tf.IndexedSlices(
    tf.constant(values[:3]), tf.constant(rows), tf.constant(SHAPE)
  )


def _sum(grads: Sequence[Any]) -> Any:
  if not isinstance(grads[0], tf.IndexedSlices):
    return tf.add_n(grads)
  return tf.IndexedSlices(
    tf.concat([grad.values for grad in grads], axis=0),
    tf.concat([grad.indices for grad in grads], axis=0),
    tf.constant(SHAPE),
  )


def _trained(opt: Any, members: Sequence[int], sparse: bool) -> Any:
  """Trains a variable on the sums of the members' gradients."""
  variable = tf.Variable(_first())
  for step in range(STEPS):
    total = _sum([_gradient(step, i, sparse) for i in members])
    opt.apply_gradients([(total, variable)])
  return variable


@every_form
@pytest.mark.parametrize("kind", KINDS)
@every_keras
def test_steps_equal_version_1(which: str, kind: str, sparse: bool) -> None:
  theirs = KINDS[kind](0.05)
  other = _trained(theirs, [0, 1], sparse)
  ours = KERASES[which].CrossShardOptimizer(KINDS[kind](0.05))
  variable = _trained(ours, [0, 1], sparse)
  # For these two, Keras or the dense kernel computes rows in another order.
  tolerance = 1e-6 if sparse and kind in ("descent", "adam") else 0.0
  np.testing.assert_allclose(variable, other, rtol=tolerance, atol=tolerance)
  moved = np.abs(variable.numpy() - _first()).max(axis=1)
  assert (moved[:TOUCHED] > 1e-3).all()
  assert (moved[TOUCHED:] == 0.0).all() == sparse
  names = SLOTS[kind.split()[0]]
  slots = {names[n]: ours.get_slot(variable, n) for n in ours.get_slot_names()}
  if kind == "descent":
    return
  assert slots.keys() == set(theirs.get_slot_names())
  for name, slot in slots.items():
    expected = theirs.get_slot(other, name).numpy()
    np.testing.assert_allclose(slot, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
  "kind", ["adam", "rmsprop centered", "ftrl", "nesterov", "adadelta"]
)
def test_on_a_virtual_tpu(kind: str) -> None:
  """Sparse gradients become dense on TPUs."""
  strategy = testbed.virtual(2)
  [weight], optimizer = training.build(
    *("keras", lambda _: KINDS[kind](0.05), {"weight": _first()}, strategy)
  )
  grads = [[_gradient(i, r, False) for r in (0, 1)] for i in range(STEPS)]
  rows = [np.array(grads)]
  training.train([weight], optimizer, rows, strategy=strategy)
  held = testbed.copies(weight)
  assert len(held) == 2
  other = _trained(KINDS[kind](0.05), [0, 1], False)
  for copy in held:
    np.testing.assert_allclose(copy, other, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize(
  ("which", "kind"),
  [
    ("keras3", "nesterov"),
    ("keras3", "rmsprop centered"),
    ("tf_keras", "ftrl"),
  ],
)
def test_compiled_rows(which: str, kind: str) -> None:
  """XLA has no kernels for rows; other rows must not change."""
  ours = KERASES[which].CrossShardOptimizer(KINDS[kind](0.05))
  variable = tf.Variable(_first())
  ours.build([variable])

  @tf.function(jit_compile=True)
  def step(values: tf.Tensor, indices: tf.Tensor) -> None:
    grad = tf.IndexedSlices(values, indices, tf.constant(SHAPE))
    ours.apply_gradients([(grad, variable)])

  for i in range(STEPS):
    grad = _gradient(i, 0, sparse=True)
    step(grad.values, grad.indices)
  theirs = KINDS[kind](0.05)
  other = _trained(theirs, [0], sparse=True)
  np.testing.assert_allclose(variable, other, rtol=5e-6, atol=5e-6)
  assert (variable.numpy()[TOUCHED:] == _first()[TOUCHED:]).all()
  for name in ours.get_slot_names():
    slot = theirs.get_slot(other, SLOTS[kind.split()[0]][name])
    own = ours.get_slot(variable, name)
    np.testing.assert_allclose(own, slot, rtol=5e-6, atol=5e-6)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
  "exponential": lambda step: train.exponential_decay(
    0.25, step, 10, 0.5, staircase=True
  ),
  "natural_exp": lambda step: train.natural_exp_decay(0.25, step, 10, 0.5),
  "piecewise": lambda step: train.piecewise_constant(
    step, [2, 4], [0.25, 0.125, 0.5]
  ),
  "polynomial": lambda step: train.polynomial_decay(
    0.25, step, 3, 0.01, power=2.0, cycle=True
  ),
  "inverse_time": lambda step: train.inverse_time_decay(0.25, step, 10, 0.5),
  "cosine": lambda step: train.cosine_decay(0.25, step, 30, alpha=0.125),
  "restarts": lambda step: train.cosine_decay_restarts(
    0.25, step, 3, t_mul=2.0, m_mul=0.75, alpha=0.125
  ),
}


@pytest.mark.parametrize(
  ("which", "schedule"),
  [
    *(("keras3", schedule) for schedule in SCHEDULES),
    ("tf_keras", "piecewise"),
  ],
)
def test_schedules(which: str, schedule: str) -> None:
  """Schedules become Keras schedules that start at the global step."""
  start = tf.Variable(1, dtype=tf.int64)
  ours = KERASES[which].CrossShardOptimizer(
    train.MomentumOptimizer(SCHEDULES[schedule](start), 0.5)
  )
  assert int(ours.iterations) == 1
  ours = type(ours).from_config(ours.get_config())
  ours.iterations.assign(1)
  step, variable, other = (tf.Variable(x) for x in (1, _first(), _first()))
  theirs = train.MomentumOptimizer(SCHEDULES[schedule](step), 0.5)
  apply = tf.function(lambda grad: ours.apply_gradients([(grad, variable)]))
  for i in range(STEPS):
    grad = _gradient(i, 0, sparse=False)
    apply(grad)
    theirs.apply_gradients([(grad, other)], step)
  np.testing.assert_allclose(variable, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  "form", ["variable", "function", "decay of a variable"]
)
@every_keras
def test_a_learning_rate_that_changes(which: str, form: str) -> None:
  """A callable learning rate is read in every step, and cannot be saved."""
  rate = tf.Variable(1.0)
  forms: dict[str, Any] = {
    "variable": rate,
    "function": lambda: float(rate),
    "decay of a variable": train.exponential_decay(
      rate, tf.Variable(0), 1, 1.0
    ),
  }
  ours = KERASES[which].CrossShardOptimizer(
    train.MomentumOptimizer(forms[form], 0.0)
  )
  weight = tf.Variable(0.0)
  ours.build([weight])

  @tf.function(autograph=False, jit_compile=form == "variable")
  def step() -> None:
    ours.apply_gradients([(tf.constant(1.0), weight)])

  for value in (1.0, 10.0, 100.0):
    rate.assign(value)
    step()
  assert float(weight) == -111.0
  with pytest.raises(TypeError, match=r"`learning_rate` is .* cannot be saved"):
    ours.get_config()


@pytest.mark.parametrize(
  ("which", "kind"),
  [
    ("keras3", "adam"),
    ("keras3", "nesterov"),
    ("tf_keras", "rmsprop"),
    ("tf_keras", "ftrl"),
  ],
)
def test_continues_after_a_round_trip(
  which: str, kind: str, tmp_path: Path
) -> None:
  def train_on(optimizer: Any, variable: Any, start: int) -> None:
    for i in range(start, start + 2):
      optimizer.apply_gradients([(_gradient(i, 0, False), variable)])

  first = KERASES[which].CrossShardOptimizer(KINDS[kind](0.05))
  second = pickle.loads(pickle.dumps(first))
  assert type(second.inner_optimizer) is type(first.inner_optimizer)
  variable = tf.Variable(_first())
  train_on(first, variable, 0)
  other = tf.Variable(variable)
  second.build([other])
  path = tf.train.Checkpoint(optimizer=first).write(str(tmp_path / "c"))
  tf.train.Checkpoint(optimizer=second).read(path).assert_consumed()
  train_on(first, variable, 2)
  train_on(second, other, 2)
  np.testing.assert_array_equal(variable, other)


@every_keras
def test_model_files(which: str, tmp_path: Path) -> None:
  library = importlib.import_module("keras" if which == "keras3" else which)
  layer = library.layers.Dense(1, use_bias=False)
  model = library.Sequential([library.layers.Input((2,)), layer])
  optimizer = KERASES[which].CrossShardOptimizer(KINDS["adam"](0.05))
  model.compile(optimizer, library.losses.MeanSquaredError())
  x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
  model.fit(x, y, verbose=0)
  # What Keras 3 loads from HDF5 cannot be trained on.
  files = ["a.keras", "b.h5"] if which == "tf_keras" else ["a.keras"]
  for file in files:
    model.save(tmp_path / file)
  model.fit(x, y, verbose=0)
  for file in files:
    again = library.models.load_model(tmp_path / file)
    assert type(again.optimizer.inner_optimizer).__name__ == "V1Adam"
    again.fit(x, y, verbose=0)
    np.testing.assert_array_equal(again.get_weights(), model.get_weights())


@pytest.mark.tf_keras_mode
def test_settings_of_cross_shard_optimizer_are_kept() -> None:
  """The reduction, name and groups of TensorFlow 1's CrossShardOptimizer."""
  reduction = tf.compat.v1.losses.Reduction
  for spelling, meaning in ((reduction.SUM, "sum"), (reduction.MEAN, "mean")):
    adam = train.AdamOptimizer(np.float64(0.5), name="train/Adam")
    optimizer = migration.from_v1(
      tpu.CrossShardOptimizer(adam, spelling, "a/b", [[0]])
    )
    assert optimizer.reduction == meaning
    assert optimizer.group_assignment == [[0]]
    assert optimizer.name == "a_b"  # Keras refuses slashes.
    assert optimizer.inner_optimizer.name == "train_Adam"
    assert float(optimizer.learning_rate) == 0.5
  alone = migration.from_v1(train.AdamOptimizer(tf.constant(0.5)))
  assert alone.reduction == "mean"


@pytest.mark.tf_keras_mode
def test_slots_of_used_optimizers_are_warned_about(
  caplog: pytest.LogCaptureFixture,
) -> None:
  opt = train.AdamOptimizer(0.5)
  migration.from_v1(opt)
  assert "was used before" not in caplog.text
  opt.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
  migration.from_v1(opt)
  assert "Adam was used before, but its slots are not" in caplog.text


def _graph_tensor() -> Any:
  with tf.Graph().as_default():
    return tf.constant(0.5)


@pytest.mark.parametrize(
  ("make", "error", "words"),
  [
    (lambda: "adam", TypeError, r"`opt` must be an optimizer of .* 'adam'"),
    (
      lambda: keras3.CrossShardOptimizer("sgd"),
      TypeError,
      r"`opt` must be .*CrossShardOptimizer.* as it is",
    ),
    (
      lambda: tpu.CrossShardOptimizer(
        tpu.CrossShardOptimizer(train.AdamOptimizer())
      ),
      ValueError,
      r"`opt` must not be or contain .* reduced twice",
    ),
    (
      lambda: type("Mine", (train.AdamOptimizer,), {})(),
      TypeError,
      r"be converted; got .*Mine 'Adam', but only Gradient.* a Keras optimizer",
    ),
    (
      lambda: train.AdamOptimizer(_graph_tensor()),
      ValueError,
      r"`learning_rate` is .*Tensor.* you create it eagerly",
    ),
    (
      lambda: train.AdamOptimizer(0.5, beta1=lambda: 0.5),
      ValueError,
      r"`beta_1` is .* Only the learning rate can change",
    ),
    (
      lambda: train.AdamOptimizer(
        train.linear_cosine_decay(0.5, tf.Variable(0), 10)
      ),
      TypeError,
      r"`learning_rate` is a LinearCosineDecay, which Keras does not have\.",
    ),
  ],
)
def test_unsupported_optimizers_raise_an_error(
  make: Callable[[], Any], error: type[Exception], words: str
) -> None:
  with pytest.raises(error, match=words):
    migration.from_v1(make())
