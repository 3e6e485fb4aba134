"""The gradient noise scale of each group, against NumPy."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import fake_engine, group_training, testbed
from tf_cross_shard import keras3, replica_state
from tf_cross_shard.step import noise_scale

GROUPS = [[0, 2], [1, 3]]
STEPS = 6
_RNG = np.random.default_rng(11)
# [steps, replicas, 5] whole numbers: norms and sums are exact, in bfloat16 sums
# but not norms. Another mean and another variance in each group.
GRADS = (
  np.array([30, -50, 30, -50])[:, np.newaxis]
  + _RNG.integers(-1, 2, (STEPS, 4, 5)) * np.array([[9], [30], [20], [30]])
).astype("f")


class Oracle:
  """One group's averages, from each step's sample variance."""

  def __init__(self) -> None:
    self.variance, self.square = 0.0, 0.0
    self.ratio = self.norm = np.nan

  def step(self, grads: np.ndarray, share: float = 1.0) -> None:
    """Looks at the members' gradients, `[members, elements]`.

    They are means over a share of the calls that count as one batch.
    """
    if not np.isfinite(grads).all():
      return
    grads = grads.astype("float64").reshape(len(grads), -1)
    mean = grads.mean(0)
    variance = grads.var(0, ddof=1).sum()
    square = mean @ mean - variance / len(grads)
    self.variance = 0.99 * self.variance + 0.01 * variance * share
    self.square = 0.99 * self.square + 0.01 * square
    self.ratio = self.variance / self.square
    self.norm = np.sqrt(mean @ mean)


def replicas(
  library: Any = keras,
  opt: Any = None,
  shape: tuple[int, ...] = (5,),
  dtype: str = "float32",
  **settings: Any,
) -> list[fake_engine.Replica]:
  """Replicas with a weight of zeros each, measured in every step."""
  settings.setdefault("noise_scale", 1)
  make_opt = opt or (lambda: library.optimizers.SGD(0.125))
  return fake_engine.replicas(
    make_opt, [np.zeros(shape, dtype)], library, **settings
  )


def assert_measured(
  oracles: list[Oracle], trained: Sequence[fake_engine.Replica]
) -> None:
  """Every replica's stage has its group's numbers."""
  noises = [replica.step.noise for replica in trained]
  assert_as(
    oracles,
    [noise.noise_scale.numpy() for noise in noises],
    [noise.gradient_norm.numpy() for noise in noises],
  )


def assert_as(
  oracles: list[Oracle], scale: Sequence[Any], norm: Sequence[Any]
) -> None:
  """Every replica has its group's numbers."""
  assert len(scale) == len(norm) == 4
  for oracle, members in zip(oracles, GROUPS, strict=True):
    for member in members:
      np.testing.assert_allclose(scale[member], oracle.ratio, rtol=1e-6)
      np.testing.assert_allclose(norm[member], oracle.norm, rtol=1e-6)


