"""Checks users' arguments before any state changes.

Errors name the argument, show the value and say what to pass instead.
"""

import numbers
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core.variables import is_variable, path_of

if TYPE_CHECKING:  # For editors only: Keras 3 or tf_keras may be missing.
  import keras
  import tf_keras

  Optimizer: TypeAlias = (
    keras.optimizers.Optimizer
    | tf_keras.optimizers.Optimizer
    | tf.compat.v1.train.Optimizer
  )
  Variable: TypeAlias = tf.Variable | keras.Variable
  Variables: TypeAlias = Iterable[Variable] | Variable


def is_number(value: Any) -> bool:
  kinds = (int, float, np.integer, np.floating)
  return isinstance(value, kinds) and not isinstance(value, bool)


def check_integer(name: str, value: Any, remedy: str, least: int = 1) -> int:
  """Returns an argument's value; `remedy` ends the message of the error."""
  is_integer = isinstance(value, numbers.Integral)
  if not is_integer or isinstance(value, bool) or value < least:
    raise ValueError(
      f"`{name}` must be an integer of at least {least}; got {value!r}."
      f" {remedy}"
    )
  return int(value)


def strategy_in_words(strategy: tf.distribute.Strategy) -> str:
  """Returns the class and the size of a strategy, for an error."""
  count, kind = single_program.num_copies(strategy), type(strategy).__name__
  if kind == "_DefaultDistributionStrategy":  # Outside every scope.
    return "no strategy"
  one = "model" if single_program.are_models(strategy) else "replica"
  return f"{kind} ({count} {one if count == 1 else one + 's'})"


def other_in_words(
  strategy: tf.distribute.Strategy, than: tf.distribute.Strategy
) -> str:
  """Returns a strategy in words that tell it from another strategy."""
  words = strategy_in_words(strategy)
  if words == strategy_in_words(than):
    return f"another {type(strategy).__name__} object"
  return words


def check_variable(argument: str, variable: object) -> None:
  """Raises `TypeError` unless a value of this argument is a variable."""
  if not is_variable(variable):
    raise TypeError(
      f"`{argument}` must contain tf.Variable or keras.Variable objects; got"
      f" {_shown(variable)}. Pass the variable itself, not its value."
    )
  dtype = getattr(variable, "dtype", None)
  if isinstance(dtype, tf.DType) and dtype != dtype.base_dtype:
    raise TypeError(
      f"`{argument}` must contain resource variables; got {_shown(variable)}, a"
      " reference variable of TensorFlow 1. Create it with use_resource=True,"
      " or call tf.compat.v1.enable_resource_variables() first."
    )


def is_var_list(value: Any) -> bool:
  """Returns whether the second argument of `minimize` is a list of variables.

  Keras passes its list of variables there, where TensorFlow 1 has
  `global_step`.
  """
  if is_variable(value) or tf.is_tensor(value) or isinstance(value, str):
    return False
  return isinstance(value, Iterable)


