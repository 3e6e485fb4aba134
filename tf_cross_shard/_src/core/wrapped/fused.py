"""Faster update steps: one TensorFlow kernel instead of Keras' operations.

Keras computes an update in about twenty operations over a whole variable. A
kernel reads and writes each number once. It replaces `update_step` during a
step; everything else in the optimizer runs as usual.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import tensorflow as tf

from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.wrapped import (
  adam_parts,
  keras_classes,
  keras_private,
  kernels,
  overriding,
)

# Maps the name of a Keras class to a function that returns the name of the
# kernel for an optimizer's settings, or None.
# Adagrad does not use TensorFlow's kernel: Keras adds epsilon inside the root,
# and the kernel does not. The kernel of RMSprop needs a slot that Keras creates
# only with momentum. The kernel of Amsgrad is not used, because XLA cannot
# compile it and Keras may compile the step.
_CHOICES: Final[dict[str, Callable[[Any], str | None]]] = {
  # tf_keras creates and writes the slot even if the momentum is 0.
  "SGD": lambda opt: (
    "KerasMomentum" if getattr(opt, "momentums", None) else "GradientDescent"
  ),
  "Adam": lambda opt: None if opt.amsgrad else "Adam",
  "AdamW": lambda opt: None if opt.amsgrad else "Adam",
  "Adamax": lambda opt: "AdaMax",
  "RMSprop": lambda opt: (
    ("CenteredRMSProp" if opt.centered else "RMSProp")
    if opt.momentum > 0
    else None
  ),
  "Adadelta": lambda opt: "Adadelta",
  "Ftrl": lambda opt: "FtrlV2",
}
# The settings with which these classes have no kernel.
_NO_KERNEL: Final = {
  "Adam": " with amsgrad",
  "AdamW": " with amsgrad",
  "RMSprop": " without momentum",
}
# Variables of other dtypes are updated by Keras' operations.
_DTYPES: Final = (tf.float32, tf.float64)
_IN_PARTS: Final = "Adam in parts"


def find_kernel(optimizer: Any) -> tuple[kernels.Kernel | None, str]:
  """Returns the kernel of an optimizer's formula, or why there is none."""
  name, kind = keras_classes.keras_class(optimizer), type(optimizer)
  # A class that derives from Keras' may compute anything, and so may an
  # `update_step` that was assigned to the object.
  if not name:
    names = filter(None, map(keras_classes.name_in_keras, kind.__mro__))
    # There is at least Keras' own base class.
    return None, f"{kind.__name__} is a subclass of {next(names)}"
  if "update_step" in vars(optimizer):
    return None, "`update_step` was assigned to the optimizer"
  chosen = _CHOICES.get(name, lambda opt: None)(optimizer)
  if chosen is None:
    return None, f"no kernel for {name}{_NO_KERNEL.get(name, '')}"
  return kernels.KERNELS[chosen], ""


def is_compiled(optimizer: Any) -> bool:
  """Returns whether XLA compiles the optimizer's step that is being traced."""
  return bool(getattr(optimizer, "jit_compile", False)) or kernels.is_compiled()


class UpdateMethod(NamedTuple):
  """How a step updates one variable, and why not by the kernel ("" if it does).

  `name` is a kernel's operation, "Adam in parts" or "Keras" (its operations).
  """

  name: str
  reason: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
  """How a step updates its variables; `reason` is why `kernel` is None.

  With `sums_rows`, the kernel also updates by row-sparse gradients.
  """

  kernel: kernels.Kernel | None = None
  reason: str = ""
  in_function: bool = True
  is_stack: bool = False
  sums_rows: bool = False

  def kernel_or_parts(self, variable: Any, is_sparse: bool) -> UpdateMethod:
    """Returns how a step updates a `tf.Variable`."""
    if self.kernel is None:
      return UpdateMethod("Keras", self.reason)
    if is_sparse and not self.sums_rows:
      return UpdateMethod("Keras", "no kernel for row-sparse gradients")
    dtype = kernels.dtype_of(variable)
    if dtype not in _DTYPES:
      return UpdateMethod("Keras", f"no kernel for {dtype.name}")
    if self.kernel.name == "Adam":
      if self.is_stack:
        return UpdateMethod(
          _IN_PARTS, "the kernel has one count of steps for all models"
        )
      # An eager call has a cost for each operation, and its kernel does all at
      # once. On GPUs, the kernel is one launch.
      has_size = math.prod(variable.shape) in adam_parts.SIZES
      if self.in_function and has_size and "CPU" in variable.device:
        return UpdateMethod(
          _IN_PARTS, "the kernel would divide so few elements among threads"
        )
    return UpdateMethod(self.kernel.operation)


