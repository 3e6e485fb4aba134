"""The gradient noise scale of each group, against NumPy."""

import pathlib
import pickle
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

  def step(self, grads: np.ndarray) -> None:
    """Looks at the members' gradients, `[members, elements]`."""
    if not np.isfinite(grads).all():
      return
    grads = grads.astype("float64").reshape(len(grads), -1)
    mean = grads.mean(0)
    variance = grads.var(0, ddof=1).sum()
    square = mean @ mean - variance / len(grads)
    self.variance = 0.99 * self.variance + 0.01 * variance
    self.square = 0.99 * self.square + 0.01 * square
    self.ratio = self.variance / self.square
    self.norm = np.sqrt(mean @ mean)


def make(
  package: Any = keras3,
  opt: Any = None,
  reduction: str = "sum",
  strategy: Any = None,
  shape: tuple[int, ...] = (5,),
  dtype: str = "float32",
  **options: Any,
) -> tuple[Any, Any]:
  """A weight of zeros and an optimizer of groups, built."""
  library = tf_keras if package is ours_tf_keras else keras
  options.setdefault("group_assignment", GROUPS)
  options.setdefault("noise_scale", 1)
  with (strategy or testbed.mirrored()).scope():
    weight = testbed.variable(tf.zeros(shape, dtype), "weight", library)
    opt = library.optimizers.SGD(0.125) if opt is None else opt()
    optimizer = package.CrossShardOptimizer(opt, reduction, **options)
    optimizer.build([weight])
  return weight, optimizer


def stepper(
  weight: Any,
  optimizer: Any,
  to_grad: Callable[[Any], Any] = lambda row: row,
  strategy: Any = None,
  eager: bool = False,
) -> Callable[[Any], None]:
  """A function that steps with each replica's row."""
  strategy = strategy or testbed.mirrored()
  assert strategy.num_replicas_in_sync == 4

  def step(grads: tf.Tensor) -> None:
    def replica_step() -> None:
      grad = to_grad(grads[testbed.replica_id()])
      optimizer.apply_gradients([(grad, weight)])

    strategy.run(replica_step)

  call = step if eager else tf.function(step, autograph=False)
  return lambda rows: call(tf.constant(rows))


def assert_as(oracles: list[Oracle], optimizer: Any) -> None:
  """Every replica has its group's numbers."""
  for variable, name in (
    (optimizer.noise_scale, "ratio"),
    (optimizer.gradient_norm, "norm"),
  ):
    assert variable.dtype == tf.float32
    found = testbed.copies(variable)
    assert len(found) == 4
    for oracle, members in zip(oracles, GROUPS, strict=True):
      for member in members:
        np.testing.assert_allclose(
          found[member], getattr(oracle, name), rtol=1e-6
        )


def check(
  weight: Any,
  optimizer: Any,
  to_grad: Callable[[Any], Any] = lambda row: row,
  seen: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
  rows: np.ndarray = GRADS,
  calls: int = 1,
  strategy: Any = None,
  eager: bool = False,
) -> None:
  """Compares after every step; `seen` is what is reduced."""
  step = stepper(weight, optimizer, to_grad, strategy, eager)
  oracles = [Oracle(), Oracle()]
  every = optimizer.get_config()["noise_scale"]
  assert_as(oracles, optimizer)  # NaN
  for i, row in enumerate(rows, 1):
    step(row)
    if i % calls == 0 and (i // calls - 1) % every == 0:
      window = seen(rows[i - calls : i]).mean(0)
      for oracle, members in zip(oracles, GROUPS, strict=True):
        oracle.step(window[members])
    assert_as(oracles, optimizer)
  assert abs(oracles[0].ratio - oracles[1].ratio) > 0.01


def _double_rows(row: tf.Tensor) -> tf.IndexedSlices:
  """A gradient whose rows come in two pieces, one of them negative."""
  values = tf.concat([2.0 * row, -row], 0)[:, tf.newaxis]
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
    ({"package": ours_tf_keras}, {}),
    ({"reduction": "mean", "scale_gradients": True,
      "loss_averaged_over": "replica"}, {}),
    ({"noise_scale": 2, "shard_update": True}, {}),
    ({"clipvalue": 40.0}, {"seen": lambda rows: np.clip(rows, -40, 40)}),
    ({"wire_dtype": "float16"}, {}),
    ({"dtype": "float16"},
     {"to_grad": lambda row: tf.cast(row * 64.0, tf.float16),
      "seen": lambda rows: 64.0 * rows}),
    ({"shape": (5, 1)}, {"to_grad": _double_rows, "eager": True}),
    ({"accumulate_steps": 2, "package": ours_tf_keras}, {"calls": 2}),
    ({"opt": _accumulating}, {"calls": 2}),
    ({"shard_update": True, "accumulate_steps": 2}, {"calls": 2}),
    ({"shard_update": True, "wire_dtype": "bfloat16"}, {}),
  ],
)  # fmt: skip
def test_moving_averages(options: Any, check_options: Any) -> None:
  check(*make(**options), **check_options)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_loss_scale_and_steps_that_are_left_out(sharded: bool) -> None:
  weight, optimizer = make(opt=_scaling, shard_update=sharded)
  scale = optimizer.inner_optimizer.dynamic_scale
  rows = GRADS.copy()
  rows[3, 2, 1] = np.inf  # of the first group
  check(weight, optimizer, lambda row: row * scale, rows=rows)
  assert [float(each) for each in testbed.copies(scale)] == [16, 64, 16, 64]


