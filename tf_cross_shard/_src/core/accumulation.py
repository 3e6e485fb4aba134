"""Gradient accumulation: several calls of `apply_gradients` make one step.

    call 1        call 2              call k
    sum_r += g_r  sum_r += g_r  ...   finish(sum_r + g_r), sum_r = 0

Each replica r adds up its own gradients g_r. Replicas exchange nothing in the
first k - 1 calls. In the k-th call, `finish` reduces the sums over the group
and applies them. The k calls are an accumulation *window*. Without
accumulation, a window is one call.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import context as context_lib
from tf_cross_shard._src.core import group_settings
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.gradients.clipping import Gradient
from tf_cross_shard._src.core.reduce import isolation

# A function that reduces a whole window's gradients over the group, and applies
# the result.
Finish = Callable[[Sequence[Gradient]], None]


class Window(context_lib.Stage, abc.ABC):
  """The calls of `apply_gradients` that make one step.

  Attributes:
    variables: The window's sums and count. Each replica has its own values.
    steps: The number of calls.
  """

  variables: Sequence[Any] = ()
  steps: int = 1

  def of_call(self) -> "Window":
    """Returns the object that accumulates the gradients of a call.

    The result is this object, or one that does not accumulate.
    """
    return self

  def build(self, variables: Sequence[Any]) -> None:
    """Creates variables for the sums of the variables' gradients, if needed."""
    del variables

  def sums_of(self, variable: Any) -> list[Any]:
    """Returns the variables of this window that hold a variable's sums."""
    del variable
    return []

  @abc.abstractmethod
  def add(
    self, own: Sequence[Gradient], variables: Sequence[Any], finish: Finish
  ) -> None:
    """Accumulates this replica's gradients.

    The last call of the window passes the accumulated gradients to `finish`.
    """


class OneCall(Window):
  """The window without accumulation: every call makes a step."""

  def add(
    self, own: Sequence[Gradient], variables: Sequence[Any], finish: Finish
  ) -> None:
    """Passes the gradients to `finish`."""
    del variables
    finish(own)


