"""Importing the package: what it needs, and what it does at once."""

import pathlib

from tests.support import programs

_FIRST_COMPILE = """
import tensorflow as tf
tf.config.set_logical_device_configuration(
  tf.config.list_physical_devices("CPU")[0],
  [tf.config.LogicalDeviceConfiguration()] * 2,
)
import sys
for name in ("", ".pfor", ".control_flow_ops"):
  sys.modules["tensorflow.python.ops.parallel_for" + name] = None
import numpy as np
import tf_cross_shard

with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
  model = tf.keras.Sequential(
    [tf.keras.Input((1,)), tf.keras.layers.Dense(1, kernel_initializer="zeros")]
  )
  model.compile(
    tf_cross_shard.CrossShardOptimizer(tf.keras.optimizers.SGD(0.25)),
    lambda y, pred: tf.reduce_mean((y - pred) ** 2),
  )
model.fit(np.ones([4, 1]), np.ones([4, 1]), batch_size=4, verbose=0)
print("weight", model.get_weights()[0][0, 0])
try:
  tf_cross_shard.VectorizedStrategy(2)
except NotImplementedError as error:
  print(error)
"""


def test_without_the_vectorizer(tmp_path: pathlib.Path) -> None:
  """The first `compile` of a process is right, and the vectorizer may lack."""
  output = programs.run(["-c", _FIRST_COMPILE], tmp_path)
  assert "weight 0.5" in output  # 0.25 x 2 x (1 - 0)
  assert "VectorizedStrategy uses private parts of TensorFlow" in output
  assert "Train the models in separate fits" in output