def test_virtual_tpu() -> None:
  strategy = testbed.virtual(4)
  options = {"skip_nonfinite": True, "noise_scale": 2}
  check(*make(strategy=strategy, **options), strategy=strategy)


def test_true_measures_every_thirty_second_step() -> None:
  weight, optimizer = make(noise_scale=True)
  step = stepper(weight, optimizer)
  seen = []
  for i in range(65):
    step(np.full((4, 5), i + 1, "f"))
    seen.append(testbed.copies(optimizer.gradient_norm)[0] / 5**0.5)
  np.testing.assert_allclose(seen, [1] * 32 + [33] * 32 + [65], rtol=1e-6)


def test_sums_that_tf_keras_hands_back() -> None:
  weight, optimizer = make(ours_tf_keras)

  def replica_step() -> None:
    grad = tf.constant(GRADS[0])[testbed.replica_id()]
    pairs = optimizer.aggregate_gradients([(grad, weight)])
    optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)

  testbed.run(replica_step)
  oracles = [Oracle(), Oracle()]
  for oracle, members in zip(oracles, GROUPS, strict=True):
    oracle.step(GRADS[0, members])
  assert_as(oracles, optimizer)


def test_gradients_of_a_known_covariance() -> None:
  # tr(covariance) / |mean|^2 of the groups, in d dimensions.
  d, steps, truth = 50, 300, (1.0, 4.0)
  rng = np.random.default_rng(3)
  means = [np.full(d, truth[0] ** -0.5), np.full(d, truth[1] ** -0.5)]
  weight, optimizer = make(shape=(d,))
  step = stepper(weight, optimizer)
  for _ in range(steps):
    noise = rng.normal(size=(4, d))
    step(np.stack([means[r % 2] + noise[r] for r in range(4)]).astype("f"))
  found = replica_state.group_values(optimizer.noise_scale, optimizer)
  # With tr = d and |m|^2 = d / B, the variances of a step's S / d and of its
  # G^2 / |m|^2 for two members are 2 / d and (2 B + B^2) / d. An average with
  # a decay of 0.99 is as good as one over 199 steps.
  for ratio, right in zip(found, truth, strict=True):
    deviation = ((2 + 2 * right + right**2) / d / 199) ** 0.5
    assert abs(ratio / right - 1) < 3 * deviation < 0.2


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


@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
def test_the_norms_travel_in_the_buffers_of_gradients(wire_dtype: Any) -> None:
  counts = []
  for measures in (False, True):
    weight, optimizer = make(noise_scale=measures, wire_dtype=wire_dtype)

    def replica_step(weight: Any = weight, optimizer: Any = optimizer) -> Any:
      return tf.cond(
        testbed.replica_id() >= 0,
        lambda: optimizer.apply_gradients([(tf.ones(5), weight)]),
        lambda: tf.constant(0, tf.int64),
      )

    run = tf.function(lambda s=replica_step: testbed.mirrored().run(s))
    graph = run.get_concrete_function().graph.as_graph_def()
    ops = [n.op for f in graph.library.function for n in f.node_def]
    counts.append(sum("CollectiveReduce" in op for op in ops))
  # Each of four replicas has one, and one more where gradients are narrow.
  assert counts == ([4, 4] if wire_dtype is None else [4, 8])


def test_it_is_kept_with_the_groups(tmp_path: pathlib.Path) -> None:
  weight, optimizer = make()
  step = stepper(weight, optimizer)
  for rows in GRADS[:3]:
    step(rows)
  replica_state.save(tmp_path / "state", optimizer, [weight])
  other_weight, other = make()
  replica_state.restore(tmp_path / "state", other, [other_weight])
  replica_state.assert_in_sync(other, [other_weight])
  other_step = stepper(other_weight, other)
  for rows in GRADS[3:]:
    step(rows)
    other_step(rows)
  for one, two in (
    (optimizer.noise_scale, other.noise_scale),
    (optimizer.gradient_norm, other.gradient_norm),
  ):
    assert testbed.copies(one) == testbed.copies(two)


@pytest.mark.parametrize("package", [keras3, ours_tf_keras])
def test_as_an_argument(package: Any) -> None:
  _, optimizer = make(package)
  _, plain = make(package, noise_scale=False)
  assert len(optimizer.variables) == len(plain.variables)
  assert plain.noise_scale is None
  assert plain.gradient_norm is None
  with testbed.mirrored().scope():
    copies = [
      type(optimizer).from_config(optimizer.get_config()),
      pickle.loads(pickle.dumps(optimizer)),
    ]
  for copy in copies:
    assert np.isnan(testbed.copies(copy.noise_scale)).all()
  assert plain.get_config()["noise_scale"] is False


def test_groups_of_one() -> None:
  with pytest.raises(ValueError, match=r"`noise_scale` compares .* larger"):
    make(group_assignment=[[0], [1], [2], [3]])
  # One replica may only want to load a model.
  weight = keras.Variable([1.0])
  optimizer = keras3.CrossShardOptimizer("sgd", noise_scale=True)
  with pytest.raises(ValueError, match=r"`noise_scale` compares .* larger"):
    optimizer.apply_gradients([(tf.ones(1), weight)])
  assert weight.numpy().tolist() == [1.0]
  for value in ("yes", -1):
    with pytest.raises(ValueError, match=rf"`noise_scale`.*{value}"):
      keras3.CrossShardOptimizer("sgd", noise_scale=value)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
