"""The optimizer and the schedule for Keras 3.

If `tf.keras` is Keras 3, `tf_cross_shard.CrossShardOptimizer` is the class in
this module. If `tf.keras` is tf_keras (TF_USE_LEGACY_KERAS=1), import the
classes for Keras 3 from `tf_cross_shard.keras3`.
"""

# ruff: noqa: E402  # Versions are checked first.
# ruff: noqa: SLF001  # Keras keeps the losses of a model in private attributes.

from collections.abc import Callable
from typing import Any

from tf_cross_shard._src.core import versions

versions.check_keras3()

import keras
import tensorflow as tf

from tf_cross_shard._src.catalogue import documented
from tf_cross_shard._src.core import (
  compiled_losses,
  loss_factor,
  loss_scale,
  optimizer,
)
from tf_cross_shard._src.core.keras3 import facade
from tf_cross_shard._src.core.per_model import schedule as per_model_lib


@documented
@keras.saving.register_keras_serializable(package="tf_cross_shard")
class CrossShardOptimizer(optimizer.CrossShardOptimizer, facade.Keras3Facade):
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

  `pickle` and `copy` do what they do for an optimizer of Keras, by Keras' code:
  the copy is not built. It has the configuration, with the current learning
  rate. It has the iteration count only if the original was not built; from a
  built one, Keras loads no variables, and warns. Exclusions from weight decay
  are not in the copy. A copy of a compiled and built model keeps the slots.
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
    self._pipeline.checks.check_place()
    return self._wrapped.scale_loss(
      self._pipeline.scale(loss, loss_factor.GLOBAL)
    )


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@documented
class PerModel(
  per_model_lib.PerModel,
  keras.optimizers.schedules.LearningRateSchedule,
):
  """A schedule with a learning rate, or another schedule, for each group."""

  _package = "keras"


def _wrap_losses(model: Any, wrap: Callable[[Any], Any]) -> None:
  compiled = model._compile_loss

  def build(y_true: Any, y_pred: Any) -> None:
    type(compiled).build(compiled, y_true, y_pred)
    compiled._flat_losses = [
      flat._replace(loss=wrap(flat.loss)) for flat in compiled._flat_losses
    ]

  if compiled is not None:
    compiled.build = build


def _build_from_one_replica(model: Any) -> None:
  """Lets Keras build a model from the batch of the first replica.

  Keras would take the mean of all replicas' batches, which makes floats of
  integers, and fails for strings and where replicas have different numbers of
  examples.
  """
  strategy = model.distribute_strategy

  def maybe_symbolic_build(iterator: Any = None, data_batch: Any = None) -> Any:
    # Only train_on_batch and its like hand the batch itself in.
    is_whole = data_batch is not None and not any(
      isinstance(each, tf.distribute.DistributedValues)
      for each in tf.nest.flatten(data_batch)
    )
    setattr(model, compiled_losses.WHOLE_BATCH, is_whole)
    if iterator is not None:
      data_batch = next(next(each for *_, each in iterator))
    first = tf.nest.map_structure(
      lambda each: strategy.experimental_local_results(each)[0], data_batch
    )
    return type(model)._maybe_symbolic_build(model, data_batch=first)

  vars(model)["_maybe_symbolic_build"] = maybe_symbolic_build


compiled_losses.wrap_losses["keras"] = _wrap_losses
compiled_losses.build_from_one["keras"] = _build_from_one_replica
compiled_losses.watch_compile("keras")
loss_scale.watch(keras.optimizers.LossScaleOptimizer)
