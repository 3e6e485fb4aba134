"""Callbacks of `fit` for groups that are trained apart.

They serve both Kerases, whichever `tf.keras` is.

>>> outer = OuterOptimizer(every=100)  # model.fit(data, callbacks=[outer])
"""

from tf_cross_shard.callbacks.outer_optimizer import OuterOptimizer

__all__ = [
  "OuterOptimizer",
]
