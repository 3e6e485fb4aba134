"""Chooses how a step updates each variable: a kernel, XLA or Keras' operations.

The rule: TensorFlow's kernel where there is one, or kernels of its parts where
these are faster; Keras' operations where there is none. XLA compiles Keras'
operations with `fused_update=True`, and by itself for many elements of the
classes below or of vectorized replicas.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf

from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core.wrapped import (
  adam_parts,
  keras_classes,
  keras_private,
  kernels,
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
DTYPES: Final = (tf.float32, tf.float64)

# The classes for which, with settings that have no kernel, XLA is faster on
# CPUs than Keras' operations.
_FASTER_COMPILED: Final = (
  *("Adagrad", "Adam", "AdamW", "Lion", "Nadam", "RMSprop"),
)
# The smallest number of elements for which XLA is faster. From about here on,
# variables and slots do not stay in the processor's cache.
_MANY_ELEMENTS: Final = 1_000_000


def find_kernel(optimizer: Any) -> kernels.Kernel | None:
  """Returns the kernel with the formula of `optimizer.update_step`, or None.

  A user's class that derives from a Keras class has no kernel, because
  it may compute anything. An `update_step` that was assigned to the object may
  compute anything, too.

  >>> find_kernel(tf.keras.optimizers.Adam()).name
  'Adam'
  >>> find_kernel(tf.keras.optimizers.Adam(amsgrad=True)) is None
  True
  """
  choose = _CHOICES.get(keras_classes.keras_class(optimizer))
  if choose is None or "update_step" in vars(optimizer):
    return None
  name = choose(optimizer)
  return None if name is None else kernels.KERNELS[name]


def why_no_kernel(optimizer: Any) -> str:
  """Returns why `find_kernel` returns None for an optimizer.

  >>> why_no_kernel(tf.keras.optimizers.Adam(amsgrad=True))
  'no kernel for Adam with amsgrad'
  """
  name, kind = keras_classes.keras_class(optimizer), type(optimizer)
  if name in _CHOICES and "update_step" in vars(optimizer):
    return "`update_step` was assigned to the optimizer"
  if hasattr(optimizer, "v1_operation"):
    return "TensorFlow 1's own kernel"
  if name:
    settings = _NO_KERNEL.get(name, "")
    return f"no kernel for {name}{settings}"
  names = filter(None, map(keras_classes.name_in_keras, kind.__mro__))
  base = next(names)  # At least Keras' own base class.
  return f"{kind.__name__} is a subclass of {base}"


def can_compile(optimizer: Any) -> bool:
  """Returns whether XLA can compile the updates of this optimizer's variables.

  >>> can_compile(tf.keras.optimizers.Nadam())
  True
  """
  # Only Keras 3 has this method. A MultiOptimizer delegates its updates to
  # nested optimizers.
  has_method = hasattr(optimizer, keras_private.UPDATE_ALL)
  return has_method and not keras_private.nested(optimizer)


def is_compiled(optimizer: Any) -> bool:
  """Returns whether XLA compiles the optimizer's step that is being traced."""
  return bool(getattr(optimizer, "jit_compile", False)) or kernels.is_compiled()


