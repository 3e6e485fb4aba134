"""The optimizer, the schedule and the layers for tf_keras (Keras 2).

If `tf.keras` is tf_keras (TF_USE_LEGACY_KERAS=1),
`tf_cross_shard.CrossShardOptimizer` is the class in this module. In a program
that uses Keras 3 and tf_keras, import the classes for tf_keras from
`tf_cross_shard.tf_keras`.
"""

# ruff: noqa: E402  # Versions are checked first.

import random
from collections.abc import Iterable
from typing import Any

from tf_cross_shard._src.core import versions

versions.check_tf_keras()

import tensorflow as tf
import tf_keras as keras

from tf_cross_shard._src.core import (
  embedding_lookup,
  group_batch_norm,
  group_dropout,
  group_schedule,
  optimizer,
  validation,
)
from tf_cross_shard._src.core.gradients import differentiation, loss_factor
from tf_cross_shard._src.core.step import flow
from tf_cross_shard._src.core.tf_keras import wrapper
from tf_cross_shard._src.core.wrapper import forwarding


@forwarding.documented
@keras.saving.register_keras_serializable(package="tf_cross_shard")
class CrossShardOptimizer(
  optimizer.CrossShardOptimizer, wrapper.TfKerasWrapper
):
  """Wraps a Keras optimizer for training on several replicas, or in groups.

  `opt` is a `tf_keras.optimizers.Optimizer` or one of
  `tf_keras.optimizers.legacy`.

  >>> import tensorflow as tf
  >>> import tf_keras as keras
  >>> optimizer = CrossShardOptimizer(keras.optimizers.SGD(0.5))
  >>> weight = tf.Variable(3.0)
  >>> int(optimizer.apply_gradients([(tf.constant(2.0), weight)]))
  1
  >>> float(weight.numpy())
  2.0
  """

  @tf.autograph.experimental.do_not_convert
  def scale_loss(self, loss: Any) -> Any:
    """Returns the loss to differentiate in a custom loop.

    `fit` and `minimize` scale the loss themselves. Apply a loss scale with
    `get_scaled_loss` and `get_unscaled_gradients`, as in plain tf_keras.

    Args:
      loss: A loss averaged over all replicas' examples.

    Returns:
      The loss times the factor for `"global"`.

    Raises:
      RuntimeError: If you call it in the cross-replica context.
    """
    self._components.checks.check_place()
    return self._components.step.scale(loss, loss_factor.GLOBAL)

  @tf.autograph.experimental.do_not_convert
  def aggregate_gradients(
    self, grads_and_vars: Iterable[Any]
  ) -> differentiation.Pairs:
    """Clips this replica's gradients and sums them over the group.

    >>> import tensorflow as tf
    >>> optimizer = CrossShardOptimizer("sgd", clipvalue=1.0)
    >>> weight = tf.Variable(3.0)
    >>> [(grad, _)] = optimizer.aggregate_gradients(
    ...   [(tf.constant(2.0), weight)]
    ... )
    >>> float(grad)
    1.0

    Args:
      grads_and_vars: Pairs of this replica's gradient and its variable.

    Returns:
      Pairs for `apply_gradients(..., skip_gradients_aggregation=True)`.

    Raises:
      RuntimeError: If you call it in the cross-replica context.
    """
    self._components.checks.check_place()
    call = flow.Call(*validation.check_pairs(grads_and_vars))
    return list(
      zip(self._components.step.sum(call), call.variables, strict=True)
    )

  @tf.autograph.experimental.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[Any],
    global_step: Any = None,
    name: str | None = None,
    *,
    skip_gradients_aggregation: bool = False,
    experimental_aggregate_gradients: bool = True,
  ) -> Any:
    """Sums each gradient over the group, then lets `opt` apply the sums once.

    Args:
      grads_and_vars: Pairs of this replica's gradient (dense, row-sparse or
        None) and its variable.
      global_step: An integer variable, incremented by one afterwards.
      name: The name scope of the operations; this optimizer's name if None.
      skip_gradients_aggregation: Whether the gradients already are the group's
        sums, for example from `aggregate_gradients`.
      experimental_aggregate_gradients: The older argument, with the opposite
        meaning.

    Returns:
      The iteration count after the step, an int64 tensor.

    Raises:
      RuntimeError: As in `CrossShardOptimizer`.
      ValueError: As in `CrossShardOptimizer`.
      TypeError: As in `CrossShardOptimizer`.
    """
    if isinstance(global_step, str) and name is None:
      global_step, name = None, global_step  # Keras' second argument.
    if experimental_aggregate_gradients and not skip_gradients_aggregation:
      return super().apply_gradients(grads_and_vars, global_step, name)
    grads, variables = validation.check_pairs(grads_and_vars)
    if self._encapsulated.is_called_by_loss_scaler:
      return self._components.step.apply_for_loss_scaler(grads, variables)
    validation.check_global_step(global_step)
    call = flow.Call(grads, variables, global_step, name, is_reduced=True)
    return self._perform(call)


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@forwarding.documented
class PerGroup(
  group_schedule.PerGroup,
  keras.optimizers.schedules.LearningRateSchedule,
):
  """A schedule with a learning rate, or another schedule, for each group."""

  _package = "tf_keras"
  _was_called = False

  def _is_called_by_constructor(self) -> bool:
    """Returns whether this is the first call.

    tf_keras calls the schedule in the constructor of the optimizer, before the
    optimizer is wrapped. That is the first call.
    """
    is_first, self._was_called = not self._was_called, True
    return is_first


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

  def _calculate_mean_and_var(
    self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None
  ) -> Any:
    """Overrides Keras' method: returns moments over the group's examples."""
    return self._group_moments(inputs, reduction_axes, keep_dims, mask)

  def _support_zero_size_input(self) -> bool:
    """Returns False: the group may have examples when this replica has none."""
    return False


# A LossScaleOptimizer in an HDF5 file or a SavedModel looks for this name.
keras.saving.get_custom_objects()["CrossShardOptimizer"] = CrossShardOptimizer


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
    """Returns whether neither ids nor outputs are sparse, nor one-hot."""
    is_plain = not self.sparse and not self._use_one_hot_matmul
    return is_plain and isinstance(ids, tf.Tensor | tf.RaggedTensor)

  def _look_up(self, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows."""
    return embedding_lookup.embedding_lookup(self.embeddings, ids)


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@forwarding.documented
class GroupDropout(group_dropout.GroupDropoutBase, keras.layers.Layer):
  """Dropout with a rate for each group.

  >>> layer = GroupDropout([0.0, 0.25], [[0, 1], [2, 3]])
  >>> layer.rates
  [0.0, 0.25]
  """

  def build(self, input_shape: Any) -> None:
    """Creates the state of the random numbers, as Keras 3 has it."""
    seed = random.randint(1, 10**9) if self.seed is None else self.seed
    self._seeds = self.add_weight(
      "seed_generator_state",
      shape=(2,),
      dtype="int64",
      initializer=lambda *_, **__: tf.constant([seed, 0], tf.int64),
      trainable=False,
      aggregation=tf.VariableAggregation.NONE,  # Each replica has its own.
    )
    super().build(input_shape)

  def _next_seed(self) -> tf.Tensor:
    """Returns the seed of this call, and counts the call."""
    seed = tf.identity(self._seeds)
    self._seeds.assign_add(tf.constant([0, 1], tf.int64))
    return seed
