"""The optimizers, the schedule and the layers of this package for Keras 3.

You usually do not need this module: `tf_cross_shard.CrossShardOptimizer`,
`TowerOptimizer`, `schedules.PerModel` and the classes of `layers`
already match whichever Keras `tf.keras` refers to. Import from this module if
your program imports `keras` while `tf.keras` is tf_keras
(TF_USE_LEGACY_KERAS=1):

>>> import keras
>>> from tf_cross_shard import keras3
>>> keras3.CrossShardOptimizer(keras.optimizers.SGD(0.5)).learning_rate.dtype
'float32'
"""

# ruff: noqa: E402  # Versions are checked first.

from tf_cross_shard._src.core import versions as _versions

_versions.check_keras3()

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.core.keras3.classes import (
  CrossShardOptimizer,
  PerModel,
)
from tf_cross_shard._src.layers.keras3 import (
  Embedding,
  SyncBatchNormalization,
  TunableDropout,
)
from tf_cross_shard._src.towers.keras3 import TowerOptimizer

__all__ = [
  "CrossShardOptimizer",
  "Embedding",
  "PerModel",
  "SyncBatchNormalization",
  "TunableDropout",
  "TowerOptimizer",
]
__dir__ = _catalogue.publish(globals())
