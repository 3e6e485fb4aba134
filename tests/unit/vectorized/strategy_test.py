"""VectorizedStrategy as a user sees it.

tests/unit/virtual_tpu/strategy_test.py tests what both strategies share.
"""

import contextlib
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
  schedules,
)

N = 3


@pytest.fixture
def strategy() -> VectorizedStrategy:
  return VectorizedStrategy(N, split_batches=True)


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


def test_the_number_of_replicas_is_checked() -> None:
  for number in (0, True, 2.0):
    with pytest.raises(ValueError, match=r"`num_replicas` must be an integer"):
      VectorizedStrategy(number, split_batches=True)  # type: ignore[arg-type]


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
  with VectorizedStrategy(N, split_batches=True).scope():
    foreign = tf.Variable(1.0, name="foreign")
  with pytest.raises(ValueError, match=r"foreign:0 belongs to another"):
    strategy.run(lambda: foreign + 1.0)


@training.in_both
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_optimizers_from_outside_of_the_scope(kind: str, which: str) -> None:
  """In `fit` and in a loop of your own."""
  home, _ = training.KERASES[which]
  models = VectorizedStrategy(N)
  optimizer = getattr(home.optimizers, kind)(0.5)
  with models.scope():
    dense = home.layers.Dense(2, use_bias=False)
    model = home.Sequential([home.Input((3,)), dense])
    model.compile(optimizer, "mse")
  before = model.get_weights()

  def step() -> None:
    optimizer.apply_gradients([(tf.ones([3, 2]), dense.kernel)])

  acts: list[Callable[[], Any]] = [lambda: models.run(step)]
  if (which, kind) != ("keras", "Adam"):  # Keras 3 builds it outside of `run`.
    acts.append(lambda: model.fit(np.ones([4, 3]), np.ones([4, 2]), verbose=0))
  for act in acts:
    with pytest.raises(RuntimeError, match=r"Create the opt.* inside .*scope"):
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
  models, args = VectorizedStrategy(N), (np.ones([4, 2]), np.zeros([4, 2]))
  words = r'`reduction` .*"none", and take tf\.reduce_mean\('
  with pytest.raises(ValueError, match=words):
    models.run(mean, args)
  found = models.run(lambda *args: tf.reduce_mean(each(*args)), args)
  assert testbed.per_replica_results(models, found) == [float(mean(*args))] * N
  with pytest.raises(ValueError, match="custom_training for more details"):
    strategy.run(mean, args)


def test_variables_from_outside_of_the_scope(
  strategy: VectorizedStrategy,
) -> None:
  shared = tf.Variable(1.0)
  result = strategy.run(lambda x: x * shared, (_ids(strategy),))
  assert testbed.per_replica_results(strategy, result) == [0.0, 1.0, 2.0]
  strategy.run(lambda x: shared.assign_add(x), (_ids(strategy),))
  strategy.run(lambda: shared.assign_sub(1.0))
  assert float(shared.numpy()) == 1.0  # 1 + (0 + 1 + 2) - 3 * 1
  with pytest.raises(ValueError, match=r"Replicas assign different values"):
    strategy.run(lambda x: shared.assign(x), (_ids(strategy),))


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


@pytest.mark.parametrize("in_function", [False, True])
def test_reduce_and_gather(
  in_function: bool, strategy: VectorizedStrategy
) -> None:
  def combine(values: Any) -> Any:
    values = strategy.run(lambda x: tf.stack([x, 1.0]), (values,))
    return (
      strategy.reduce("SUM", values, axis=None),
      strategy.reduce("MEAN", values, axis=0),
      strategy.gather(values, axis=0),
    )

  call = tf.function(combine) if in_function else combine
  total, mean, gathered = call(_ids(strategy))
  assert total.numpy().tolist() == [3.0, 3.0]
  assert float(mean) == 1.0
  assert gathered.numpy().tolist() == [0.0, 1.0, 1.0, 1.0, 2.0, 1.0]


