"""The optimizers for the Keras that `tf.keras` is."""

from tf_cross_shard import versions

if versions.uses_tf_keras():
  from tf_cross_shard.tf_keras import CrossShardOptimizer, TowerOptimizer
else:
  from tf_cross_shard.keras3 import CrossShardOptimizer, TowerOptimizer

__all__ = ["CrossShardOptimizer", "TowerOptimizer"]
