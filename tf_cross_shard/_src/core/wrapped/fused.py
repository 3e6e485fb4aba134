"""Faster update steps: one TensorFlow kernel instead of Keras' operations.

Keras computes an update in about twenty operations over a whole variable. For
many optimizers TensorFlow has one kernel with the same formula, which reads and
writes each number only once. For example, Adam with learning rate alpha in step
t (Kingma and Ba, 2015, Algorithm 1):

    m_t     = beta_1 * m_{t-1} + (1 - beta_1) * g_t
    v_t     = beta_2 * v_{t-1} + (1 - beta_2) * g_t^2
    alpha_t = alpha * sqrt(1 - beta_2^t) / (1 - beta_1^t)
    W_t     = W_{t-1} - alpha_t * m_t / (sqrt(v_t) + epsilon)

While gradients are applied, the kernel replaces the optimizer's `update_step`.
Everything else in the optimizer (weight decay, moving averages, accumulation,
loss scaling) runs as usual.

If there is no kernel, XLA can compile the `update_step`s of all variables of a
call as one function. The obvious alternative, one function for each variable,
is no faster, and takes XLA three times as long to compile.

References:
  Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015 (arXiv
  1412.6980). The second form of the update at the end of section 2 is the one
  above.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf

from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.wrapped import keras_private, kernels, overriding

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
# Keras rounds the settings of these kernels to float32, also for float64.
_CAST: Final = ("Momentum", "KerasMomentum")
# The settings with which these classes have no kernel.
_NO_KERNEL: Final = {
  "Adam": " with amsgrad",
  "AdamW": " with amsgrad",
  "RMSprop": " without momentum",
}
_DTYPES: Final = (tf.float32, tf.float64)

# Keras' classes whose update of an element depends only on that element.
ELEMENTWISE: Final = (
  *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
  *("Ftrl", "Lion", "Nadam", "RMSprop", "SGD"),
)
# Keras' classes whose update uses whole variables, but one variable at a time.
BY_VARIABLE: Final = ("Adafactor", "Lamb", "Muon", "ScheduleFreeAdamW")

# The classes for which, with settings that have no kernel, XLA is faster on
# CPUs than Keras' operations.
_FASTER_COMPILED: Final = (
  *("Adagrad", "Adam", "AdamW", "Lion", "Nadam", "RMSprop"),
)
# The smallest number of elements for which XLA is faster. From about here on,
# variables and slots do not stay in the processor's cache.
_MANY_ELEMENTS: Final = 1_000_000

# The numbers of elements for which Adam's kernel is slower than Keras'
# operations on CPUs: it wakes threads for 512 elements already. A whole step of
# `fit` takes 1.10 to 1.14 times as long with it, in networks of 3 to 21 layers
# of such sizes (`benchmarks/whole_step.py --parts=kernel`). It is faster at all
# sizes in eager calls, where it replaces up to 20 operations, and if there are
# many elements in all: the kernel reads them once.
_SLOW: Final = {"Adam": range(400, 32_768)}


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
  choose = _CHOICES.get(keras_class(optimizer))
  if choose is None or "update_step" in vars(optimizer):
    return None
  name = choose(optimizer)
  return None if name is None else kernels.KERNELS[name]


def why_no_kernel(optimizer: Any) -> str:
  """Returns why `find_kernel` returns None for an optimizer.

  >>> why_no_kernel(tf.keras.optimizers.Adam(amsgrad=True))
  'no kernel for Adam with amsgrad'
  """
  name, kind = keras_class(optimizer), type(optimizer)
  if name in _CHOICES and "update_step" in vars(optimizer):
    return "`update_step` was assigned to the optimizer"
  if hasattr(optimizer, "v1_operation"):
    return "TensorFlow 1's own kernel"
  if name:
    settings = _NO_KERNEL.get(name, "")
    return f"no kernel for {name}{settings}"
  if not hasattr(optimizer, "build"):
    return f"no kernel for {kind.__name__}, a legacy optimizer"
  names = filter(None, map(_name_in_keras, kind.__mro__))
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


def keras_class(optimizer: Any) -> str:
  """Returns the name of a class of Keras; "" for other and legacy classes.

  >>> keras_class(tf.keras.optimizers.Adam())
  'Adam'
  """
  return _name_in_keras(type(optimizer))


def _name_in_keras(kind: type[Any]) -> str:
  """Returns the name of a class of Keras; "" for other and legacy classes."""
  library, *place = kind.__module__.split(".")
  is_keras = library in ("keras", "tf_keras") and len(place) == 3
  is_optimizer = is_keras and place[:2] == ["src", "optimizers"]
  return kind.__name__ if is_optimizer else ""


def check_is_one(optimizer: Any, argument: str, value: Any) -> None:
  """Raises `ValueError` for a MultiOptimizer, which has several optimizers."""
  if keras_class(optimizer) == "MultiOptimizer":
    raise ValueError(
      f"`{argument}` is {value!r}, but a MultiOptimizer passes gradients on to"
      " other optimizers. Wrap each of these optimizers, with"
      " scale_gradients=True, and create a MultiOptimizer of the results."
    )


def check_vouched_for(optimizer: Any, argument: str, value: Any) -> None:
  """Raises `ValueError` if `value` is "elementwise" but the class is not.

  With `"elementwise"`, the user promises that the update of each element uses
  only that element. The classes in `BY_VARIABLE` are known to use norms or
  shapes of whole variables.
  """
  name = keras_class(optimizer)
  if value == "elementwise" and name in BY_VARIABLE:
    remedy = {
      "shard_update": f'Use {argument}="by_variable".',
      "lazy_rows": f"Remove `{argument}`.",
    }
    raise ValueError(
      f"`{argument}` is {value!r}, but {name} uses norms, shapes or settings of"
      f" whole variables, and would compute wrong numbers. {remedy[argument]}"
    )


def is_compiled(optimizer: Any) -> bool:
  """Returns whether XLA compiles the optimizer's step that is being traced."""
  return bool(getattr(optimizer, "jit_compile", False)) or kernels.is_compiled()


