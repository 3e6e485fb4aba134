"""The optimizers, the schedule and the layers of this package for tf_keras.

tf_keras is Keras 2. You usually do not need this module:
`tf_cross_shard.CrossShardOptimizer`, `TowerOptimizer`, `schedules.PerModel` and
the classes of `layers` already match whichever Keras `tf.keras` refers to.
Import from this module if your program imports `tf_keras` while `tf.keras` is
Keras 3:

>>> import tf_keras
>>> from tf_cross_shard import tf_keras as for_tf_keras
>>> optimizer = for_tf_keras.CrossShardOptimizer(tf_keras.optimizers.SGD(0.5))
>>> optimizer.learning_rate.dtype.name
'float32'
"""

# ruff: noqa: E402  # Versions are checked first.

from tf_cross_shard._src.core import versions as _versions

_versions.check_tf_keras()

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.core.tf_keras.classes import (
  CrossShardOptimizer,
  PerModel,
)
from tf_cross_shard._src.layers.tf_keras import (
  Embedding,
  SyncBatchNormalization,
  TunableDropout,
)
from tf_cross_shard._src.towers.tf_keras import TowerOptimizer

__all__ = [
  "CrossShardOptimizer",
  "Embedding",
  "PerModel",
  "SyncBatchNormalization",
  "TunableDropout",
  "TowerOptimizer",
]
__dir__ = _catalogue.publish(globals())
