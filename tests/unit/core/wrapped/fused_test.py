"""Tests that updates by kernels equal Keras' updates."""

import copy
import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import oracle, testbed
from tf_cross_shard import keras3
from tf_cross_shard import tf_keras as ours_tf_keras

KERASES = {"keras": (keras, keras3), "tf_keras": (tf_keras, ours_tf_keras)}
STEPS = 200
# Class, settings exact in every dtype where that is possible, formula, kernel.
FUSED: dict[str, tuple[str, dict[str, Any], oracle.Formula, str]] = {
  "SGD": ("SGD", {}, oracle.sgd, "GradientDescent"),
  "momentum": ("SGD", {"momentum": 0.5}, oracle.sgd, "KerasMomentum"),
  "nesterov": (
    "SGD",
    {"momentum": 0.75, "nesterov": True},
    oracle.sgd,
    "KerasMomentum",
  ),
  "Adam": ("Adam", {}, oracle.adam, "Adam"),
  "AdamW": ("AdamW", {"weight_decay": 0.25}, oracle.adam, "Adam"),
  "Adamax": ("Adamax", {}, oracle.adamax, "AdaMax"),
  "RMSprop": ("RMSprop", {"momentum": 0.5}, oracle.rmsprop, "RMSProp"),
  "centered": (
    "RMSprop",
    {"momentum": 0.5, "centered": True},
    oracle.rmsprop,
    "CenteredRMSProp",
  ),
  "Adadelta": ("Adadelta", {}, oracle.adadelta, "Adadelta"),
  "Ftrl": ("Ftrl", {}, oracle.ftrl, "FtrlV2"),
  "Ftrl's settings": (
    "Ftrl",
    {
      "learning_rate_power": -0.75,
      "l1_regularization_strength": 0.5,
      "l2_regularization_strength": 0.25,
      "l2_shrinkage_regularization_strength": 0.125,
      "beta": 0.5,
    },
    oracle.ftrl,
    "FtrlV2",
  ),
}
RATE = 0.0625


def kernels_in(function: Any, *args: Any) -> set[str]:
  """The kernels that a traced function and those in it run."""
  graph = function.get_concrete_function(*args).graph
  names = {operation.type for operation in graph.get_operations()}
  for called in graph.as_graph_def().library.function:
    names |= {node.op for node in called.node_def}
  prefix = "ResourceApply"
  return {name.removeprefix(prefix) for name in names if prefix in name}


def gradients(dtype: str) -> oracle.Numbers:
  """[steps, replicas, 24] sixteenths, whose sums are exact."""
  rng = np.random.default_rng(3)
  parts = rng.integers(-24, 25, size=(STEPS, testbed.REPLICAS, 24)) / 16
  return parts.astype(dtype)


def expected(name: str, sums: oracle.Numbers) -> oracle.Numbers:
  """The formula in NumPy's longest floats."""
  _, settings, formula, _ = FUSED[name]
  settings = {"learning_rate": RATE, **settings}
  slots = oracle.first_slots(formula, np.zeros(24, np.longdouble))
  weight = (
    np.linspace(-1.4375, 1.4375, 24).astype("float32").astype(np.longdouble)
  )
  for t, grad in enumerate(sums.astype(np.longdouble), 1):
    weight = formula(settings, weight, grad, t, slots)
  return weight


def first_weight(library: Any, dtype: str) -> Any:
  value = np.linspace(-1.4375, 1.4375, 24).astype("float32").astype(dtype)
  kind = getattr(library, "Variable", tf.Variable)
  return kind(value, dtype=dtype)


def plain(name: str, library: Any) -> Any:
  kind, settings, _, _ = FUSED[name]
  return getattr(library.optimizers, kind)(RATE, **settings)


def train(optimizer: Any, weight: Any, grads: Any, strategy: Any = None) -> Any:
  """Takes a step with each replica's row of each of `grads`; returns it."""
  scope = strategy or tf.distribute.get_strategy()
  with scope.scope():
    optimizer.build([weight])

  @tf.function(autograph=False)
  def step(grads: tf.Tensor) -> None:
    scope.run(
      lambda: optimizer.apply_gradients([(grads[testbed.replica_id()], weight)])
    )

  for row in grads:
    step(tf.constant(row))
  return step