class UpdateMethod(NamedTuple):
  """How a step updates one variable.

  Attributes:
    name: The kernel's operation, such as "ResourceApplyAdam"; "XLA" or "Keras"
      for Keras' operations, compiled or not.
    reason: Why no kernel updates the variable; "" for a kernel.
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
    ignores_size: Whether the kernel or XLA does updates of any number of
      elements, on any device.
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
  ignores_size: bool = False
  reason: str = ""
  applies_to_sparse: bool = False
  sums_rows: bool = False
  fallback: str = "Keras"

  def has_kernel(self, variable: Any) -> bool:
    """Returns whether the kernel updates a variable with a dense gradient."""
    has_dtype = kernels.dtype_of(variable) in _DTYPES
    return self.kernel is not None and has_dtype and not self._is_slow(variable)

  def _is_slow(self, variable: Any) -> bool:
    """Returns whether Keras' operations are faster than the kernel."""
    return (
      self.kernel is not None
      and not self.ignores_size
      and math.prod(variable.shape) in _SLOW.get(self.kernel.name, ())
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
    if dtype not in _DTYPES:
      return UpdateMethod(self.fallback, f"no kernel for {dtype.name}")
    if self.copies > 1 and not why_not_xla:
      return UpdateMethod(
        "XLA", "the copies of all replicas are updated together"
      )
    if self._is_slow(variable):
      return UpdateMethod(
        self.fallback, "the kernel is slower for so few elements"
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
    dense = [v for v in dense if kernels.dtype_of(v) in _DTYPES]
    if not all("CPU" in variable.device for variable in dense):
      return "; no XLA, because not all variables are on CPUs"
    elements = self.copies * sum(math.prod(v.shape) for v in dense)
    if elements < _MANY_ELEMENTS:
      return "; no XLA, because there are fewer than a million elements"
    return ""


def _has_many_elements(optimizer: Any, kernel: kernels.Kernel) -> bool:
  """Returns whether the kernel is faster because there are so many elements."""
  attribute = next(iter(kernel.slots.values()), "")
  slots = getattr(optimizer, attribute, ())
  return sum(math.prod(v.shape) for v in slots) >= _MANY_ELEMENTS


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
    ignores_size = (
      bool(wanted) or not in_function or _has_many_elements(optimizer, kernel)
    )
    return Plan(kernel, ignores_size=ignores_size, sums_rows=bool(wanted))
  is_faster = keras_class(optimizer) in _FASTER_COMPILED and (
    "update_step" not in vars(optimizer)
  )
  return Plan(
    may_compile=may_compile and bool(wanted or is_faster),
    ignores_size=bool(wanted),
    reason=why_no_kernel(optimizer),
    fallback=fallback,
  )


def updating(
  optimizer: Any,
  index: Callable[[Any], int],
  wanted: bool | None,
  row_step: Callable[..., None] | None,
) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which kernels, XLA or `row_step` update variables.

  The context replaces methods of a built optimizer.

  Args:
    optimizer: The optimizer that keeps the slots.
    index: Returns the place of a variable among the trained variables.
    wanted: Whether a kernel or XLA does the updates; None to decide by
      speed.
    row_step: Does the updates for row-sparse gradients. Its first argument is
      the optimizer's own `update_step`. None to call that method directly.
  """
  overridden: dict[str, Any] = {}
  if single_program.is_vectorized(keras_private.strategy(optimizer)):
    overridden = keras_private.with_static_shapes(optimizer)
  if is_compiled(optimizer):
    return overriding.overriding(optimizer, **overridden)
  chosen = plan(optimizer, wanted, False, tf.inside_function())
  if chosen.may_compile:
    overridden[keras_private.UPDATE_ALL] = functools.partial(
      _compile_dense, chosen, getattr(optimizer, keras_private.UPDATE_ALL)
    )
  if chosen.kernel is not None or row_step is not None:
    # Legacy optimizers have no `update_step`, and there is no kernel for them.
    plain = getattr(optimizer, "update_step", None)
    plain = overridden.get("update_step", plain)
    step = _UpdateStep(chosen, optimizer, plain, index, row_step)
    overridden["update_step"] = step.update
  return overriding.overriding(optimizer, **overridden)


def _compile_dense(
  chosen: Plan, plain: Any, strategy: Any, pairs: Any, *rate: Any
) -> None:
  """Runs Keras' updates of all variables.

  XLA compiles the updates by dense gradients.

  Args:
    chosen: Decides which updates XLA compiles.
    plain: Keras' method, which updates all variables.
    strategy: The method's first argument.
    pairs: The method's second argument: gradients and variables.
    *rate: The method's last argument, the learning rate.
  """
  methods = chosen.methods(
    [variable for _, variable in pairs],
    [isinstance(gradient, tf.IndexedSlices) for gradient, _ in pairs],
  )
  is_done = [method.name == "XLA" for method in methods]
  if any(is_done):
    # One compiled function for all dense updates.
    dense = list(itertools.compress(pairs, is_done))
    update_dense = functools.partial(plain, strategy, dense, *rate)
    tf.function(update_dense, jit_compile=True, autograph=False)()
    pairs = [p for p, done in zip(pairs, is_done, strict=True) if not done]
  plain(strategy, pairs, *rate)


class _UpdateStep:
  """What replaces `update_step` of the optimizer during one step.

  A kernel's scalars are computed once for all variables of a dtype.
  """

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
    # The kernel's scalar arguments, by dtype and graph.
    self._scalars: dict[Any, dict[str, Any]] = {}

  def update(self, gradient: Any, variable: Any, *rate: Any) -> None:
    """Updates a variable and its slots.

    Args:
      gradient: The gradient, dense or row-sparse.
      variable: The variable of Keras.
      *rate: The learning rate, if Keras passes it to `update_step`.
    """
    native, kernel = variables_lib.native(variable), self._plan.kernel
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    if is_sparse and self._row_step is not None:
      self._row_step(self._plain, gradient, variable, *rate)
      return
    is_kernels = self._plan.sums_rows or not is_sparse
    if kernel is None or not is_kernels or not self._plan.has_kernel(native):
      self._plain(gradient, variable, *rate)
      return
    gradient = row_sparse.to_dense(gradient, native)
    index = self._index(variable)
    slots = {
      slot: variables_lib.native(getattr(self._optimizer, attribute)[index])
      for slot, attribute in kernel.slots.items()
    }
    arguments = self._arguments(kernel, kernels.dtype_of(native), *rate)
    kernels.apply(kernel, native, slots, gradient, arguments)

  def _arguments(
    self, kernel: kernels.Kernel, dtype: tf.DType, rate: Any = None
  ) -> dict[str, Any]:
    """Returns the kernel's scalar arguments."""
    # A tensor belongs to one graph, and each branch of a condition is a graph.
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    key = dtype, graph
    if key not in self._scalars:
      # The learning rate alpha.
      rate = self._optimizer.learning_rate if rate is None else rate
      rate = tf.cast(tf.convert_to_tensor(rate), dtype)
      self._scalars[key] = _scalars(kernel, self._optimizer, rate)
    return self._scalars[key]


def _scalars(
  kernel: kernels.Kernel, optimizer: Any, rate: tf.Tensor
) -> dict[str, Any]:
  """Returns settings, learning rate and powers as tensors of one dtype."""
  dtype = rate.dtype
  # beta_1, beta_2, epsilon, momentum, ... Keras rounds some settings to float32
  # before it converts them to float64: `tf.cast` does the same.
  convert = tf.cast if kernel.name in _CAST else tf.convert_to_tensor
  arguments = {
    name: value if isinstance(value, bool) else convert(value, dtype)
    for name, value in kernel.arguments(optimizer, rate).items()
  }
  if kernel.powers:
    # beta_1^t and beta_2^t, where t counts steps from 1.
    t = tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, dtype)
    for power, name in kernel.powers.items():
      setting = getattr(optimizer, kernel.settings[name])
      arguments[power] = tf.pow(tf.cast(setting, dtype), t)
  return arguments
