"""Keras optimizers with the formulas of `tf.compat.v1.train`.

`convert` converts an optimizer of TensorFlow 1 to one of them.

For each optimizer of TensorFlow 1, `KINDS` names the Keras class with the same
settings and slots. A new class derives from the Keras class and from
`V1Update`, which updates with TensorFlow 1's own kernel. The modules
`keras3.v1_optimizers` and `tf_keras.v1_optimizers` create these classes.

The formulas differ from Keras'. For example, Adagrad (Duchi et al., 2011) with
accumulator A and learning rate eta:

    TensorFlow 1    A += g^2    W -= eta * g / sqrt(A)
    Keras           A += g^2    W -= eta * g / sqrt(A + epsilon)

TensorFlow 1's Adam keeps beta_1^t and beta_2^t as variables, but Keras computes
these powers from the iteration count.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.wrapped import keras_private, kernels

_v1: Final = tf.compat.v1.train
V1Optimizer: Final = tf.compat.v1.train.Optimizer
V1CrossShard: Final = tf.compat.v1.tpu.CrossShardOptimizer


@dataclasses.dataclass(frozen=True)
class Kind:
  """The names of an optimizer's class, kernel, slots and settings.

  Attributes:
    keras: The name of the class in Keras 3 and tf_keras.
    kernel: The name of the kernel in `kernels.KERNELS`.
    slots: Maps the kernel's name of a slot to its name in a Keras 3 checkpoint.
    extra_settings: Settings of Keras that are not arguments of the kernel.
  """

  keras: str
  kernel: str
  slots: dict[str, str]
  extra_settings: tuple[str, ...] = ()

  @property
  def settings(self) -> tuple[str, ...]:
    """The names in Keras of all settings but the learning rate."""
    return (
      *kernels.KERNELS[self.kernel].settings.values(),
      *self.extra_settings,
    )


# The keys are exact classes, because a subclass may compute anything.
KINDS: Final[dict[type, Kind | None]] = {
  _v1.GradientDescentOptimizer: None,  # the same as Keras' SGD
  _v1.MomentumOptimizer: Kind("SGD", "Momentum", {"accum": "momentum"}),
  _v1.AdamOptimizer: Kind("Adam", "Adam", {"m": "momentum", "v": "velocity"}),
  _v1.AdagradOptimizer: Kind(
    "Adagrad",
    "Adagrad",
    {"accum": "accumulator"},
    ("initial_accumulator_value",),
  ),
  _v1.RMSPropOptimizer: Kind(
    "RMSprop",
    "RMSProp",
    {"ms": "velocity", "mg": "average_gradient", "mom": "momentum"},
    ("centered",),
  ),
  _v1.AdadeltaOptimizer: Kind(
    "Adadelta",
    "Adadelta",
    {"accum": "accumulated_grad", "accum_update": "accumulated_delta_var"},
  ),
  _v1.FtrlOptimizer: Kind(
    "Ftrl",
    "FtrlV2",
    {"accum": "accumulator", "linear": "linear"},
    ("initial_accumulator_value", "beta"),
  ),
}
# Most attributes of TensorFlow 1 have Keras' name with an underscore. These do
# not. (Adadelta has a "_rho", but other classes have a "_decay".)
_ATTRIBUTES: Final = {
  "learning_rate": "_lr",
  "nesterov": "_use_nesterov",
  "beta_1": "_beta1",
  "beta_2": "_beta2",
  "rho": "_decay",
}


def setting(opt: Any, name: str) -> Any:
  """Returns a TensorFlow 1 optimizer's value for a setting of Keras."""
  attribute = f"_{name}" if hasattr(opt, f"_{name}") else _ATTRIBUTES[name]
  return getattr(opt, attribute)


def named_kinds() -> Iterator[tuple[str, Kind]]:
  """Yields the name, such as "V1Adam", and the kind of each class to create."""
  for v1_class, kind in KINDS.items():
    if kind is not None:
      yield f"V1{v1_class.__name__.removesuffix('Optimizer')}", kind


