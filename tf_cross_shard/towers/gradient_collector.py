"""The gradients of one step: collected in every tower, applied after the last.

They are applied only when the last tower has returned and all is known to fit.
Applied any earlier, a second loss of the last tower would be computed from
other weights than the same loss of the other towers, and an error found later
would leave a step half done.
"""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.collectives import tpu
from tf_cross_shard.gradients import (
  indexed_slices,
  loss_factor,
)
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.towers import shared_variables

# Applies gradients, by the optimizer's own means; returns the count of steps.
Apply = Callable[[list[Gradient], list[Any]], Any]

# Operations that change a variable. Those that call a function say what they
# only read.
_WRITES: Final = (
  "Assign",
  "ResourceApply",
  "ResourceSparseApply",
  "ResourceScatter",
)
_READ_ONLY: Final = "_read_only_resource_inputs"

_OUTSIDE: Final = shared_variables.CallVariables(
  shared_variables.SharedVariables(), ""
)
_local = threading.local()  # Replicas may be threads, each with its towers.


@dataclasses.dataclass(frozen=True)
class Call:
  """One `apply_gradients` of a TowerOptimizer in one tower."""

  optimizer: Any
  grads: list[Gradient]
  variables: list[Any]
  apply: Apply

  @property
  def inner(self) -> Any:
    """The encapsulated optimizer, by which calls of one are known."""
    return self.optimizer.inner_optimizer

  @property
  def label(self) -> str:
    """The encapsulated optimizer, for errors."""
    return f"{type(self.inner).__name__}({self.optimizer.get_name()!r})"


class Towers:
  """The towers of one step."""

  def __init__(
    self,
    count: int,
    reduction: str,
    variables: shared_variables.CallVariables,
    trains: bool = True,
  ) -> None:
    """Starts before the first tower."""
    self.count = count
    self.variables = variables
    self.reduction = reduction
    self.trains = trains
    self.tape: tf.GradientTape | None = None
    self._scaled: set[int] = set()
    self._calls: list[list[Call]] = []
    self._graph = _graph()
    self._seen: dict[int, tf.Tensor] = {}  # values after the last tower

  @property
  def factor(self) -> float:
    """What every tower's loss is multiplied by."""
    return 1.0 / self.count if self.reduction == loss_factor.MEAN else 1.0

  @property
  def has_calls(self) -> bool:
    """Whether an optimizer was called in a tower."""
    return any(self._calls)

  @contextlib.contextmanager
  def tower(self) -> Iterator[None]:
    """Runs one tower. What it called is checked against the first."""
    self._calls.append([])
    before = 0 if self._graph is None else len(self._graph.get_operations())
    records = self.trains and self._graph is None
    tape = tf.GradientTape(persistent=True) if records else None
    outer, _local.towers, self.tape = current(), self, tape
    try:
      with tape or contextlib.nullcontext():
        yield
    finally:
      _local.towers, self.tape = outer, None
    first, last = self._calls[0], self._calls[-1]
    if len(last) < len(first):
      raise self._odd(
        f"called {len(last)} optimizers, tower 0 called {len(first)}:"
        f" {first[len(last)].label} is missing"
      )
    if self.trains and self.count > 1:
      changed = self._changed(before) if tape is None else self._differ(tape)
      if changed:
        # Found afterwards: in eager execution the variables have changed, and
        # a graph with such an operation never runs. To find it before, a class
        # of TensorFlow would have to be patched.
        raise ValueError(
          "`model_fn` must apply gradients through a TowerOptimizer when it is"
          f" replicated; tower {len(self._calls) - 1} of {self.count} changed"
          f" {_names(changed)} by itself. Use TowerOptimizer(optimizer); after"
          " eager execution restore the variables, which have changed."
        )

  def collect(self, call: Call) -> None:
    """Keeps what one tower would apply."""
    if _graph() is not self._graph:
      raise ValueError(
        f"{call.label} was called inside tf.cond, tf.while_loop or a"
        " tf.function of its own within `model_fn`. Its gradients must leave"
        " the tower to be added up: return the loss from there, and call the"
        " optimizer in model_fn itself."
      )
    if self.factor != 1.0 and id(call.inner) not in self._scaled:
      logging.log_first_n(
        logging.WARNING,
        "%s is given gradients that it did not compute, in %d towers whose mean"
        " is wanted. They are summed: multiply the loss by %s before you"
        " differentiate it, or take them by compute_gradients or minimize.",
        1,
        *(call.label, self.count, self.factor),
      )
    calls = self._calls[-1]
    at = len(calls)
    calls.append(call)
    if at >= len(self._calls[0]):
      raise self._odd(f"called {call.label}, which tower 0 did not call")
    first = self._calls[0][at]
    if call.inner is not first.inner:
      raise self._odd(f"called {call.label} where tower 0 called {first.label}")
    if _ids(call.variables) != _ids(first.variables):
      raise self._odd(
        f"called {call.label} with the variables {_names(call.variables)},"
        f" tower 0 with {_names(first.variables)}"
      )

  def prepare(self) -> None:
    """Makes slots, and finds what cannot be applied, before anything is."""
    self._seen.clear()  # An update copies what is still looked at.
    last = self._calls[-1]
    for call in last:
      call.optimizer.check_known(call.variables)
    for call in itertools.chain(*self._calls):
      for grad, variable in zip(call.grads, call.variables, strict=True):
        _check_rows(grad, variable)
    for call in last:
      same = [each.variables for each in last if each.inner is call.inner]
      call.optimizer.prepare(list(itertools.chain(*same)))

  def apply(self) -> Any:
    """Sums every call over the towers and applies each sum once."""
    grads = [g for call in itertools.chain(*self._calls) for g in call.grads]
    # No variable changes before all gradients are there: an error in any of
    # them leaves the step undone. In eager execution they are there.
    needed = [getattr(g, "values", g) for g in grads if g is not None]
    result: Any = None
    with tf.control_dependencies(needed):
      for same in zip(*self._calls, strict=True):
        variables = same[-1].variables
        is_overwritten = same[-1].optimizer._inner.is_overwritten
        sums = [
          _add(grads, variable, is_overwritten(variable))
          for *grads, variable in zip(
            *(call.grads for call in same), variables, strict=True
          )
        ]
        result = same[-1].apply(sums, variables)
    return result

  def scale(self, optimizer: Any) -> float:
    """The factor, and remembers that this optimizer applied it."""
    self._scaled.add(id(optimizer))
    return self.factor

  def _differ(self, tape: tf.GradientTape) -> list[Any]:
    """The trainable variables that are not as the last tower saw them."""
    changed = []
    for variable in tape.watched_variables():
      now = variable.read_value()
      if not _is_same(self._seen.setdefault(id(variable), now), now):
        changed.append(variable)
    return changed

  def _changed(self, before: int) -> list[Any]:
    """The trainable variables that a tower's operations in a graph change."""
    graph = self._graph
    handles = {
      graph.capture(variable.handle).name: variable
      for variable in variables_lib.read_by_graph()
      # What is new is given its start. A tf.function traces once more then.
      if id(variables_lib.distributed(variable)) not in self.variables.new
    }
    written = {
      name for op in graph.get_operations()[before:] for name in _written(op)
    }
    return [handles[name] for name in handles if name in written]

  def _odd(self, text: str) -> ValueError:
    """The error for a tower that does other things than the first."""
    return ValueError(
      "`model_fn` must call the same optimizers in the same order in every"
      f" tower; tower {len(self._calls) - 1} {text}. Nothing was applied. Call"
      " them whatever part of the batch the tower got."
    )


