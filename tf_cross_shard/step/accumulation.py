"""Gradients that are added up over several calls, reduced and applied once.

    call 1        call 2              call k
    sum_r += g_r  sum_r += g_r  ...   reduce(sum_r + g_r) -> apply, sum_r = 0

Each replica adds up its own; nothing travels in the first k - 1 calls.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.gradients import indexed_slices
from tf_cross_shard.gradients.clipping import Gradient


@dataclasses.dataclass(frozen=True)
class Window:
  """The calls between one update and the next.

  Attributes:
    steps: How many calls, k.
    count: A variable that counts calls; its remainder by k is the place in the
      window, equal on all replicas.
    sum_of: Returns the variable that a variable's gradients are added up in.
    divisor: What the sums over the window are divided by here.
    pass_by: Does a call that is not the last; None adds to `sum_of`, `count`.
  """

  steps: int
  count: Any
  sum_of: Callable[[Any], Any]
  divisor: int
  pass_by: Callable[[Sequence[Gradient], Sequence[Any]], None] | None = None

  def run(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    isolate: Callable[[], Any],
    finish: Callable[[Sequence[Gradient]], None],
  ) -> None:
    """Adds `grads`, or in the last call hands the window's mean to `finish`.

    Args:
      grads: This replica's own.
      variables: Their variables.
      isolate: Makes a context in which this replica writes its own copies.
      finish: Reduces and applies, or leaves the window out.
    """
    dense = [
      indexed_slices.to_dense(grad, variable)
      for grad, variable in zip(grads, variables, strict=True)
    ]
    with isolate():
      # Not `==`, which in a version 1 graph compares objects.
      is_last = tf.equal(self._place(), self.steps - 1)

    def add() -> None:
      with isolate():
        (self.pass_by or self._add)(dense, variables)

    def close() -> None:
      totals: list[Gradient] = []
      with isolate():
        for grad, variable in zip(dense, variables, strict=True):
          if grad is None:
            totals.append(None)
            continue
          before = variables_lib.native(self.sum_of(variable))
          grad = indexed_slices.cast(grad, variable)
          totals.append((before + grad) / self.divisor)
        for total, variable in zip(totals, variables, strict=True):
          if total is not None:
            before = variables_lib.native(self.sum_of(variable))
            before.assign(tf.zeros_like(before))
      finish(totals)
      with isolate():
        # A window that was left out counts as none.
        count = variables_lib.native(self.count)
        count.assign_sub(self._place())

    tf.cond(is_last, close, add)

  def _add(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    """Adds gradients to this replica's sums."""
    for grad, variable in zip(grads, variables, strict=True):
      if grad is not None:
        grad = indexed_slices.cast(grad, variable)
        variables_lib.native(self.sum_of(variable)).assign_add(grad)
    variables_lib.native(self.count).assign_add(1)

  def _place(self) -> tf.Tensor:
    """How many calls of this window there were."""
    count = tf.convert_to_tensor(variables_lib.native(self.count))
    return count % tf.cast(self.steps, count.dtype)


class Accumulation:
  """The window in force: this package's own, or the encapsulated optimizer's.

  Attributes:
    steps: Of this package's own; None without.
    variables: Of this package's own, of each replica its own; none of the
      optimizer's `variables`.
  """

  def __init__(self, steps: Any, inner: Any, engine: Any) -> None:
    """Checks `accumulate_steps`.

    Args:
      steps: The argument.
      inner: The encapsulated optimizer's adapter.
      engine: What updates variables.
    """
    if steps is not None and (type(steps) is not int or steps < 2):
      raise ValueError(
        f"`accumulate_steps` must be an integer of at least 2; got {steps!r}."
        " Leave it None to apply gradients in every call."
      )
    if steps is not None and inner.accumulates:
      raise ValueError(
        f"`accumulate_steps` is {steps}, and `opt` has"
        f" gradient_accumulation_steps={inner.accumulates}. Set one of them"
        " only."
      )
    self.steps: int | None = steps
    self.variables: list[Any] = []
    self._inner = inner
    self._engine = engine
    self._sums: dict[int, Any] = {}
    self._known: list[Any] = []  # Ids stay theirs.
    self._own: Window | None = None
    if self.steps is not None:
      engine.check_conditional("accumulate_steps")
      self._own = Window(
        self.steps,
        self._make(0, tf.int64, "accumulated_calls"),
        lambda variable: self._sums[id(variables_lib.native(variable))],
        divisor=self.steps,
      )

  def window(self) -> Window | None:
    """The calls that make one step, if it takes several."""
    if self._own is not None or not self._engine.updates_in_cond:
      return self._own
    window: Window | None = self._inner.own_window()
    return window

  def build(self, variables: Sequence[Any]) -> None:
    """Makes a sum for each of the variables that has none."""
    if self._own is None:
      return
    for variable in variables:
      native = variables_lib.native(variable)
      if id(native) not in self._sums:
        name = str(getattr(variable, "path", variable.name)).split(":")[0]
        self._known.append(native)
        self._sums[id(native)] = self._make(
          np.zeros(native.shape), native.dtype, f"gradient_sum/{name}"
        )

  def _make(self, value: Any, dtype: Any, name: str) -> Any:
    with self._engine.making_variables():
      made = tf.Variable(value, trainable=False, dtype=dtype, name=name)
    self.variables.append(made)
    return made
