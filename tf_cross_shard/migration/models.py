"""The variables of what users call a model."""

from typing import Any

import tensorflow as tf


def weights_of(model: Any) -> list[Any]:
  """The variables that a model is to have back; not its random states."""
  # Asked of the class: where there are none yet, the model may raise an error.
  is_keras = hasattr(type(model), "weights")
  if isinstance(model, (list, tuple)):
    variables = list(model)
  elif not is_keras and not isinstance(model, tf.Module):
    raise TypeError(
      "`model` must be a Keras model, a tf.Module or a list of variables; got"
      f" {type(model).__name__}."
    )
  elif not getattr(model, "built", True):
    variables = []
  else:
    # Keras' `variables` are metrics and random states as well.
    variables = list(model.weights if is_keras else model.variables)
  if not variables:
    raise ValueError(
      f"`model` has no variables yet: got {type(model).__name__}. Build it with"
      " model.build(input_shape), or call it on one batch."
    )
  for variable in variables:
    if not (hasattr(variable, "assign") and hasattr(variable, "shape")):
      raise TypeError(
        "`model` must be a Keras model, a tf.Module or a list of variables; got"
        f" a list with {type(variable).__name__} in it."
      )
  return list({id(variable): variable for variable in variables}.values())


def trained_of(model: Any) -> list[Any]:
  """The variables that a model trains, in its order."""
  if isinstance(model, (list, tuple)):
    return [weight for weight in weights_of(model) if weight.trainable]
  return list(model.trainable_variables)
