"""Gradient accumulation, by `accumulate_steps` and by Keras 3."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import fake_engine, testbed, training
from tf_cross_shard import Models, keras3
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import tf_keras as ours_tf_keras

GROUPS = fake_engine.PAIRS.to_lists()
STEPS = 2  # calls in a window
CALLS = 6
# [calls, replicas, 3] integers: sums are exact.
GRADS = np.random.default_rng(5).integers(-8, 9, (CALLS, 4, 3)).astype("f")
BAD = GRADS.copy()
BAD[2, 3] = np.nan  # The second window's first call, in the second group.
# What accumulates: the optimizer of Keras 3, which receives sums in every call,
# or CrossShardOptimizer for either Keras version.
WAYS = ("keras", "ours", "ours_tf_keras")
ZEROS = np.zeros(3, "f")
WINDOWS = ([0, 1, 2], [0, 2])  # of each group, with `BAD`


def momentum_sgd(library: Any, **own: Any) -> Any:
  return library.optimizers.SGD(0.125, momentum=0.5, **own)


def _settings(way: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
  """Returns a Keras, the settings of its optimizer, and our settings."""
  if way == "keras":
    return keras, {"gradient_accumulation_steps": STEPS}, {}
  library = tf_keras if way == "ours_tf_keras" else keras
  return library, {}, {"accumulate_steps": STEPS}


def replicas(
  way: str,
  make_opt: Callable[..., Any] = momentum_sgd,
  initial: Any = ZEROS,
  **settings: Any,
) -> list[fake_engine.Replica]:
  """Replicas with a weight each, by default of zeros."""
  library, own, ours = _settings(way)
  return fake_engine.replicas(
    functools.partial(make_opt, library, **own),
    [np.array(initial)],
    library,
    **ours,
    **settings,
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


def check(
  trained: Sequence[fake_engine.Replica],
  expected: Callable[[int, Sequence[int]], np.ndarray],
) -> None:
  """Compares every replica's weight with that of its group."""
  for group, members in enumerate(GROUPS):
    for member in members:
      np.testing.assert_array_equal(
        trained[member].values[0], expected(group, members)
      )


@pytest.mark.parametrize("way", WAYS[1:])
def test_one_step_per_window(way: str) -> None:
  """Replicas exchange gradients only in the last call of a window."""
  trained = replicas(way)
  for call in range(CALLS):
    fake_engine.train(trained, [GRADS[call : call + 1]])
    done = (call + 1) // STEPS
    for replica in trained:
      assert int(replica.inner.iterations()) == done
      assert len(replica.engine.sent) == done
    check(trained, lambda _, m, done=done: momentum(windows(m)[:done]))


@pytest.mark.parametrize("way", WAYS[:2])
def test_each_call_is_clipped_on_its_own(way: str) -> None:
  trained = replicas(way, clipvalue=2.0)
  fake_engine.train(trained, [GRADS])
  clipped = np.clip(GRADS, -2, 2)
  assert (clipped != GRADS).any()
  check(trained, lambda _, members: momentum(windows(members, clipped)))


def test_as_plain_keras_accumulates() -> None:
  opt = functools.partial(
    momentum_sgd,
    clipvalue=8.0,
    weight_decay=0.25,
    use_ema=True,
    ema_momentum=0.5,
    ema_overwrite_frequency=2,
  )
  trained = replicas("keras", opt)
  fake_engine.train(trained, [GRADS])
  for members in GROUPS:
    alone = keras.Variable(np.zeros(3, "f"), name="weight")
    plain = opt(keras, gradient_accumulation_steps=STEPS)
    plain.build([alone])
    for rows in GRADS:
      plain.apply([tf.constant(rows[members].sum(0))], [alone])
    for member in members:
      replica = trained[member]
      for ours, theirs in zip(
        [*replica.variables, *replica.opt.variables],
        [alone, *plain.variables],
        strict=True,
      ):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


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
  trained = replicas(way, initial=np.zeros(3, dtype), skip_nonfinite=True)
  fake_engine.train(trained, [BAD.astype(dtype)])
  check(
    trained,
    lambda g, members: momentum([windows(members)[i] for i in WINDOWS[g]]),
  )
  assert [int(each.step.guard.skipped_steps) for each in trained] == [
    0,
    1,
    0,
    1,
  ]


def test_averages_move_once_per_step() -> None:
  """Moving averages change once per step, and not in a skipped window."""

  def opt(library: Any) -> Any:
    return library.optimizers.SGD(0.125, use_ema=True, ema_momentum=0.5)

  trained = replicas("ours", opt, skip_nonfinite=True)
  fake_engine.train(trained, [BAD])
  for group, members in enumerate(GROUPS):
    value, expected = np.zeros(3), np.zeros(3)
    for place in WINDOWS[group]:
      value = value - 0.125 * windows(members)[place]
      # Keras takes the first value as it is.
      expected = value if place == 0 else 0.5 * expected + 0.5 * value
    for member in members:
      [average] = trained[member].inner.averages
      np.testing.assert_array_equal(average.numpy(), expected)


