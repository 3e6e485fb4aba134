"""Optimizers of TensorFlow 1 as a CrossShardOptimizer."""

import functools
import importlib
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard import versions
from tf_cross_shard.gradients import loss_factor
from tf_cross_shard.inner_optimizer import v1_update
from tf_cross_shard.wrapper import forwarding

_V1Optimizer: Final = tf.compat.v1.train.Optimizer
_V1CrossShard: Final = tf.compat.v1.tpu.CrossShardOptimizer


def from_v1(opt: Any, loss_averaged_over: str | None = None) -> Any:
  """Makes a CrossShardOptimizer that computes what `opt` computed.

  `opt` is an optimizer of `tf.compat.v1.train`, or one in a
  `tf.compat.v1.tpu.CrossShardOptimizer`. Call it inside `strategy.scope()`.
  GradientDescent, Momentum, Adam, Adagrad, RMSProp, Adadelta and Ftrl become
  classes that derive from Keras' of that name (SGD for the first two), with
  Keras' names of settings and slots, and update through TensorFlow 1's own
  kernels. Plain Keras has other numbers: its momentum sums up
  `learning_rate * grad`, its RMSprop starts at 0, its Adagrad has an epsilon,
  and most move rows that a sparse gradient does not touch. Slots are not
  carried over from `opt`: checkpoints are.

  A learning rate that is a variable or a function is read in every step. Assign
  the variable to change it: to set `optimizer.learning_rate` to a number is an
  error. Such an optimizer cannot be saved. XLA, and so a TPU, compiles
  variables, and no functions. What `tf.compat.v1.train.exponential_decay` and
  its siblings return in eager execution becomes that schedule of Keras; it
  follows `iterations`, which start from the present `global_step`.

  `use_locking` is dropped: updates never race. A `/` in a name becomes `_`.

  >>> import tensorflow as tf
  >>> optimizer = from_v1(
  ...   tf.compat.v1.tpu.CrossShardOptimizer(
  ...     tf.compat.v1.train.MomentumOptimizer(0.5, momentum=0.5),
  ...     reduction=tf.compat.v1.losses.Reduction.SUM,
  ...   )
  ... )
  >>> optimizer.reduction
  'sum'
  >>> weight = tf.Variable(1.0)
  >>> for _ in range(2):
  ...   _ = optimizer.apply_gradients([(tf.constant(1.0), weight)])
  >>> float(weight.numpy())  # 1 - 0.5 * 1 - 0.5 * (0.5 * 1 + 1)
  -0.25

  Args:
    opt: An optimizer of `tf.compat.v1.train`, whose class is one of those in
      the table itself and none derived from it, or a
      `tf.compat.v1.tpu.CrossShardOptimizer` around such a one, whose
      `reduction`, `group_assignment` and name are kept.
    loss_averaged_over: As of CrossShardOptimizer. Version 1's losses were
      averaged over a `"replica"`; `fit` of Keras needs None.

  Returns:
    A CrossShardOptimizer of the Keras that `tf.keras` is; its reduction is
    `"mean"` if `opt` had none.

  Raises:
    TypeError: If `opt` is no version 1 optimizer, or one that no optimizer of
      Keras equals; if its learning rate is a schedule that Keras has not.
    ValueError: If a setting has no value yet, or is none that stays as it is.
  """
  if not isinstance(opt, _V1Optimizer):
    raise TypeError(
      "`opt` must be an optimizer of tf.compat.v1.train; got"
      f" {type(opt).__module__}.{type(opt).__qualname__}: {opt!r}. Pass one of"
      " Keras to CrossShardOptimizer as it is."
    )
  arguments: dict[str, Any] = {"reduction": loss_factor.MEAN}
  if type(opt) is _V1CrossShard:
    arguments = {
      "reduction": opt._reduction,
      "name": _name(opt),
      "group_assignment": opt._group_assignment,
    }
    opt = opt._opt
  keras_package = "tf_keras" if versions.uses_tf_keras() else "keras"
  return _ours(keras_package).CrossShardOptimizer(
    opt, loss_averaged_over=loss_averaged_over, **arguments
  )