class V1Update:
  """Mixin that replaces the update of a Keras optimizer with a V1 kernel.

  The subclasses for Keras 3 and tf_keras define `_index` and `_add_one`.
  """

  kind: Kind

  def build(self, variables: Any) -> None:
    """Creates the slots, including slots that Keras lacks, and the powers."""
    is_built = keras_private.is_built(self)
    super().build(variables)  # type: ignore[misc]
    if is_built:  # tf_keras builds in every step.
      return
    for slot, attribute in self._kernel.slots.items():
      if not getattr(self, attribute, None):
        add, name = self.add_variable_from_reference, self.kind.slots[slot]
        setattr(
          self, attribute, [add(variable, name) for variable in variables]
        )
    for power in self._kernel.powers:
      setattr(self, power, self._add_one(power))

  def update_step(
    self, gradient: Any, variable: Any, learning_rate: Any = None
  ) -> None:
    """Updates a variable and its slots with a dense or row-sparse gradient.

    The learning rate is None in tf_keras, which passes none.
    """
    rate = self.learning_rate if learning_rate is None else learning_rate
    arguments = self._kernel.arguments(self, tf.cast(rate, tf.float32))
    for power in self._kernel.powers:
      arguments[power] = self._power(power)
    index = self._index(variable)
    slots = {
      slot: variables_lib.native(getattr(self, attribute)[index])
      for slot, attribute in self._kernel.slots.items()
    }
    native = variables_lib.native(variable)
    kernels.apply(self._kernel, native, slots, gradient, arguments)

  def _multiply_powers(self) -> None:
    """Multiplies beta^t by beta after a step, as TensorFlow 1 does."""
    for power in self._kernel.powers:
      after = self._power(power) * self._factor(power)
      kernels.write(self._handle(power), after)

  @property
  def v1_operation(self) -> str:
    return self._kernel.operation

  @property
  def _kernel(self) -> kernels.Kernel:
    centered = "Centered" if getattr(self, "centered", False) else ""
    return kernels.KERNELS[centered + self.kind.kernel]

  def _power(self, power: str) -> tf.Tensor:
    """Returns a power beta^t of this step.

    The variable starts at 1, because each group may have its own beta. So if
    the variable is 1, the power is beta itself, the power of the first step.
    """
    value = kernels.read(self._handle(power), tf.float32)
    return tf.where(value == 1.0, self._factor(power), value)

  def _factor(self, power: str) -> tf.Tensor:
    argument = self._kernel.powers[power]
    factor = getattr(self, self._kernel.settings[argument])
    return tf.convert_to_tensor(factor, tf.float32)

  def _handle(self, power: str) -> Any:
    return variables_lib.native(getattr(self, power)).handle

  learning_rate: Any
  add_variable_from_reference: Callable[..., Any]
  _index: Callable[[Any], int]
  _add_one: Callable[[str], Any]


class Function:
  """A learning rate that reads a variable or a function in every step."""

  def __init__(self, rate: Any) -> None:
    self._rate = rate

  def __call__(self, step: Any) -> tf.Tensor:
    del step
    if hasattr(self._rate, "assign"):
      return tf.cast(tf.convert_to_tensor(self._rate), tf.float32)
    if tf.executing_eagerly():
      return tf.cast(self._rate(), tf.float32)
    # Call the function in every step, not only while the step is traced.
    rate = tf.py_function(
      lambda: tf.cast(self._rate(), tf.float32), [], tf.float32
    )
    return tf.ensure_shape(rate, [])

  def get_config(self) -> dict[str, Any]:
    """Raises `TypeError`, because a function cannot be saved."""
    raise TypeError(
      f"`learning_rate` is {self._rate!r}, which cannot be saved. Set"
      " `optimizer.learning_rate` to a Keras LearningRateSchedule before you"
      " save, or save only the weights."
    )


def convert(opt: Any, keras_package: str, classes: Any) -> Any:
  """Returns a Keras optimizer that computes what TensorFlow 1's `opt` computed.

  Args:
    opt: A TensorFlow 1 optimizer.
    keras_package: "keras" or "tf_keras".
    classes: This Keras' module `v1_optimizers`.

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
  if type(opt) not in KINDS:
    known = ", ".join(kind.__name__ for kind in KINDS)
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
  kind = KINDS[type(opt)]
  library = importlib.import_module(f"{keras_package}.optimizers")
  settings: dict[str, Any] = {}
  keras_class = library.SGD
  if kind is not None:
    for name in kind.settings:
      settings[name] = _number(setting(opt, name), name)
    keras_class = getattr(
      classes, f"V1{type(opt).__name__[: -len('Optimizer')]}"
    )
  value = setting(opt, "learning_rate")
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
