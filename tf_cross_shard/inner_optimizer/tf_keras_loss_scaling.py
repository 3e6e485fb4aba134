"""A LossScaleOptimizer of tf_keras that stands around ours.

There the user multiplies the loss by the scale and divides the gradients by it,
so that those that come in to be reduced are not scaled.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import loss_scaling


class ScaledTfKerasOptimizer(loss_scaling.ScaledOptimizer):
  """The adapter where a LossScaleOptimizer of tf_keras stands around ours."""

  @property
  def scales_dynamically(self) -> bool:
    """Whether overflow changes the loss scale."""
    return bool(self.around.dynamic)

  def scale_loss(self, loss: Any) -> Any:
    """Multiplies by the loss scale."""
    loss = tf.convert_to_tensor(loss)
    return type(self.around).get_scaled_loss(self.around, loss)

  def scale_limit(self, limit: float) -> Any:
    """Gradients come in divided by the loss scale."""
    return limit

  def wire_scale(self) -> Any:
    """The loss scale, which gradients came in divided by."""
    return self.around.loss_scale

  def unscale(self, grads: Sequence[Gradient]) -> list[Gradient]:
    """Divides by the loss scale."""
    unscale = type(self.around).get_unscaled_gradients
    return list(unscale(self.around, list(grads)))

  def _begin(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    """Looks at the sums, and calls ours if they are finite."""
    type(self.around).apply_gradients(
      self.around,
      zip(grads, variables, strict=True),
      skip_gradients_aggregation=True,
    )


class _Around:
  """What a LossScaleOptimizer around ours does instead of its own."""

  def __init__(self, ours: Any) -> None:
    self._ours = ours

  def __reduce_ex__(self, protocol: Any) -> Any:
    """Keras' own cannot be copied either; a copy would not scale."""
    raise TypeError(
      "A LossScaleOptimizer of tf_keras can be neither copied nor pickled."
      " Make another with from_config(optimizer.get_config())."
    )

  def get_scaled_loss(self, loss: Any) -> Any:
    """Scales by the mean's factor too."""
    if callable(loss):
      return lambda: self.get_scaled_loss(loss())
    return self._ours._inner.scale_loss(self._ours.scale_loss(loss))

  def get_unscaled_gradients(self, grads: Any) -> Any:
    """Divides by the scale of the one that scales."""
    return self._ours._inner.unscale(grads)

  def compute_gradients(
    self, loss: Any, var_list: Any, tape: Any = None
  ) -> Any:
    """This replica's gradients, scaled by the mean's factor too."""
    return self._ours.compute_gradients(loss, var_list, tape=tape)

  def minimize(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
    """Ours: there a loss that a tape recorded is Keras'."""
    return self._ours.minimize(loss, var_list=var_list, tape=tape)

  def aggregate_gradients(self, grads_and_vars: Any) -> Any:
    """Sums over the group."""
    return self._ours.aggregate_gradients(grads_and_vars)

  def apply_gradients(
    self,
    grads_and_vars: Any,
    skip_gradients_aggregation: Any = False,
    **options: Any,
  ) -> Any:
    """Reduces first."""
    if isinstance(skip_gradients_aggregation, str):
      # In other optimizers the name has this place.
      options["name"], skip_gradients_aggregation = (
        skip_gradients_aggregation,
        False,
      )
    return self._ours.apply_gradients(
      grads_and_vars,
      skip_gradients_aggregation=skip_gradients_aggregation,
      **options,
    )


def change_places(ours: Any, around: Any) -> None:
  """Reduces before a LossScaleOptimizer looks, which has just been made."""
  ours._change_places(around, ScaledTfKerasOptimizer, _Around(ours))
  if ours._is_legacy:
    # By these a checkpoint finds the slots of an older optimizer. In a
    # SavedModel there are to be none; see ours.
    vars(around).update(
      get_slot=ours.get_slot,
      get_slot_names=lambda: [] if ours._is_exported else ours.get_slot_names(),
      _create_or_restore_slot_variable=ours._create_or_restore_slot_variable,
    )
