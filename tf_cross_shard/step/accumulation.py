"""Windows: the calls that make one step.

    call 1        call 2              call k
    sum_r += g_r  sum_r += g_r  ...   finish(sum_r + g_r), sum_r = 0

Each replica adds up its own; nothing travels in the first k - 1 calls.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import settings as settings_lib
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.collectives import base as engines
from tf_cross_shard.collectives import replica_isolation
from tf_cross_shard.gradients import indexed_slices
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base

# Reduces and applies the gradients of so many calls, added up.
Finish = Callable[[Sequence[Gradient], int], None]


class EveryCall:
  """The window of one call."""

  variables: Sequence[Any] = ()

  def build(self, variables: Sequence[Any]) -> None:
    """Does nothing: there are no sums."""

  def add(
    self, own: Sequence[Gradient], variables: Sequence[Any], finish: Finish
  ) -> None:
    """Finishes at once."""
    del variables
    finish(own, 1)


class Window(EveryCall, abc.ABC):
  """The window of several calls."""

  def __init__(self, steps: int, engine: engines.Engine) -> None:
    self.steps = steps
    self._engine = engine

  def add(
    self, own: Sequence[Gradient], variables: Sequence[Any], finish: Finish
  ) -> None:
    """Adds `own`, or in the last call hands what was added up to `finish`."""
    dense = [
      indexed_slices.cast(indexed_slices.to_dense(grad, variable), variable)
      for grad, variable in zip(own, variables, strict=True)
    ]
    with self._engine.isolate():
      # Not `==`, which in a version 1 graph compares objects.
      is_last = tf.equal(self._place(), self.steps - 1)

    def add() -> None:
      with self._engine.isolate():
        self._add(dense, variables)

    def close() -> None:
      with self._engine.isolate():
        totals = self._take(dense, variables)
      finish(totals, self._calls_in_total)
      with self._engine.isolate():
        # A window that was left out counts as none.
        self._count.assign_sub(self._place())

    tf.cond(is_last, close, add)

  @property
  @abc.abstractmethod
  def _count(self) -> Any:
    """The variable that counts calls, alike on all replicas."""

  @property
  @abc.abstractmethod
  def _calls_in_total(self) -> int:
    """How many calls' gradients `finish` is handed the sum of."""

  @abc.abstractmethod
  def _sum_of(self, variable: Any) -> Any:
    """Returns the variable that a variable's gradients are added up in."""

  @abc.abstractmethod
  def _add(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    """Adds gradients to this replica's sums, and counts the call."""

  def _place(self) -> tf.Tensor:
    """Returns how many calls of this window there were."""
    count = tf.convert_to_tensor(self._count)
    return count % tf.cast(self.steps, count.dtype)

  def _take(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> list[Gradient]:
    """Returns what was added up with `grads`, and starts the sums anew."""
    totals: list[Gradient] = []
    for grad, variable in zip(grads, variables, strict=True):
      before = variables_lib.native(self._sum_of(variable))
      totals.append(None if grad is None else before + grad)
    for total, variable in zip(totals, variables, strict=True):
      if total is not None:
        before = variables_lib.native(self._sum_of(variable))
        before.assign(tf.zeros_like(before))
    return totals


class OwnWindow(Window):
  """The window of `accumulate_steps`, with sums of its own.

  Attributes:
    variables: Sums and count; of each replica its own.
  """

  def __init__(self, steps: int, engine: engines.Engine) -> None:
    super().__init__(steps, engine)
    self.variables: list[Any] = []
    self._sums: dict[int, Any] = {}
    self._known: list[Any] = []  # Ids stay theirs.
    # Variables that some call has a gradient of, and those that a traced end of
    # a window had none of and left out.
    self._added: set[Any] = set()
    self._left_out: set[Any] = set()
    self._calls = self._make(0, tf.int64, "accumulated_calls")

  def build(self, variables: Sequence[Any]) -> None:
    """Makes a sum for each of the variables that has none."""
    for variable in variables:
      native = variables_lib.native(variable)
      if id(native) not in self._sums:
        self._known.append(native)
        self._sums[id(native)] = self._make(
          np.zeros(native.shape),
          native.dtype,
          f"gradient_sum/{variables_lib.path_of(variable)}",
        )

  @property
  def _count(self) -> Any:
    return self._calls

  @property
  def _calls_in_total(self) -> int:
    return 1

  def _sum_of(self, variable: Any) -> Any:
    return self._sums[id(variables_lib.native(variable))]

  def _add(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    for grad, variable in zip(grads, variables, strict=True):
      if grad is None:
        continue
      key = self._key(variable)
      if key in self._left_out:
        raise ValueError(
          f"{variables_lib.path_of(variable)} has a gradient in some calls of a"
          " window and None in others, and the function that ends windows was"
          " traced first. Use zeros in the place of None."
        )
      self._added.add(key)
      self._sum_of(variable).assign_add(grad)
    self._calls.assign_add(1)

  def _take(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> list[Gradient]:
    """Returns the mean over the window.

    A gradient of None is one of zeros where another call of the window, or of
    any in functions, has one: the sum would be kept for a later window.
    """
    grads = list(grads)
    for i, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
      key = self._key(variable)
      if grad is None and key in self._added:
        grads[i] = tf.zeros_like(self._sum_of(variable))
      elif grad is None and not tf.executing_eagerly():
        self._left_out.add(key)
    totals = super()._take(grads, variables)
    if tf.executing_eagerly():  # A trace says nothing of windows.
      self._added -= set(map(self._key, variables))
    return [None if total is None else total / self.steps for total in totals]

  def _key(self, variable: Any) -> Any:
    """Returns what a variable is known by, in each replica by another."""
    return replica_isolation.replica_id(), id(self._sum_of(variable))

  def _make(self, value: Any, dtype: Any, name: str) -> Any:
    with self._engine.making_variables():
      made = tf.Variable(value, trainable=False, dtype=dtype, name=name)
    self.variables.append(made)
    return made


class KerasWindow(Window):
  """The window in which a Keras 3 optimizer itself accumulates.

  In the last call it is handed the sums over the group, and divides them.
  """

  def __init__(
    self, inner: base.InnerOptimizer, engine: engines.Engine
  ) -> None:
    assert inner.accumulates is not None
    super().__init__(inner.accumulates, engine)
    self._inner = inner

  @property
  def _count(self) -> Any:
    return variables_lib.native(self._inner.accumulated_calls)

  @property
  def _calls_in_total(self) -> int:
    return self.steps

  def _sum_of(self, variable: Any) -> Any:
    return self._inner.accumulated_gradient(variable)

  def _add(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    self._inner.accumulate(grads, variables)


def own_window(
  settings: settings_lib.Settings,
  inner: base.InnerOptimizer,
  engine: engines.Engine,
) -> EveryCall:
  """Returns the window of `accumulate_steps`; one call without."""
  steps = settings.accumulate_steps
  if steps is not None and inner.accumulates:
    raise ValueError(
      f"`accumulate_steps` is {steps}, and `opt` has"
      f" gradient_accumulation_steps={inner.accumulates}. Set one of them"
      " only."
    )
  return EveryCall() if steps in (None, 1) else OwnWindow(int(steps), engine)


def in_force(
  own: EveryCall,
  inner: base.InnerOptimizer,
  engine: engines.Engine,
  variables: Sequence[Any],
) -> EveryCall:
  """Returns `own`, or the encapsulated optimizer's window, if it has one.

  Raises:
    NotImplementedError: If a variable is overwritten by its gradient.
  """
  has_values = any(map(inner.is_overwritten, variables))
  if isinstance(own, Window):
    if has_values:
      raise NotImplementedError(
        "Gradients of variables with `overwrite_with_gradient` (Keras' float8"
        " scales) cannot be accumulated. Leave `accumulate_steps` out."
      )
    return own
  # Keras accumulates values too: it is handed sums in every call.
  if has_values or not inner.accumulates_own_gradients:
    return own
  return KerasWindow(inner, engine)
