"""VectorizedStrategy as a user sees it.

tests/unit/virtual_tpu/strategy_test.py tests what both strategies share.
"""

import dataclasses
import gc
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  groups,
  per_model,
  schedules,
)

N = 3


@pytest.fixture
def strategy() -> VectorizedStrategy:
  return VectorizedStrategy(N)


def _ids(strategy: VectorizedStrategy) -> Any:
  return testbed.per_replica(strategy, [0.0, 1.0, 2.0])


def _copies(variable: Any) -> list[Any]:
  return [copy.tolist() for copy in testbed.copies(variable)]


RUN: dict[str, Callable[..., Any]] = {
  "eager": lambda strategy, fn, *args: strategy.run(fn, args),
  "function": lambda strategy, fn, *args: tf.function(
    lambda *x: strategy.run(fn, x)
  )(*args),
  "compiled": lambda strategy, fn, *args: tf.function(
    lambda *x: strategy.run(fn, x), jit_compile=True
  )(*args),
  "compiled inside": lambda strategy, fn, *args: strategy.run(
    tf.function(fn, jit_compile=True), args
  ),
}
each_way = pytest.mark.parametrize("way", RUN)


@each_way
def test_every_replica_has_its_own_copy(
  way: str, strategy: VectorizedStrategy
) -> None:
  with strategy.scope():
    weight = tf.Variable([1.0, 2.0])

  def step(x: tf.Tensor) -> tf.Tensor:
    weight.assign_add([x, 10.0 * x])
    return tf.reduce_sum(weight)

  result = RUN[way](strategy, step, _ids(strategy))
  assert testbed.per_replica_results(strategy, result) == [3.0, 14.0, 25.0]
  assert _copies(weight) == [[1.0, 2.0], [2.0, 12.0], [3.0, 22.0]]


@each_way
def test_a_function_that_returns_nothing(
  way: str, strategy: VectorizedStrategy
) -> None:
  with strategy.scope():
    weight = tf.Variable(1.0)

  def inner(x: tf.Tensor) -> None:
    tf.cond(x > 1.0, lambda: weight.assign(5.0 * x), lambda: weight * 1.0)
    for _ in tf.range(2):
      weight.assign_sub(x)

  def step(x: tf.Tensor) -> None:
    tf.function(inner)(x)

  assert RUN[way](strategy, step, _ids(strategy)) is None
  assert _copies(weight) == [1.0, -1.0, 6.0]


def test_call_for_each_replica(strategy: VectorizedStrategy) -> None:
  """Old loops call it, eagerly and in a tf.function."""
  call = strategy.extended.call_for_each_replica
  for run in (call, tf.function(call)):
    result = run(lambda x, y: x + y, (_ids(strategy),), {"y": 1.0})
    assert testbed.per_replica_results(strategy, result) == [1.0, 2.0, 3.0]


def test_one_stack_in_place_of_copies(strategy: VectorizedStrategy) -> None:
  """The handle that programs capture keeps no second value."""
  with strategy.scope():
    weight = tf.Variable(tf.ones([4, 5]))
  strategy.run(lambda: weight.assign_add(tf.ones([4, 5])))
  kept = tf.raw_ops.ReadVariableOp(
    resource=weight.replica_handle, dtype=tf.float32
  )
  assert kept.shape == [0]
  assert weight.read_stack().shape == [N, 4, 5]
  assert weight.shape == [4, 5]
  np.testing.assert_array_equal(weight.numpy(), np.full([4, 5], 2.0))


def test_the_host_gathers_rows_of_the_value(
  strategy: VectorizedStrategy,
) -> None:
  with strategy.scope():
    table = tf.Variable([[1.0], [2.0]])
  with tf.GradientTape() as tape:
    rows = tf.nn.embedding_lookup(table, [1, 1, 0])
    one = tf.gather_nd(table, [[1, 0]])
    total = tf.reduce_sum(rows) + tf.reduce_sum(one)
  assert rows.numpy().tolist() == [[2.0], [2.0], [1.0]]
  assert one.numpy().tolist() == [2.0]
  grad = tf.convert_to_tensor(tape.gradient(total, table))
  assert grad.numpy().tolist() == [[1.0], [3.0]]


