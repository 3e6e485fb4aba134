"""Learning rates that differ between groups.

`PerGroup` is a schedule of what `tf.keras` is; `tf_cross_shard.keras3` and
`tf_cross_shard.tf_keras` have one each. Four rates are tried in one `fit` by

>>> import tensorflow as tf
>>> from tf_cross_shard import CrossShardOptimizer, groups, schedules
>>> devices = [f"CPU:{i}" for i in range(4)]
>>> with tf.distribute.MirroredStrategy(devices).scope():
...   rates = schedules.PerGroup([0.1, 0.03, 0.01, 0.003])
...   optimizer = CrossShardOptimizer(
...     tf.keras.optimizers.Adam(rates), group_assignment=groups.singletons(4)
...   )
"""

from tf_cross_shard import versions
from tf_cross_shard.group_schedule import as_group, per_group

if versions.uses_tf_keras():
  from tf_cross_shard.tf_keras import PerGroup
else:
  from tf_cross_shard.keras3 import PerGroup

__all__ = ["PerGroup", "as_group", "per_group"]


def __dir__() -> list[str]:
  """Returns the public names."""
  return sorted(__all__)
