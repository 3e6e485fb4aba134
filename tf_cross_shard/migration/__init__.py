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


def __dir__() -> list[str]:
  """Returns the public names."""
  return sorted(__all__)
