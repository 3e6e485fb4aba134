"""Optimizers of `tf.compat.v1.train` as optimizers of Keras 3.

Keras' own classes where they compute the same; otherwise classes derived from
them, which keep their settings and slots, and update as version 1 does.
"""

from typing import Any, Final

import keras
import tensorflow as tf

from tf_cross_shard.gradients import indexed_slices
from tf_cross_shard.migration import v1, v1_rates, v1_updates

_register: Final = keras.saving.register_keras_serializable("tf_cross_shard")


@_register
class V1Momentum(keras.optimizers.SGD):
  """SGD whose slot is a sum of gradients, as version 1's."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def update_step(
    self, gradient: Any, variable: Any, learning_rate: Any
  ) -> None:
    """Updates `variable` by `gradient` at `learning_rate`."""
    index = self._get_variable_index(variable)
    v1_updates.momentum(
      self, index, _ready(gradient, variable), variable, learning_rate
    )


@_register
class V1Adam(keras.optimizers.Adam):
  """Adam whose powers of beta are rounded as version 1's."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def update_step(
    self, gradient: Any, variable: Any, learning_rate: Any
  ) -> None:
    """Updates `variable` by `gradient` at `learning_rate`."""
    index = self._get_variable_index(variable)
    v1_updates.adam(
      self, index, _ready(gradient, variable), variable, learning_rate
    )


@_register
class V1Adagrad(keras.optimizers.Adagrad):
  """Adagrad that divides only a sparse gradient's rows, as version 1's."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def update_step(
    self, gradient: Any, variable: Any, learning_rate: Any
  ) -> None:
    """Updates `variable` by `gradient` at `learning_rate`."""
    index = self._get_variable_index(variable)
    v1_updates.adagrad(
      self, index, _ready(gradient, variable), variable, learning_rate
    )


@_register
class V1RMSProp(keras.optimizers.RMSprop):
  """RMSprop whose average of squares starts at 1, as version 1's."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def add_variable_from_reference(
    self, reference_variable: Any, name: Any = None, initializer: Any = "zeros"
  ) -> Any:
    """Makes a slot."""
    if name == "velocity":
      initializer = "ones"
    return super().add_variable_from_reference(
      reference_variable, name=name, initializer=initializer
    )

  def update_step(
    self, gradient: Any, variable: Any, learning_rate: Any
  ) -> None:
    """Updates `variable` by `gradient` at `learning_rate`."""
    index = self._get_variable_index(variable)
    v1_updates.rmsprop(
      self, index, _ready(gradient, variable), variable, learning_rate
    )


@_register
class V1Adadelta(keras.optimizers.Adadelta):
  """Adadelta that touches only a sparse gradient's rows, as version 1's."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def update_step(
    self, gradient: Any, variable: Any, learning_rate: Any
  ) -> None:
    """Updates `variable` by `gradient` at `learning_rate`."""
    index = self._get_variable_index(variable)
    v1_updates.adadelta(
      self, index, _ready(gradient, variable), variable, learning_rate
    )


@_register
class V1Ftrl(keras.optimizers.Ftrl):
  """Ftrl that touches only a sparse gradient's rows, as version 1's."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def update_step(
    self, gradient: Any, variable: Any, learning_rate: Any
  ) -> None:
    """Updates `variable` by `gradient` at `learning_rate`."""
    index = self._get_variable_index(variable)
    v1_updates.ftrl(
      self, index, _ready(gradient, variable), variable, learning_rate
    )


@_register
class V1LinearCosineDecay(
  v1_rates.LinearCosine, keras.optimizers.schedules.LearningRateSchedule
):
  """The schedule that `v1_rules.linear_cosine` computes."""


@_register
class V1Function(
  v1_rates.Function, keras.optimizers.schedules.LearningRateSchedule
):
  """A learning rate that a function of no arguments answers in every step."""


_CLASSES: Final[dict[str, Any]] = {
  "SGD": keras.optimizers.SGD,
  "Adam": V1Adam,
  "Adagrad": V1Adagrad,
  "Momentum": V1Momentum,
  "RMSProp": V1RMSProp,
  "Adadelta": V1Adadelta,
  "Ftrl": V1Ftrl,
}


def convert(opt: Any) -> Any:
  """`opt`, or what it is in Keras 3 if it is a version 1 optimizer."""
  if not v1.is_v1(opt):
    return opt
  found = v1.recipe(opt)
  made = _CLASSES[found.kind](
    learning_rate=_rate(found.rate), name=found.name, **found.settings
  )
  if found.start:
    made.iterations.assign(found.start)
  v1.said(made, found)
  return made


def _rate(rate: v1_rates.Rate) -> Any:
  """What Keras takes as a learning rate."""
  if isinstance(rate, float):
    return rate
  if not isinstance(rate, v1_rates.Decay):
    return V1Function(rate)
  kind = getattr(keras.optimizers.schedules, rate.kind, V1LinearCosineDecay)
  return kind(**rate.settings)


def _ready(gradient: Any, variable: Any) -> Any:
  """A gradient of the variable's dtype, each of whose rows stands once.

  Keras 3's own `update_step` casts; tf_keras merges rows itself.
  """
  gradient = indexed_slices.cast(gradient, variable)
  if isinstance(gradient, tf.IndexedSlices):
    return indexed_slices.merge_duplicates(gradient)
  return gradient