def check(
  trained: list[fake_engine.Replica],
  to_grad: Callable[[Any], Any] = tf.constant,
  seen: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
  rows: np.ndarray = GRADS,
  calls: int = 1,
) -> None:
  """Compares after every step; `seen` is what is reduced."""
  oracles = [Oracle(), Oracle()]
  every = trained[0].step.settings.noise_scale
  for i in range(len(rows) + 1):
    assert_measured(oracles, trained)
    if i == len(rows):
      break
    fake_engine.train(trained, [rows[i : i + 1]], to_grad)
    if (i + 1) % calls == 0 and ((i + 1) // calls - 1) % every == 0:
      window = seen(rows[i + 1 - calls : i + 1]).mean(0)
      for oracle, members in zip(oracles, GROUPS, strict=True):
        oracle.step(window[members])
  assert abs(oracles[0].ratio - oracles[1].ratio) > 0.01


def _double_rows(row: Any) -> tf.IndexedSlices:
  """A gradient whose rows come in two pieces, one of them negative."""
  values = tf.concat([2.0 * row, -row], 0)[:, np.newaxis]
  return tf.IndexedSlices(
    values, tf.concat([tf.range(5)] * 2, 0), tf.constant([5, 1])
  )


def _scaling() -> Any:
  """Scale 8, doubled after every second step."""
  return keras.optimizers.LossScaleOptimizer(
    keras.optimizers.SGD(0.125), initial_scale=8.0, dynamic_growth_steps=2
  )


def _accumulating() -> Any:
  return keras.optimizers.SGD(0.125, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
  ("options", "check_options"),
  [
    ({}, {}),
    ({"library": tf_keras}, {}),
    # A member has the mean's share of what it sums.
    ({"reduction": "mean", "scale_gradients": True,
      "loss_averaged_over": "replica"}, {}),
    ({"noise_scale": 2, "shard_update": True}, {}),
    ({"clipvalue": 40.0}, {"seen": lambda rows: np.clip(rows, -40, 40)}),
    ({"wire_dtype": "float16"}, {}),
    ({"dtype": "float16"},
     {"to_grad": lambda row: tf.constant(row * 64.0, tf.float16),
      "seen": lambda rows: 64.0 * rows}),
    ({"shape": (5, 1)}, {"to_grad": _double_rows}),
    ({"accumulate_steps": 2, "library": tf_keras}, {"calls": 2}),
    ({"opt": _accumulating}, {"calls": 2}),
    ({"shard_update": True, "accumulate_steps": 2}, {"calls": 2}),
    ({"shard_update": True, "wire_dtype": "bfloat16"}, {}),
  ],
)  # fmt: skip
def test_moving_averages(options: Any, check_options: Any) -> None:
  check(replicas(**options), **check_options)


@pytest.mark.parametrize("sharded", [False, True])
def test_windows_whose_length_changes(sharded: bool) -> None:
  """In batches of one replica in a window of `accumulate_steps`."""
  trained = replicas(accumulate_steps=4, shard_update=sharded)
  oracles, done = [Oracle(), Oracle()], 0
  for calls in (1, 4, 2, 3):
    for replica in trained:
      replica.step.window_length().assign(calls)
    window = 12 * GRADS[:calls] + done  # Means are exact.
    fake_engine.train(trained, [window])
    done += calls
    for oracle, members in zip(oracles, GROUPS, strict=True):
      oracle.step(window[:, members].mean(0), calls / 4)
  assert_measured(oracles, trained)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_loss_scale_and_steps_that_are_left_out(sharded: bool) -> None:
  trained = replicas(opt=_scaling, shard_update=sharded)
  rows = GRADS.copy()
  rows[3, 2, 1] = np.inf  # of the first group
  # Of a group's losses its own scale is a factor.
  scale = {}

  def to_grad(row: np.ndarray) -> tf.Tensor:
    replica = scale[row.tobytes()]
    return tf.constant(row) * replica.opt.dynamic_scale

  for step in rows:
    scale |= {row.tobytes(): r for row, r in zip(step, trained, strict=True)}
  check(trained, to_grad, rows=rows)
  scales = [float(each.opt.dynamic_scale.numpy()) for each in trained]
  assert scales == [16, 64, 16, 64]


def measure(
  noise: noise_scale.NoiseScale,
) -> Callable[[np.ndarray], tf.Tensor]:
  """A function that hands a group's gradients of a step to one member."""

  @tf.function(autograph=False)
  def step(rows: tf.Tensor) -> None:
    own = [noise.of_replica([row])[0] for row in tf.unstack(rows)]
    noise.after_sum([tf.reduce_sum(rows, axis=0)], [tf.add_n(own)])

  return lambda rows: step(tf.constant(rows, tf.float32))


def test_true_measures_every_thirty_second_step() -> None:
  noise = replicas(tf_keras, noise_scale=True)[0].step.noise
  step, seen = measure(noise), []
  for i in range(65):
    step(np.full((2, 5), i + 1.0))
    seen.append(noise.gradient_norm.numpy() / 5**0.5)
  np.testing.assert_allclose(seen, [1] * 32 + [33] * 32 + [65], rtol=1e-6)


# tr(covariance) / |mean|^2
@pytest.mark.parametrize("truth", [1.0, 4.0])
def test_gradients_of_a_known_covariance(truth: float) -> None:
  d, steps = 50, 300
  noise = replicas(tf_keras)[0].step.noise
  step, rng = measure(noise), np.random.default_rng(3)
  for _ in range(steps):
    step(truth**-0.5 + rng.normal(size=(2, d)))
  # With tr = d and |m|^2 = d / B, the variances of a step's S / d and of its
  # G^2 / |m|^2 for two members are 2 / d and (2 B + B^2) / d. An average with
  # a decay of 0.99 is as good as one over 199 steps.
  deviation = ((2 + 2 * truth + truth**2) / d / 199) ** 0.5
  assert abs(noise.noise_scale.numpy() / truth - 1) < 3 * deviation < 0.2


def test_norms_of_all_kinds() -> None:
  rows = tf.IndexedSlices(
    tf.constant([1.0, 2.0, 2.0]), tf.constant([1, 0, 1]), tf.constant([9])
  )
  big = tf.constant([300.0], tf.float16)  # Its square is infinite there.
  grads = [rows, None, tf.constant([3 + 4j]), tf.zeros([0]), big]
  expected = 9 + 4 + 25 + 9e4
  assert float(noise_scale.squared_norm(grads)) == expected
  assert float(noise_scale.squared_norm(grads, 2.0)) == expected / 4
  assert float(noise_scale.squared_norm([None])) == 0.0
  huge = tf.constant([2.0**100, 2.0**100], tf.float64)
  assert float(noise_scale.squared_norm([huge], 2.0**100)) == 2.0


# Float32 norms travel in the buffer of the gradients, or beside narrow ones.
@pytest.mark.parametrize(
  ("wire_dtype", "buffers"), [(None, ["float32"]), ("bfloat16", None)]
)
def test_the_norms_travel_in_the_buffers_of_gradients(
  wire_dtype: Any, buffers: Any
) -> None:
  [first, *_] = trained = replicas(wire_dtype=wire_dtype)
  fake_engine.train(trained, [GRADS[:1]])
  sent = sorted(tensor.dtype.name for tensor in first.engine.sent)
  assert sent == (buffers or ["bfloat16", "float32"])


# ----------------------------------------------------------- on real engines


def make(
  strategy: Any, which: str = "keras", **options: Any
) -> tuple[list[Any], Any]:
  """A weight of zeros and an optimizer of groups, built."""
  options = {"group_assignment": GROUPS, "noise_scale": 1, **options}
  return group_training.build(
    *(which, lambda library: library.optimizers.SGD(0.125)),
    *({"weight": np.zeros(5, "f")}, strategy),
    **options,
  )


@pytest.mark.parametrize(
  ("engine", "options"), [("mirrored", {}), ("virtual", {"noise_scale": 2})]
)
def test_engines_measure_and_keep(
  engine: str, options: Any, tmp_path: pathlib.Path
) -> None:
  """In a function; saved and restored in the middle."""
  strategy = testbed.STRATEGIES[engine]()
  options = {"skip_nonfinite": True, **options}
  weights, optimizer = make(strategy, **options)
  oracles = [Oracle(), Oracle()]
  step = group_training.stepper(weights, optimizer, strategy)
  for i, rows in enumerate(GRADS):
    if i == 3:
      replica_state.save(tmp_path / "state", optimizer, weights)
      weights, optimizer = make(strategy, **options)
      replica_state.restore(tmp_path / "state", optimizer, weights)
      replica_state.assert_in_sync(optimizer, weights)
      step = group_training.stepper(weights, optimizer, strategy)
    step(rows)
    if i % options.get("noise_scale", 1) == 0:
      for oracle, members in zip(oracles, GROUPS, strict=True):
        oracle.step(rows[members])
  assert_as(
    oracles,
    testbed.copies(optimizer.noise_scale),
    testbed.copies(optimizer.gradient_norm),
  )


@pytest.mark.parametrize("calls", [1, 2])
def test_sums_that_tf_keras_hands_back(calls: int) -> None:
  """They are of one call, also where several make a window."""
  [weight], optimizer = make(
    testbed.mirrored(), "tf_keras", accumulate_steps=calls
  )
  assert len(optimizer.variables) == len(optimizer.inner_optimizer.variables)

  def replica_step() -> None:
    grad = tf.constant(GRADS[0])[testbed.replica_id()]
    pairs = optimizer.aggregate_gradients([(grad, weight)])
    optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)

  testbed.run(replica_step)
  oracles = [Oracle(), Oracle()]
  for oracle, members in zip(oracles, GROUPS, strict=True):
    oracle.step(GRADS[0, members], 1 / calls)
  assert_as(
    oracles,
    testbed.copies(optimizer.noise_scale),
    testbed.copies(optimizer.gradient_norm),
  )


def test_groups_of_one() -> None:
  with pytest.raises(ValueError, match=r"`noise_scale` compares .* larger"):
    make(testbed.mirrored(), group_assignment=[[0], [1], [2], [3]])
  # One replica may only want to load a model.
  weight = keras.Variable([1.0])
  optimizer = keras3.CrossShardOptimizer("sgd", noise_scale=True)
  with pytest.raises(ValueError, match=r"`noise_scale` compares .* larger"):
    optimizer.apply_gradients([(tf.ones(1), weight)])
  assert weight.numpy().tolist() == [1.0]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