@dataclasses.dataclass(frozen=True)
class Scale:
  """Objects with the same name are equal, whatever their factor is."""

  name: str
  factor: float = dataclasses.field(compare=False)

  def times(self, x: tf.Tensor) -> tf.Tensor:
    return self.factor * x


def test_methods_of_equal_objects_are_traced_for_each_object(
  strategy: VectorizedStrategy,
) -> None:
  scales = Scale("a", 2.0), Scale("a", 3.0)
  assert scales[0] == scales[1]
  for scale in scales:
    result = strategy.run(scale.times, (_ids(strategy),))
    assert testbed.per_replica_results(strategy, result) == [
      i * scale.factor for i in range(N)
    ]


def test_functions_are_kept_as_long_as_their_objects_live(
  strategy: VectorizedStrategy,
) -> None:
  scale = Scale("a", 2.0)
  of = strategy.extended.function_of
  assert of(scale.times) is of(scale.times)
  function = weakref.ref(of(scale.times))
  del scale
  gc.collect()
  assert function() is None


def test_a_function_may_create_a_variable_of_a_constant(
  strategy: VectorizedStrategy,
) -> None:
  """As the `build` of Keras' Nadam does."""
  made: list[Any] = []

  def step(x: tf.Tensor) -> tf.Tensor:
    if not made:
      made.append(tf.Variable(tf.constant([1.0, 2.0])))
    return made[0].assign_add([x, x])

  RUN["function"](strategy, step, _ids(strategy))
  assert _copies(made[0]) == [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]


def test_graphs_of_tensorflow_1(strategy: VectorizedStrategy) -> None:
  with tf.Graph().as_default(), strategy.scope():
    with pytest.raises(NotImplementedError, match=r"TensorFlow 1\. Create"):
      tf.Variable(1.0)


def test_saved_models_are_loaded_outside_of_the_scope(
  strategy: VectorizedStrategy, tmp_path: pathlib.Path
) -> None:
  module = tf.Module()
  module.weight = tf.Variable(1.0)
  tf.saved_model.save(module, str(tmp_path))
  with strategy.scope():
    with pytest.raises(NotImplementedError, match="Load it outside, create"):
      tf.saved_model.load(str(tmp_path))


def test_variables_of_another_strategy(strategy: VectorizedStrategy) -> None:
  with VectorizedStrategy(N).scope():
    foreign = tf.Variable(1.0, name="foreign")
  with pytest.raises(ValueError, match=r"foreign:0 belongs to another"):
    strategy.run(lambda: foreign + 1.0)


@training.in_both
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_optimizers_from_outside_of_the_scope(
  kind: str, which: str, strategy: VectorizedStrategy
) -> None:
  """In `fit` and in a loop of your own."""
  home, _ = training.KERASES[which]
  optimizer = getattr(home.optimizers, kind)(0.5)
  with strategy.scope():
    dense = home.layers.Dense(2, use_bias=False)
    model = home.Sequential([home.Input((3,)), dense])
    model.compile(optimizer, "mse")
  before = model.get_weights()

  def step() -> None:
    optimizer.apply_gradients([(tf.ones([3, 2]), dense.kernel)])

  words = r"Create the opt.*model\.compile, inside .*scope"
  for act in (
    lambda: strategy.run(step),
    lambda: model.fit(np.ones([4, 3]), np.ones([4, 2]), verbose=0),
  ):
    with pytest.raises(RuntimeError, match=words):
      act()
  np.testing.assert_equal(model.get_weights(), before)


