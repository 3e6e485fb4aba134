"""Keras' update steps, each by the one TensorFlow kernel of the same formula.

Keras computes a step in about twenty operations over the whole of a variable;
the kernel reads and writes each number once. While gradients are applied, the
kernel stands in the place of the optimizer's `update_step`, so that all else of
the optimizer (decay, moving averages, accumulation, loss scaling) is as it is.

Where there is no kernel, XLA compiles the `update_step`s of all variables of a
call as one function. The obvious way, a function for each variable, is no
faster, and takes XLA three times as long to compile.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.inner_optimizer import kernels, libraries

# By the name of Keras' class, the kernel for its settings, if there is one.
# Keras' Adagrad has epsilon inside the root, the kernels outside. The kernel of
# RMSprop needs a slot that Keras makes only where there is momentum. Amsgrad's
# kernel cannot be compiled, should Keras compile the step.
_CHOICES: Final[dict[str, Callable[[Any], str | None]]] = {
  # tf_keras makes and writes the slot without momentum too.
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
_CAST: Final = ("Momentum", "KerasMomentum")  # whose settings Keras casts
_DTYPES: Final = (tf.float32, tf.float64)

# Keras' classes whose update of an element depends on that element only.
ELEMENTWISE: Final = (
  *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
  *("Ftrl", "Lion", "Nadam", "RMSprop", "SGD"),
)
# Those that look at whole variables, at each by itself.
BY_VARIABLE: Final = ("Adafactor", "Lamb", "Muon", "ScheduleFreeAdamW")

# The classes and sizes at which XLA's updates are faster than Keras' operations
# on CPUs, with settings for which there is no kernel.
_FASTER_COMPILED: Final = (
  *("Adagrad", "Adam", "AdamW", "Lion", "Nadam", "RMSprop"),
)
_MANY_ELEMENTS: Final = 1_000_000


def find_kernel(optimizer: Any) -> kernels.Kernel | None:
  """The kernel that computes what `optimizer.update_step` does, if any.

  A class derived from Keras' own, or an `update_step` put on the object, may
  compute anything.

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


def can_compile(optimizer: Any) -> bool:
  """Whether XLA can compile the updates of this optimizer's variables.

  >>> can_compile(tf.keras.optimizers.Nadam())
  True
  """
  # Keras 3's; a MultiOptimizer's parts do the steps.
  has_method = hasattr(optimizer, libraries.UPDATE_ALL)
  return has_method and not libraries.nested(optimizer)


def keras_class(optimizer: Any) -> str:
  """The name of the class, if it is Keras' own and not a legacy one; else "".

  >>> keras_class(tf.keras.optimizers.Adam())
  'Adam'
  """
  kind = type(optimizer)
  library, *place = kind.__module__.split(".")
  is_keras = library in ("keras", "tf_keras") and len(place) == 3
  is_own = is_keras and place[:2] == ["src", "optimizers"]
  return kind.__name__ if is_own else ""


def check_is_one(optimizer: Any, argument: str, value: Any) -> None:
  """Raises `ValueError` for several optimizers, whose steps Keras calls."""
  if keras_class(optimizer) == "MultiOptimizer":
    raise ValueError(
      f"`{argument}` is {value!r}, and MultiOptimizer hands gradients on to"
      " others. Encapsulate each of these, with scale_gradients=True, and make"
      " a MultiOptimizer of what you get."
    )


def is_compiled(optimizer: Any) -> bool:
  """Whether XLA compiles a step of the optimizer that is being traced."""
  return bool(getattr(optimizer, "jit_compile", False)) or kernels.is_compiled()


