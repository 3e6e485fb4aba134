"""The optimizers, PerGroup and SyncBatchNormalization for Keras 3.

`tf_cross_shard.CrossShardOptimizer` is the one here where `tf.keras` is Keras
3. Import them from here where TF_USE_LEGACY_KERAS makes `tf.keras` another one.
"""

from collections.abc import Sequence
from typing import Any

from tf_cross_shard import versions

versions.check_keras3()

import keras  # noqa: E402  # after the check above
import tensorflow as tf  # noqa: E402

from tf_cross_shard import (  # noqa: E402
  group_batch_norm,
  group_schedule,
  optimizer,
  validation,
)
from tf_cross_shard.gradients import loss_factor  # noqa: E402

# Registers its classes, which files may name.
from tf_cross_shard.keras3 import v1_optimizers as v1_optimizers  # noqa: E402
from tf_cross_shard.keras3 import wrapper  # noqa: E402
from tf_cross_shard.step import flow  # noqa: E402
from tf_cross_shard.towers import tower_optimizer  # noqa: E402
from tf_cross_shard.wrapper import forwarding  # noqa: E402


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

  @tf.autograph.experimental.do_not_convert
  def apply(
    self, grads: Sequence[Any], trainable_variables: Any = None
  ) -> None:
    """Applies gradients as Keras calls it: `apply_gradients` with two lists.

    In your own loop scale the loss with `scale_loss` first. Keras' losses are
    averaged over all replicas' examples, so an ungrouped mean needs no factor
    and gets no warning here.

    Args:
      grads: This replica's gradients; an empty list does nothing.
      trainable_variables: Their variables. None means those that the
        optimizer was built on.

    Raises:
      ValueError: If the lists do not match or the optimizer is not built.
    """
    grads = list(grads)
    variables = _variables(self._inner, grads, trainable_variables)
    if not variables:
      return
    if self._inner.is_within:
      self._inner.apply_reduced(grads, variables, through_apply=True)
      return
    pairs = zip(grads, variables, strict=True)
    call = flow.Call(*validation.check_pairs(pairs), through_apply=True)
    self._perform(call)


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

  @tf.autograph.experimental.do_not_convert
  def apply(
    self, grads: Sequence[Any], trainable_variables: Any = None
  ) -> None:
    """Applies gradients as Keras calls it: `apply_gradients` with two lists.

    Args:
      grads: Gradients; an empty list does nothing.
      trainable_variables: Their variables. None means those that the
        optimizer was built on.

    Raises:
      ValueError: If the lists do not match or the optimizer is not built.
    """
    grads = list(grads)
    variables = _variables(self._inner, grads, trainable_variables)
    if variables:
      pairs = zip(grads, variables, strict=True)
      self._collect_or(self._hand_on, *validation.check_pairs(pairs))

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


def _variables(
  inner: Any, grads: Sequence[Any], trainable_variables: Any
) -> list[Any]:
  """The variables that `apply` must update, one for each gradient."""
  if not grads:
    return []
  if trainable_variables is None:
    if not inner.is_built:
      raise ValueError(
        "`trainable_variables` is None and the optimizer is not built. Pass"
        " the variables, or call build(variables) first."
      )
    trainable_variables = inner.unsharded_state.trainable_variables
  if len(grads) != len(trainable_variables):
    raise ValueError(
      f"`grads` must hold one gradient per variable; got {len(grads)}"
      f" gradients for {len(trainable_variables)} variables."
    )
  return list(trainable_variables)
