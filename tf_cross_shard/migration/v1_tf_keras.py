"""Optimizers of `tf.compat.v1.train` as optimizers of tf_keras.

Keras' own classes where they compute the same; otherwise classes derived from
them, which keep their settings and slots, and update as version 1 does.
"""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf
import tf_keras

from tf_cross_shard.gradients import indexed_slices
from tf_cross_shard.migration import v1, v1_rates, v1_updates

_register: Final = tf_keras.saving.register_keras_serializable("tf_cross_shard")


class _MergesOnce:
  """Keeps tf_keras from merging rows a second time, which XLA loses."""

  def _deduplicate_sparse_grad(self, grads: Sequence[Any]) -> list[Any]:
    """Gradients each of whose rows stands once."""
    return [
      indexed_slices.merge_duplicates(grad)
      if isinstance(grad, tf.IndexedSlices)
      else grad
      for grad in grads
    ]


@_register
class V1Momentum(_MergesOnce, tf_keras.optimizers.SGD):
  """SGD whose slot is a sum of gradients, as version 1's."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def update_step(self, gradient: Any, variable: Any) -> None:
    """Updates `variable` by `gradient`, whose rows stand once."""
    index = self._index_dict[self._var_key(variable)]
    v1_updates.momentum(self, index, gradient, variable, self.learning_rate)


@_register
class V1Adam(_MergesOnce, tf_keras.optimizers.Adam):
  """Adam whose powers of beta are rounded as version 1's."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def update_step(self, gradient: Any, variable: Any) -> None:
    """Updates `variable` by `gradient`, whose rows stand once."""
    index = self._index_dict[self._var_key(variable)]
    v1_updates.adam(self, index, gradient, variable, self.learning_rate)


@_register
class V1Adagrad(_MergesOnce, tf_keras.optimizers.Adagrad):
  """Adagrad that computes by the same rule as in Keras 3."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def update_step(self, gradient: Any, variable: Any) -> None:
    """Updates `variable` by `gradient`, whose rows stand once."""
    index = self._index_dict[self._var_key(variable)]
    v1_updates.adagrad(self, index, gradient, variable, self.learning_rate)


@_register
class V1RMSProp(_MergesOnce, tf_keras.optimizers.RMSprop):
  """RMSprop whose average of squares starts at 1, as version 1's."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def add_variable_from_reference(
    self,
    model_variable: Any,
    variable_name: str,
    shape: Any = None,
    initial_value: Any = None,
  ) -> Any:
    """Makes a slot."""
    if variable_name == "velocity":
      # Under mixed precision `dtype` is what the variable is computed in.
      dtype = getattr(model_variable, "true_dtype", model_variable.dtype)
      initial_value = tf.ones(model_variable.shape, dtype)
    return super().add_variable_from_reference(
      model_variable, variable_name, shape, initial_value
    )

  def update_step(self, gradient: Any, variable: Any) -> None:
    """Updates `variable` by `gradient`, whose rows stand once."""
    index = self._index_dict[self._var_key(variable)]
    v1_updates.rmsprop(self, index, gradient, variable, self.learning_rate)


@_register
class V1Adadelta(_MergesOnce, tf_keras.optimizers.Adadelta):
  """Adadelta that touches only a sparse gradient's rows, as version 1's."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def update_step(self, gradient: Any, variable: Any) -> None:
    """Updates `variable` by `gradient`, whose rows stand once."""
    index = self._index_dict[self._var_key(variable)]
    v1_updates.adadelta(self, index, gradient, variable, self.learning_rate)


@_register
class V1Ftrl(_MergesOnce, tf_keras.optimizers.Ftrl):
  """Ftrl that touches only a sparse gradient's rows, as version 1's."""

  slots_as_v1 = True  # for migration.convert_checkpoint

  def update_step(self, gradient: Any, variable: Any) -> None:
    """Updates `variable` by `gradient`, whose rows stand once."""
    index = self._index_dict[self._var_key(variable)]
    v1_updates.ftrl(self, index, gradient, variable, self.learning_rate)


@_register
class V1LinearCosineDecay(
  v1_rates.LinearCosine, tf_keras.optimizers.schedules.LearningRateSchedule
):
  """The schedule that `v1_rules.linear_cosine` computes."""


@_register
class V1Function(
  v1_rates.Function, tf_keras.optimizers.schedules.LearningRateSchedule
):
  """A learning rate that a function of no arguments answers in every step."""


_CLASSES: Final[dict[str, Any]] = {
  "SGD": tf_keras.optimizers.SGD,
  "Adam": V1Adam,
  "Adagrad": V1Adagrad,
  "Momentum": V1Momentum,
  "RMSProp": V1RMSProp,
  "Adadelta": V1Adadelta,
  "Ftrl": V1Ftrl,
}
# HDF5 files look for a class by its bare name.
for _class in (V1Momentum, V1Adam, V1Adagrad, V1RMSProp, V1Adadelta, V1Ftrl):
  tf_keras.saving.get_custom_objects()[_class.__name__] = _class


def convert(opt: Any) -> Any:
  """`opt`, or what it is in tf_keras if it is a version 1 optimizer."""
  if not v1.is_v1(opt):
    return opt
  found = v1.recipe(opt)
  made = _CLASSES[found.kind](
    learning_rate=_rate(found.rate), name=found.name, **found.settings
  )
  if found.start:
    made.iterations.assign(found.start)
    made._compute_current_learning_rate()
  v1.said(made, found)
  return made


def _rate(rate: v1_rates.Rate) -> Any:
  """What Keras takes as a learning rate."""
  if isinstance(rate, float):
    return rate
  if not isinstance(rate, v1_rates.Decay):
    return V1Function(rate)
  kind = getattr(tf_keras.optimizers.schedules, rate.kind, V1LinearCosineDecay)
  return kind(**rate.settings)
