"""Gradient accumulation, by `accumulate_steps` and by Keras 3.

Random programs combine it with all other settings.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import testbed, training
from tf_cross_shard import Models, keras3
from tf_cross_shard import tf_keras as ours_tf_keras

GROUPS = testbed.GROUPINGS["strided"]
STEPS = 2  # calls in a window
CALLS = 6
# [calls, replicas, 3] integers: sums are exact.
GRADS = np.random.default_rng(5).integers(-8, 9, (CALLS, 4, 3)).astype("f")
# What accumulates: the optimizer of Keras 3, which receives sums in every call,
# or CrossShardOptimizer for either Keras version.
WAYS = ("keras", "ours", "ours_tf_keras")


def momentum_sgd(library: Any, **own: Any) -> Any:
  return library.optimizers.SGD(0.125, momentum=0.5, **own)


def _settings(way: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
  """Returns a Keras, the settings of its optimizer, and our settings."""
  if way == "keras":
    return keras, {"gradient_accumulation_steps": STEPS}, {}
  library = tf_keras if way == "ours_tf_keras" else keras
  return library, {}, {"accumulate_steps": STEPS}


def build(
  way: str,
  make: Any = momentum_sgd,
  strategy: Any = None,
  dtype: str = "float32",
  **settings: Any,
) -> tuple[list[Any], Any]:
  """Returns a weight of zeros, in a list, and its optimizer."""
  library, own, ours = _settings(way)
  return training.build(
    "keras" if library is keras else "tf_keras",
    functools.partial(make, **own),
    {"weight": np.zeros(3, dtype)},
    strategy,
    **{"group_assignment": GROUPS, **ours, **settings},
  )


def windows(
  members: Sequence[int], grads: np.ndarray = GRADS
) -> list[np.ndarray]:
  """The group's gradient in each window."""
  sums = grads[:, list(members)].sum(axis=1)
  return [sums[i : i + STEPS].mean(0) for i in range(0, len(sums), STEPS)]


def momentum(grads: Sequence[np.ndarray]) -> np.ndarray:
  """SGD(0.125, momentum=0.5) in NumPy."""
  weight, velocity = np.zeros(3), np.zeros(3)
  for grad in grads:
    velocity = 0.5 * velocity - 0.125 * grad
    weight = weight + velocity
  return weight


@pytest.mark.parametrize("way", WAYS[1:])
def test_one_step_per_window(way: str) -> None:
  weights, optimizer = build(way)
  for call in range(CALLS):
    training.train(weights, optimizer, [GRADS], [call], mode="eager")
    done = (call + 1) // STEPS
    assert int(optimizer.iterations.numpy()) == done
    for members in GROUPS:
      expected = momentum(windows(members)[:done])
      for member in members:
        copy = testbed.copies(weights[0])[member]
        np.testing.assert_array_equal(copy, expected)


@pytest.mark.parametrize("way", WAYS[:2])
def test_each_call_is_clipped_on_its_own(way: str) -> None:
  weights, optimizer = build(way, clipvalue=2.0)
  training.train(weights, optimizer, [GRADS], mode="eager")
  training.check_groups(
    training.by_replica(weights),
    GROUPS,
    lambda members: [momentum(windows(members, np.clip(GRADS, -2, 2)))],
  )


def test_as_plain_keras_accumulates() -> None:
  make = functools.partial(
    momentum_sgd,
    clipvalue=8.0,
    weight_decay=0.25,
    use_ema=True,
    ema_momentum=0.5,
    ema_overwrite_frequency=2,
  )
  weights, optimizer = build("keras", make)
  training.train(weights, optimizer, [GRADS], mode="eager")

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    alone = training.make_weights("keras", {"weight": np.zeros(3, "f")})
    plain = make(keras, gradient_accumulation_steps=STEPS)
    training.train_plain(alone, plain, [GRADS], members)
    return [each.numpy() for each in (*alone, *plain.variables)]

  held = training.by_replica([*weights, *optimizer.variables])
  training.check_groups(held, GROUPS, expected)


@pytest.mark.parametrize(
  ("way", "rates"),
  [
    ("keras", [0.5, 0.125]),
    ("ours", [1.0, 0.5]),
    ("ours_tf_keras", [1.0, 0.5]),
  ],
)
def test_what_a_schedule_counts(way: str, rates: list[float]) -> None:
  """Calls, if Keras accumulates; steps, if CrossShardOptimizer does."""
  library, own, options = _settings(way)
  package = ours_tf_keras if library is tf_keras else keras3
  decay = library.optimizers.schedules.PiecewiseConstantDecay
  schedule = decay([0, 1, 2], [1.0, 0.5, 0.25, 0.125])
  sgd = library.optimizers.SGD(schedule, **own)
  optimizer = package.CrossShardOptimizer(sgd, **options)
  weight = tf.Variable(0.0)
  for _ in range(2 * STEPS):
    optimizer.apply_gradients([(tf.constant(1.0), weight)])
  assert weight.numpy() == -sum(rates)


@pytest.mark.parametrize(
  ("way", "dtype"), [("ours", "float32"), ("ours_tf_keras", "float16")]
)
def test_nonfinite_window_is_skipped(way: str, dtype: str) -> None:
  bad = GRADS.copy()
  bad[2, 3] = np.nan  # The second window's first call, in the second group.
  weights, optimizer = build(way, dtype=dtype, skip_nonfinite=True)
  training.train(weights, optimizer, [bad], mode="eager")

  def expected(members: Sequence[int]) -> list[Any]:
    skipped = 3 in members
    kept = windows(members)[:: 2 if skipped else 1]
    return [momentum(kept), int(skipped)]

  held = training.by_replica([*weights, optimizer.skipped_steps])
  training.check_groups(held, GROUPS, expected)


