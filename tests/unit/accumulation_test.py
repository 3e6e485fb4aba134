"""Gradients added up over several calls, reduced and applied in the last."""

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import testbed
from tf_cross_shard import keras3, replica_state
from tf_cross_shard import tf_keras as ours_tf_keras

GROUPS = [[0, 2], [1, 3]]
STEPS = 2  # calls in a window
CALLS = 6
# [calls, replicas, 3] integers: sums are exact.
GRADS = np.random.default_rng(5).integers(-8, 9, (CALLS, 4, 3)).astype("f")
# Who accumulates: the optimizer of Keras 3, or ours in either Keras.
_ZEROS = np.zeros(3, "f")
WAYS = ("keras", "ours", "ours_tf_keras")


def make(
  way: str,
  make_opt: Callable[..., Any] = lambda library, **own: library.optimizers.SGD(
    0.125, momentum=0.5, **own
  ),
  strategy: Any = None,
  initial: Any = _ZEROS,
  **options: Any,
) -> tuple[Any, Any]:
  """A weight, by default of zeros, and an optimizer of groups, built."""
  library, package = keras, keras3
  if way == "ours_tf_keras":
    library, package = tf_keras, ours_tf_keras
  own = {"gradient_accumulation_steps": STEPS} if way == "keras" else {}
  if way != "keras":
    options["accumulate_steps"] = STEPS
  options.setdefault("group_assignment", GROUPS)
  with (strategy or testbed.mirrored()).scope():
    weight = testbed.variable(initial, "weight", library)
    optimizer = package.CrossShardOptimizer(
      make_opt(library, **own), "sum", **options
    )
    optimizer.build([weight])
  return weight, optimizer


def stepper(
  weight: Any, optimizer: Any, strategy: Any = None, eager: bool = False
) -> Callable[[Any], None]:
  """A function that steps with each replica's row."""
  strategy = strategy or testbed.mirrored()

  def step(grads: tf.Tensor) -> None:
    def replica_step() -> None:
      grad = grads[testbed.replica_id()]
      optimizer.apply_gradients([(grad, weight)])

    strategy.run(replica_step)

  call = step if eager else tf.function(step, autograph=False)
  return lambda rows: call(tf.constant(rows))


def windows(members: list[int], calls: int = CALLS) -> list[np.ndarray]:
  """The group's gradient in each window."""
  sums = GRADS[:calls, members].sum(axis=1)
  return [sums[i : i + STEPS].mean(0) for i in range(0, calls, STEPS)]


def momentum(grads: list[np.ndarray]) -> np.ndarray:
  """SGD(0.125, momentum=0.5) in NumPy."""
  weight, velocity = np.zeros(3), np.zeros(3)
  for grad in grads:
    velocity = 0.5 * velocity - 0.125 * grad
    weight = weight + velocity
  return weight


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_one_step_per_window(way: str, eager: bool) -> None:
  weight, optimizer = make(way)
  step = stepper(weight, optimizer, eager=eager)
  for call, rows in enumerate(GRADS, 1):
    step(rows)
    assert int(optimizer.iterations.numpy()) == call // STEPS
    done = call // STEPS * STEPS
    for members in GROUPS:
      for member in members:
        np.testing.assert_array_equal(
          testbed.copies(weight)[member], momentum(windows(members, done))
        )


@pytest.mark.parametrize("way", WAYS)
def test_nothing_travels_in_the_other_calls(way: str) -> None:
  weight, optimizer = make(way)
  strategy = testbed.mirrored()

  @tf.function(autograph=False)
  def step() -> None:
    strategy.run(lambda: optimizer.apply_gradients([(tf.ones(3), weight)]))

  definition = step.get_concrete_function().graph.as_graph_def()
  outside = {node.op for node in definition.node}
  assert "If" in outside or "StatelessIf" in outside
  assert not any("Collective" in op or op == "AddN" for op in outside)
  inside = {n.op for f in definition.library.function for n in f.node_def}
  assert any("CollectiveReduce" in op for op in inside)


@pytest.mark.parametrize("way", WAYS)
def test_each_call_is_clipped_on_its_own(way: str) -> None:
  weight, optimizer = make(way, clipvalue=2.0)
  step = stepper(weight, optimizer)
  for rows in GRADS:
    step(rows)
  clipped = np.clip(GRADS, -2, 2)
  assert (clipped != GRADS).any()
  for members in GROUPS:
    sums = clipped[:, members].sum(axis=1).reshape(-1, STEPS, 3).mean(1)
    np.testing.assert_array_equal(
      testbed.copies(weight)[members[0]], momentum(list(sums))
    )