@contextlib.contextmanager
def in_place(
  optimizer: Any,
  index: Callable[[Any], int],
  wanted: bool | None,
  row_step: Callable[..., None] | None,
) -> Iterator[None]:
  """Replaces the update of a built optimizer inside the context.

  Args:
    optimizer: The one that keeps the slots.
    index: The place of a variable among those the optimizer was built on.
    wanted: Whether a kernel or XLA does the steps; None where it is faster.
    row_step: Does those of row-sparse gradients, given `update_step` first.
  """
  # XLA fuses Keras' operations by itself, and knows no number of rows.
  if is_compiled(optimizer):
    yield
    return
  kernel = None if wanted is False else find_kernel(optimizer)
  step = None if kernel is None else _Step(kernel, optimizer)

  def update_step(
    plain: Callable[..., None], gradient: Any, variable: Any, *rate: Any
  ) -> None:
    native = variables_lib.native(variable)
    if isinstance(gradient, tf.IndexedSlices):
      if row_step is None:
        plain(gradient, variable, *rate)
      else:
        row_step(plain, gradient, variable, *rate)
    elif step is None or kernels.dtype_of(native) not in _DTYPES:
      plain(gradient, variable, *rate)
    else:
      step.apply(native, gradient, index(variable), *rate)

  def update_all(
    plain: Callable[..., None], strategy: Any, pairs: Any, *rate: Any
  ) -> None:
    is_dense = [_is_compilable(*pair) for pair in pairs]
    dense = list(itertools.compress(pairs, is_dense))
    if wanted or _are_many([variable for _, variable in dense]):
      together = functools.partial(plain, strategy, dense, *rate)
      tf.function(together, jit_compile=True, autograph=False)()
      pairs = [p for p, done in zip(pairs, is_dense, strict=True) if not done]
    plain(strategy, pairs, *rate)

  with contextlib.ExitStack() as stack:
    if step is None and _may_compile(optimizer, wanted):
      stack.enter_context(
        libraries.replacing(optimizer, libraries.UPDATE_ALL, update_all)
      )
    if step is not None or row_step is not None:
      stack.enter_context(
        libraries.replacing(optimizer, "update_step", update_step)
      )
    yield


def _may_compile(optimizer: Any, wanted: bool | None) -> bool:
  """Whether XLA is to update what it can."""
  if wanted is None:
    wanted = keras_class(optimizer) in _FASTER_COMPILED and (
      "update_step" not in vars(optimizer)
    )
  # Each call of a function made here compiles anew: not in eager calls, nor in
  # TensorFlow 1's graphs.
  return wanted and tf.inside_function() and can_compile(optimizer)


def _is_compilable(gradient: Any, variable: Any) -> bool:
  """Whether XLA can update a variable by this gradient."""
  is_sparse = isinstance(gradient, tf.IndexedSlices)
  return not is_sparse and kernels.dtype_of(variable) in _DTYPES


def _are_many(variables: Sequence[Any]) -> bool:
  """Whether XLA is faster with these variables than Keras' operations."""
  is_on_cpu = all("CPU" in variable.device for variable in variables)
  count = sum(math.prod(variable.shape) for variable in variables)
  return is_on_cpu and count >= _MANY_ELEMENTS


class _Step:
  """The numbers of one step, made once for all variables of a dtype."""

  def __init__(self, kernel: kernels.Kernel, optimizer: Any) -> None:
    self._kernel = kernel
    self._optimizer = optimizer
    self._made: dict[Any, dict[str, Any]] = {}

  def apply(
    self, variable: Any, gradient: tf.Tensor, index: int, *rate: Any
  ) -> None:
    """Updates a variable and its slots, which are at a place of the lists."""
    slots = {
      slot: variables_lib.native(getattr(self._optimizer, attribute)[index])
      for slot, attribute in self._kernel.slots.items()
    }
    arguments = self.arguments(kernels.dtype_of(variable), *rate)
    kernels.apply(self._kernel, variable, slots, gradient, arguments)

  def arguments(self, dtype: tf.DType, rate: Any = None) -> dict[str, Any]:
    """Returns the kernel's arguments but variable, slots and gradient."""
    # Two branches of a condition are two graphs.
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    key = dtype, graph
    if key not in self._made:
      self._made[key] = self._make(dtype, rate)
    return self._made[key]

  def _make(self, dtype: tf.DType, rate: Any) -> dict[str, Any]:
    """Settings, learning rate and powers as tensors of `dtype`."""
    if rate is None:
      rate = self._optimizer.learning_rate
    rate = tf.cast(tf.convert_to_tensor(rate), dtype)
    # Some settings Keras rounds to float32 on their way to float64.
    convert = tf.cast if self._kernel.name in _CAST else tf.convert_to_tensor
    arguments = {
      name: value if isinstance(value, bool) else convert(value, dtype)
      for name, value in self._kernel.arguments(self._optimizer, rate).items()
    }
    if self._kernel.powers:
      count = tf.convert_to_tensor(self._optimizer.iterations)
      steps = tf.cast(count + 1, dtype)
      for power, name in self._kernel.powers.items():
        setting = getattr(self._optimizer, self._kernel.settings[name])
        arguments[power] = tf.pow(tf.cast(setting, dtype), steps)
    return arguments