def check_pairs(grads_and_vars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
  """Checks (gradient, variable) pairs; returns gradients and variables."""
  pairs = _as_list("grads_and_vars", grads_and_vars)
  if not pairs:
    raise ValueError(
      "`grads_and_vars` must contain at least one (gradient, variable) pair;"
      " got []. Pass what compute_gradients() returned."
    )
  for pair in pairs:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
      raise ValueError(
        "`grads_and_vars` must contain (gradient, variable) pairs; got"
        f" {_shown(pair)}. Use zip(grads, variables)."
      )
    if is_variable(pair[0]) and not is_variable(pair[1]):
      raise TypeError(
        "`grads_and_vars` must contain (gradient, variable) pairs; got a pair"
        f" that begins with the variable {path_of(pair[0])}. Use zip(grads,"
        " variables)."
      )
  checked = [(_check_gradient(g, v), v) for g, v in pairs]
  if all(grad is None for grad, _ in checked):
    raise ValueError(
      "`grads_and_vars` must contain a gradient that is not None. No gradients"
      f" provided for any variable: {[path_of(v) for _, v in checked]}. Compute"
      " the loss from the variables, inside the tape."
    )
  return [g for g, _ in checked], [v for _, v in checked]


def check_var_list(var_list: Any) -> list[Any] | None:
  """Returns the trainable variables that the argument `var_list` names.

  The argument may be a list, one variable, a function that returns variables,
  or None, which stays None.
  """
  if callable(var_list) and not is_variable(var_list):
    var_list = var_list()
  if var_list is None:
    return None
  variables = (
    [var_list] if is_variable(var_list) else _as_list("var_list", var_list)
  )
  if not variables:
    raise ValueError(
      "`var_list` must contain at least one variable; got []. Use None for"
      " every trainable variable that the loss depends on."
    )
  for variable in variables:
    check_variable("var_list", variable)
    if not variable.trainable:
      raise ValueError(
        f"`var_list` must contain trainable variables; {path_of(variable)} has"
        " trainable=False. Remove it from `var_list`, or make it trainable."
      )
  return variables


def check_global_step(global_step: Any) -> None:
  """Raises `TypeError` unless `global_step` can be incremented by one."""
  if global_step is None:
    return
  is_given = is_variable(global_step)
  if not is_given or not tf.as_dtype(global_step.dtype).is_integer:
    raise TypeError(
      "`global_step` must be an integer variable or None; got"
      f" {_shown(global_step)}. Use tf.Variable(0, dtype=tf.int64). To pass"
      " variables to train, use `var_list=`."
    )


def check_scalar(loss: tf.Tensor, seeded: bool) -> None:
  """Raises `ValueError` unless a loss that is averaged is a scalar."""
  if not seeded and loss.shape.rank not in (0, None):
    raise ValueError(
      '`loss` must be a scalar when `reduction` is "mean"; got shape'
      f" {loss.shape}. Use tf.reduce_mean(loss), or pass `grad_loss`, because"
      " TensorFlow would differentiate the sum of the elements."
    )


def check_not_overwritten(variables: Iterable[Any]) -> None:
  """Raises `NotImplementedError` for variables that Keras does not update.

  The "gradient" of a float8 scale is its next value, which must not be scaled,
  clipped or summed.
  """
  for variable in variables:
    if getattr(variable, "overwrite_with_gradient", False):
      raise NotImplementedError(
        f"{path_of(variable)} has `overwrite_with_gradient`:"
        " Keras replaces the float8 scales of this layer by their gradients,"
        " which cannot be summed over replicas. Train the layer with plain"
        ' Keras, or with dtype="mixed_bfloat16".'
      )


def check_known(
  variables: Sequence[Any],
  is_known: Callable[[Any], bool],
  argument: str = "grads_and_vars",
) -> None:
  """Raises `ValueError` if a built optimizer does not know a variable."""
  for variable in variables:
    if not is_known(variable):
      raise ValueError(
        f"Unknown variable: `{argument}` holds {path_of(variable)}, which is"
        " not among the variables that the optimizer was built for. Call"
        " build() with all variables first, or create a new optimizer."
      )


def _as_list(argument: str, value: Any) -> list[Any]:
  if not isinstance(value, Iterable) or tf.is_tensor(value):
    raise TypeError(
      f"`{argument}` must be a list; got {_shown(value)}. Pass what"
      " compute_gradients() returned, or a list of variables."
    )
  return list(value)


def _check_gradient(grad: Any, variable: Any) -> Any:
  """Returns a gradient as a tensor, after checking its dtype and shape."""
  check_variable("grads_and_vars", variable)
  if grad is None:
    return None
  if isinstance(grad, tf.IndexedSlices):
    # Any number of rows, each of the shape of the variable's rows.
    shape = tf.TensorShape([None]).concatenate(grad.values.shape[1:])
  else:
    grad = tf.convert_to_tensor(grad)
    shape = grad.shape
  is_complex = tf.as_dtype(variable.dtype).is_complex
  if not (grad.dtype.is_floating or (grad.dtype.is_complex and is_complex)):
    raise TypeError(
      "`grads_and_vars` must contain gradients of a floating dtype, or of a"
      " complex dtype for a complex variable; the gradient of"
      f" {path_of(variable)} is"
      f" {_shown(grad)}. Pass what a tape or compute_gradients() returned."
    )
  expected = tf.TensorShape(variable.shape)
  if not shape.is_compatible_with(expected):
    raise ValueError(
      f"`grads_and_vars` must contain gradients of their variables' shapes; the"
      f" gradient of {path_of(variable)} has shape {shape}, but the variable"
      f" has {expected}. Pair each gradient with its own variable."
    )
  return grad


def _shown(value: Any) -> str:
  try:
    text = repr(value)
  except Exception:  # Keras 3.10 cannot show a variable in a graph.
    text = f"a {type(value).__name__}"
  return textwrap.shorten(text, 200, placeholder=" ...")
