"""Variables of all replicas, on the host and in wrappers of Keras."""

import pathlib

import pytest
import tensorflow as tf

from tests.support import training
from tf_cross_shard import VectorizedStrategy

needs_tf_keras = pytest.mark.skipif(
  "tf_keras" not in training.KERASES, reason="it is not installed"
)


@pytest.fixture
def strategy() -> VectorizedStrategy:
  return VectorizedStrategy(2)


def test_a_checkpoint_restores_all_models(
  strategy: VectorizedStrategy, tmp_path: pathlib.Path
) -> None:
  with strategy.scope():
    weight = tf.Variable(1.0)
  checkpoint = tf.train.Checkpoint(weight=weight)
  path = checkpoint.write(str(tmp_path / "checkpoint"))
  weight.assign(2.0)
  checkpoint.read(path).assert_consumed()
  assert [float(x) for x in strategy.experimental_local_results(weight)] == [
    1,
    1,
  ]


@needs_tf_keras
@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_of_tf_keras_in_mixed_precision(
  asynchronous: bool, strategy: VectorizedStrategy, tmp_path: pathlib.Path
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
