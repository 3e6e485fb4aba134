"""Learning rates of version 1: numbers, variables, functions and schedules.

Version 1 reads a learning rate in every step. So does what is made of it here:
nothing that may change is frozen.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard.migration import v1_rules


@dataclasses.dataclass(frozen=True)
class Decay:
  """A learning rate that follows the optimizer's step count."""

  kind: str
  settings: dict[str, Any]
  start: int


# A function is called in every step.
Rate = float | Decay | Callable[[], Any]

_DECAYS: Final = frozenset(
  (
    "ExponentialDecay",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
    "InverseTimeDecay",
    "CosineDecay",
    "CosineDecayRestarts",
    "LinearCosineDecay",
    "NoisyLinearCosineDecay",
  )
)


def rate(value: Any, source: str) -> Rate:
  """A learning rate that changes where version 1's does."""
  if _is_variable(value):
    return lambda: value
  if not callable(value):
    return number(value, "learning_rate", source)
  decay = _decay(value, source)
  return value if decay is None else decay


def number(value: Any, argument: str, source: str) -> float:
  """A setting as a Python number."""
  if tf.is_tensor(value) and tf.is_symbolic_tensor(value):
    raise ValueError(
      f"`{argument}` of {source} is {value}, which belongs to a graph and has"
      " no value here. Pass a number, or a function of no arguments as the"
      " learning rate; make schedules such as exponential_decay in eager"
      " execution."
    )
  is_step = argument == "global_step"
  if callable(value) or (_is_variable(value) and not is_step):
    raise ValueError(
      f"`{argument}` of {source} is {value!r}, which version 1 reads in every"
      " step and Keras once. Only a learning rate may change: pass a number"
      " here."
    )
  array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
  if array.shape or array.dtype.kind not in "iufV":
    raise ValueError(
      f"`{argument}` of {source} must be a number; got {value!r}. Pass one."
    )
  if np.isnan(float(array)):  # Comparisons with it are false: Keras takes it.
    raise ValueError(
      f"`{argument}` of {source} must be a number; got NaN. Pass one."
    )
  return float(array)


def present(function: Callable[[], Any]) -> tf.Tensor:
  """What a function answers now, and in a graph anew in every step."""
  if tf.executing_eagerly():
    return tf.cast(tf.convert_to_tensor(function()), tf.float32)
  # What it does on its way, such as printing, is not to stay in the graph if
  # it is called in every step.
  with tf.__internal__.FuncGraph("rate").as_default() as scratch:
    value = function()
  if _is_fixed(value, scratch):
    # As it is, the graph that is being traced would keep it for good.
    value = tf.py_function(
      lambda: tf.cast(function(), tf.float32), [], tf.float32
    )
    value.set_shape([])
  elif getattr(value, "graph", None) is scratch:
    value = function()
  return tf.cast(tf.convert_to_tensor(value), tf.float32)


class LinearCosine:
  """What the two Kerases' schedules of `v1_rules.linear_cosine` share."""

  def __init__(self, **settings: Any) -> None:
    """Keeps the settings."""
    self._settings = settings

  def __call__(self, step: Any) -> tf.Tensor:
    """The learning rate at `step`."""
    return v1_rules.linear_cosine(step, **self._settings)

  def get_config(self) -> dict[str, Any]:
    """The settings."""
    return dict(self._settings)


class Function:
  """What the two Kerases' schedules that ask a function share."""

  def __init__(self, function: Callable[[], Any]) -> None:
    """Keeps the function."""
    self._function = function

  def __call__(self, step: Any) -> tf.Tensor:
    """The learning rate now, whatever `step` it is."""
    return present(self._function)

  def get_config(self) -> dict[str, Any]:
    """Cannot be: a function is not data."""
    raise TypeError(
      f"`learning_rate` is {self._function!r}, which version 1 called in every"
      " step. A function or a variable cannot be saved. Set"
      " `optimizer.learning_rate` to a LearningRateSchedule of Keras before"
      " saving, or save weights only."
    )


def _decay(function: Callable[[], Any], source: str) -> Decay | float | None:
  """The schedule in what `tf.compat.v1.train.exponential_decay` answers.

  None where it cannot stand alone: it follows a variable besides the global
  step, or is none.
  """
  if not isinstance(function, functools.partial) or len(function.args) != 1:
    return None
  schedule: Any = function.func
  step = function.args[0]
  # One of TensorFlow's own, and none that is derived from it.
  where, kind = type(schedule).__module__, type(schedule).__qualname__
  is_own = where.startswith("tensorflow.") and kind in _DECAYS
  if not is_own or function.keywords:
    return None
  config = schedule.get_config()
  if any(_is_variable(x) or callable(x) for x in config.values()):
    return None
  if _is_variable(step):
    if not tf.as_dtype(step.dtype).is_integer:
      return None
    settings = {
      name: _plain(value, name, source)
      for name, value in config.items()
      if name != "name"  # a name scope's
    }
    return Decay(kind, settings, int(number(step, "global_step", source)))
  # A step that is a number stays it.
  number(step, "global_step", source)
  return number(schedule(step), "learning_rate", source)


def _is_fixed(value: Any, scratch: Any) -> bool:
  """Whether a graph that keeps it would have the same in every step.

  That is what depends on Python's values and eager tensors alone.
  """
  if not isinstance(value, tf.Tensor):
    return isinstance(value, (int, float, np.ndarray, np.generic))
  if not tf.is_symbolic_tensor(value):
    return True
  if value.graph is not scratch:
    return False
  captured = {within.op.name: of for of, within in scratch.captures}
  found, left = {value.op.name}, [value.op]
  while left:
    op = left.pop()
    if op.op_def.is_stateful:  # It reads a variable, or draws.
      return False
    if op.type == "Placeholder":
      of = captured.get(op.name)
      if of is None or tf.is_symbolic_tensor(of):
        return False
    for before in (each.op for each in op.inputs):
      if before.name not in found:
        found.add(before.name)
        left.append(before)
  return True


def _plain(value: Any, argument: str, source: str) -> Any:
  """A schedule's setting as Python's numbers, booleans and text."""
  if isinstance(value, (list, tuple)):
    return [_plain(each, argument, source) for each in value]
  if isinstance(value, (bool, str)):
    return value
  plain = number(value, argument, source)
  # As floats, steps beyond 2^24 would be rounded. In what else there is, Keras
  # would compute with integers.
  if argument == "boundaries" and np.asarray(value).dtype.kind in "iu":
    return int(np.asarray(value))
  return plain


def _is_variable(value: object) -> bool:
  """Whether it is a variable, TensorFlow's or a Keras'."""
  return hasattr(value, "assign")