def test_as_plain_keras_accumulates() -> None:
  def opt(library: Any, **own: Any) -> Any:
    return library.optimizers.SGD(
      0.125,
      momentum=0.5,
      clipvalue=8.0,
      weight_decay=0.25,
      use_ema=True,
      ema_momentum=0.5,
      ema_overwrite_frequency=2,
      **own,
    )

  weight, optimizer = make("keras", opt)
  step = stepper(weight, optimizer)
  for rows in GRADS:
    step(rows)
  for index, members in enumerate(GROUPS):
    alone = keras.Variable(np.zeros(3, "f"), name="weight")
    plain = opt(keras, gradient_accumulation_steps=STEPS)
    plain.build([alone])
    for rows in GRADS:
      plain.apply([tf.constant(rows[members].sum(0))], [alone])
    for ours, theirs in zip(
      [weight, *optimizer.variables], [alone, *plain.variables], strict=True
    ):
      values = replica_state.group_values(ours, optimizer)
      np.testing.assert_array_equal(values[index], theirs.numpy())


@pytest.mark.parametrize("way", WAYS)
def test_window_that_is_not_finite_is_left_out_whole(way: str) -> None:
  weight, optimizer = make(way, skip_nonfinite=True)
  step = stepper(weight, optimizer)
  grads = GRADS.copy()
  grads[2, 3] = np.nan  # The second window's first call, in the second group.
  for rows in grads:
    step(rows)
  one, two = (
    [windows(members)[i] for i in places]
    for members, places in zip(GROUPS, ([0, 1, 2], [0, 2]), strict=True)
  )
  copies = testbed.copies(weight)
  np.testing.assert_array_equal(copies[0], momentum(one))
  np.testing.assert_array_equal(copies[3], momentum(two))
  counts = replica_state.group_values(optimizer.skipped_steps, optimizer)
  assert [int(count) for count in counts] == [0, 1]
  replica_state.assert_in_sync(optimizer, [weight])


def test_averages_move_once_per_step() -> None:
  """And not in a window that is left out."""
  weight, optimizer = make(
    "ours",
    lambda library: library.optimizers.SGD(
      0.125, use_ema=True, ema_momentum=0.5
    ),
    skip_nonfinite=True,
  )
  step = stepper(weight, optimizer)
  grads = GRADS.copy()
  grads[2, 3] = np.nan
  for rows in grads:
    step(rows)
  [average] = [v for v in optimizer.variables if "average" in v.path]
  found = replica_state.group_values(average, optimizer)
  for each, members, places in zip(
    found, GROUPS, ([0, 1, 2], [0, 2]), strict=True
  ):
    value, expected = np.zeros(3), np.zeros(3)
    for place in places:
      value = value - 0.125 * windows(members)[place]
      # Keras takes the first value as it is.
      expected = value if place == 0 else 0.5 * expected + 0.5 * value
    np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize(
  ("place", "way"),
  [("within", "keras"), ("around", "ours"), ("around", "ours_tf_keras")],
)
def test_loss_scale_changes_once_per_window(way: str, place: str) -> None:
  def scaled(optimizer: Any) -> Any:
    if way == "ours_tf_keras":
      kind = tf_keras.mixed_precision.LossScaleOptimizer
      return kind(optimizer, initial_scale=4.0)
    return keras.optimizers.LossScaleOptimizer(optimizer, 4.0)

  def opt(library: Any, **own: Any) -> Any:
    inner = library.optimizers.SGD(0.125, momentum=0.5, **own)
    return scaled(inner) if place == "within" else inner

  weight, optimizer = make(way, opt)
  strategy = testbed.mirrored()
  called = optimizer
  if place == "around":
    with strategy.scope():
      called = scaled(optimizer)
      if way != "ours_tf_keras":
        called.build([weight])
  scaler = optimizer.inner_optimizer if place == "within" else called
  factor = 1.0 if way == "ours_tf_keras" else 4.0
  step = stepper(weight, called)
  grads = GRADS * factor  # tf_keras is handed gradients of the loss itself.
  grads[2, 3] = np.inf
  for rows in grads:
    step(rows)
  copies = testbed.copies(weight)
  np.testing.assert_array_equal(copies[0], momentum(windows(GROUPS[0])))
  scale = getattr(scaler, "dynamic_scale", None)
  scale = scaler._loss_scale._current_loss_scale if scale is None else scale
  assert [float(s) for s in testbed.copies(scale)] == [4, 2, 4, 2]
  second = [windows(GROUPS[1])[i] for i in (0, 2)]
  if factor == 4:  # The third window's gradients are of a loss scaled by 4.
    second[1] = second[1] * 2
  np.testing.assert_array_equal(copies[3], momentum(second))


@pytest.mark.parametrize("way", WAYS)
def test_stopped_and_resumed_within_a_window(
  way: str, tmp_path: pathlib.Path
) -> None:
  weight, optimizer = make(way)
  step = stepper(weight, optimizer)
  for rows in GRADS[:3]:
    step(rows)
  replica_state.assert_in_sync(optimizer, [weight])
  replica_state.save(tmp_path / "state", optimizer, [weight])
  again, other = make(way)
  replica_state.restore(tmp_path / "state", other, [again])
  step = stepper(again, other)
  for rows in GRADS[3:]:
    step(rows)
  for members in GROUPS:
    np.testing.assert_array_equal(
      testbed.copies(again)[members[0]], momentum(windows(members))
    )


