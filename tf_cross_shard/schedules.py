"""Learning rates that differ between models.

- `PerModel`: a learning rate schedule with one learning rate for each model

`PerModel` subclasses the schedule class of `tf.keras`.
`tf_cross_shard.keras3.PerModel` and `tf_cross_shard.tf_keras.PerModel` are the
versions for Keras 3 and tf_keras.

Try four learning rates in one `fit`, one in each group:

>>> import tensorflow as tf
>>> from tf_cross_shard import CrossShardOptimizer, groups, schedules
>>> devices = [f"CPU:{i}" for i in range(4)]
>>> with tf.distribute.MirroredStrategy(devices).scope():
...   rates = schedules.PerModel([0.1, 0.03, 0.01, 0.003])
...   optimizer = CrossShardOptimizer(
...     tf.keras.optimizers.Adam(rates), group_assignment=groups.singletons(4)
...   )
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.core import versions as _versions

if _versions.uses_tf_keras():
  from tf_cross_shard._src.core.tf_keras.classes import PerModel
else:
  from tf_cross_shard._src.core.keras3.classes import PerModel

__all__ = ["PerModel"]
__dir__ = _catalogue.publish(globals())