class UpdateMethod(NamedTuple):
  """How a step updates one variable.

  Attributes:
    name: The kernel's operation, such as "ResourceApplyAdam"; "Adam in parts"
      for kernels of its parts; "XLA" or "Keras" for Keras' operations, compiled
      or not.
    reason: Why not the kernel; "" for the kernel.
  """

  name: str
  reason: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
  """Decides how a step updates each variable, by its gradient and its dtype.

  Attributes:
    kernel: The kernel for dense gradients; None if no variable has a kernel.
    may_compile: Whether XLA may compile the updates of dense gradients.
    copies: The number of replicas whose variables are updated together.
    in_function: Whether the step runs inside a `tf.function`.
    ignores_size: Whether XLA does updates of any number of elements, on any
      device.
    reason: Why `kernel` is None.
    applies_to_sparse: Whether `reason` also applies to row-sparse gradients.
    sums_rows: Whether the kernel also updates variables with a row-sparse
      gradient, which becomes dense: rows of the same index are added up first,
      unlike in Keras 3.
    fallback: The name of what updates a variable if neither `kernel` nor XLA
      does, which is the optimizer's own `update_step`: "Keras", or the kernel
      of an optimizer of TensorFlow 1.
  """

  kernel: kernels.Kernel | None = None
  may_compile: bool = False
  copies: int = 1
  in_function: bool = True
  ignores_size: bool = False
  reason: str = ""
  applies_to_sparse: bool = False
  sums_rows: bool = False
  fallback: str = "Keras"

  def is_in_parts(self, variable: Any) -> bool:
    """Returns whether kernels of its parts replace the kernel.

    An eager call has a cost for each operation, and its kernel does all at
    once. On GPUs, the kernel is one launch.
    """
    return (
      self.kernel is kernels.KERNELS["Adam"]
      and self.in_function
      and math.prod(variable.shape) in adam_parts.SIZES
      and "CPU" in variable.device
    )

  def methods(
    self, variables: Sequence[Any], are_sparse: Sequence[bool]
  ) -> list[UpdateMethod]:
    """Returns how a step updates each variable.

    Args:
      variables: All `tf.Variable`s that a step updates.
      are_sparse: Whether their gradients are row-sparse.
    """
    pairs = list(zip(variables, are_sparse, strict=True))
    why_not_xla = self._why_not_xla(
      [v for v, is_sparse in pairs if not is_sparse]
    )
    return [self._method(*pair, why_not_xla) for pair in pairs]

  def _method(
    self, variable: Any, is_sparse: bool, why_not_xla: str
  ) -> UpdateMethod:
    """Returns how a step updates a variable."""
    dtype = kernels.dtype_of(variable)
    if self.applies_to_sparse:
      return UpdateMethod(self.fallback, self.reason)
    if is_sparse and not self.sums_rows:
      return UpdateMethod(self.fallback, "no kernel for row-sparse gradients")
    if dtype not in DTYPES:
      return UpdateMethod(self.fallback, f"no kernel for {dtype.name}")
    if self.copies > 1 and not why_not_xla:
      return UpdateMethod(
        "XLA", "the copies of all replicas are updated together"
      )
    if self.is_in_parts(variable):
      return UpdateMethod(
        "Adam in parts", "the kernel would divide so few elements among threads"
      )
    if self.kernel is not None:
      return UpdateMethod(self.kernel.operation)
    if not self.may_compile or why_not_xla:
      return UpdateMethod(self.fallback, self.reason + why_not_xla)
    return UpdateMethod("XLA", self.reason)

  def _why_not_xla(self, dense: Sequence[Any]) -> str:
    """Returns why XLA would not be faster than Keras; "" if it would be."""
    if self.ignores_size or not self.may_compile:
      return ""
    dense = [v for v in dense if kernels.dtype_of(v) in DTYPES]
    if not all("CPU" in variable.device for variable in dense):
      return "; no XLA, because not all variables are on CPUs"
    elements = self.copies * sum(math.prod(v.shape) for v in dense)
    if elements < _MANY_ELEMENTS:
      return "; no XLA, because there are fewer than a million elements"
    return ""


def plan(
  optimizer: Any,
  wanted: bool | None,
  is_compiled: bool,
  in_function: bool,
) -> Plan:
  """Decides how a step of an optimizer updates its variables.

  The step follows this plan, and `describe` shows it.

  Args:
    optimizer: The optimizer that keeps the slots.
    wanted: Whether a kernel or XLA does the updates; None to decide by
      speed.
    is_compiled: Whether XLA compiles the whole step.
    in_function: Whether the step runs inside a `tf.function`. XLA does not
      compile in eager calls and in TensorFlow 1's graphs, where each call would
      compile a new function.
  """
  fallback: str = getattr(optimizer, "v1_operation", "Keras")
  # If XLA compiles the whole step, it fuses Keras' operations by itself. It
  # could not compile an update by rows, whose number of rows is not known.
  if is_compiled:
    return Plan(
      reason="XLA compiles the whole step",
      applies_to_sparse=True,
      fallback=fallback,
    )
  if wanted is False:
    return Plan(
      reason="fused_update=False", applies_to_sparse=True, fallback=fallback
    )
  kernel = find_kernel(optimizer)
  may_compile = in_function and can_compile(optimizer)
  strategy = keras_private.strategy(optimizer)
  is_stack = single_program.is_vectorized(strategy)
  if wanted is None and may_compile and is_stack and kernel and kernel.slots:
    copies = single_program.num_copies(strategy)
    return Plan(kernel, may_compile=True, copies=copies)
  if kernel is not None:
    return Plan(kernel, in_function=in_function, sums_rows=bool(wanted))
  is_faster = keras_classes.keras_class(optimizer) in _FASTER_COMPILED and (
    "update_step" not in vars(optimizer)
  )
  return Plan(
    may_compile=may_compile and bool(wanted or is_faster),
    ignores_size=bool(wanted),
    reason=why_no_kernel(optimizer),
    fallback=fallback,
  )