class TestDatasets:
  def _elements(self, strategy: VectorizedStrategy, size: int) -> list[Any]:
    data = tf.data.Dataset.range(12).batch(size)
    distributed = strategy.experimental_distribute_dataset(data)
    return [
      testbed.per_replica_results(strategy, element) for element in distributed
    ]

  def test_split(self, strategy: VectorizedStrategy) -> None:
    assert self._elements(strategy, 6)[0] == [[0, 1], [2, 3], [4, 5]]

  def test_whole_batches(self) -> None:
    shared = VectorizedStrategy(N)
    assert self._elements(shared, 5)[-1] == [[10, 11]] * N

  def test_from_a_function(self, strategy: VectorizedStrategy) -> None:
    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
      size = context.get_per_replica_batch_size(6)
      return tf.data.Dataset.range(12).batch(size)

    data = strategy.distribute_datasets_from_function(make)
    elements = [testbed.per_replica_results(strategy, x) for x in data]
    assert elements[1] == [[6, 7], [8, 9], [10, 11]]

  def test_uneven_batches(self, strategy: VectorizedStrategy) -> None:
    elements = self._elements(strategy, 7)
    assert elements == [[[0, 1, 2], [3, 4, 5], [6]], [[7, 8], [9, 10], [11]]]
    data = tf.data.Dataset.range(12).batch(5, drop_remainder=True)
    spec = strategy.experimental_distribute_dataset(data).element_spec
    assert [own.shape.as_list() for own in spec._value_specs] == [[None]] * N

  def test_what_is_not_dense(self, strategy: VectorizedStrategy) -> None:
    ragged = tf.ragged.constant([[1], [2, 3], [4]])
    data = tf.data.Dataset.from_tensors({"x": ragged})
    with pytest.raises(ValueError, match=r"'x' is a RaggedTensorSpec"):
      strategy.experimental_distribute_dataset(data)
    scalars = tf.data.Dataset.range(3)
    with pytest.raises(ValueError, match=r"no rows to split"):
      strategy.experimental_distribute_dataset(scalars)

  def test_examples_in_place_of_batches(
    self, strategy: VectorizedStrategy
  ) -> None:
    data = tf.data.Dataset.from_tensor_slices(
      (tf.ones([6, 4]), tf.ones([6, 1]))
    )
    with pytest.raises(ValueError, match=r"\[4, 1\] rows.* not batches"):
      strategy.experimental_distribute_dataset(data)
    # Several rows for each example.
    pairs = tf.data.Dataset.from_tensors((tf.ones([3]), tf.ones([6])))
    [(one, two)] = strategy.experimental_distribute_dataset(pairs)
    parts = map(strategy.experimental_local_results, (one, two))
    assert [len(part[0]) for part in parts] == [1, 2]


class TestUnevenBatches:
  """Three replicas share ten examples, in batches of seven and three."""

  def _data(self) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)

  def _models(
    self, strategy: VectorizedStrategy, jit_compile: bool
  ) -> tuple[Any, Any]:
    """Returns a model of the strategy, and the same model on one device."""
    models = []
    for scope in (strategy.scope(), contextlib.nullcontext()):
      with scope:
        tf.keras.utils.set_random_seed(0)
        models.append(testbed.network(1))
        models[-1].compile(
          "sgd", "mse", metrics=["mae"], jit_compile=jit_compile
        )
    return models[0], models[1]

  @pytest.mark.parametrize("jit_compile", [False, True])
  def test_evaluate_and_predict_count_each_example_once(
    self, strategy: VectorizedStrategy, jit_compile: bool
  ) -> None:
    x, y = self._data()
    model, plain = self._models(strategy, jit_compile)
    for size in (7, 2):
      np.testing.assert_allclose(
        model.predict(x, batch_size=size, verbose=0),
        plain.predict(x, batch_size=size, verbose=0),
        rtol=1e-5,
      )
      np.testing.assert_allclose(
        model.evaluate(x, y, batch_size=size, verbose=0),
        plain.evaluate(x, y, batch_size=size, verbose=0),
        rtol=1e-5,
      )

  def test_fit_repeats_the_first_examples(
    self, strategy: VectorizedStrategy, said: list[str]
  ) -> None:
    x, y = self._data()
    model, plain = self._models(strategy, False)
    model.evaluate(x, y, batch_size=7, verbose=0)
    assert said == []
    model.fit(x, y, batch_size=7, shuffle=False, verbose=0)
    [line] = said
    assert "batch has 7 examples" in line
    assert "repeats the first 2 examples" in line
    for rows in ([*range(7), 0, 1], [7, 8, 9]):
      plain.train_on_batch(x[rows], y[rows])
    for own, other in zip(
      model.get_weights(), plain.get_weights(), strict=True
    ):
      np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)

  def test_in_a_loop_of_your_own(self, strategy: VectorizedStrategy) -> None:
    @tf.function
    def doubled(batch: Any) -> tf.Tensor:
      results = strategy.run(lambda x: 2 * x, args=(batch,))
      return strategy.gather(results, axis=0)

    data = tf.data.Dataset.range(10).batch(7)
    batches = strategy.experimental_distribute_dataset(data)
    gathered = np.concatenate([doubled(batch) for batch in batches])
    assert gathered.tolist() == list(range(0, 20, 2))


