"""Converts optimizers of `tf.compat.v1.train` to Keras optimizers."""

import functools
import importlib
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core.inner import v1_update

V1Optimizer: Final = tf.compat.v1.train.Optimizer
V1CrossShard: Final = tf.compat.v1.tpu.CrossShardOptimizer


def convert(opt: Any, keras_package: str, classes: Any) -> Any:
  """Returns a Keras optimizer that computes what `opt` computed.

  Args:
    opt: A TensorFlow 1 optimizer.
    keras_package: "keras" or "tf_keras".
    classes: The module that contains the classes of this Keras with the updates
      of TensorFlow 1.

  Raises:
    TypeError: If no optimizer of Keras equals `opt`.
    ValueError: If `opt` reduces gradients itself, or a setting is not a number.
  """
  source = f"{type(opt).__module__}.{type(opt).__qualname__}"
  if isinstance(opt, V1CrossShard):
    raise ValueError(
      "`opt` must not be or contain a tf.compat.v1.tpu.CrossShardOptimizer;"
      f" got {opt.get_name()!r}. Gradients would be reduced twice: convert the"
      " whole optimizer with tf_cross_shard.migration.from_v1(opt)."
    )
  if type(opt) not in v1_update.KINDS:
    known = ", ".join(kind.__name__ for kind in v1_update.KINDS)
    raise TypeError(
      f"`opt` cannot be converted; got {source} {opt.get_name()!r}, but only"
      f" {known} of tf.compat.v1.train can be converted, and not their"
      " subclasses. If your class wraps one of these, convert the wrapped"
      " optimizer; otherwise rewrite your class as a Keras optimizer."
    )
  has_slots = opt.variables() or opt._deferred_slot_restorations  # noqa: SLF001
  if has_slots:
    logging.warning(
      "%s was used before, but its slots are not converted. To convert them,"
      " save a checkpoint, and convert the checkpoint with"
      " tf_cross_shard.migration.convert_checkpoint.",
      opt.get_name(),
    )
  kind = v1_update.KINDS[type(opt)]
  library = importlib.import_module(f"{keras_package}.optimizers")
  settings: dict[str, Any] = {}
  keras_class = library.SGD
  if kind is not None:
    for name in kind.settings:
      settings[name] = _number(v1_update.setting(opt, name), name)
    keras_class = getattr(
      classes, f"V1{type(opt).__name__[: -len('Optimizer')]}"
    )
  value = v1_update.setting(opt, "learning_rate")
  rate, start = _convert_rate(value, library.schedules, classes)
  converted = keras_class(learning_rate=rate, name=name_of(opt), **settings)
  if start:
    converted.iterations.assign(start)
  logging.info(
    "%s %r became %s with learning_rate=%s, %s.",
    *(source, opt.get_name(), type(converted).__name__),
    *(rate, f"iterations={start}, {settings}"),
  )
  return converted


def _convert_rate(value: Any, schedules: Any, classes: Any) -> tuple[Any, int]:
  """Returns a learning rate for Keras, and the number of steps so far."""
  if hasattr(value, "assign"):
    return classes.V1Function(value), 0
  if not callable(value):
    return _number(value, "learning_rate"), 0
  # exponential_decay and the other decays of TensorFlow 1 return this eagerly.
  is_partial = isinstance(value, functools.partial) and len(value.args) == 1
  schedule: Any = value.func if is_partial else None
  if not type(schedule).__module__.startswith("tensorflow."):
    return classes.V1Function(value), 0
  name, step = type(schedule).__name__, value.args[0]
  config = schedule.get_config()
  config.pop("name", None)
  if not hasattr(schedules, name):
    raise TypeError(
      f"`learning_rate` is a {name}, which Keras does not have. Pass your own"
      " function, or use a Keras optimizer with a Keras LearningRateSchedule."
    )
  changes = any(hasattr(x, "assign") or callable(x) for x in config.values())
  is_count = hasattr(step, "assign") and tf.as_dtype(step.dtype).is_integer
  if changes or (hasattr(step, "assign") and not is_count):
    # The learning rate depends on more than a count of steps.
    return classes.V1Function(value), 0
  if not is_count:
    return _number(value(), "learning_rate"), 0
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
      " number. Only the learning rate can change, and only if you create it"
      " eagerly."
    )
  return float(np.asarray(value))


def name_of(opt: Any) -> str:
  """Returns an optimizer's name without slashes, which Keras 3 refuses."""
  return str(opt.get_name()).replace("/", "_")
