"""Maps optimizers of `tf.compat.v1.train` to Keras' classes.

Keras' class gets the arguments with which it has the formula of TensorFlow 1.
"""

import functools
import importlib
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

_v1: Final = tf.compat.v1.train
V1Optimizer: Final = tf.compat.v1.train.Optimizer
V1CrossShard: Final = tf.compat.v1.tpu.CrossShardOptimizer

# For each class, Keras' class, and the attributes of its arguments. These are
# exact classes, because a subclass may compute anything.
_KINDS: Final[dict[type, tuple[str, dict[str, str]]]] = {
  _v1.GradientDescentOptimizer: ("SGD", {}),
  _v1.MomentumOptimizer: (
    "SGD",
    {"momentum": "_momentum", "nesterov": "_use_nesterov"},
  ),
  _v1.AdamOptimizer: (
    "Adam",
    {"beta_1": "_beta1", "beta_2": "_beta2", "epsilon": "_epsilon"},
  ),
  _v1.AdagradOptimizer: (
    "Adagrad",
    {"initial_accumulator_value": "_initial_accumulator_value"},
  ),
  _v1.RMSPropOptimizer: (
    "RMSprop",
    {
      **{"rho": "_decay", "momentum": "_momentum", "epsilon": "_epsilon"},
      "centered": "_centered",
    },
  ),
  _v1.AdadeltaOptimizer: ("Adadelta", {"rho": "_rho", "epsilon": "_epsilon"}),
  _v1.FtrlOptimizer: (
    "Ftrl",
    {
      name: f"_{name}"
      for name in (
        *("learning_rate_power", "initial_accumulator_value", "beta"),
        *("l1_regularization_strength", "l2_regularization_strength"),
        "l2_shrinkage_regularization_strength",
      )
    },
  ),
}


def convert(opt: Any, keras_package: str) -> Any:
  """Returns an optimizer of this Keras for an optimizer of TensorFlow 1."""
  if isinstance(opt, V1CrossShard):
    raise ValueError(
      "`opt` must not be or contain a tf.compat.v1.tpu.CrossShardOptimizer;"
      f" got {opt.get_name()!r}. Gradients would be reduced twice: convert the"
      " whole optimizer with tf_cross_shard.migration.from_v1(opt)."
    )
  if type(opt) not in _KINDS:
    source = f"{type(opt).__module__}.{type(opt).__qualname__}"
    known = ", ".join(kind.__name__ for kind in _KINDS)
    raise TypeError(
      f"`opt` cannot be converted; got {source} {opt.get_name()!r}, but only"
      f" {known} of tf.compat.v1.train can be converted, and not their"
      " subclasses. If your class wraps one of these, convert the wrapped"
      " optimizer; otherwise rewrite your class as a Keras optimizer."
    )
  kind, attributes = _KINDS[type(opt)]
  settings = {
    name: _number(getattr(opt, attribute), name)
    for name, attribute in attributes.items()
  }
  if kind == "Adagrad":
    settings["epsilon"] = 0.0
  library = importlib.import_module(f"{keras_package}.optimizers")
  value = opt._lr if hasattr(opt, "_lr") else opt._learning_rate  # noqa: SLF001
  rate, start = _convert_rate(value, library.schedules)
  converted = getattr(library, kind)(rate, name=name_of(opt), **settings)
  if start:
    converted.iterations.assign(start)
  _warn(opt, kind, bool(settings.get("momentum")) and callable(rate))
  return converted


def name_of(opt: Any) -> str:
  """Returns an optimizer's name without slashes, which Keras 3 refuses."""
  return str(opt.get_name()).replace("/", "_")


def _warn(opt: Any, kind: str, moves_by_schedule: bool) -> None:
  """Warns of what the new optimizer does not do as the old one did."""
  name = opt.get_name()
  if opt.variables() or opt._deferred_slot_restorations:  # noqa: SLF001
    logging.warning(
      "%s was used before, but its slots are not converted. To convert them,"
      " save a checkpoint, and convert the checkpoint with"
      " tf_cross_shard.migration.convert_checkpoint.",
      name,
    )
  if kind == "RMSprop":
    logging.warning(
      "%s becomes Keras' RMSprop, whose average of squares starts at 0, and not"
      " at 1. So the first steps differ, unless you convert a checkpoint.",
      name,
    )
  elif kind == "SGD" and moves_by_schedule:
    logging.warning(
      "%s becomes Keras' SGD, whose momentum adds up gradients times their"
      " learning rates, and not gradients. So steps differ while the schedule"
      " changes the learning rate.",
      name,
    )


def _convert_rate(value: Any, schedules: Any) -> tuple[Any, int]:
  """Returns a learning rate for Keras, and the number of steps so far."""
  # exponential_decay and the other decays of TensorFlow 1 return this eagerly.
  is_partial = isinstance(value, functools.partial) and len(value.args) == 1
  schedule: Any = value.func if is_partial else None
  if not type(schedule).__module__.startswith("tensorflow."):
    return _number(value, "learning_rate"), 0
  name, step = type(schedule).__name__, value.args[0]
  if not hasattr(schedules, name):
    raise TypeError(
      f"`learning_rate` is a {name}, which Keras does not have. Use a Keras"
      " optimizer with a Keras LearningRateSchedule of your own."
    )
  if not hasattr(step, "assign"):
    return _number(value(), "learning_rate"), 0
  config = schedule.get_config()
  config.pop("name", None)
  config = {key: _plain(x, key) for key, x in config.items()}
  return getattr(schedules, name)(**config), int(step.numpy())


def _plain(value: Any, argument: str) -> Any:
  """Returns a schedule's setting as Python numbers."""
  if isinstance(value, (list, tuple)):
    return [_plain(item, argument) for item in value]
  # Float32 would round steps beyond 2^24.
  if argument == "boundaries" and np.asarray(value).dtype.kind in "iu":
    return int(np.asarray(value))
  return _number(value, argument)


def _number(value: Any, argument: str) -> Any:
  """Returns a setting as a Python number, or a boolean."""
  if isinstance(value, bool):
    return value
  is_of_graph = tf.is_tensor(value) and tf.is_symbolic_tensor(value)
  if is_of_graph or callable(value) or hasattr(value, "assign"):
    raise ValueError(
      f"`{argument}` is {value!r}, which can change during training. Pass a"
      " number, and assign to the new optimizer's setting to change it; or, for"
      " the learning rate, a schedule such as exponential_decay that you create"
      " eagerly."
    )
  return float(np.asarray(value))
