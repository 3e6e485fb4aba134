"""The optimizer, the schedule and the layers for Keras 3.

If `tf.keras` is Keras 3, `tf_cross_shard.CrossShardOptimizer` is the class in
this module. If `tf.keras` is tf_keras (TF_USE_LEGACY_KERAS=1), import the
classes for Keras 3 from `tf_cross_shard.keras3`.
"""

# ruff: noqa: E402  # Versions are checked first.

from typing import Any

from tf_cross_shard._src.core import versions

versions.check_keras3()

import keras
import tensorflow as tf

from tf_cross_shard._src.core import (
  embedding_lookup,
  group_batch_norm,
  group_dropout,
  group_schedule,
  optimizer,
)
from tf_cross_shard._src.core.gradients import loss_factor
from tf_cross_shard._src.core.keras3 import wrapper
from tf_cross_shard._src.core.step import flow
from tf_cross_shard._src.core.wrapper import forwarding


@forwarding.documented
@keras.saving.register_keras_serializable(package="tf_cross_shard")
class CrossShardOptimizer(optimizer.CrossShardOptimizer, wrapper.Keras3Wrapper):
  """Wraps a Keras optimizer for training on several replicas, or in groups.

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
    """Returns the loss to differentiate; `model.fit` calls this method.

    Args:
      loss: A loss averaged over all replicas' examples, as Keras' losses are.

    Returns:
      The loss, multiplied by the loss factor (for a loss averaged over all
      replicas' examples) and by the loss scale.

    Raises:
      RuntimeError: If you call it in the cross-replica context.
    """
    self._components.checks.check_place()
    return self._encapsulated.scaling.scale_loss(
      self._components.step.scale(loss, loss_factor.GLOBAL)
    )

  def _apply_pairs(self, grads: list[Any], variables: list[Any]) -> None:
    """Takes a step, or applies sums that a LossScaleOptimizer found finite."""
    if self._encapsulated.is_called_by_loss_scaler:
      self._components.step.apply_for_loss_scaler(grads, variables)
    else:
      self._perform(flow.Call(grads, variables, through_apply=True))


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@forwarding.documented
class PerGroup(
  group_schedule.PerGroup,
  keras.optimizers.schedules.LearningRateSchedule,
):
  """A schedule with a learning rate, or another schedule, for each group."""

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
    """Overrides Keras' method: returns moments over the group's examples."""
    return self._group_moments(inputs, self._reduction_axes, False, mask)


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@forwarding.documented
class Embedding(embedding_lookup.RowLookup, keras.layers.Embedding):
  """Keras' `Embedding`, except that it reads only the rows of the batch.

  >>> import tensorflow as tf
  >>> layer = Embedding(1000, 2, embeddings_initializer="ones")
  >>> layer(tf.constant([[3, 7]])).shape
  TensorShape([1, 2, 2])
  """

  def _can_read_rows(self, ids: Any) -> bool:
    """Returns whether the weights are a plain table and ids are not sparse."""
    is_plain = self.quantization_mode is None and not self.lora_enabled
    return is_plain and isinstance(ids, tf.Tensor | tf.RaggedTensor)

  def _look_up(self, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows. As in Keras 3, negative ids count from the last row."""
    ids = tf.where(ids < 0, ids + self.input_dim, ids)
    return embedding_lookup.embedding_lookup(self._embeddings, ids)


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@forwarding.documented
class GroupDropout(group_dropout.GroupDropoutBase, keras.layers.Layer):
  """Dropout with a rate for each group.

  >>> layer = GroupDropout([0.0, 0.25], [[0, 1], [2, 3]])
  >>> layer.rates
  [0.0, 0.25]
  """

  def __init__(
    self, rates: Any, group_assignment: Any, seed: Any = None, **kwargs: Any
  ) -> None:
    """Creates the layer, and the state of its random numbers."""
    super().__init__(rates, group_assignment, seed, **kwargs)
    self._seeds = keras.random.SeedGenerator(seed)

  def _next_seed(self) -> tf.Tensor:
    """Returns the next seed of Keras' generator."""
    return tf.cast(self._seeds.next(), tf.int32)