def test_a_loss_scale_within_changes_once_per_window() -> None:
  def opt(library: Any, **own: Any) -> Any:
    inner = momentum_sgd(library, **own)
    return library.optimizers.LossScaleOptimizer(inner, 4.0)

  trained = replicas("ours", opt)
  grads = GRADS * 4
  grads[2, 3] = np.inf
  fake_engine.train(trained, [grads])
  scales = [float(each.opt.dynamic_scale.numpy()) for each in trained]
  assert scales == [4, 2, 4, 2]
  # The second group's last gradients are of a loss scaled by 4.
  factors = ([1, 1, 1], [1, 0, 2])

  def expected(group: int, members: Sequence[int]) -> np.ndarray:
    pairs = zip(windows(members), factors[group], strict=True)
    return momentum([grad * factor for grad, factor in pairs if factor])

  check(trained, expected)


def test_a_loss_scale_of_tf_keras_changes_once_per_window() -> None:
  """Our optimizer receives unscaled gradients."""
  weight = tf.Variable(np.zeros(3, "f"))
  scaled = tf_keras.mixed_precision.LossScaleOptimizer(
    momentum_sgd(tf_keras), initial_scale=4.0
  )
  ours = ours_tf_keras.CrossShardOptimizer(
    scaled, "sum", accumulate_steps=STEPS
  )
  ours.build([weight])
  grads = GRADS[:, 0].copy()
  grads[2] = np.inf
  for row in grads:
    ours.apply_gradients([(tf.constant(row), weight)])
  assert float(scaled.loss_scale) == 2
  first, _, third = windows([0])
  np.testing.assert_array_equal(weight.numpy(), momentum([first, third]))


@pytest.mark.parametrize("way", WAYS[:2])
def test_rows(way: str) -> None:
  def opt(library: Any, **own: Any) -> Any:
    return library.optimizers.SGD(0.125, **own)

  def to_grad(row: np.ndarray) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.ones([2, 1]), tf.constant(row), [3, 1])

  trained = replicas(way, opt, initial=np.zeros([3, 1], "f"))
  ids = np.array([[[0, 0], [1, 0], [2, 0], [0, 0]]] * STEPS)
  fake_engine.train(trained, [ids], to_grad)
  for replica, counts in ((0, [3, 0, 1]), (1, [3, 1, 0])):
    np.testing.assert_array_equal(
      trained[replica].values[0][:, 0], -0.125 * np.array(counts)
    )


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("has_gradient", [[True, False], [False, True]])
def test_none_in_some_calls_is_an_error(
  has_gradient: list[bool], mode: str
) -> None:
  """The state of the window stays as it was."""
  [replica] = fake_engine.replicas(
    lambda: keras.optimizers.SGD(1.0),
    [0.0, 0.0],
    groups=groups_lib.singletons(1),
    accumulate_steps=3,
  )
  one = tf.constant(1.0)
  first, second = ([one, one if has else None] for has in has_gradient)
  call = replica.apply
  if mode == "function":
    call = tf.function(call, autograph=False)
  call(first)
  state = replica.step.window.variables
  before = [float(each.numpy()) for each in state]
  assert before == [1.0, 1.0, float(has_gradient[0])]
  with pytest.raises(ValueError, match="Use zeros instead of None"):
    call(second)
  assert [float(each.numpy()) for each in state] == before


def test_none_in_all_calls_reaches_the_wrapped_optimizer() -> None:
  """Keras warns of it, and does not decay the weight."""
  [replica] = fake_engine.replicas(
    lambda: keras.optimizers.SGD(1.0, weight_decay=0.5),
    [0.0, 3.0],
    groups=groups_lib.singletons(1),
    accumulate_steps=2,
  )
  grads = [tf.constant(1.0), None]
  replica.apply(grads)
  with pytest.warns(UserWarning, match="do not exist for .*weight_1"):
    replica.apply(grads)
  assert [float(v) for v in replica.values] == [-1.0, 3.0]


# ----------------------------------------------------------- on real engines


@pytest.mark.parametrize(
  ("engine", "way"), [("mirrored", "keras"), ("virtual", "ours")]
)
def test_engines_stop_and_resume_within_a_window(
  engine: str, way: str, tmp_path: pathlib.Path
) -> None:
  strategy = testbed.STRATEGIES[engine]()
  _, own, options = _settings(way)

  def make() -> tuple[list[Any], Any]:
    return training.build(
      *("keras", functools.partial(momentum_sgd, **own)),
      *({"weight": np.zeros(3, "f")}, strategy),
      group_assignment=GROUPS,
      **options,
    )

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
  [weight], optimizer = training.build(
    *("keras", momentum_sgd, {"weight": np.zeros(3, "f")}), accumulate_steps=2
  )

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
