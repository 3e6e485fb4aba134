"""Keras optimizers with the formulas of `tf.compat.v1.train`.

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
from collections.abc import Callable, Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.inner import keras_private, kernels

_v1: Final = tf.compat.v1.train


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
  own = f"_{name}"
  return getattr(opt, own if hasattr(opt, own) else _ATTRIBUTES[name])


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
    """Multiplies beta^t by beta, after a step has updated all variables.

    TensorFlow 1 does the same.
    """
    for power in self._kernel.powers:
      after = self._power(power) * self._factor(power)
      kernels.write(self._handle(power), after)

  @property
  def v1_operation(self) -> str:
    """The operation that updates a variable with a dense gradient."""
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
    return tf.constant(factor, tf.float32)

  def _handle(self, power: str) -> Any:
    """Returns the handle of this replica's copy of a power."""
    return variables_lib.native(getattr(self, power)).handle

  learning_rate: Any
  add_variable_from_reference: Callable[..., Any]
  _index: Callable[[Any], int]
  _add_one: Callable[[str], Any]


class Function:
  """A learning rate that reads a variable or a function in every step."""

  def __init__(self, rate: Any) -> None:
    """Stores a variable, or a function of no arguments."""
    self._rate = rate

  def __call__(self, step: Any) -> tf.Tensor:
    """Returns the current learning rate; ignores `step`."""
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
