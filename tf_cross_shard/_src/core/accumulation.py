"""Gradient accumulation: several calls of `apply_gradients` make one step.

    call 1        call 2              call k
    sum_r += g_r  sum_r += g_r  ...   take: (sum_r + g_r) / k, then sum_r = 0

Each replica r adds up its own gradients g_r. Replicas exchange nothing in the
first k - 1 calls. In the k-th call, the step reduces the means over the group
and applies them. The k calls are an accumulation *window*.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.reduce import engine as engine_lib
from tf_cross_shard._src.core.variables import Gradient, Variable
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


class Window:
  """The calls of `apply_gradients` that make one step."""

  def __init__(self, steps: int, engine: engine_lib.Engine) -> None:
    self._steps = steps
    self._engine = engine
    self.variables: list[Variable] = []
    # The sums of the variables' gradients, and whether the variables have
    # gradients. The key of a variable is its `ref()`.
    self._sums: dict[Any, Any] = {}
    self._have_gradients: dict[Any, bool] = {}
    self._calls = self._make_variable(0, tf.int64, "accumulated_calls")

  def build(self, variables: Sequence[Variable]) -> None:
    """Creates a variable for the sum of each new variable's gradients."""
    for variable in variables:
      native = variables_lib.native(variable)
      if native.ref() not in self._sums:
        name = f"gradient_sum/{variables_lib.path_of(variable)}"
        self._sums[native.ref()] = self._make_variable(
          np.zeros(native.shape), native.dtype, name
        )

  def is_last_call(self) -> tf.Tensor:
    """Returns whether this call ends the window."""
    with self._engine.isolate():
      # A restored window may have had more calls than `steps`.
      calls = self._engine.same_on_all_replicas(
        tf.convert_to_tensor(self._calls)
      )
      return calls + 1 >= self._steps

  def to_dense(
    self, grads: Sequence[Gradient], variables: Sequence[Variable]
  ) -> list[tf.Tensor | None]:
    """Returns dense gradients; each call must have those of the others."""
    # A row-sparse gradient has different rows in each call. A gradient of zeros
    # for None would apply weight decay and momentum to an unused variable. A
    # traced last call cannot know of the other calls, and would leave a sum.
    for grad, variable in zip(grads, variables, strict=True):
      has_gradient = grad is not None
      if has_gradient != self._have_gradients.get(_key(variable), has_gradient):
        raise ValueError(
          f"{variables_lib.path_of(variable)} has a gradient in some of the"
          " accumulated calls and None in others. Use zeros instead of None."
        )
    for grad, variable in zip(grads, variables, strict=True):
      self._have_gradients[_key(variable)] = grad is not None
    return [
      row_sparse.cast(row_sparse.to_dense(grad, variable), variable)
      for grad, variable in zip(grads, variables, strict=True)
    ]

  def add(
    self, grads: Sequence[tf.Tensor | None], variables: Sequence[Variable]
  ) -> None:
    """Adds up this replica's gradients: sum_r += g_r."""
    with self._engine.isolate():
      for grad, variable in zip(grads, variables, strict=True):
        if grad is not None:
          self._sums[_key(variable)].assign_add(grad)
      self._calls.assign_add(1)

  def take(
    self, grads: Sequence[tf.Tensor | None], variables: Sequence[Variable]
  ) -> list[tf.Tensor | None]:
    """Ends the window: returns (sum_r + g_r) / k, and sets sum_r = 0."""
    means: list[tf.Tensor | None] = []
    with self._engine.isolate():
      calls = tf.convert_to_tensor(self._calls) + 1
      for grad, variable in zip(grads, variables, strict=True):
        if grad is None:
          means.append(None)
          continue
        stored = self._sums[_key(variable)]
        before = tf.convert_to_tensor(stored)
        stored.assign(tf.zeros_like(before))
        means.append((before + grad) / tf.cast(calls, before.dtype))
      self._calls.assign(0)
    return means

  def _make_variable(self, value: Any, dtype: Any, name: str) -> Any:
    """Creates a variable with a copy on each replica, and lists it."""
    with self._engine.making_variables():
      made = tf.Variable(value, trainable=False, dtype=dtype, name=name)
    self.variables.append(made)
    return made


def make(
  steps: int | None,
  wrapped: wrapped_lib.WrappedOptimizer,
  engine: engine_lib.Engine,
) -> Window | None:
  """Returns the window of `accumulate_steps`; None if every call is a step."""
  if steps is not None and wrapped.accumulates:
    raise ValueError(
      f"`accumulate_steps` is {steps}, but `opt` already accumulates gradients"
      f" (gradient_accumulation_steps={wrapped.accumulates}). Set only one of"
      " these arguments."
    )
  return None if steps in (None, 1) else Window(int(steps), engine)


def _key(variable: Variable) -> Any:
  """Returns a key of a variable for dictionaries, alike on all replicas."""
  return variables_lib.native(variable).ref()