@pytest.mark.skipif(
  "tf_keras" not in training.KERASES, reason="it is not installed"
)
def test_loss_objects_of_tf_keras_in_a_loop_of_your_own(
  strategy: VectorizedStrategy,
) -> None:
  """What the error names gives each model what the loss gives without it."""
  losses = training.KERASES["tf_keras"][0].losses
  mean, each = losses.MeanSquaredError(), losses.MeanSquaredError("none")
  args = np.ones([4, 2]), np.zeros([4, 2])
  words = r'`reduction` .*"none", and take tf\.reduce_mean\('
  with pytest.raises(ValueError, match=words):
    strategy.run(mean, args)
  found = strategy.run(lambda *args: tf.reduce_mean(each(*args)), args)
  expected = [float(mean(*args))] * N
  assert testbed.per_replica_results(strategy, found) == expected


def test_variables_from_outside_of_the_scope(
  strategy: VectorizedStrategy,
) -> None:
  shared = tf.Variable(1.0)
  result = strategy.run(lambda x: x * shared, (_ids(strategy),))
  assert testbed.per_replica_results(strategy, result) == [0.0, 1.0, 2.0]
  strategy.run(lambda: shared.assign_sub(3.0))
  assert float(shared.numpy()) == -2.0
  for assign in (shared.assign, shared.assign_add):
    with pytest.raises(ValueError, match=r"Replicas assign different values"):
      strategy.run(lambda x, assign=assign: assign(x), (_ids(strategy),))


