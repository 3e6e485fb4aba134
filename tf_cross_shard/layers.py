"""Keras layers that know of groups.

`SyncBatchNormalization` is a layer of what `tf.keras` is;
`tf_cross_shard.keras3` and `tf_cross_shard.tf_keras` have one each.

>>> layer = SyncBatchNormalization([[0, 1], [2, 3]])
>>> layer.group_assignment  # replica 2 shares statistics with replica 3 only
[[0, 1], [2, 3]]
"""

from tf_cross_shard import versions

if versions.uses_tf_keras():
  from tf_cross_shard.tf_keras import SyncBatchNormalization
else:
  from tf_cross_shard.keras3 import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]


def __dir__() -> list[str]:
  """Returns the public names."""
  return sorted(__all__)
