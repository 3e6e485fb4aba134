"""The TowerOptimizer that wraps optimizers of tf_keras (Keras 2)."""

from collections.abc import Iterable
from typing import Any

import tf_keras as keras

from tf_cross_shard._src.catalogue import documented
from tf_cross_shard._src.core.gradients import differentiate
from tf_cross_shard._src.core.tf_keras import facade
from tf_cross_shard._src.towers import tower_optimizer


@documented
@keras.saving.register_keras_serializable(package="tf_cross_shard")
class TowerOptimizer(tower_optimizer.TowerOptimizer, facade.TfKerasFacade):
  """Sums gradients over the towers of a model function and applies them once.

  This class wraps an optimizer of tf_keras.

  >>> import tensorflow as tf
  >>> import tf_keras as keras
  >>> optimizer = TowerOptimizer(lambda: keras.optimizers.SGD(0.5))
  >>> weight = tf.Variable(3.0)
  >>> int(optimizer.apply_gradients([(tf.constant(2.0), weight)]))
  1
  >>> float(weight.numpy())
  2.0
  """

  def aggregate_gradients(
    self, grads_and_vars: Iterable[Any]
  ) -> differentiate.Pairs:
    """Aggregates gradients over replicas as the wrapped optimizer does.

    Args:
      grads_and_vars: Pairs of a gradient and its variable.

    Returns:
      Pairs for `apply_gradients(..., skip_gradients_aggregation=True)`.
    """
    reduced = self._wrapped.optimizer.aggregate_gradients(list(grads_and_vars))
    return list(reduced)


# A LossScaleOptimizer in an HDF5 file or a SavedModel looks for this name.
keras.saving.get_custom_objects()["TowerOptimizer"] = TowerOptimizer