@pytest.mark.parametrize("way", WAYS)
def test_virtual_tpu(way: str) -> None:
  strategy = testbed.virtual(4)
  weight, optimizer = make(way, strategy=strategy)
  step = stepper(weight, optimizer, strategy)
  for rows in GRADS:
    step(rows)
  for index, members in enumerate(GROUPS):
    np.testing.assert_array_equal(
      replica_state.group_values(weight, optimizer)[index],
      momentum(windows(members)),
    )


@pytest.mark.parametrize("way", WAYS)
def test_rows(way: str) -> None:
  table, optimizer = make(
    way,
    lambda library, **own: library.optimizers.SGD(0.125, **own),
    initial=np.zeros((3, 1), "f"),
  )

  def replica_step() -> None:
    replica = testbed.replica_id()
    rows = tf.IndexedSlices(
      tf.ones([2, 1]), tf.stack([replica % 3, 0]), tf.constant([3, 1])
    )
    optimizer.apply_gradients([(rows, table)])

  step = tf.function(lambda: testbed.mirrored().run(replica_step))
  step()
  assert not testbed.copies(table)[0].any()
  step()
  # Rows of replicas 0 to 3: 0 and 0; 1 and 0; 2 and 0; 0 and 0.
  for replica, counts in ((0, [3, 0, 1]), (1, [3, 1, 0])):
    np.testing.assert_array_equal(
      testbed.copies(table)[replica][:, 0], -0.125 * np.array(counts)
    )


def test_fit() -> None:
  rng = np.random.default_rng(1)
  x = rng.integers(-2, 3, (32, 3)).astype("float32")
  y = rng.integers(-2, 3, (32, 1)).astype("float32")
  weights = []
  for is_ours in (True, False):
    scope = testbed.mirrored() if is_ours else tf.distribute.get_strategy()
    with scope.scope():
      layer = keras.layers.Dense(1, kernel_initializer="ones")
      model = keras.Sequential([keras.Input((3,)), layer])
      optimizer = keras.optimizers.SGD(0.125)
      if is_ours:
        optimizer = keras3.CrossShardOptimizer(optimizer, accumulate_steps=2)
      model.compile(optimizer, "mse")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(
      8 if is_ours else 16
    )
    testbed.fit(model, data)
    weights.append(model.get_weights())
  for ours, plain in zip(*weights, strict=True):
    np.testing.assert_allclose(ours, plain, rtol=1e-6)


@pytest.mark.parametrize("steps", [0, 2.0, True, "2"])
def test_number_of_calls(steps: Any) -> None:
  with pytest.raises(
    ValueError, match=r"`accumulate_steps` must be a positive integer"
  ):
    keras3.CrossShardOptimizer("sgd", accumulate_steps=steps)


def test_not_both() -> None:
  opt = keras.optimizers.SGD(gradient_accumulation_steps=2)
  with pytest.raises(ValueError, match="Set one of them only"):
    keras3.CrossShardOptimizer(opt, accumulate_steps=2)


def test_none_is_zeros_where_another_call_has_a_gradient() -> None:
  """Else its sum would be kept for a later window."""
  for is_traced in (False, True):
    weight, other = tf.Variable(0.0), tf.Variable(0.0)
    optimizer = keras3.CrossShardOptimizer(
      keras.optimizers.SGD(1.0), accumulate_steps=2
    )
    optimizer.build([weight, other])
    one = tf.constant(1.0)

    def early(optimizer: Any, one: Any, weight: Any, other: Any) -> None:
      optimizer.apply_gradients([(2.0 * one, weight), (one, other)])

    def late(optimizer: Any, one: Any, weight: Any, other: Any) -> None:
      optimizer.apply_gradients([(None, weight), (one, other)])

    steps = [
      tf.function(step, autograph=False) if is_traced else step
      for step in (early, late)
    ]
    for step in (*steps, *steps, steps[1], steps[1]):
      step(optimizer, one, weight, other)
    assert (float(weight.numpy()), float(other.numpy())) == (-2.0, -3.0)
  # The end of a window that was traced without it cannot know of it.
  optimizer = keras3.CrossShardOptimizer("sgd", accumulate_steps=2)
  optimizer.build([weight, other])
  steps[1](optimizer, one, weight, other)
  with pytest.raises(ValueError, match="None in others"):
    steps[0](optimizer, one, weight, other)


def test_values_in_place_of_gradients() -> None:
  scale = keras.Variable(1.0, name="scale")
  scale.overwrite_with_gradient = True
  optimizer = keras3.CrossShardOptimizer("sgd", accumulate_steps=2)
  with pytest.raises(NotImplementedError, match="cannot be accumulated"):
    optimizer.apply_gradients([(tf.constant(2.0), scale)])
  assert float(scale.numpy()) == 1


def test_setting_is_kept() -> None:
  optimizer = keras3.CrossShardOptimizer("sgd", accumulate_steps=3)
  copy = keras3.CrossShardOptimizer.from_config(optimizer.get_config())
  assert copy.accumulate_steps == 3
  assert len(optimizer.variables) == len(optimizer.inner_optimizer.variables)
