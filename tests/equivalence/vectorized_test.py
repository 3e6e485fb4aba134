"""VectorizedStrategy against MirroredStrategy, by value.

Both train the same model, with different examples on each replica.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  layers,
  schedules,
)

keras = tf.keras
N, BATCH, STEPS = testbed.REPLICAS, 16, 4
PAIRS, STRIDED = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
SINGLE = [[i] for i in range(N)]


def _adam(rate: Any = 0.01, **options: Any) -> Any:
  # A large epsilon: rounding errors of tiny gradients stay small.
  return keras.optimizers.Adam(rate, epsilon=1e-3, **options)


def _optimizer(
  groups: Any, make: Callable[[], Any] = _adam, **options: Any
) -> Callable[[], Any]:
  return lambda: CrossShardOptimizer(make(), group_assignment=groups, **options)


def _scaled(make: Callable[[], Any]) -> Any:
  mixed = getattr(keras.mixed_precision, "LossScaleOptimizer", None)
  return (mixed or keras.optimizers.LossScaleOptimizer)(make())


OPTIMIZERS: dict[str, Callable[[], Any]] = {
  "plain Keras": _adam,
  "no groups": _optimizer(None),
  "pairs": _optimizer(PAIRS),
  "Keras' operations": _optimizer(STRIDED, fused_update=False),
  "learning rates": _optimizer(
    SINGLE, lambda: _adam(schedules.PerGroup([0.01, 0.02, 0.005, 0.03]))
  ),
  "schedule": _optimizer(
    PAIRS,
    lambda: _adam(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)),
  ),
  "clipnorm": _optimizer(STRIDED, clipnorm=0.1),
  "global_clipnorm": _optimizer(PAIRS, global_clipnorm=0.1),
  "clipping of opt": _optimizer(PAIRS, lambda: _adam(global_clipnorm=0.05)),
  "bfloat16": _optimizer(
    PAIRS, lambda: keras.optimizers.SGD(0.1), wire_dtype="bfloat16"
  ),
  "skip_nonfinite": _optimizer(SINGLE, skip_nonfinite=True),
  "accumulate_steps": _optimizer(PAIRS, accumulate_steps=2),
  "sharded": _optimizer(STRIDED, shard_update=True),
  "sharded over all": _optimizer(None, shard_update=True),
  "sharded, clipping of opt": _optimizer(
    PAIRS, lambda: _adam(global_clipnorm=0.05), shard_update=True
  ),
  "averages": _optimizer(
    PAIRS, lambda: _adam(use_ema=True, ema_overwrite_frequency=3)
  ),
  "momentum": _optimizer(
    PAIRS, lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
  ),
  "settings": _optimizer(
    PAIRS,
    lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3),
    group_settings={"weight_decay": [0.1, 0.3], "beta_1": [0.9, 0.5]},
  ),
  "limits": _optimizer(
    PAIRS, clipnorm=1.0, group_settings={"clipnorm": [0.1, 0.01]}
  ),
  "loss scale": _optimizer(PAIRS, lambda: _scaled(_adam)),
}


class Branching(keras.layers.Layer):
  """Has a branch that depends on the replica's data, and a loop."""

  def build(self, shape: Any) -> None:
    self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")
    super().build(shape)

  def call(self, x: tf.Tensor) -> tf.Tensor:
    y = tf.cond(
      tf.reduce_mean(x) > 0.0,
      lambda: tf.tanh(x @ self.kernel),
      lambda: tf.sin(x @ self.kernel) * 2.0,
    )
    return tf.while_loop(
      lambda i, y: i < 3, lambda i, y: (i + 1, y * tf.tanh(y)), [0, y]
    )[1]


class OwnStep(keras.Model):
  """Has a `train_step` of its own."""

  def __init__(self) -> None:
    super().__init__()
    self.hidden = keras.layers.Dense(5, "tanh")
    self.last = keras.layers.Dense(2)

  def call(self, x: tf.Tensor, training: Any = None) -> tf.Tensor:
    return self.last(self.hidden(x))

  def train_step(self, data: Any) -> dict[str, tf.Tensor]:
    x, y = data
    with tf.GradientTape() as tape:
      logits = self(x, training=True)
      loss = tf.reduce_mean(
        keras.losses.sparse_categorical_crossentropy(
          y, logits, from_logits=True
        )
      )
    weights = self.trainable_variables
    grads = tape.gradient(loss, weights)
    self.optimizer.apply_gradients(zip(grads, weights, strict=True))
    return {"loss": loss}


def _sequential(*stack: Any) -> Any:
  return keras.Sequential([*stack, keras.layers.Dense(2, name="last")])


def _attention() -> Any:
  x = keras.Input((4, 6))
  y = keras.layers.MultiHeadAttention(2, 3)(x, x)
  y = keras.layers.LayerNormalization()(x + y)
  return keras.Model(x, keras.layers.Dense(2)(keras.layers.Flatten()(y)))


