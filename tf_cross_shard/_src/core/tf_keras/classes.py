"""CrossShardOptimizer and the schedule PerModel, for tf_keras (Keras 2).

If `tf.keras` is tf_keras (TF_USE_LEGACY_KERAS=1),
`tf_cross_shard.CrossShardOptimizer` is the class in this module. In a program
that uses Keras 3 and tf_keras, import the classes for tf_keras from
`tf_cross_shard.tf_keras`.
"""

# ruff: noqa: E402  # Versions are checked first.
# ruff: noqa: SLF001  # Keras keeps the losses of a model in private attributes.

import sys
from collections.abc import Callable, Iterable
from typing import Any

from tf_cross_shard._src.core import versions

versions.check_tf_keras()

import tensorflow as tf
import tf_keras as keras

from tf_cross_shard._src.catalogue import documented
from tf_cross_shard._src.core import (
  compiled_losses,
  loss_factor,
  loss_scale,
  optimizer,
  single_program,
  validation,
)
from tf_cross_shard._src.core import pipeline as pipeline_lib
from tf_cross_shard._src.core.gradients import differentiate
from tf_cross_shard._src.core.per_model import schedule as per_model_lib
from tf_cross_shard._src.core.tf_keras import facade


@documented
@keras.saving.register_keras_serializable(package="tf_cross_shard")
class CrossShardOptimizer(optimizer.CrossShardOptimizer, facade.TfKerasFacade):
  """Wraps a Keras optimizer for training on several replicas, or in groups.

  `opt` is a `tf_keras.optimizers.Optimizer`. Those of
  `tf_keras.optimizers.legacy` raise a `TypeError`.

  `pickle` and `copy` take the configuration, with the current learning rate,
  and no other values. Exclusions from weight decay are not in the copy. Plain
  optimizers of tf_keras cannot be pickled. A copy of a compiled and built model
  keeps the slots.

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
    self._pipeline.checks.check_place()
    return self._pipeline.scale(loss, loss_factor.GLOBAL)

  @tf.autograph.experimental.do_not_convert
  def aggregate_gradients(
    self, grads_and_vars: Iterable[Any]
  ) -> differentiate.Pairs:
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
    self._pipeline.checks.check_place()
    call = pipeline_lib.Call(*validation.check_pairs(grads_and_vars))
    return list(zip(self._pipeline.sum(call), call.variables, strict=True))

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
    validation.check_global_step(global_step)
    call = pipeline_lib.Call(
      grads, variables, global_step, name, is_reduced=True
    )
    return self._perform(call)


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@documented
class PerModel(
  per_model_lib.PerModel,
  keras.optimizers.schedules.LearningRateSchedule,
):
  """A schedule with a learning rate, or another schedule, for each group."""

  _package = "tf_keras"


# A LossScaleOptimizer in an HDF5 file or a SavedModel looks for this name.
keras.saving.get_custom_objects()["CrossShardOptimizer"] = CrossShardOptimizer


def _wrap_losses(model: Any, wrap: Callable[[Any], Any]) -> None:
  compiled = model.compiled_loss

  def get_loss_object(loss: Any) -> Any:
    loss = type(compiled)._get_loss_object(compiled, loss)
    return loss and wrap(loss)

  compiled._get_loss_object = get_loss_object


_training: Any = sys.modules[keras.Model.__module__]
_reduce = _training.reduce_per_replica


def _reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
  """Returns the mean of n models' logs of a batch, which Keras would sum."""
  if reduction == "auto" and single_program.are_models(strategy):
    return strategy.reduce("MEAN", values, axis=None)
  return _reduce(values, strategy, reduction)


_training.reduce_per_replica = _reduce_per_replica
compiled_losses.wrap_losses["tf_keras"] = _wrap_losses
compiled_losses.watch_compile("tf_keras")
# One for legacy optimizers, and one for others.
for _scaler in keras.mixed_precision.LossScaleOptimizer.__subclasses__():
  loss_scale.watch(_scaler)
