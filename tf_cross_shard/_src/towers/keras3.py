"""The TowerOptimizer that wraps optimizers of Keras 3."""

from typing import Any

import keras

from tf_cross_shard._src.catalogue import documented
from tf_cross_shard._src.core.keras3 import facade
from tf_cross_shard._src.towers import tower_optimizer


@documented
@keras.saving.register_keras_serializable(package="tf_cross_shard")
class TowerOptimizer(tower_optimizer.TowerOptimizer, facade.Keras3Facade):
  """Sums gradients over the towers of a model function and applies them once.

  This class wraps a `keras.optimizers.Optimizer`.

  >>> import keras
  >>> import tensorflow as tf
  >>> optimizer = TowerOptimizer(lambda: keras.optimizers.SGD(0.5))
  >>> weight = keras.Variable(3.0)
  >>> int(optimizer.apply_gradients([(tf.constant(2.0), weight)]))
  1
  >>> float(weight.numpy())
  2.0
  """

  def scale_loss(self, loss: Any) -> Any:
    """Scales a loss as `compute_gradients` does, before you differentiate it.

    Args:
      loss: A loss: a scalar tensor.

    Returns:
      The scaled loss of the wrapped optimizer, divided by the number of
      towers if `loss_reduction` is `"mean"`.
    """
    return self._wrapped.optimizer.scale_loss(loss) * self._factor()
