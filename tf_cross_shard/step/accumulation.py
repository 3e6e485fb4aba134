"""Windows: the calls that make one step.

    call 1        call 2              call k
    sum_r += g_r  sum_r += g_r  ...   finish(sum_r + g_r), sum_r = 0

Each replica adds up its own; nothing travels in the first k - 1 calls.

The k of `accumulate_steps` is a variable, which may change between two calls,
also within a window: that ends with the next call if there were k by then, or
more, and its mean is over the calls that there were.
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
from tf_cross_shard.step import group_settings, noise_scale, row_update

# Reduces and applies what was added up in these calls.
Finish = Callable[[Sequence[Gradient], noise_scale.Calls], None]


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
    finish(own, noise_scale.ONE_CALL)

  @property
  def open_state(self) -> list[Any]:
    """The variables that are zero when a window begins."""
    return list(self.variables)

  def vary(self) -> Any:
    """Raises `NotImplementedError`: there is nothing to add up in."""
    raise NotImplementedError(
      "The length of windows can vary only with `accumulate_steps` of at least"
      " 2, the longest that they may be."
    )


class DenseSum:
  """The sum of a variable's gradients.

  Attributes:
    variables: Those of TensorFlow or Keras that keep it.
  """

  def __init__(self, variable: Any) -> None:
    self.variables = [variable]

  def add(self, grad: tf.Tensor) -> None:
    """Adds a gradient."""
    variables_lib.native(self.variables[0]).assign_add(grad)

  def take(self, grad: tf.Tensor | None) -> Any:
    """Returns the sum with a gradient, and starts anew."""
    variable = variables_lib.native(self.variables[0])
    before = tf.convert_to_tensor(variable)
    total = before + (0 if grad is None else grad)
    variable.assign(tf.zeros_like(before))
    return total


class RowSum:
  """The sum of a table's row-sparse gradients: the rows that occurred.

  Attributes:
    variables: The rows [1 + k, width] and their indices [1 + k]. The first is
      none: workers cannot make variables without elements.
    shape: The table's.
  """

  def __init__(self, values: Any, indices: Any, shape: Sequence[int]) -> None:
    """Keeps the sum in variables with any number of rows, at first none."""
    self.variables = [values, indices]
    self.shape = shape

  def add(self, grad: Any) -> None:
    """Adds a gradient."""
    self._set(self._with(grad))

  def take(self, grad: Any) -> tf.IndexedSlices:
    """Returns the sum with a gradient, and starts anew."""
    total = self._with(grad)
    self._set(tf.IndexedSlices(total.values[:0], total.indices[:0]))
    return total

  def fill(self) -> None:
    """Puts all rows of the table into the sum, in their order."""
    every = tf.range(self.shape[0], dtype=tf.int64)
    total = self._with(None)
    dense = tf.math.unsorted_segment_sum(
      total.values, total.indices, self.shape[0]
    )
    self._set(tf.IndexedSlices(dense, every))

  def _set(self, rows: tf.IndexedSlices) -> None:
    values, indices = map(variables_lib.native, self.variables)
    values.assign(tf.concat([values[:1], rows.values], 0))
    indices.assign(tf.concat([indices[:1], rows.indices], 0))

  def _with(self, grad: Any) -> tf.IndexedSlices:
    """Returns the rows so far with those of a gradient."""
    values, indices = (
      tf.convert_to_tensor(variables_lib.native(variable))[1:]
      for variable in self.variables
    )
    if grad is not None:
      if not isinstance(grad, tf.IndexedSlices):
        grad = tf.IndexedSlices(grad, tf.range(self.shape[0]))
      values = tf.concat([values, grad.values], 0)
      indices = tf.concat([indices, tf.cast(grad.indices, tf.int64)], 0)
    return indexed_slices.merge_duplicates(
      tf.IndexedSlices(values, indices, tf.constant(self.shape, tf.int64))
    )


class AllRows(DenseSum):
  """The dense sum of a table's gradients, in the variables of a `RowSum`.

  So no window is lost, and files have one form, whether XLA compiles or not.
  """

  def __init__(self, rows: RowSum, strategy: tf.distribute.Strategy) -> None:
    """Fills all replicas' sums, whichever replica comes first."""
    super().__init__(rows.variables[0])
    self._rows = rows  # Its id stays its own.
    copies = (
      strategy.experimental_local_results(variables_lib.native(variable))
      for variable in rows.variables
    )
    with tf.init_scope():
      for values, indices in zip(*copies, strict=True):
        RowSum(values, indices, rows.shape).fill()

  def add(self, grad: tf.Tensor) -> None:
    """Adds a gradient."""
    super().add(_below_zeros(grad))

  def take(self, grad: tf.Tensor | None) -> Any:
    """Returns the sum with a gradient, and starts anew."""
    total = super().take(None if grad is None else _below_zeros(grad))[1:]
    return tf.ensure_shape(total, self._rows.shape)