def test_fit_takes_booleans_and_strings(strategy: VectorizedStrategy) -> None:
  """Keras averages the first batch, for its shape."""
  x = np.arange(6.0, dtype="float32").reshape(6, 1)
  words = tf.constant([["a"], ["b"]] * 3)
  data = tf.data.Dataset.from_tensors(({"x": x, "words": words}, x > 2.0))

  class Model(tf.keras.Model):  # type: ignore[misc]
    def build(self, shapes: Any) -> None:
      self.weight = self.add_weight(shape=(), initializer="zeros")

    def call(self, inputs: Any) -> tf.Tensor:
      is_a = tf.cast(inputs["words"] == "a", tf.float32)
      return self.weight * inputs["x"] * is_a

  with strategy.scope():
    model = Model()
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
  model.fit(data, verbose=0)
  # The gradient is the mean of -2 * x over "a" and x > 2: -2 * 4 / 6.
  assert float(model.weight) == pytest.approx(0.5 * 8 / 6)


def test_whole_batches_train_as_separate_fits() -> None:
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
  shared = VectorizedStrategy(N)
  with shared.scope():
    model = testbed.network(1)
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.SGD(schedules.PerGroup([r / 10 for r in rates])),
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
  caplog: pytest.LogCaptureFixture,
) -> None:
  shared = VectorizedStrategy(N)
  with shared.scope():
    model = testbed.network(1)
    model.compile("sgd", "mse")
  for _ in range(2):
    assert len(model.predict(np.ones([4, 3], np.float32), verbose=0)) == 4 * N
  assert caplog.text.count("3 times as many rows") == 1
  model.evaluate(np.ones([4, 3]), np.ones([4, 1]), verbose=0)
  assert caplog.text.count("as many rows") == 1


def test_xla_updates_large_stacks(strategy: VectorizedStrategy) -> None:
  rates, shape = [0.5, 0.1, 0.02], [512, 700]  # With N copies, over a million.
  with strategy.scope():
    weight = tf.Variable(tf.ones(shape))
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(schedules.PerGroup(rates)),
      group_assignment=groups.singletons(N),
      loss_averaged_over="replica",
    )

  def step(x: tf.Tensor) -> None:
    optimizer.minimize(lambda: tf.reduce_sum((weight - x) ** 2), [weight])

  for _ in range(3):
    strategy.run(step, args=(_ids(strategy),))
  [row] = optimizer.describe().rows()
  assert row["updated_by"] == "XLA"
  for i, copy in enumerate(testbed.copies(weight)):
    plain = tf.Variable(tf.ones(shape))
    adam = tf.keras.optimizers.Adam(rates[i])
    for _ in range(3):
      adam.apply_gradients([(2 * (plain - float(i)), plain)])
    np.testing.assert_allclose(copy, plain, rtol=1e-5, atol=1e-5)
