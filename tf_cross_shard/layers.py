"""Keras layers for embedding tables, for groups and for searches.

- `Embedding`: Keras' layer, but it reads only the rows that a batch looks up
- `embedding_lookup`: the lookup of `Embedding` as a function, for your own
  layers
- `SyncBatchNormalization`: batch normalization over each group's batch
- `TunableDropout`: dropout whose rate is a weight

The layers subclass those of `tf.keras`. `tf_cross_shard.keras3` and
`tf_cross_shard.tf_keras` have the versions for Keras 3 and tf_keras.

>>> from tf_cross_shard import layers
>>> layer = layers.SyncBatchNormalization([[0, 1], [2, 3]])
>>> layer.group_assignment  # replica 2 shares statistics with replica 3 only
[[0, 1], [2, 3]]
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.core import versions as _versions
from tf_cross_shard._src.layers.embedding_lookup import embedding_lookup

if _versions.uses_tf_keras():
  from tf_cross_shard._src.layers.tf_keras import (
    Embedding,
    SyncBatchNormalization,
    TunableDropout,
  )
else:
  from tf_cross_shard._src.layers.keras3 import (
    Embedding,
    SyncBatchNormalization,
    TunableDropout,
  )

__all__ = [
  "Embedding",
  "SyncBatchNormalization",
  "TunableDropout",
  "embedding_lookup",
]
__dir__ = _catalogue.publish(globals())
