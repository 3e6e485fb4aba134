"""The optimizers of `tf.compat.v1.train`, as a table and a mixin.

Each becomes a class that derives from Keras' optimizer of that name, whose
settings and slots it keeps, and updates through TensorFlow 1's own kernel.
`v1_keras3` and `v1_tf_keras` make the classes, one set for each Keras.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import validation
from tf_cross_shard.inner_optimizer import kernels

_v1: Final = tf.compat.v1.train


@dataclasses.dataclass(frozen=True)
class Kind:
  """What Keras and the kernel call the same things.

  Attributes:
    keras: The class in both Kerases.
    kernel: In `kernels.KERNELS`.
    settings: By Keras' name, the kernel's argument, if it has one.
    slots: By the kernel's name, the attribute in both Kerases, and a name.
  """

  keras: str
  kernel: str
  settings: dict[str, str | None]
  slots: dict[str, tuple[str, str]]


# By the class itself: a subclass of one of them may do anything.
KINDS: Final[dict[type, Kind | None]] = {
  _v1.GradientDescentOptimizer: None,  # is Keras' SGD
  _v1.MomentumOptimizer: Kind(
    "SGD",
    "Momentum",
    {"momentum": "momentum", "nesterov": "use_nesterov"},
    {"accum": ("momentums", "momentum")},
  ),
  _v1.AdamOptimizer: Kind(
    "Adam",
    "Adam",
    {"beta_1": "beta1", "beta_2": "beta2", "epsilon": "epsilon"},
    {"m": ("_momentums", "momentum"), "v": ("_velocities", "velocity")},
  ),
  _v1.AdagradOptimizer: Kind(
    "Adagrad",
    "Adagrad",
    {"initial_accumulator_value": None},
    {"accum": ("_accumulators", "accumulator")},
  ),
  _v1.RMSPropOptimizer: Kind(
    "RMSprop",
    "RMSProp",
    {
      "rho": "rho",
      "momentum": "momentum",
      "epsilon": "epsilon",
      "centered": None,
    },
    {
      "ms": ("_velocities", "velocity"),
      "mg": ("_average_gradients", "average_gradient"),
      "mom": ("_momentums", "momentum"),
    },
  ),
  _v1.AdadeltaOptimizer: Kind(
    "Adadelta",
    "Adadelta",
    {"rho": "rho", "epsilon": "epsilon"},
    {
      "accum": ("_accumulated_grads", "accumulated_grad"),
      "accum_update": ("_accumulated_delta_vars", "accumulated_delta_var"),
    },
  ),
  _v1.FtrlOptimizer: Kind(
    "Ftrl",
    "FtrlV2",
    {
      "learning_rate_power": "lr_power",
      "initial_accumulator_value": None,
      "l1_regularization_strength": "l1",
      "l2_regularization_strength": "l2",
      "l2_shrinkage_regularization_strength": "l2_shrinkage",
      "beta": None,
    },
    {
      "accum": ("_accumulators", "accumulator"),
      "linear": ("_linears", "linear"),
    },
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
  """What a version 1 optimizer has for a setting of Keras."""
  own = f"_{name}"
  return getattr(opt, own if hasattr(opt, own) else _ATTRIBUTES[name])


def named_kinds() -> Iterator[tuple[str, Kind]]:
  """The classes to make, by name: "V1Adam"."""
  for v1_class, kind in KINDS.items():
    if kind is not None:
      yield f"V1{v1_class.__name__.removesuffix('Optimizer')}", kind


class V1Update:
  """Puts TensorFlow 1's kernel in the place of a Keras optimizer's update.

  What differs between the two Kerases is `_index` and `_add_number`.
  """

  kind: Kind

  def build(self, variables: Any) -> None:
    """Makes the slots, those too that Keras does without, and the powers."""
    is_built = getattr(self, "_built", False) or getattr(self, "built", False)
    super().build(variables)  # type: ignore[misc]
    if is_built:  # tf_keras builds in every step.
      return
    for slot in self._kernel.slots:
      attribute, name = self.kind.slots[slot]
      if not getattr(self, attribute, None):
        add = self.add_variable_from_reference
        setattr(
          self, attribute, [add(variable, name) for variable in variables]
        )
    for power, beta in self._kernel.powers.items():
      setattr(self, power, self._add_number(power, self._kernel_settings[beta]))

  def update_step(
    self, gradient: Any, variable: Any, learning_rate: Any = None
  ) -> None:
    """Updates `variable` by `gradient`; tf_keras gives no learning rate."""
    rate = self.learning_rate if learning_rate is None else learning_rate
    settings: dict[str, Any] = {"lr": rate, **self._kernel_settings}
    if "l2" in settings:  # In version 1 it is beta's place too.
      rate = tf.maximum(tf.cast(rate, tf.float32), 1e-36)
      settings["l2"] += getattr(self, "beta") / (2.0 * rate)  # noqa: B009
    for power in self._kernel.powers:
      settings[power] = kernels.read(self._handle(power), tf.float32)
    index = self._index(variable)
    slots = {
      slot: validation.native(getattr(self, self.kind.slots[slot][0])[index])
      for slot in self._kernel.slots
    }
    native = validation.native(variable)
    kernels.apply(self._kernel, native, slots, gradient, settings)

  def _multiply_powers(self) -> None:
    """After all variables of a step, as version 1 does."""
    for power, beta in self._kernel.powers.items():
      handle = self._handle(power)
      factor = tf.constant(self._kernel_settings[beta], tf.float32)
      kernels.write(handle, kernels.read(handle, tf.float32) * factor)

  @property
  def _kernel(self) -> kernels.Kernel:
    """Chosen by the settings."""
    centered = "Centered" if getattr(self, "centered", False) else ""
    return kernels.KERNELS[centered + self.kind.kernel]

  @property
  def _kernel_settings(self) -> dict[str, Any]:
    """By the kernel's names."""
    return {
      argument: getattr(self, name)
      for name, argument in self.kind.settings.items()
      if argument is not None
    }

  def _handle(self, power: str) -> Any:
    """Of this replica's copy."""
    return validation.native(getattr(self, power)).handle

  learning_rate: Any
  add_variable_from_reference: Callable[..., Any]
  _index: Callable[[Any], int]
  _add_number: Callable[[str, float], Any]


class LinearCosine:
  """TensorFlow's own `linear_cosine_decay`, which neither Keras has."""

  def __init__(self, **settings: Any) -> None:
    """Takes what that function takes."""
    self._settings = settings

  def __call__(self, step: Any) -> tf.Tensor:
    """The learning rate at `step`."""
    rate = _v1.linear_cosine_decay(global_step=step, **self._settings)
    return rate() if callable(rate) else rate

  def get_config(self) -> dict[str, Any]:
    """The settings."""
    return dict(self._settings)


class Function:
  """A learning rate that is a variable or a function, read in every step."""

  def __init__(self, rate: Any) -> None:
    """Keeps it."""
    self._rate = rate

  def __call__(self, step: Any) -> tf.Tensor:
    """The learning rate now, whatever `step` is."""
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
