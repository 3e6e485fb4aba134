"""From TensorFlow 1: optimizers of `tf.compat.v1.train`, and their checkpoints.

>>> import tensorflow as tf
>>> from tf_cross_shard import migration
>>> optimizer = migration.from_v1(tf.compat.v1.train.AdamOptimizer(0.5))
>>> float(optimizer.learning_rate.numpy())
0.5
"""

from tf_cross_shard.migration.checkpoints import Conversion, convert_checkpoint
from tf_cross_shard.migration.optimizers import from_v1

__all__ = ["Conversion", "convert_checkpoint", "from_v1"]


def convert_optimizer(opt, package):  # type: ignore
  """The optimizer of a Keras with the formula of one of TensorFlow 1."""
  import importlib

  module = "v1_keras3" if package == "keras" else "v1_tf_keras"
  return importlib.import_module(f"tf_cross_shard.migration.{module}").convert(
    opt
  )
