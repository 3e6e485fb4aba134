"""Optimizers of TensorFlow 1 become those of both Kerases.

The oracle is the optimizer of `tf.compat.v1.train` itself, which receives the
group's sum.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard import keras3, migration
from tf_cross_shard import tf_keras as keras2

train = tf.compat.v1.train
tpu = tf.compat.v1.tpu

SHAPE = (5, 2)
TOUCHED = 4  # Sparse gradients have rows among the first four.
STEPS = 6
KERASES: dict[str, Any] = {"keras3": keras3, "tf_keras": keras2}
every_keras = pytest.mark.parametrize("which", KERASES)

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
  variable = tf.Variable(_first())
  _train(opt, variable, members, sparse)
  return variable


def _train(
  opt: Any, variable: Any, members: Sequence[int], sparse: bool
) -> None:
  """Trains a variable on the sums of the members' gradients."""
  for step in range(STEPS):
    total = _sum([_gradient(step, i, sparse) for i in members])
    opt.apply_gradients([(total, variable)])


@pytest.mark.parametrize("kind", KINDS)
@every_keras
def test_steps_equal_version_1(
  which: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
  other = _trained(KINDS[kind](0.05), [0, 1], False)
  ours = KERASES[which].CrossShardOptimizer(KINDS[kind](0.05))
  variable = tf.Variable(_first())
  ours.build([variable])
  assert ("starts at 0" in caplog.text) == kind.startswith("rmsprop")
  if kind.startswith("rmsprop"):
    [slot, *_] = [n for n in ours.get_slot_names() if n == "velocity"]
    ours.get_slot(variable, slot).assign(tf.ones(SHAPE))
  _train(ours, variable, [0, 1], False)
  # TensorFlow 1's Adam rounds the powers of its betas in each step.
  np.testing.assert_allclose(variable, other, rtol=1e-5, atol=1e-5)
  assert (np.abs(variable.numpy() - _first()) > 1e-3).any(axis=1).all()


@pytest.mark.parametrize(
  ("kind", "lazy_rows"),
  [
    ("descent", False),
    ("momentum", True),
    ("nesterov", True),
    ("adagrad", True),
    ("adadelta", True),
    ("ftrl", True),
  ],
)
@every_keras
def test_rows_equal_version_1(which: str, kind: str, lazy_rows: bool) -> None:
  """Rows that do not occur do not change."""
  other = _trained(KINDS[kind](0.05), [0, 1], True)
  ours = KERASES[which].CrossShardOptimizer(
    KINDS[kind](0.05), lazy_rows=lazy_rows
  )
  variable = _trained(ours, [0, 1], True)
  np.testing.assert_allclose(variable, other, rtol=1e-5, atol=1e-5)
  moved = np.abs(variable.numpy() - _first()).max(axis=1)
  assert (moved[:TOUCHED] > 1e-3).all()
  assert (moved[TOUCHED:] == 0.0).all()


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
  make = train.GradientDescentOptimizer
  ours = KERASES[which].CrossShardOptimizer(make(SCHEDULES[schedule](start)))
  assert int(ours.iterations) == 1
  ours = type(ours).from_config(ours.get_config())
  ours.iterations.assign(1)
  step, variable, other = (tf.Variable(x) for x in (1, _first(), _first()))
  theirs = make(SCHEDULES[schedule](step))
  apply = tf.function(lambda grad: ours.apply_gradients([(grad, variable)]))
  for i in range(STEPS):
    grad = _gradient(i, 0, sparse=False)
    apply(grad)
    theirs.apply_gradients([(grad, other)], step)
  np.testing.assert_allclose(variable, other, rtol=1e-5, atol=1e-5)


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


@every_keras
def test_momentum_under_a_schedule_is_warned_about(
  which: str, caplog: pytest.LogCaptureFixture
) -> None:
  rate = SCHEDULES["exponential"](tf.Variable(0))
  make = KERASES[which].CrossShardOptimizer
  make(train.MomentumOptimizer(rate, 0.0))
  make(train.MomentumOptimizer(0.1, 0.5))
  make(train.AdamOptimizer(rate))
  assert not caplog.text
  make(train.MomentumOptimizer(rate, 0.5))
  assert "whose momentum adds up gradients times" in caplog.text


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
    (lambda: keras3.CrossShardOptimizer("sgd"), TypeError, "as it is"),
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
    *(
      (
        lambda rate=rate: train.AdamOptimizer(rate()),
        ValueError,
        r"learning_rate` is .*, which can change .*you create eagerly",
      )
      for rate in (
        _graph_tensor,
        lambda: tf.Variable(1.0),
        lambda: lambda: 1.0,
        lambda: train.exponential_decay(tf.Variable(1.0), tf.Variable(0), 1, 1),
      )
    ),
    (
      lambda: train.AdamOptimizer(0.5, beta1=lambda: 0.5),
      ValueError,
      r"`beta_1` is .*assign to the new optimizer's setting",
    ),
    (lambda: train.ProximalAdagradOptimizer(0.5), TypeError, "only Gradient"),
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
