"""The optimizers of `tf.compat.v1.train`, as a table and a mixin.

Each becomes a class that derives from Keras' optimizer of that name, whose
settings and slots it keeps, and updates through TensorFlow 1's own kernel.
`keras3.v1_optimizers` and `tf_keras.v1_optimizers` make the classes.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.inner_optimizer import kernels, libraries

_v1: Final = tf.compat.v1.train


@dataclasses.dataclass(frozen=True)
class Kind:
  """The names in Keras and in the kernel of the same things.

  Attributes:
    keras: The class in both Kerases.
    kernel: In `kernels.KERNELS`.
    slots: By the kernel's name, the slot's name in a checkpoint of Keras 3.
    more: Settings of Keras that are no arguments of the kernel.
  """

  keras: str
  kernel: str
  slots: dict[str, str]
  more: tuple[str, ...] = ()

  @property
  def settings(self) -> tuple[str, ...]:
    """All settings but the learning rate, by Keras' names."""
    return (*kernels.KERNELS[self.kernel].settings.values(), *self.more)


# By the class itself: a subclass of one of them may do anything.
KINDS: Final[dict[type, Kind | None]] = {
  _v1.GradientDescentOptimizer: None,  # is Keras' SGD
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
# Version 1's attributes that are not Keras' names; Adadelta has a "_rho".
_ATTRIBUTES: Final = {
  "learning_rate": "_lr",
  "nesterov": "_use_nesterov",
  "beta_1": "_beta1",
  "beta_2": "_beta2",
  "rho": "_decay",
}


def setting(opt: Any, name: str) -> Any:
  """Returns what a version 1 optimizer has for a setting of Keras."""
  own = f"_{name}"
  return getattr(opt, own if hasattr(opt, own) else _ATTRIBUTES[name])


def named_kinds() -> Iterator[tuple[str, Kind]]:
  """Yields the classes to make, by name: "V1Adam"."""
  for v1_class, kind in KINDS.items():
    if kind is not None:
      yield f"V1{v1_class.__name__.removesuffix('Optimizer')}", kind


class V1Update:
  """Puts TensorFlow 1's kernel in the place of a Keras optimizer's update.

  The two Kerases differ in `_index` and `_add_one`.
  """

  kind: Kind

  def build(self, variables: Any) -> None:
    """Makes the slots, those too that Keras does without, and the powers."""
    is_built = libraries.is_built(self)
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
    """Updates `variable` by `gradient`; tf_keras gives no learning rate."""
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
    """After all variables of a step, as version 1 does."""
    for power in self._kernel.powers:
      after = self._power(power) * self._factor(power)
      kernels.write(self._handle(power), after)

  @property
  def _kernel(self) -> kernels.Kernel:
    """Chosen by the settings."""
    centered = "Centered" if getattr(self, "centered", False) else ""
    return kernels.KERNELS[centered + self.kind.kernel]

  def _power(self, power: str) -> tf.Tensor:
    """Returns a power; 1 is none yet, and groups may begin with others."""
    value = kernels.read(self._handle(power), tf.float32)
    return tf.where(value == 1.0, self._factor(power), value)

  def _factor(self, power: str) -> tf.Tensor:
    """Returns the hyperparameter that is a power's factor."""
    argument = self._kernel.powers[power]
    factor = getattr(self, self._kernel.settings[argument])
    return tf.constant(factor, tf.float32)

  def _handle(self, power: str) -> Any:
    """Returns the handle of this replica's copy."""
    return variables_lib.native(getattr(self, power)).handle

  learning_rate: Any
  add_variable_from_reference: Callable[..., Any]
  _index: Callable[[Any], int]
  _add_one: Callable[[str], Any]


class Function:
  """A learning rate that is a variable or a function, read in every step."""

  def __init__(self, rate: Any) -> None:
    """Keeps it."""
    self._rate = rate

  def __call__(self, step: Any) -> tf.Tensor:
    """Returns the learning rate now, whatever `step` is."""
    del step
    if hasattr(self._rate, "assign"):
      return tf.cast(tf.convert_to_tensor(self._rate), tf.float32)
    if tf.executing_eagerly():
      return tf.cast(self._rate(), tf.float32)
    # Called by the trace, it would give one number for good.
    rate = tf.py_function(
      lambda: tf.cast(self._rate(), tf.float32), [], tf.float32
    )
    return tf.ensure_shape(rate, [])

  def get_config(self) -> dict[str, Any]:
    """Raises: a function is not data."""
    raise TypeError(
      f"`learning_rate` is {self._rate!r}, which cannot be saved. Set"
      " `optimizer.learning_rate` to a LearningRateSchedule of Keras before"
      " saving, or save weights only."
    )