@training.in_both
def test_a_loss_scale_changes_once_per_window(which: str) -> None:
  library, package = training.KERASES[which]
  weight = testbed.variable(np.zeros(3, "f"), library=library)
  scaled = library.mixed_precision.LossScaleOptimizer(
    momentum_sgd(library), initial_scale=4.0
  )
  ours = package.CrossShardOptimizer(scaled, "sum", accumulate_steps=STEPS)
  ours.build([weight])
  grads = GRADS[:, 0].copy()
  grads[2] = np.inf
  if which == "keras":  # tf_keras leaves the loss scale to the user.
    grads *= np.array([4, 4, 4, 4, 2, 2])[:, np.newaxis]
  for row in grads:
    ours.apply_gradients([(tf.constant(row), weight)])
  scale = scaled.dynamic_scale if which == "keras" else scaled.loss_scale
  assert float(scale) == 2
  first, _, third = windows([0])
  np.testing.assert_array_equal(weight.numpy(), momentum([first, third]))


@pytest.mark.parametrize(
  ("mode", "has_gradient"),
  [("eager", [True, False]), ("function", [False, True])],
)
def test_none_in_some_calls_is_an_error(
  mode: str, has_gradient: list[bool]
) -> None:
  """The state of the window stays as it was."""
  weights = [keras.Variable(0.0), keras.Variable(0.0)]
  optimizer = keras3.CrossShardOptimizer(
    keras.optimizers.SGD(1.0), accumulate_steps=3
  )
  optimizer.build(weights)

  def call(has: bool) -> None:
    grads = [tf.constant(3.0), tf.constant(3.0) if has else None]
    optimizer.apply_gradients(list(zip(grads, weights, strict=True)))

  run = call if mode == "eager" else tf.function(call, autograph=False)
  first, second = has_gradient
  run(first)
  with pytest.raises(ValueError, match="Use zeros instead of None"):
    run(second)
  run(first)
  assert [float(weight) for weight in weights] == [0.0, 0.0]
  run(first)
  assert [float(weight) for weight in weights] == [-3.0, -3.0 * first]


def test_none_in_all_calls_reaches_the_wrapped_optimizer() -> None:
  """Keras warns of it, and does not decay the weight."""
  weights = [keras.Variable(0.0), keras.Variable(3.0, name="unused")]
  optimizer = keras3.CrossShardOptimizer(
    keras.optimizers.SGD(1.0, weight_decay=0.5), accumulate_steps=2
  )
  pairs = [(tf.constant(1.0), weights[0]), (None, weights[1])]
  optimizer.apply_gradients(pairs)
  with pytest.warns(UserWarning, match="do not exist for .*unused"):
    optimizer.apply_gradients(pairs)
  assert [float(weight) for weight in weights] == [-1.0, 3.0]


# ----------------------------------------------------------- on real engines


@pytest.mark.parametrize(
  ("engine", "way"), [("mirrored", "keras"), ("virtual", "ours")]
)
def test_engines_stop_and_resume_within_a_window(
  engine: str, way: str, tmp_path: pathlib.Path
) -> None:
  strategy = testbed.STRATEGIES[engine]()
  make = functools.partial(build, way, strategy=strategy)
  train = functools.partial(training.train, strategy=strategy)
  weights, optimizer = make()
  train(weights, optimizer, [GRADS[:3]])
  Models(weights, optimizer).assert_in_sync()
  Models(weights, optimizer).save(tmp_path / "state")
  again, other = make()
  Models(again, other).restore(tmp_path / "state")
  train(again, other, [GRADS[3:]])
  found = Models(optimizer=other).values(again[0])
  for value, members in zip(found, GROUPS, strict=True):
    np.testing.assert_array_equal(value, momentum(windows(members)))


def test_collectives_are_within_the_condition() -> None:
  """TensorFlow traces both branches of the condition."""
  [weight], optimizer = build("ours")

  @tf.function(autograph=False)
  def step() -> None:
    pairs = [(testbed.mark() * tf.ones(3), weight)]
    testbed.mirrored().run(lambda: optimizer.apply_gradients(pairs))

  definition = step.get_concrete_function().graph.as_graph_def()
  outside = {node.op for node in definition.node}
  assert "If" in outside or "StatelessIf" in outside
  assert not any("Collective" in op or op == "AddN" for op in outside)
  inside = {n.op for f in definition.library.function for n in f.node_def}
  assert any("CollectiveReduce" in op for op in inside)


def test_a_restored_window_may_be_longer_than_the_new_ones(
  tmp_path: pathlib.Path,
) -> None:
  """The next call ends the window, and applies the mean over its calls."""
  weight = tf.Variable(0.0)
  for steps, grads in ((4, [1.0, 2.0, 4.0]), (2, [5.0, 1.0, 3.0])):
    optimizer = keras3.CrossShardOptimizer(
      keras.optimizers.SGD(1.0), accumulate_steps=steps
    )
    optimizer.build([weight])
    if steps == 2:
      Models([weight], optimizer).restore(tmp_path / "state")
    values = []
    for grad in grads:
      optimizer.apply_gradients([(tf.constant(grad), weight)])
      values.append(float(weight.numpy()))
    if steps == 4:
      assert values == [0.0, 0.0, 0.0]
      Models([weight], optimizer).save(tmp_path / "state")
  # (1 + 2 + 4 + 5) / 4, and then (1 + 3) / 2.
  assert values == [-3.0, -3.0, -5.0]


# --------------------------------------------------------------------- errors


def test_both_accumulation_arguments_raise_value_error() -> None:
  opt = keras.optimizers.SGD(gradient_accumulation_steps=2)
  with pytest.raises(ValueError, match="Set only one of these"):
    keras3.CrossShardOptimizer(opt, accumulate_steps=2)
