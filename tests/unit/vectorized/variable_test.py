"""Variables of all replicas, on the host and in wrappers of Keras."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from tests.support import training
from tf_cross_shard import VectorizedStrategy
from tf_cross_shard.virtual_tpu import VirtualTPUStrategy

needs_tf_keras = pytest.mark.skipif(
  "tf_keras" not in training.KERASES, reason="it is not installed"
)


@pytest.fixture
def strategy() -> VectorizedStrategy:
  return VectorizedStrategy(2, split_batches=True)


def test_the_synchronization_that_auto_stands_for(
  strategy: VectorizedStrategy,
) -> None:
  """AUTO means ON_WRITE for data-parallel replicas, as in MirroredStrategy."""
  kinds = tf.VariableSynchronization
  for replicas, expected in (
    (strategy, kinds.ON_WRITE),
    (VectorizedStrategy(2), kinds.AUTO),
  ):
    with replicas.scope():
      assert tf.Variable(1.0).synchronization == expected
      read = tf.Variable(1.0, synchronization=kinds.ON_READ)
      assert read.synchronization == kinds.ON_READ


@needs_tf_keras
@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_of_tf_keras_in_mixed_precision(
  asynchronous: bool,
  strategy: VectorizedStrategy,
  tmp_path: pathlib.Path,
) -> None:
  """Restoring sets all copies to the value in the file."""
  home, _ = training.KERASES["tf_keras"]
  with strategy.scope():
    layer = home.layers.Dense(1, dtype="mixed_bfloat16")
    layer.build([None, 3])
  kernel = layer.kernel.numpy()
  checkpoint = tf.train.Checkpoint(layer=layer)
  options = tf.train.CheckpointOptions(
    experimental_enable_async_checkpoint=asynchronous
  )
  path = checkpoint.save(str(tmp_path / "checkpoint"), options)
  layer.kernel.assign(tf.zeros([3, 1]))
  checkpoint.restore(path).assert_consumed()
  copies = strategy.experimental_local_results(layer.kernel)
  assert [x.numpy().tolist() for x in copies] == [kernel.tolist()] * 2


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_the_host_assigns_without_reading(
  method: str, strategy: VectorizedStrategy
) -> None:
  """With `read_value=False`, the result is what a plain variable returns."""
  with strategy.scope():
    weight = tf.Variable(1.0)
  assign = getattr(weight, method)
  assert assign(1.0, read_value=False) is None

  @tf.function
  def step() -> tf.Tensor:
    operation = assign(1.0, read_value=False)
    assert isinstance(operation, tf.Operation)
    with tf.control_dependencies([operation]):
      return tf.identity(weight)

  plain = tf.Variable(1.0)
  for _ in range(2):
    getattr(plain, method)(1.0)
  assert float(step()) == float(plain)


@needs_tf_keras
def test_the_host_assigns_in_mixed_precision_of_tf_keras(
  strategy: VectorizedStrategy,
) -> None:
  home, _ = training.KERASES["tf_keras"]
  with strategy.scope():
    layer = home.layers.Dense(1, dtype="mixed_bfloat16", use_bias=False)
    layer.build([None, 1])

  @tf.function
  def step() -> tf.Tensor:
    with tf.control_dependencies([layer.kernel.assign([[3.0]])]):
      return tf.identity(layer.kernel)

  assert step().numpy().tolist() == [[3.0]]


def _results_of_batches(home: Any, strategy: Any, jit_compile: bool) -> Any:
  """Trains and evaluates a model of tf_keras on batches."""
  draw = np.random.default_rng(0)
  x = draw.normal(size=[16, 2]).astype("float32")
  y = (x.sum(1, keepdims=True) + draw.normal(size=[16, 1]) > 0).astype("int32")
  with strategy.scope():
    model = home.Sequential(
      [home.layers.Dense(1, "sigmoid", kernel_initializer="ones")]
    )
    metrics = [home.metrics.AUC(num_thresholds=5), home.metrics.Precision()]
    model.compile("sgd", "mse", metrics=metrics, jit_compile=jit_compile)
  batches = [
    model.train_on_batch(x, y),
    model.train_on_batch(x[:8], y[:8], reset_metrics=False),
    model.test_on_batch(x, y),
  ]
  if not isinstance(strategy, VirtualTPUStrategy):
    batches.append(model.test_on_batch(x[:7], y[:7]))
  return batches


@needs_tf_keras
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("kind", ["vectorized", "virtual TPU"])
def test_tf_keras_reports_metrics_of_all_replicas(
  kind: str, jit_compile: bool, strategy: VectorizedStrategy
) -> None:
  """tf_keras computes the results of a batch's metrics in each replica."""
  home, _ = training.KERASES["tf_keras"]
  replicas = strategy if kind == "vectorized" else VirtualTPUStrategy(2)
  found = _results_of_batches(home, replicas, jit_compile)
  expected = _results_of_batches(home, tf.distribute.get_strategy(), False)
  np.testing.assert_allclose(found, expected[: len(found)], rtol=1e-5)


def _result_in_replicas(strategy: VectorizedStrategy, **kwargs: Any) -> Any:
  """Returns what replicas read of a variable whose copies are 1 and 2."""
  with strategy.scope():
    metric = tf.Variable(
      0.0, synchronization=tf.VariableSynchronization.ON_READ, **kwargs
    )

  def step() -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    metric.assign(1.0 + tf.cast(context.replica_id_in_sync_group, tf.float32))
    with distribute_lib.variable_sync_on_read_context():
      return 10.0 * metric

  result = strategy.run(step)
  return [float(x) for x in strategy.experimental_local_results(result)]


@pytest.mark.parametrize(
  ("aggregation", "expected"),
  [
    ("SUM", [30.0]),
    ("MEAN", [15.0]),
    ("ONLY_FIRST_REPLICA", [10.0, 10.0]),
    ("NONE", [10.0, 20.0]),
  ],
)
def test_replicas_that_ask_read_the_value_of_all(
  aggregation: str, expected: list[float], strategy: VectorizedStrategy
) -> None:
  kind = getattr(tf.VariableAggregation, aggregation)
  assert _result_in_replicas(strategy, aggregation=kind) == expected
  models = VectorizedStrategy(2)
  assert _result_in_replicas(models, aggregation=kind) == [10.0, 20.0]