def error(weight: oracle.Numbers, name: str, sums: oracle.Numbers) -> float:
  """Root mean square of the differences to the formula."""
  difference = weight.astype(np.longdouble) - expected(name, sums)
  return float(np.sqrt(np.mean(difference**2)))


@pytest.mark.parametrize(
  ("name", "which", "dtype"),
  [
    (name, which, ("float32", "float64")[(i + j) % 2])
    for i, name in enumerate(FUSED)
    for j, which in enumerate(KERASES)
  ],
)
def test_kernels_are_as_accurate_as_keras(
  name: str, which: str, dtype: str
) -> None:
  """Compares with the formula, and after a few steps with plain Keras."""
  library, package = KERASES[which]
  grads = gradients(dtype)[:, :1]
  errors, after_few = [], []
  for is_fused in (False, True):
    weight = first_weight(library, dtype)
    optimizer = package.CrossShardOptimizer(
      plain(name, library), fused_update=None if is_fused else False
    )
    step = train(optimizer, weight, grads[:5])
    after_few.append(weight.numpy())
    for row in grads[5:]:
      step(tf.constant(row))
    is_v1_slot = which == "tf_keras" and name == "SGD"
    kernel = "KerasMomentum" if is_v1_slot else FUSED[name][3]
    found = kernels_in(step, tf.constant(grads[0]))
    assert found == ({kernel} if is_fused else set())
    errors.append(error(weight.numpy(), name, grads[:, 0]))
  assert errors[1] <= 1.5 * errors[0] < 1e-4
  bound = 1e-13 if dtype == "float64" else 1e-5
  np.testing.assert_allclose(*after_few, rtol=0, atol=bound)


def _moving_average() -> Any:
  return tf_keras.optimizers.SGD(
    RATE,
    momentum=0.5,
    use_ema=True,
    ema_momentum=0.5,
    ema_overwrite_frequency=3,
  )


def _loss_scaled() -> Any:
  return tf_keras.mixed_precision.LossScaleOptimizer(
    tf_keras.optimizers.SGD(RATE, momentum=0.5), initial_scale=4.0
  )


@pytest.mark.parametrize("make", [_moving_average, _loss_scaled])
def test_tf_keras_clipping_decay_and_averages_with_kernels(make: Any) -> None:
  """The tests of clipping, accumulation and weight decay check Keras 3.

  Kernels are the default, and a few steps are exact in any order.
  """
  grads = gradients("float32")[:5, :1].copy()
  if make is _loss_scaled:
    grads[2] = np.inf
  states = []
  for is_fused in (False, None):
    weight = first_weight(tf_keras, "float32")
    optimizer = ours_tf_keras.CrossShardOptimizer(make(), fused_update=is_fused)
    step = train(optimizer, weight, grads)
    assert bool(kernels_in(step, tf.constant(grads[0]))) == (is_fused is None)
    states.append([each.numpy() for each in (weight, *optimizer.variables)])
  for one, other in zip(*states, strict=True):
    np.testing.assert_array_equal(one, other)


def test_an_update_step_of_the_object_runs() -> None:
  weight, optimizer = tf.Variable([1.0, 2.0]), keras.optimizers.SGD(1.0)

  def update_step(gradient: Any, variable: Any, rate: Any) -> None:
    variable.assign_add(gradient * rate)

  optimizer.update_step = update_step
  ours = keras3.CrossShardOptimizer(optimizer)
  ours.apply_gradients([(tf.constant([3.0, 4.0]), weight)])
  assert weight.numpy().tolist() == [4.0, 6.0]
  assert optimizer.update_step is update_step


@pytest.mark.parametrize("which", KERASES)
def test_the_encapsulated_optimizer_stays_as_it_was(which: str) -> None:
  library, package = KERASES[which]
  optimizer, weight = (
    library.optimizers.Adam(),
    first_weight(library, "float32"),
  )
  ours = package.CrossShardOptimizer(optimizer)
  ours.build([weight])
  names, config = set(vars(optimizer)), copy.deepcopy(optimizer.get_config())
  ours.apply_gradients([(tf.ones(24), weight)])
  with pytest.raises(tf.errors.InvalidArgumentError):
    ours._wrapped.apply([tf.ones(23)], [weight])
  assert set(vars(optimizer)) - {"_current_learning_rate"} == names - {
    "_current_learning_rate"
  }
  assert optimizer.get_config() == config