class TestOperationsWithoutConverter:
  def test_run_in_a_loop_and_are_named_once(
    self, strategy: VectorizedStrategy, caplog: pytest.LogCaptureFixture
  ) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 2, 3, 3, 3, 1)).astype("float32")
    with strategy.scope():
      kernel = tf.Variable(tf.ones([2, 2, 2, 1, 3]))

    def convolve(x: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
      kernel.assign_add(tf.fill(kernel.shape, own))
      return tf.nn.conv3d(x, kernel, [1] * 5, "VALID")

    with caplog.at_level("INFO", "absl"):
      result = strategy.run(
        convolve, (testbed.per_replica(strategy, list(x)), _ids(strategy))
      )
    [record] = [r for r in caplog.records if "VectorizedStrategy" in r.message]
    assert "once for each replica" in record.getMessage()
    assert "Conv3D (1)" in record.getMessage()
    for i, own in enumerate(strategy.experimental_local_results(result)):
      filters = tf.fill(kernel.shape, 1.0 + i)
      plain = tf.nn.conv3d(x[i], filters, [1] * 5, "VALID")
      np.testing.assert_allclose(own, plain, rtol=1e-5)

  def test_on_variables_are_errors(self, strategy: VectorizedStrategy) -> None:
    with strategy.scope():
      weight = tf.Variable([1.0, 2.0])

    def step() -> None:
      tf.raw_ops.ResourceScatterMul(
        resource=weight.handle, indices=[0], updates=[2.0]
      )

    words = r"vectorize the operation ResourceScatterMul.*separate fits"
    with pytest.raises(NotImplementedError, match=words):
      strategy.run(step)
    assert _copies(weight) == [[1.0, 2.0]] * N


def test_the_second_trace_receives_tensors_of_its_own(
  strategy: VectorizedStrategy,
) -> None:
  """Bijectors of TensorFlow Probability keep their results by tensor."""
  kept: dict[Any, tf.Tensor] = {}
  with strategy.scope():
    weight = tf.Variable(2.0)
  slots: list[tf.Variable] = []

  def step(x: tf.Tensor, ragged: tf.RaggedTensor) -> tf.Tensor:
    slots[:] = slots or [tf.Variable(0.0)]  # So there is a second trace.
    with tf.GradientTape() as tape:
      for given in (x, ragged.values):
        if given.ref() not in kept:
          kept[given.ref()] = weight * given
      y = kept[x.ref()] * kept[ragged.values.ref()]
    return tape.gradient(y, weight)

  args = tf.constant([3.0]), tf.ragged.constant([[5.0]])
  gradient = tf.function(lambda *x: strategy.run(step, x))(*args)
  assert testbed.per_replica_results(strategy, gradient) == [60.0] * N


def test_whole_batches(strategy: VectorizedStrategy) -> None:
  data = tf.data.Dataset.range(12).batch(5)
  for batches in (
    strategy.experimental_distribute_dataset(data),
    strategy.distribute_datasets_from_function(lambda _: data),
  ):
    last = testbed.per_replica_results(strategy, list(batches)[-1])
    assert last == [[10, 11]] * N


def test_fit_takes_batches_of_all_dtypes(strategy: VectorizedStrategy) -> None:
  """The model is built from one model's batch, not from the batches' mean."""
  x = np.arange(6.0, dtype="float32").reshape(6, 1)
  words = tf.constant([["a"], ["b"]] * 3)
  data = tf.data.Dataset.from_tensors(({"x": x, "words": words}, x > 2.0))
  # Model i gets id i for each row.
  ids = np.arange(N, dtype="int32")[:, np.newaxis].repeat(6, axis=1)
  data = data.map(lambda x, y: ({**x, "ids": per_model(ids)}, y))

  class Model(tf.keras.Model):  # type: ignore[misc]
    def build(self, shapes: Any) -> None:
      self.weight = self.add_weight(shape=(), initializer="zeros")

    def call(self, inputs: Any) -> tf.Tensor:
      is_a = tf.cast(inputs["words"] == "a", tf.float32)
      factors = tf.gather(tf.range(1.0, N + 1.0), inputs["ids"])
      return self.weight * inputs["x"] * is_a * factors[:, tf.newaxis]

  with strategy.scope():
    model = Model()
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
  model.fit(data, verbose=0)
  # The gradient is the mean of -2 * x over "a" and x > 2, times the factor:
  # -2 * 4 / 6 * (i + 1).
  right = [0.5 * 8 / 6 * (i + 1) for i in range(N)]
  np.testing.assert_allclose(_copies(model.weight), right, rtol=1e-6)


def test_whole_batches_train_as_separate_fits(
  strategy: VectorizedStrategy,
) -> None:
  """Weights, losses, metrics and validation, of different learning rates."""
  rates, steps, size = [0.5, 0.1, 0.02], 5, 8
  rng = np.random.default_rng(0)
  x = rng.normal(size=(steps * size, 3)).astype("float32")
  y = x.sum(axis=1, keepdims=True)
  data = tf.data.Dataset.from_tensor_slices((x, y)).batch(size)

  def fit(model: Any) -> Any:
    return model.fit(
      data, epochs=2, verbose=0, validation_data=data, shuffle=False
    ).history

  histories = []
  plain_weights = []
  for rate in rates:
    plain = testbed.network(1)
    plain.compile(tf.keras.optimizers.SGD(rate / 10), "mse", metrics=["mae"])
    histories.append(fit(plain))
    plain_weights.append(plain.get_weights())
  with strategy.scope():
    model = testbed.network(1)
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.SGD(schedules.PerModel([r / 10 for r in rates])),
      group_assignment=groups.singletons(N),
    )
    model.compile(optimizer, "mse", metrics=["mae"])
  history = fit(model)
  for number, variable in enumerate(model.weights):
    for copy, own in zip(testbed.copies(variable), plain_weights, strict=True):
      np.testing.assert_allclose(copy, own[number], rtol=1e-5, atol=1e-6)
  for name, values in history.items():
    means = np.mean([own[name] for own in histories], axis=0)
    np.testing.assert_allclose(values, means, rtol=1e-5)


def test_predict_with_whole_batches_warns_of_more_rows(
  strategy: VectorizedStrategy, caplog: pytest.LogCaptureFixture
) -> None:
  with strategy.scope():
    model = testbed.network(1)
    model.compile("sgd", "mse")
  for _ in range(2):
    assert len(model.predict(np.ones([4, 3], np.float32), verbose=0)) == 4 * N
  assert caplog.text.count("3 times as many rows") == 1
  model.evaluate(np.ones([4, 3]), np.ones([4, 1]), verbose=0)
  assert caplog.text.count("as many rows") == 1