def plan(
  optimizer: Any, wanted: bool | None, is_compiled: bool, in_function: bool
) -> Plan:
  """Decides how a step updates its variables; `wanted` is `fused_update`."""
  # If XLA compiles the step, it fuses Keras' operations by itself. It could not
  # compile an update by rows, whose number of rows is not known.
  if is_compiled:
    return Plan(reason="XLA compiles the whole step")
  if wanted is False:
    return Plan(reason="fused_update=False")
  kernel, reason = find_kernel(optimizer)
  if kernel is None:
    return Plan(reason=reason)
  is_stack = single_program.are_models(keras_private.strategy(optimizer))
  return Plan(kernel, "", in_function, is_stack, sums_rows=bool(wanted))


def updating(
  optimizer: Any,
  index: Callable[[Any], int],
  wanted: bool | None,
  row_step: Callable[..., None] | None,
) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which kernels or `row_step` update variables."""
  overridden: dict[str, Any] = {}
  if single_program.are_models(keras_private.strategy(optimizer)):
    overridden = keras_private.with_static_shapes(optimizer)
  if is_compiled(optimizer):
    return overriding.overriding(optimizer, **overridden)
  chosen = plan(optimizer, wanted, False, tf.inside_function())
  if chosen.kernel is not None or row_step is not None:
    plain = overridden.get("update_step", optimizer.update_step)
    step = _UpdateStep(chosen, optimizer, plain, index, row_step)
    overridden["update_step"] = step.update
  return overriding.overriding(optimizer, **overridden)


class _UpdateStep:
  """What replaces `update_step` of the optimizer during one step."""

  def __init__(
    self,
    chosen: Plan,
    optimizer: Any,
    plain: Any,
    index: Callable[[Any], int],
    row_step: Callable[..., None] | None,
  ) -> None:
    self._plan = chosen
    self._optimizer = optimizer
    self._index = index
    self._row_step = row_step
    self._plain = plain
    # The scalars of the kernel and of its parts, once for a dtype and graph.
    self._scalars: dict[Any, Any] = {}

  def update(self, gradient: Any, variable: Any, *rate: Any) -> None:
    """Updates a variable and its slots; Keras 3 passes the learning rate."""
    native, kernel = variables_lib.native(variable), self._plan.kernel
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    if is_sparse and self._row_step is not None:
      self._row_step(self._plain, gradient, variable, *rate)
      return
    method = self._plan.kernel_or_parts(native, is_sparse)
    if kernel is None or method.name == "Keras":
      self._plain(gradient, variable, *rate)
      return
    gradient = row_sparse.to_dense(gradient, native)
    index, dtype = self._index(variable), kernels.dtype_of(native)
    slots = {
      slot: variables_lib.native(getattr(self._optimizer, attribute)[index])
      for slot, attribute in kernel.slots.items()
    }
    arguments = self._once(
      (kernel.name, dtype), lambda: self._arguments(kernel, dtype, *rate)
    )
    if method.name == _IN_PARTS:
      numbers = self._once(
        (_IN_PARTS, dtype),
        lambda: adam_parts.numbers(self._optimizer, arguments),
      )
      adam_parts.apply(native, slots, gradient, numbers)
    else:
      kernels.apply(kernel, native, slots, gradient, arguments)

  def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Returns what `make` returned for this key in the current graph."""
    # A tensor belongs to one graph, and each branch of a condition is a graph.
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    key = (*key, graph)
    if key not in self._scalars:
      self._scalars[key] = make()
    return self._scalars[key]

  def _arguments(
    self, kernel: kernels.Kernel, dtype: tf.DType, rate: Any = None
  ) -> dict[str, Any]:
    """Returns learning rate, settings and powers as tensors of one dtype."""
    rate = self._optimizer.learning_rate if rate is None else rate
    rate = tf.cast(tf.convert_to_tensor(rate), dtype)
    # Keras rounds the momentum to float32, also for float64, as `tf.cast` does.
    is_rounded = kernel.name == "KerasMomentum"
    convert = tf.cast if is_rounded else row_sparse.in_dtype
    arguments = {
      name: value
      if isinstance(value, bool)
      else tf.convert_to_tensor(convert(value, dtype), dtype)
      for name, value in kernel.arguments(self._optimizer, rate).items()
    }
    if kernel.powers:
      # beta_1^t and beta_2^t, where t counts steps from 1.
      t = tf.cast(tf.convert_to_tensor(self._optimizer.iterations) + 1, dtype)
      for power, name in kernel.powers.items():
        setting = getattr(self._optimizer, kernel.settings[name])
        arguments[power] = tf.pow(tf.cast(setting, dtype), t)
    return arguments
