"""VirtualTPUStrategy trains to the same values as MirroredStrategy.

Random programs have the other settings.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer

keras = tf.keras
N, STEPS = testbed.REPLICAS, 4
PAIRS, STRIDED = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def _adam(rate: Any = 0.01, **options: Any) -> Any:
  # A large epsilon: rounding errors of tiny gradients stay small.
  return keras.optimizers.Adam(rate, epsilon=1e-3, **options)


def _optimizer(
  groups: Any, make: Callable[[], Any] = _adam, **options: Any
) -> Callable[[], Any]:
  return lambda: CrossShardOptimizer(make(), group_assignment=groups, **options)


# What no random program has.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
  "plain Keras": _adam,
  "averages in shards": _optimizer(
    STRIDED,
    lambda: _adam(use_ema=True, ema_overwrite_frequency=3),
    shard_update=True,
  ),
  "limits": _optimizer(
    PAIRS, clipnorm=1.0, per_model={"clipnorm": [0.1, 0.01]}
  ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options(name: str) -> None:
  """Each replica has other gradients."""
  rng = np.random.default_rng(1)
  shapes = {"kernel": (6, 8), "bias": (8,)}
  grads = [
    rng.normal(size=(6, N, *shape)).astype("f") for shape in shapes.values()
  ]
  found = []
  for strategy in (testbed.mirrored(), testbed.virtual(N)):
    with strategy.scope():
      weights = [
        testbed.variable(np.full(shape, 0.5, "f"), weight)
        for weight, shape in shapes.items()
      ]
      optimizer = OPTIMIZERS[name]()
      optimizer.build(weights)
    training.train(weights, optimizer, grads, strategy=strategy)
    variables = [*weights, *optimizer.variables]
    found.append(list(map(testbed.copies, variables)))
  for own, other in zip(*found, strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
  assert np.abs(np.array(found[0][0]) - 0.5).max() > 1e-3


def test_shards_of_float64_are_summed_in_float64() -> None:
  grads = np.random.default_rng(2).normal(size=(STEPS, N, 6))
  trained = []
  for shards in (False, "elementwise"):
    [weight], optimizer = training.build(
      *("keras", lambda _: _adam(), {"weight": np.ones(6)}, testbed.virtual(N)),
      group_assignment=PAIRS,
      shard_update=shards,
    )
    training.train([weight], optimizer, [grads], strategy=testbed.virtual(N))
    trained.append(testbed.copies(weight))
  assert trained[0][0].dtype == np.float64
  np.testing.assert_allclose(*trained, rtol=1e-12)


@pytest.mark.parametrize("least", [0, 2])
def test_steps_in_a_branch(least: int) -> None:
  """The sums of a group that does not enter the branch change nothing."""
  strategy = testbed.virtual(N)
  with strategy.scope():
    weight = tf.Variable(0.0)
    optimizer = CrossShardOptimizer(
      keras.optimizers.SGD(1.0), "sum", group_assignment=PAIRS
    )
    optimizer.build([weight])

  def replica_fn(grad: tf.Tensor) -> tf.Tensor:
    return tf.cond(
      testbed.replica_id() >= least,
      lambda: optimizer.apply_gradients([(grad, weight)]),
      lambda: tf.constant(0, tf.int64),
    )

  grads = testbed.per_replica(strategy, [1.0, 2.0, 4.0, 8.0])
  strategy.run(replica_fn, (grads,))
  sums = [-3.0, -12.0]
  if least:
    sums[0] = 0.0
  assert testbed.copies(weight) == [sums[0]] * 2 + [sums[1]] * 2


@pytest.mark.parametrize(
  "num_replicas", [pytest.param(5, marks=pytest.mark.slow), 13]
)
@pytest.mark.parametrize(
  "make",
  [
    _adam,
    lambda: _adam(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.7)),
    lambda: keras.optimizers.Nadam(0.01),
    lambda: keras.optimizers.Ftrl(0.1, learning_rate_power=-0.4),
    lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
    lambda: keras.optimizers.SGD(
      keras.optimizers.schedules.CosineDecay(0.01, 30)
    ),
  ],
)
def test_members_of_a_group_stay_bitwise_equal(
  num_replicas: int, make: Callable[[], Any]
) -> None:
  """Also where the numbers of replicas fill no vector of the processor."""
  strategy = testbed.virtual(num_replicas)
  with strategy.scope():
    weights = [tf.Variable(tf.ones(shape)) for shape in ([7, 3], [5], [3])]
    optimizer = CrossShardOptimizer(make(), loss_averaged_over="global")
    optimizer.build(weights)
  rng = np.random.default_rng(0)
  given = testbed.per_replica(
    strategy, list(rng.normal(size=(num_replicas, 7, 3)).astype("float32"))
  )

  @tf.function
  def step(values: Any) -> None:
    def replica_fn(x: tf.Tensor) -> None:
      grads = [x * weights[0] + x, tf.reduce_sum(x) * weights[1]]
      grads += [tf.zeros([3])]  # Ftrl then makes zeros, which have a sign.
      optimizer.apply_gradients(list(zip(grads, weights, strict=True)))

    strategy.run(replica_fn, (values,))

  for _ in range(12):
    step(given)
  for variable in (*weights, *optimizer.variables):
    assert len({copy.tobytes() for copy in testbed.copies(variable)}) == 1


def test_each_replica_draws_its_own_numbers_from_a_generator() -> None:
  drawn = []
  for strategy in (testbed.mirrored(), testbed.virtual(N)):
    with strategy.scope():
      generator = tf.random.Generator.from_seed(1)

    @tf.function
    def draw(strategy: Any = strategy, generator: Any = generator) -> Any:
      return strategy.run(lambda: generator.normal([3]))

    drawn.append(
      [testbed.per_replica_results(strategy, draw()) for _ in range(2)]
    )
  assert drawn[0] == drawn[1]
  assert len({tuple(row) for rows in drawn[1] for row in rows}) == 2 * N


def test_only_the_last_call_of_a_window_sums() -> None:
  """The condition is the same everywhere, so one branch runs."""
  strategy = testbed.virtual(N)
  with strategy.scope():
    weight = tf.Variable(0.0)
    optimizer = CrossShardOptimizer(
      keras.optimizers.SGD(1.0), "sum", accumulate_steps=2
    )
    optimizer.build([weight])

  @tf.function
  def step(grads: Any) -> None:
    strategy.run(
      lambda g: optimizer.apply_gradients([(g, weight)]), args=(grads,)
    )

  grads = testbed.per_replica(strategy, [1.0, 2.0, 4.0, 8.0])
  step(grads)
  assert [float(copy) for copy in testbed.copies(weight)] == [0.0] * N
  step(grads)
  assert [float(copy) for copy in testbed.copies(weight)] == [-15.0] * N
  graph = step.get_concrete_function(grads).graph
  assert "If" in {operation.type for operation in graph.get_operations()}