_K = keras.layers
# The shape of an example, and the model.
MODELS: dict[str, tuple[tuple[int, ...], Callable[[], Any]]] = {
  "dense": ((6,), lambda: _sequential(_K.Input((6,)), _K.Dense(8, "tanh"))),
  "convolution": (
    (6, 6, 1),
    lambda: _sequential(
      _K.Input((6, 6, 1)),
      _K.Conv2D(3, 3, padding="same"),
      _K.BatchNormalization(),
      _K.MaxPooling2D(),
      _K.Flatten(),
    ),
  ),
  "statistics by group": (
    (6,),
    lambda: _sequential(
      _K.Input((6,)), _K.Dense(8), layers.SyncBatchNormalization([[0, 1]])
    ),
  ),
  "embedding": (
    (5,),
    lambda: _sequential(
      _K.Input((5,), dtype="int32"), _K.Embedding(20, 4), _K.Flatten()
    ),
  ),
  "recurrent": (
    (4, 3),
    lambda: _sequential(
      _K.Input((4, 3)), _K.LSTM(5, return_sequences=True), _K.GRU(4)
    ),
  ),
  "attention": ((4, 6), _attention),
  "branches": ((6,), lambda: _sequential(_K.Input((6,)), Branching())),
  "own train_step": ((6,), OwnStep),
  "seeded dropout": (
    (6,),
    lambda: _sequential(_K.Input((6,)), _K.Dense(8), _K.Dropout(0.5, seed=3)),
  ),
}


# keras_layers_test.py has each of Keras' layers.
_FAST = {"convolution", "statistics by group", "branches", "own train_step"}


def _train(
  strategy: Any,
  model_name: str,
  make_optimizer: Callable[[], Any],
  jit: bool = False,
) -> tuple[list[Any], list[float]]:
  """Returns every replica's weights and slots, and the losses."""
  shape, make_model = MODELS[model_name]
  rng = np.random.default_rng(1)
  size = BATCH * STEPS
  if model_name == "embedding":
    x = rng.integers(0, 20, size=(size, *shape)).astype("int32")
  else:
    x = rng.normal(size=(size, *shape)).astype("float32")
  y = (x.reshape(size, -1).sum(axis=1) > 0).astype("int32")
  data = tf.data.Dataset.from_tensor_slices((x, y)).batch(
    BATCH, drop_remainder=True
  )
  keras.utils.set_random_seed(0)
  with strategy.scope():
    model, optimizer = make_model(), make_optimizer()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit)
  history = testbed.fit(model, data, epochs=2).history
  variables = [*model.weights, *optimizer.variables]
  return list(map(testbed.copies, variables)), history["loss"]


def _assert_equal(got: Any, expected: Any) -> None:
  for own, other in zip(got[0], expected[0], strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(got[1], expected[1], rtol=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options(name: str) -> None:
  """Each replica has other gradients."""
  rng = np.random.default_rng(1)
  shapes = {"kernel": (6, 8), "bias": (8,)}
  scale = 2.0**15 if "loss scale" in name else 1.0  # as Keras starts
  grads = [
    (scale * rng.normal(size=(6, N, *shape))).astype("f")
    for shape in shapes.values()
  ]
  found = []
  for strategy in (
    testbed.mirrored(),
    VectorizedStrategy(N, split_batches=True),
  ):
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


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if name in _FAST else pytest.mark.slow)
    for name in MODELS
  ],
)
def test_models(name: str) -> None:
  """Each replica is a group, and trains with its own weights."""
  if name == "seeded dropout" and testbed.IS_TF_KERAS:
    pytest.skip("Each replica of tf_keras has a generator of its own.")
  make = _optimizer([[0], [1]])
  expected = _train(testbed.mirrored(2), name, make)
  _assert_equal(
    _train(VectorizedStrategy(2, split_batches=True), name, make), expected
  )


def test_compiled_by_xla() -> None:
  rates = [0.01, 0.02, 0.005, 0.03]
  make = _optimizer(
    SINGLE, lambda: _adam(schedules.PerGroup(rates)), skip_nonfinite=True
  )
  expected = _train(testbed.mirrored(), "dense", make)
  got = _train(
    VectorizedStrategy(N, split_batches=True), "dense", make, jit=True
  )
  _assert_equal(got, expected)


@pytest.mark.parametrize("groups", [None, PAIRS, STRIDED, SINGLE])
def test_powers_of_two_are_summed_exactly(groups: Any) -> None:
  strategy = VectorizedStrategy(N, split_batches=True)
  with strategy.scope():
    weight = tf.Variable([0.0, 64.0])
    optimizer = CrossShardOptimizer(
      keras.optimizers.SGD(1.0), "sum", group_assignment=groups
    )
    optimizer.build([weight])
  grads = testbed.per_replica(
    strategy, [[2.0**i, 2.0 ** (i + 4)] for i in range(N)]
  )
  strategy.run(
    lambda g: optimizer.apply_gradients([(g, weight)]), args=(grads,)
  )
  for members in groups or [range(N)]:
    total = sum(2.0**i for i in members)
    for i in members:
      assert testbed.copies(weight)[i].tolist() == [-total, 64 - 16 * total]


