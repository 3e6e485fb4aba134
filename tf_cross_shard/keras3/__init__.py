"""The optimizers, PerGroup and SyncBatchNormalization for Keras 3.

`tf_cross_shard.CrossShardOptimizer` is the one here where `tf.keras` is Keras
3. Import them from here where TF_USE_LEGACY_KERAS makes `tf.keras` another one.
"""

# ruff: noqa: E402  # Versions are checked first.

from collections.abc import Sequence
from typing import Any

from tf_cross_shard import versions

versions.check_keras3()

import keras
import tensorflow as tf

from tf_cross_shard import group_batch_norm, group_schedule, optimizer
from tf_cross_shard.gradients import loss_factor

# Registers its classes, which files may name.
from tf_cross_shard.keras3 import v1_optimizers as v1_optimizers
from tf_cross_shard.keras3 import wrapper
from tf_cross_shard.step import flow
from tf_cross_shard.towers import tower_optimizer
from tf_cross_shard.wrapper import forwarding


@forwarding.documented
@keras.saving.register_keras_serializable(package="tf_cross_shard")
class CrossShardOptimizer(optimizer.CrossShard, wrapper.Keras3Wrapper):
  """Sums or averages gradients over replicas, then lets `opt` apply them.

  `opt` is a `keras.optimizers.Optimizer`.

  >>> import keras
  >>> import tensorflow as tf
  >>> optimizer = CrossShardOptimizer(keras.optimizers.SGD(0.5))
  >>> weight = keras.Variable(3.0)
  >>> int(optimizer.apply_gradients([(tf.constant(2.0), weight)]))
  1
  >>> float(weight.numpy())
  2.0
  """

  @tf.autograph.experimental.do_not_convert
  def scale_loss(self, loss: Any) -> Any:
    """The loss that `model.fit` differentiates.

    Args:
      loss: A loss averaged over all replicas' examples, as Keras' are.

    Returns:
      The loss times the factor for `"global"`, and times the loss scale.

    Raises:
      RuntimeError: If called in the cross-replica context.
    """
    self._checks.check_place()
    return self._inner.scale_loss(self._step.scale(loss, loss_factor.GLOBAL))

  def _apply_pairs(self, grads: list[Any], variables: list[Any]) -> None:
    """Does a step; for a LossScaleOptimizer around it applies finite sums."""
    if self._inner.is_within:
      self._inner.apply_reduced(grads, variables, through_apply=True)
    else:
      self._perform(flow.Call(grads, variables, through_apply=True))


@forwarding.documented
@keras.saving.register_keras_serializable(package="tf_cross_shard")
class TowerOptimizer(tower_optimizer.Tower, wrapper.Keras3Wrapper):
  """Gathers gradients across the towers of a model function.

  It encapsulates a `keras.optimizers.Optimizer`.

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
    """The loss to differentiate, as `compute_gradients` does.

    Args:
      loss: A loss.

    Returns:
      The encapsulated optimizer's scaled loss; in towers whose mean is wanted
      divided by their number.
    """
    return self._inner.optimizer.scale_loss(loss) * self._factor()

  def _apply_pairs(self, grads: list[Any], variables: list[Any]) -> None:
    """Collects gradients in a tower, or applies them."""
    self._collect_or(self._hand_on, grads, variables)

  def _hand_on(
    self,
    grads: Sequence[Any],
    variables: Sequence[Any],
    options: dict[str, Any] | None = None,
  ) -> None:
    """Keras 3 has no options."""
    del options
    # Not `apply`: `fit` calls this one, which the user's class may override.
    pairs = zip(grads, variables, strict=True)
    self._inner.optimizer.apply_gradients(list(pairs))


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@forwarding.documented
class PerGroup(
  group_schedule.PerGroup,
  keras.optimizers.schedules.LearningRateSchedule,
):
  """A schedule with a learning rate for each group: numbers, or schedules."""

  _package = "keras"


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@forwarding.documented
class SyncBatchNormalization(
  group_batch_norm.GroupBatchNorm, keras.layers.BatchNormalization
):
  """Batch normalization over the examples of a group.

  >>> layer = SyncBatchNormalization([[0, 1], [2, 3]], momentum=0.9)
  >>> layer.group_assignment
  [[0, 1], [2, 3]]
  """

  def _moments(self, inputs: Any, mask: Any) -> Any:
    """Keras' method, over the group."""
    return self._group_moments(inputs, self._reduction_axes, False, mask)