def _is_open(kept: DenseSum | RowSum) -> bool:
  """Whether a sum is seen not to be zero: it may be that of a file."""
  values = variables_lib.native(kept.variables[0])
  return tf.executing_eagerly() and bool(tf.math.count_nonzero(values))


def _below_zeros(grad: tf.Tensor) -> tf.Tensor:
  """Returns a gradient below one row of zeros."""
  return tf.pad(grad, [[1, 0]] + [[0, 0]] * (len(grad.shape) - 1))


class Window(EveryCall, abc.ABC):
  """The window of several calls."""

  def __init__(self, steps: int, engine: engines.Engine) -> None:
    self.steps = steps
    self._engine = engine

  def add(
    self, own: Sequence[Gradient], variables: Sequence[Any], finish: Finish
  ) -> None:
    """Adds `own`, or in the last call hands what was added up to `finish`."""
    grads = [
      indexed_slices.cast(self._as_kept(grad, variable), variable)
      for grad, variable in zip(own, variables, strict=True)
    ]
    with self._engine.isolate():
      is_last = self._place() + 1 >= self._length

    def add() -> None:
      with self._engine.isolate():
        self._add(grads, variables)

    def close() -> None:
      with self._engine.isolate():
        totals = self._take(grads, variables)
        calls = self._in_total()
      finish(totals, calls)
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
  def _length(self) -> Any:
    """After how many calls a window ends, alike on all replicas."""

  @abc.abstractmethod
  def _in_total(self) -> noise_scale.Calls:
    """Returns what, in the last call, `finish` is handed the sum or mean of."""

  @abc.abstractmethod
  def _sum_of(self, variable: Any) -> DenseSum | RowSum:
    """Returns where a variable's gradients are added up."""

  @abc.abstractmethod
  def _add(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    """Adds gradients to this replica's sums, and counts the call."""

  def _as_kept(self, grad: Gradient, variable: Any) -> Gradient:
    """Returns a gradient as it is added up."""
    return indexed_slices.to_dense(grad, variable)

  def _place(self) -> tf.Tensor:
    """Returns how many calls of this window there were."""
    return tf.convert_to_tensor(self._count)

  def _take(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> list[Gradient]:
    """Returns what was added up with `grads`, and starts the sums anew."""
    return [
      None if grad is None else self._sum_of(variable).take(grad)
      for grad, variable in zip(grads, variables, strict=True)
    ]


class OwnWindow(Window):
  """The window of `accumulate_steps`, with sums of its own.

  Attributes:
    variables: Sums and count; of each replica its own.
  """

  def __init__(
    self, steps: int, engine: engines.Engine, tables: row_update.Tables
  ) -> None:
    super().__init__(steps, engine)
    self.variables: list[Any] = []
    self._tables = tables
    self._sums: dict[int, DenseSum | RowSum] = {}
    self._known: list[Any] = []  # Ids stay theirs.
    # Sums that some call has a gradient of, and those that a traced end of a
    # window had none of and left out.
    self._added: set[Any] = set()
    self._left_out: set[Any] = set()
    self._calls = self._make(0, tf.int64, "accumulated_calls")
    self._varied = self._make(steps, tf.int64, "window_length")
    self.variables.pop()  # Files have it only where something varies it.

  @property
  def open_state(self) -> list[Any]:
    """The variables that are zero when a window begins: not its length."""
    return [v for v in self.variables if v is not self._varied]

  def vary(self) -> Any:
    """Returns the variable of the length, and has files keep it."""
    if len(self.open_state) == len(self.variables):
      self.variables.append(self._varied)
    return self._varied

  def build(self, variables: Sequence[Any]) -> None:
    """Makes a sum for each of the variables that has none."""
    for variable in variables:
      native = variables_lib.native(variable)
      if id(native) not in self._sums:
        self._known.append(native)
        self._sums[id(native)] = (
          self._make_rows(variable)
          if self._tables.is_table(variable)
          else self._make_dense(variable)
        )

  def _make_dense(self, variable: Any) -> DenseSum:
    """Makes room for all elements of a variable."""
    native = variables_lib.native(variable)
    name = f"gradient_sum/{variables_lib.path_of(variable)}"
    return DenseSum(self._make(np.zeros(native.shape), native.dtype, name))

  def _make_rows(self, variable: Any) -> RowSum:
    """Makes room for any number of rows, at first none."""
    native = variables_lib.native(variable)
    width = native.shape[1:]
    name = f"gradient_sum/{variables_lib.path_of(variable)}"
    return RowSum(
      self._make(
        np.zeros([1, *width]), native.dtype, f"{name}/rows", [None, *width]
      ),
      self._make(np.zeros([1]), tf.int64, f"{name}/indices", [None]),
      native.shape.as_list(),
    )

  def _as_kept(self, grad: Gradient, variable: Any) -> Gradient:
    """Keeps rows of tables, but where XLA compiles, which knows no rows."""
    total = self._sum_of(variable)
    if isinstance(total, RowSum):
      if self._tables.is_by_rows():
        return grad
      native = variables_lib.native(variable)
      self._sums[id(native)] = AllRows(total, self._engine.strategy)
    return self._tables.to_dense(grad, variable)

  @property
  def _count(self) -> Any:
    return self._calls

  @property
  def _length(self) -> Any:
    return tf.convert_to_tensor(self._varied)

  def _in_total(self) -> noise_scale.Calls:
    share = tf.cast(self._place() + 1, tf.float32) / self.steps
    return noise_scale.Calls(share=share)

  def _sum_of(self, variable: Any) -> DenseSum | RowSum:
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
      self._sum_of(variable).add(grad)
    self._calls.assign_add(1)

  def _take(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> list[Gradient]:
    """Returns the mean over the window.

    A gradient of None is one of zeros where another call of the window, or of
    any in functions, has one: the sum would be kept for a later window.
    """
    totals: list[Gradient] = []
    for grad, variable in zip(grads, variables, strict=True):
      key, kept = self._key(variable), self._sum_of(variable)
      if grad is not None or key in self._added or _is_open(kept):
        totals.append(self._mean(kept.take(grad)))
        continue
      totals.append(None)
      if not tf.executing_eagerly():
        self._left_out.add(key)
    if tf.executing_eagerly():  # A trace says nothing of windows.
      self._added -= set(map(self._key, variables))
    return totals

  def _mean(self, total: tf.Tensor | tf.IndexedSlices) -> Gradient:
    """Returns a sum divided by the number of calls, this one included."""
    calls = tf.cast(self._place() + 1, total.dtype)
    if isinstance(total, tf.IndexedSlices):
      values = total.values / calls
      return tf.IndexedSlices(values, total.indices, total.dense_shape)
    return total / calls

  def _key(self, variable: Any) -> Any:
    """Returns what a sum is known by, in each replica by another."""
    native = variables_lib.native(variable)
    return replica_isolation.replica_id(), id(native)

  def _make(self, value: Any, dtype: Any, name: str, shape: Any = None) -> Any:
    with self._engine.making_variables():
      made = tf.Variable(
        value, trainable=False, dtype=dtype, name=name, shape=shape
      )
    self.variables.append(made)
    return made


class KerasWindow(Window):
  """The window in which a Keras 3 optimizer itself accumulates.

  In the last call it is handed the sums over the group, and divides them.
  """

  def __init__(
    self,
    inner: base.InnerOptimizer,
    engine: engines.Engine,
    by_group: group_settings.GroupSettings,
  ) -> None:
    assert inner.accumulates is not None
    super().__init__(inner.accumulates, engine)
    self._inner = inner
    self._by_group = by_group

  @property
  def _count(self) -> Any:
    return variables_lib.native(self._inner.accumulated_calls)

  @property
  def _length(self) -> Any:
    return self.steps

  def _in_total(self) -> noise_scale.Calls:
    return noise_scale.Calls(summed=self.steps)

  def _place(self) -> tf.Tensor:
    """Returns how many calls of this window there were: Keras counts all."""
    return super()._place() % self.steps

  def _sum_of(self, variable: Any) -> DenseSum:
    return DenseSum(self._inner.accumulated_gradient(variable))

  def _add(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    with self._by_group.in_force():  # Keras moves averages in every call.
      self._inner.accumulate(grads, variables)


def own_window(
  settings: settings_lib.Settings,
  inner: base.InnerOptimizer,
  engine: engines.Engine,
  tables: row_update.Tables,
) -> EveryCall:
  """Returns the window of `accumulate_steps`; one call without."""
  steps = settings.accumulate_steps
  if steps is not None and inner.accumulates:
    raise ValueError(
      f"`accumulate_steps` is {steps}, and `opt` has"
      f" gradient_accumulation_steps={inner.accumulates}. Set one of them"
      " only."
    )
  return (
    EveryCall() if steps in (None, 1) else OwnWindow(int(steps), engine, tables)
  )


def in_force(
  own: EveryCall,
  inner: base.InnerOptimizer,
  engine: engines.Engine,
  by_group: group_settings.GroupSettings,
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
  return KerasWindow(inner, engine, by_group)