def convert_optimizer(opt: Any, keras_package: str) -> Any:
  """Returns `opt` as an optimizer of a Keras; others as they are."""
  if not isinstance(opt, _V1Optimizer):
    return opt
  source = f"{type(opt).__module__}.{type(opt).__qualname__}"
  if isinstance(opt, _V1CrossShard):
    raise ValueError(
      "`opt` must not be or contain a tf.compat.v1.tpu.CrossShardOptimizer;"
      f" got {opt.get_name()!r}. Gradients would be reduced twice: convert all"
      " of it by tf_cross_shard.migration.from_v1(opt)."
    )
  if type(opt) not in v1_update.KINDS:
    known = ", ".join(kind.__name__ for kind in v1_update.KINDS)
    raise TypeError(
      f"`opt` cannot be converted; got {source} {opt.get_name()!r}, and known"
      f" are {known} of tf.compat.v1.train, not what is derived from them."
      " Convert the one within, if there is one, or write it as a Keras"
      " optimizer with an update_step of its own."
    )
  if opt.variables() or opt._deferred_slot_restorations:
    logging.warning(
      "%s was used before: its slots are not carried over. Save a checkpoint"
      " of it and convert that: tf_cross_shard.migration.convert_checkpoint.",
      opt.get_name(),
    )
  kind = v1_update.KINDS[type(opt)]
  classes = _ours(keras_package).v1_optimizers
  library = importlib.import_module(f"{keras_package}.optimizers")
  settings: dict[str, Any] = {}
  made_by = library.SGD
  if kind is not None:
    for name in kind.settings:
      settings[name] = _number(v1_update.setting(opt, name), name)
    made_by = getattr(classes, f"V1{type(opt).__name__[: -len('Optimizer')]}")
  value = v1_update.setting(opt, "learning_rate")
  rate, start = _rate(value, library.schedules, classes)
  made = made_by(learning_rate=rate, name=_name(opt), **settings)
  if start:
    made.iterations.assign(start)
  logging.info(
    "%s %r became %s with learning_rate=%s, %s.",
    *(source, opt.get_name(), type(made).__name__),
    *(rate, f"iterations={start}, {settings}"),
  )
  return made


def _ours(keras_package: str) -> Any:
  """Returns our module of a Keras; neither Keras is imported for the other."""
  name = "keras3" if keras_package == "keras" else keras_package
  return importlib.import_module(f"tf_cross_shard.{name}")


def _rate(value: Any, schedules: Any, classes: Any) -> tuple[Any, int]:
  """Returns a learning rate for Keras, and the step that it is at."""
  if hasattr(value, "assign"):
    return classes.V1Function(value), 0
  if not callable(value):
    return _number(value, "learning_rate"), 0
  # What exponential_decay and its siblings return in eager execution.
  is_partial = isinstance(value, functools.partial) and len(value.args) == 1
  schedule: Any = value.func if is_partial else None
  if not type(schedule).__module__.startswith("tensorflow."):
    return classes.V1Function(value), 0
  name, step = type(schedule).__name__, value.args[0]
  config = schedule.get_config()
  config.pop("name", None)
  if not hasattr(schedules, name):
    raise TypeError(
      f"`learning_rate` is a {name}, which Keras has not. Pass a function of"
      " your own, or a LearningRateSchedule of Keras to a Keras optimizer."
    )
  changes = any(hasattr(x, "assign") or callable(x) for x in config.values())
  is_count = hasattr(step, "assign") and tf.as_dtype(step.dtype).is_integer
  if changes or (hasattr(step, "assign") and not is_count):
    return classes.V1Function(value), 0  # It follows more than a step.
  if not is_count:
    return _number(value(), "learning_rate"), 0
  config = {key: _plain(x, key) for key, x in config.items()}
  return getattr(schedules, name)(**config), int(step.numpy())


def _plain(value: Any, argument: str) -> Any:
  """Returns a schedule's setting as Python's numbers."""
  if isinstance(value, (list, tuple)):
    return [_plain(item, argument) for item in value]
  # As floats, steps beyond 2^24 would be rounded.
  if argument == "boundaries" and np.asarray(value).dtype.kind in "iu":
    return int(np.asarray(value))
  return _number(value, argument)


def _number(value: Any, argument: str) -> Any:
  """Returns a setting as Python's number, or a boolean."""
  if isinstance(value, bool):
    return value
  is_of_graph = tf.is_tensor(value) and tf.is_symbolic_tensor(value)
  if is_of_graph or callable(value) or hasattr(value, "assign"):
    raise ValueError(
      f"`{argument}` is {value!r}, which is not one number from here on. Pass a"
      " number. Only a learning rate may change; make it in eager execution."
    )
  return float(np.asarray(value))


def _name(opt: Any) -> str:
  """Returns its name as Keras 3 takes it: without slashes."""
  return str(opt.get_name()).replace("/", "_")


forwarding.v1_converters[:] = [convert_optimizer]
