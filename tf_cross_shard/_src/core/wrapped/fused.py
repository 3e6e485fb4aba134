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
import functools
import itertools
from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.wrapped import (
  adam_parts,
  keras_private,
  kernels,
  overriding,
  update_plan,
)

# Keras rounds the settings of these kernels to float32, also for float64.
_CAST: Final = ("Momentum", "KerasMomentum")


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
  if update_plan.is_compiled(optimizer):
    return overriding.overriding(optimizer, **overridden)
  chosen = update_plan.plan(optimizer, wanted, False, tf.inside_function())
  if chosen.may_compile:
    overridden[keras_private.UPDATE_ALL] = functools.partial(
      _compile_dense, chosen, getattr(optimizer, keras_private.UPDATE_ALL)
    )
  if chosen.kernel is not None or row_step is not None:
    plain = overridden.get("update_step", optimizer.update_step)
    step = _UpdateStep(chosen, optimizer, plain, index, row_step)
    overridden["update_step"] = step.update
  return overriding.overriding(optimizer, **overridden)


def _compile_dense(
  chosen: update_plan.Plan, plain: Any, strategy: Any, pairs: Any, *rate: Any
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

  The scalars are computed once for all variables of a dtype.
  """

  def __init__(
    self,
    chosen: update_plan.Plan,
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
    # The scalars of the kernel and of its parts, by dtype and graph.
    self._scalars: dict[Any, Any] = {}

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
    dtype = kernels.dtype_of(native)
    is_kernels = self._plan.sums_rows or not is_sparse
    if kernel is None or not is_kernels or dtype not in update_plan.DTYPES:
      self._plain(gradient, variable, *rate)
      return
    gradient = row_sparse.to_dense(gradient, native)
    index = self._index(variable)
    slots = {
      slot: variables_lib.native(getattr(self._optimizer, attribute)[index])
      for slot, attribute in kernel.slots.items()
    }
    arguments = self._once(
      (kernel.name, dtype), lambda: self._arguments(kernel, dtype, *rate)
    )
    if self._plan.is_in_parts(native):
      numbers = self._once(
        ("parts", dtype),
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
    """Returns the kernel's scalar arguments."""
    # The learning rate alpha.
    rate = self._optimizer.learning_rate if rate is None else rate
    rate = tf.cast(tf.convert_to_tensor(rate), dtype)
    return _scalars(kernel, self._optimizer, rate)


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