class Accumulation(Window):
  """A window of `steps` calls."""

  def __init__(self, context: context_lib.Context, steps: int) -> None:
    """Creates a window of `steps` calls."""
    super().__init__(context)
    self.steps = steps

  def add(
    self, own: Sequence[Gradient], variables: Sequence[Any], finish: Finish
  ) -> None:
    """Adds up gradients; the last call of the window calls `finish`."""
    # A row-sparse gradient has different rows in each call: add dense
    # gradients.
    grads = [
      row_sparse.cast(row_sparse.to_dense(grad, variable), variable)
      for grad, variable in zip(own, variables, strict=True)
    ]
    with self.engine.isolate():
      is_last = self._calls_so_far() + 1 >= self.steps

    def add() -> None:  # sum_r += g_r
      with self.engine.isolate():
        self._add(grads, variables)

    def close() -> None:  # finish(sum_r + g_r), sum_r = 0
      with self.engine.isolate():
        totals = self._take(grads, variables)
      # Not isolated: `finish` reduces over the group.
      finish(totals)
      with self.engine.isolate():
        # Reset the count, even if the step was skipped. Keras' variable counts
        # the calls of all windows, so subtract this window's calls instead of
        # assigning 0. (If Keras has already counted the last call, there is
        # nothing to subtract.)
        self._count.assign_sub(self._calls_so_far())

    # All replicas have had the same number of calls, so all run the same
    # branch.
    tf.cond(is_last, close, add)

  @property
  @abc.abstractmethod
  def _count(self) -> Any:
    """The variable that counts calls. It is equal on all replicas."""

  @abc.abstractmethod
  def _sum_of(self, variable: Any) -> Any:
    """Returns the `tf.Variable` with the sum of a variable's gradients."""

  @abc.abstractmethod
  def _add(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    """Adds gradients to this replica's sums, and counts the call."""

  def _calls_so_far(self) -> tf.Tensor:
    """Returns how many calls of this window are complete."""
    return tf.convert_to_tensor(self._count)

  def _take(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> list[Gradient]:
    """Returns what `finish` receives, and resets the sums to zero.

    This class returns the sums with `grads` added.
    """
    return [
      None if grad is None else self._take_sum(variable, grad)
      for grad, variable in zip(grads, variables, strict=True)
    ]

  def _take_sum(self, variable: Any, grad: Gradient) -> tf.Tensor:
    """Returns one variable's sum with `grad` added, and resets the sum."""
    stored_sum = self._sum_of(variable)
    before = tf.convert_to_tensor(stored_sum)
    result = before + (0 if grad is None else grad)  # sum_r + g_r
    stored_sum.assign(tf.zeros_like(before))  # sum_r = 0
    return result


class OwnAccumulation(Accumulation):
  """The window of `accumulate_steps`, which keeps the sums itself.

  `finish` receives the mean over the k calls of the window:

      (sum over the calls of g_r) / k
  """

  def __init__(self, context: context_lib.Context, steps: int) -> None:
    """Creates the variable that counts calls."""
    super().__init__(context, steps)
    self.variables: list[Any] = []
    self._sums: dict[int, Any] = {}
    # Keep references, so that Python does not reuse the `id()` of a key.
    self._known: list[Any] = []
    # Keys of the sums to which an eager call of this window adds a gradient.
    self._added: set[Any] = set()
    # Keys of the sums to which a traced call adds a gradient, in any window.
    self._added_by_traces: set[Any] = set()
    # Keys of the sums for which a traced last call had no gradient. The trace
    # does not read and reset these sums.
    self._not_reset: set[Any] = set()
    self._calls = self._make_variable(0, tf.int64, "accumulated_calls")

  def build(self, variables: Sequence[Any]) -> None:
    """Creates a variable for the sum of each new variable's gradients."""
    for variable in variables:
      native = variables_lib.native(variable)
      if id(native) not in self._sums:
        self._known.append(native)
        name = f"gradient_sum/{variables_lib.path_of(variable)}"
        zeros = np.zeros(native.shape)
        self._sums[id(native)] = self._make_variable(zeros, native.dtype, name)

  def sums_of(self, variable: Any) -> list[Any]:
    """Returns the sum of a variable's gradients, if it exists."""
    found = self._sums.get(id(variables_lib.native(variable)))
    return [] if found is None else [found]

  @property
  def _count(self) -> Any:
    """The variable that counts the calls of this window."""
    return self._calls

  def _sum_of(self, variable: Any) -> Any:
    """Returns the `tf.Variable` with the sum of a variable's gradients."""
    return self._sums[id(variables_lib.native(variable))]

  def _add(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    """Adds gradients to this replica's sums, and counts the call.

    Raises:
      ValueError: If a gradient would be added to a sum that the traced last
        call of the window does not read.
    """
    present = [
      (grad, variable)
      for grad, variable in zip(grads, variables, strict=True)
      if grad is not None
    ]
    for _, variable in present:
      if self._key(variable) in self._not_reset:
        raise ValueError(
          f"{variables_lib.path_of(variable)} has a gradient in some of the"
          " accumulated calls and None in others. Use zeros instead of None."
        )
    is_eager = tf.executing_eagerly()
    added = self._added if is_eager else self._added_by_traces
    for grad, variable in present:
      added.add(self._key(variable))
      self._sum_of(variable).assign_add(grad)
    self._calls.assign_add(1)

  def _take(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> list[Gradient]:
    """Returns the mean over the window, and resets the sums.

    A gradient of None counts as zeros if another call of the window (in a
    `tf.function`: any call) has a gradient for the variable. Otherwise the sum
    would be left over for a later window. If no call has a gradient, the result
    is None: a zero gradient would still apply weight decay and momentum to a
    variable that the loss does not use.
    """
    totals: list[Gradient] = []
    for grad, variable in zip(grads, variables, strict=True):
      key = self._key(variable)
      is_added = key in self._added or key in self._added_by_traces
      if grad is not None or is_added or self._is_nonzero(variable):
        total = self._take_sum(variable, grad)
        # The mean over k calls. This call is not counted yet.
        totals.append(total / tf.cast(self._calls_so_far() + 1, total.dtype))
        continue
      totals.append(None)
      if not tf.executing_eagerly():
        self._not_reset.add(key)
    # The next window starts without gradients. A traced function is reused in
    # every window, so keep the keys recorded while tracing.
    if tf.executing_eagerly():
      self._added -= set(map(self._key, variables))
    return totals

  def _is_nonzero(self, variable: Any) -> bool:
    """Returns whether a sum is known to be nonzero, as after a restore."""
    stored_sum = self._sum_of(variable)
    if tf.executing_eagerly():
      return bool(tf.math.count_nonzero(stored_sum))
    # While a function is traced, no replica's value can be read. Leave the
    # graph, and look at the copies of all replicas.
    with tf.init_scope():
      if not tf.executing_eagerly():
        return False
      copies = getattr(stored_sum, "values", [stored_sum])
      return any(bool(tf.math.count_nonzero(copy)) for copy in copies)

  def _key(self, variable: Any) -> Any:
    """Returns the key of one replica's sum of a variable's gradients."""
    native = variables_lib.native(variable)
    return isolation.replica_id(), id(native)

  def _make_variable(self, value: Any, dtype: Any, name: str) -> Any:
    """Creates a variable with a copy on each replica, and lists it."""
    with self.engine.making_variables():
      made = tf.Variable(value, trainable=False, dtype=dtype, name=name)
    self.variables.append(made)
    return made


class KerasAccumulation(Accumulation):
  """The window of a Keras 3 optimizer's `gradient_accumulation_steps`.

  Keras keeps the sums. In the last call of the window, Keras receives the sums
  over the group, and divides them by the number of calls k:

      opt.apply(reduce(sum_r + g_r))    in Keras: the argument / k
  """

  def __init__(
    self,
    context: context_lib.Context,
    by_group: group_settings.GroupSettings,
  ) -> None:
    """Creates the window of the wrapped optimizer.

    The settings of `by_group` must be active whenever Keras adds gradients.
    """
    assert context.inner.accumulates is not None
    super().__init__(context, context.inner.accumulates)
    self._by_group = by_group

  def of_call(self) -> Window:
    """Returns this window, if Keras can accumulate a replica's gradients."""
    if not self.inner.accumulates_own_gradients:
      return OneCall(self.context)
    return self

  @property
  def _count(self) -> Any:
    """Keras' variable, which counts the calls of all windows."""
    return variables_lib.native(self.inner.accumulated_calls)

  def _calls_so_far(self) -> tf.Tensor:
    """Returns how many calls of this window are complete."""
    return super()._calls_so_far() % self.steps

  def _sum_of(self, variable: Any) -> Any:
    """Returns Keras' variable with the sum of a variable's gradients."""
    return variables_lib.native(self.inner.accumulated_gradient(variable))

  def _add(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    """Adds gradients to the sums and counts the call, both in Keras."""
    # In every call, Keras also updates moving averages of weights.
    with self._by_group.in_force():
      self.inner.accumulate(grads, variables)


def make(
  context: context_lib.Context, by_group: group_settings.GroupSettings
) -> Window:
  """Returns the window for the settings.

  Raises:
    ValueError: If the CrossShardOptimizer and the wrapped optimizer both
      accumulate gradients.
  """
  steps = context.settings.accumulate_steps
  accumulates = context.inner.accumulates
  if steps is not None and accumulates:
    raise ValueError(
      f"`accumulate_steps` is {steps}, but `opt` already accumulates gradients"
      f" (gradient_accumulation_steps={accumulates}). Set only one of these"
      " arguments."
    )
  if accumulates:
    return KerasAccumulation(context, by_group)
  if steps in (None, 1):
    return OneCall(context)
  return OwnAccumulation(context, int(steps))