def test_compiled_by_xla() -> None:
  states = []
  for name in ("Adam", "centered", "Ftrl"):
    for is_compiled in (False, True):
      weight = first_weight(keras, "float32")
      optimizer = keras3.CrossShardOptimizer(
        plain(name, keras), fused_update=True
      )
      optimizer.build([weight])
      step = functools.partial(
        optimizer.apply_gradients, [(tf.ones(24), weight)]
      )
      tf.function(step, jit_compile=is_compiled, autograph=False)()
      states.append(weight.numpy())
    np.testing.assert_allclose(states[-1], states[-2], rtol=0, atol=1e-6)
    assert np.abs(states[-1] - first_weight(keras, "float32")).max() > 1e-5


def _take_steps(
  optimizer: Any, weights: list[Any], grads: list[list[oracle.Numbers]]
) -> tuple[list[list[oracle.Numbers]], set[str]]:
  """Returns each weight with its slots, and the kernels of a step."""
  optimizer.build(weights)

  @tf.function(autograph=False)
  def step(*grads: tf.Tensor) -> None:
    optimizer.apply_gradients(list(zip(grads, weights, strict=True)))

  for row in grads:
    step(*map(tf.constant, row))
  values = [v.numpy() for v in (*weights, *optimizer.variables)]
  return [
    [v for v in values if (v.shape, v.dtype) == (w.shape, w.dtype)]
    for w in values[: len(weights)]
  ], kernels_in(step, *map(tf.constant, grads[0]))


@pytest.mark.parametrize("which", KERASES)
def test_adam_in_parts_equals_keras_to_the_bit(which: str) -> None:
  """In functions, the parts update variables of 65 to 65,535 elements."""
  library, package = KERASES[which]
  kind = getattr(library, "Variable", tf.Variable)
  cases = [
    (size, dtype)
    for size in (64, 65, 4096, 65_535, 65_536)
    for dtype in ("float32", "float64")
  ]
  rng, found = np.random.default_rng(1), []
  grads = [[rng.normal(size=n).astype(d) for n, d in cases] for _ in range(9)]
  for is_fused in (False, None):
    weights = [kind(np.linspace(-1, 1, n), dtype=d) for n, d in cases]
    optimizer = package.CrossShardOptimizer(
      plain("AdamW", library), fused_update=is_fused
    )
    found.append(_take_steps(optimizer, weights, grads))
  (expected, _), (values, used) = found
  assert used == {"Adam", "GradientDescent", "AdagradV2"}
  rows = optimizer.describe().rows()
  for (size, _), row, ones, others in zip(
    cases, rows, values, expected, strict=True
  ):
    is_in_parts = size not in (64, 65_536)
    name = "Adam in parts" if is_in_parts else "ResourceApplyAdam"
    assert row["updated_by"] == name
    assert ("among threads" in row["reason"]) is is_in_parts
    assert len(ones) == 3
    for one, other in zip(ones, others, strict=True):
      bound = 0 if is_in_parts else 1e-5
      np.testing.assert_allclose(one, other, rtol=0, atol=bound)
      assert np.ptp(one) > 1e-4


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_adam_in_parts_with_betas_of_another_dtype(dtype: str) -> None:
  other = {"float32": tf.float64, "float64": tf.float32}[dtype]
  results = []
  for size in (3, 100):  # The kernel, and its parts.
    weight = keras.Variable(np.ones(size), dtype=dtype)
    adam = keras.optimizers.Adam(
      0.1, beta_1=tf.constant(0.5, other), beta_2=tf.constant(0.75, other)
    )
    optimizer = keras3.CrossShardOptimizer(adam)
    _take_steps(optimizer, [weight], [[np.ones(size, dtype)]] * 2)
    results.append(weight.numpy()[:3])
  np.testing.assert_allclose(*results, rtol=0, atol=1e-6)
  assert (results[0] < 0.9).all()


def test_eager_calls_use_adams_kernel_for_every_size(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """An eager call has a cost for each operation."""
  done: list[Any] = []
  monkeypatch.setattr(
    tf.raw_ops, "ResourceApplyAdam", lambda **given: done.append(given["grad"])
  )
  weight = keras.Variable(np.ones(4096, "f"))
  optimizer = keras3.CrossShardOptimizer(keras.optimizers.Adam())
  optimizer.apply_gradients([(tf.ones(4096), weight)])
  assert len(done) == 1
