"""A LossScaleOptimizer that encapsulates our optimizer.

`compile` makes one under mixed precision. Keras decides by each replica's own
gradients, or by the first replica's, that a step has overflowed, and leaves the
others with other weights. So the two change places: our optimizer reduces the
gradients first, and then each replica, isolated, hands the sums to the
LossScaleOptimizer, which decides alike on all members of a group and calls our
optimizer for the update.
"""

import sys
from typing import Any

from absl import logging


def change_places(ours: Any, around: Any, methods: Any) -> None:
  """Lets `ours` reduce before `around`, just made, looks at the gradients.

  Args:
    ours: The optimizer that `around` encapsulates.
    around: The LossScaleOptimizer.
    methods: An object whose public methods take the place of those of `around`.
  """
  inner = ours._inner
  inner.around = None  # An earlier one is out of use.
  if inner.scales_dynamically:
    logging.info(
      "%s encapsulates a loss scaling optimizer and is encapsulated by one,"
      " as compile() does under mixed_float16. The inner one scales; the"
      " outer one does nothing.",
      ours.name,
    )
  else:
    inner.around = around
  for name in dir(methods):
    if not name.startswith("_"):
      vars(around)[name] = getattr(methods, name)


def find_caller(optimizer: Any, kind: type[Any]) -> Any:
  """The LossScaleOptimizer that is setting an attribute of `optimizer`.

  Its constructor marks the optimizer that it encapsulates by an attribute.
  Nothing but the calling frame, two above this one, tells who it is. None if
  somebody else is setting the attribute.
  """
  caller = sys._getframe(2).f_locals.get("self")
  if isinstance(caller, kind) and caller.inner_optimizer is optimizer:
    return caller
  return None


class Keras3Methods:
  """The methods of a Keras 3 LossScaleOptimizer around ours."""

  def __init__(self, around: Any, ours: Any) -> None:
    self._around = around
    self._ours = ours

  def scale_loss(self, loss: Any) -> Any:
    """Scales by the factor of the mean, too."""
    return self._ours.scale_loss(loss)

  def apply(self, grads: Any, trainable_variables: Any = None) -> None:
    """Reduces first."""
    if not self._around.built:
      self._around.build(list(trainable_variables))
    self._ours.apply(grads, trainable_variables)


class TfKerasMethods:
  """The methods of a tf_keras LossScaleOptimizer around ours.

  There the user multiplies the loss by the scale and divides the gradients by
  it, so that gradients come in without the scale.
  """

  def __init__(self, ours: Any) -> None:
    self._ours = ours

  def __reduce_ex__(self, protocol: Any) -> Any:
    """Refuses: Keras' own cannot be copied either; a copy would not scale."""
    raise TypeError(
      "A LossScaleOptimizer of tf_keras can be neither copied nor pickled."
      " Make another with from_config(optimizer.get_config())."
    )

  def get_scaled_loss(self, loss: Any) -> Any:
    """Scales by the factor of the mean, too."""
    if callable(loss):
      return lambda: self.get_scaled_loss(loss())
    return self._ours._inner.scale_loss(self._ours.scale_loss(loss))

  def get_unscaled_gradients(self, grads: Any) -> Any:
    """Divides by the scale of the optimizer that scales."""
    return self._ours._inner.unscale(grads)

  def compute_gradients(
    self, loss: Any, var_list: Any, tape: Any = None
  ) -> Any:
    """This replica's gradients."""
    return self._ours.compute_gradients(loss, var_list, tape=tape)

  def minimize(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
    """As ours, which takes a loss that a tape recorded for one of Keras'."""
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
      # Other optimizers have the name in this place.
      options["name"], skip_gradients_aggregation = (
        skip_gradients_aggregation,
        False,
      )
    return self._ours.apply_gradients(
      grads_and_vars,
      skip_gradients_aggregation=skip_gradients_aggregation,
      **options,
    )