def current() -> Towers | None:
  """The towers that the caller runs in, or None."""
  towers: Towers | None = getattr(_local, "towers", None)
  return towers


def variables() -> shared_variables.CallVariables:
  """What hands out variables where the caller runs; nothing outside towers."""
  towers = current()
  return _OUTSIDE if towers is None else towers.variables


def _graph() -> Any:
  """What operations are added to; None where they run at once."""
  if tf.executing_eagerly():
    return None
  return tf.compat.v1.get_default_graph()


def _is_same(then: tf.Tensor, now: tf.Tensor) -> bool:
  """Whether two values are equal to the bit; a NaN is like itself."""
  one, other = (np.asarray(x).reshape(-1).view(np.uint8) for x in (then, now))
  return np.array_equal(one, other)


def _written(op: tf.Operation) -> list[str]:
  """Names of the resources that an operation changes."""
  calls = _READ_ONLY in op.node_def.attr
  if not calls and not op.type.startswith(_WRITES):
    return []
  read = set(op.get_attr(_READ_ONLY)) if calls else ()
  return [each.name for at, each in enumerate(op.inputs) if at not in read]


def _check_rows(grad: Any, variable: Any) -> None:
  """Raises `ValueError` for rows of a sparse gradient that do not exist.

  Some devices would leave them out silently. Symbolic rows are not checked.
  """
  if not isinstance(grad, tf.IndexedSlices) or not tf.executing_eagerly():
    return
  indices = tf.convert_to_tensor(grad.indices).numpy()
  rows = variable.shape[0]
  if indices.size and not 0 <= indices.min() <= indices.max() < rows:
    [name] = _names([variable])
    raise ValueError(
      f"`grads_and_vars` must hold gradients of existing rows; that of"
      f" {name}, which has {rows}, has the rows {indices.min()} to"
      f" {indices.max()}. Look up numbers from 0 to {rows - 1}."
    )


def _ids(variables: Sequence[Any]) -> list[int]:
  """What variables are known by."""
  return [id(variables_lib.native(variable)) for variable in variables]


def _names(variables: Sequence[Any]) -> list[str]:
  """The names of variables, for errors."""
  return [str(getattr(v, "path", None) or v.name) for v in variables]


def _add(grads: Sequence[Gradient], variable: Any, is_mean: bool) -> Gradient:
  """A sum or mean that stays row-sparse if all are; None without any."""
  present = [grad for grad in grads if grad is not None]
  if not present:
    return None
  if is_mean:
    present = [indexed_slices.times(x, 1 / len(present)) for x in present]
  if len({grad.dtype for grad in present}) > 1:
    present = [indexed_slices.cast(grad, variable) for grad in present]
  is_rows = [isinstance(grad, tf.IndexedSlices) for grad in present]
  # A TPU cannot merge rows.
  if all(is_rows) and not tpu.is_tpu(tf.distribute.get_strategy()):
    rows = tf.IndexedSlices(
      tf.concat([grad.values for grad in present], axis=0),
      tf.concat([grad.indices for grad in present], axis=0),
      present[0].dense_shape,
    )
    return indexed_slices.merge_duplicates(rows)
  dense = indexed_slices.to_dense
  pairs = zip(present, is_rows, strict=True)
  return tf.add_n([dense(g, variable) if rows else g for g, rows in pairs])
