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
  return VectorizedStrategy(2, split_batches=True)


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