def test_shards_of_float64_are_summed_in_float64() -> None:
  rng = np.random.default_rng(2)
  steps = rng.normal(size=(STEPS, N, 6))
  trained = []
  for shards in (False, "elementwise"):
    strategy = VectorizedStrategy(N, split_batches=True)
    with strategy.scope():
      weight = testbed.variable(np.ones(6))
      optimizer = _optimizer(PAIRS, shard_update=shards)()
      optimizer.build([weight])
    for values in steps:
      grads = testbed.per_replica(strategy, list(values))
      strategy.run(
        lambda g, w=weight, o=optimizer: o.apply_gradients([(g, w)]), (grads,)
      )
    trained.append(testbed.copies(weight))
  assert trained[0][0].dtype == np.float64
  np.testing.assert_allclose(*trained, rtol=1e-12)


@pytest.mark.parametrize("least", [0, 2])
def test_steps_in_a_branch(least: int) -> None:
  """The sums of a group that does not enter the branch change nothing."""
  strategy = VectorizedStrategy(N, split_batches=True)
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


def test_a_nan_in_one_group_skips_that_group_alone() -> None:
  strategy = VectorizedStrategy(N, split_batches=True)
  with strategy.scope():
    weight = tf.Variable(8.0)
    optimizer = CrossShardOptimizer(
      keras.optimizers.SGD(1.0),
      "sum",
      group_assignment=PAIRS,
      skip_nonfinite=True,
    )
    optimizer.build([weight])
  grads = testbed.per_replica(strategy, [1.0, 2.0, np.nan, 4.0])
  strategy.run(
    lambda g: optimizer.apply_gradients([(g, weight)]), args=(grads,)
  )
  assert [float(copy) for copy in testbed.copies(weight)] == [5.0] * 2 + [
    8.0
  ] * 2
  assert testbed.copies(optimizer.skipped_steps) == [0, 0, 1, 1]


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
@pytest.mark.parametrize("fused", [None, False])
def test_members_of_a_group_stay_bitwise_equal(
  num_replicas: int, make: Callable[[], Any], fused: bool | None
) -> None:
  """Also where the numbers of replicas fill no vector of the processor."""
  strategy = VectorizedStrategy(num_replicas, split_batches=True)
  with strategy.scope():
    weights = [tf.Variable(tf.ones(shape)) for shape in ([7, 3], [5], [3])]
    optimizer = CrossShardOptimizer(
      make(), fused_update=fused, loss_averaged_over="global"
    )
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
  for strategy in (
    testbed.mirrored(),
    VectorizedStrategy(N, split_batches=True),
  ):
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
  strategy = VectorizedStrategy(N, split_batches=True)
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


def test_values_on_the_host(tmp_path: Any) -> None:
  """Weights, checkpoints and replica_state, for groups that differ."""
  from tf_cross_shard import replica_state

  def make(strategy: Any) -> tuple[Any, Any]:
    with strategy.scope():
      model = testbed.network(1)
      optimizer = CrossShardOptimizer(
        _adam(schedules.PerGroup([0.1, 0.2, 0.3, 0.4])), group_assignment=SINGLE
      )
      model.compile(optimizer, "mse")
      optimizer.build(model.trainable_variables)
    return model, optimizer

  model, optimizer = make(VectorizedStrategy(N, split_batches=True))
  x = np.random.default_rng(0).normal(size=(2 * N, 3)).astype("float32")
  model.fit(x, x[:, :1], batch_size=2 * N, epochs=3, verbose=0)
  trained = [testbed.copies(v) for v in model.weights]
  assert not np.array_equal(trained[0][0], trained[0][1])
  np.testing.assert_array_equal(model.get_weights()[0], trained[0][0])
  replica_state.save(tmp_path / "state", optimizer, model)
  tf.train.Checkpoint(model=model).write(os.fspath(tmp_path / "first"))
  model.set_weights([np.zeros_like(w) for w in model.get_weights()])
  assert not any(np.any(copy) for copy in testbed.copies(model.weights[0]))
  for strategy in (
    VectorizedStrategy(N, split_batches=True),
    testbed.mirrored(),
  ):
    other, other_optimizer = make(strategy)
    replica_state.restore(tmp_path / "state", other_optimizer, other)
    for variable, copies in zip(other.weights, trained, strict=True):
      np.testing.assert_array_equal(testbed.copies(variable), copies)
  tf.train.Checkpoint(model=model).read(os.fspath(tmp_path / "first"))
  np.testing.assert_array_equal(model.get_weights()[0], trained[0][0])
