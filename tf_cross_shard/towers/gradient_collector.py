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

import tensorflow as tf
from absl import logging

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.collectives import tpu
from tf_cross_shard.gradients import indexed_slices, loss_factor
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.towers import shared_variables

# Applies gradients, by the optimizer's own means; returns the count of steps.
Apply = Callable[[list[Gradient], list[Any]], Any]

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
    """The encapsulated optimizer, by which calls are told apart."""
    return self.optimizer.inner_optimizer

  @property
  def key(self) -> tuple[int, ...]:
    """Equal for calls of one optimizer with the same variables."""
    return id(self.inner), *map(id, map(variables_lib.native, self.variables))

  def __str__(self) -> str:
    """The encapsulated optimizer and the variables, for errors."""
    paths = [variables_lib.path_of(variable) for variable in self.variables]
    name = f"{type(self.inner).__name__}({self.optimizer.get_name()!r})"
    return f"{name} with the variables {paths}"


class Towers:
  """The towers of one step."""

  def __init__(
    self,
    count: int,
    reduction: str,
    variables: shared_variables.CallVariables,
    trains: bool,
  ) -> None:
    self.count = count
    self.variables = variables
    self.trains = trains
    self.tape: tf.GradientTape | None = None
    self._factor = 1.0 / count if reduction == loss_factor.MEAN else 1.0
    self._scaled: set[int] = set()
    self._calls: list[list[Call]] = []
    self._graph = tf.compat.v1.get_default_graph()

  @property
  def has_calls(self) -> bool:
    """Whether an optimizer was called in a tower."""
    return any(self._calls)

  @contextlib.contextmanager
  def tower(self) -> Iterator[None]:
    """Runs one tower, and checks that it called all that the first did."""
    self._calls.append([])
    if self.trains and tf.executing_eagerly():
      self.tape = tf.GradientTape(persistent=True)
    _local.towers = self
    try:
      with self.tape or contextlib.nullcontext():
        yield
    finally:
      _local.towers = self.tape = None
    for first, own in itertools.zip_longest(self._calls[0], self._calls[-1]):
      if first is None or own is None or own.key != first.key:
        raise ValueError(
          "`model_fn` must call the same optimizers in the same order in every"
          f" tower; tower {len(self._calls) - 1} called {own or 'none'} where"
          f" tower 0 called {first or 'none'}. Nothing was applied. Call them"
          " whatever part of the batch the tower got."
        )

  def scale(self, optimizer: Any) -> float:
    """The factor of a loss; remembers that this optimizer multiplied by it."""
    self._scaled.add(id(optimizer))
    return self._factor

  def collect(self, call: Call) -> None:
    """Keeps the gradients that one tower would apply."""
    if tf.compat.v1.get_default_graph() is not self._graph:
      raise ValueError(
        f"{call} was called inside tf.cond, tf.while_loop or a tf.function of"
        " its own within `model_fn`. Return the loss from there, and call the"
        " optimizer in model_fn itself."
      )
    if self._factor != 1.0 and id(call.inner) not in self._scaled:
      logging.log_first_n(
        logging.WARNING,
        "%s is given gradients that it did not compute, in %d towers whose mean"
        " is wanted. They are summed: multiply the loss by %s before you"
        " differentiate it, or take them by compute_gradients or minimize.",
        1,
        *(call, self.count, self._factor),
      )
    self._calls[-1].append(call)

  def prepare(self) -> None:
    """Makes slots, and finds what cannot be applied, before anything is."""
    calls = self._calls[-1]
    for call in calls:
      call.optimizer.check_known(call.variables)
    for call in calls:
      same = [other for other in calls if other.inner is call.inner]
      call.optimizer.prepare([v for other in same for v in other.variables])

  def apply(self) -> Any:
    """Sums every call over the towers and applies each sum once."""
    grads = [g for call in itertools.chain(*self._calls) for g in call.grads]
    # No variable changes before all gradients are there: an error in any of
    # them leaves the step undone. In eager execution they are there.
    needed = [getattr(g, "values", g) for g in grads if g is not None]
    result: Any = None
    with tf.control_dependencies(needed):
      for calls in zip(*self._calls, strict=True):
        last = calls[-1]
        is_overwritten = last.optimizer._inner.is_overwritten
        columns = zip(*(call.grads for call in calls), strict=True)
        sums = [
          _add(column, variable, is_overwritten(variable))
          for column, variable in zip(columns, last.variables, strict=True)
        ]
        result = last.apply(sums, last.variables)
    return result


def current() -> Towers | None:
  """The towers that the caller runs in, or None."""
  towers: Towers | None = getattr(_local, "towers", None)
  return towers


def variables() -> shared_variables.CallVariables:
  """The variables of the towers around the caller; paused outside of towers."""
  towers = current()
  return _OUTSIDE if towers is None else towers.variables


def _add(grads: Sequence[Gradient], variable: Any, is_mean: bool) -> Gradient:
  """A sum or mean that stays row-sparse if all are; None without any."""
  present = [grad for grad in grads if grad is not None]
  if not present:
    return None
  if is_mean:
    present = [indexed_slices.times(x, 1 / len(present)) for x in present]
  if len({grad.dtype for grad in present}) > 1:
    present = [indexed_slices.cast(grad, variable) for grad in present]
  is_sparse = all(isinstance(grad, tf.IndexedSlices) for grad in present)
  # A TPU cannot merge rows.
  if is_sparse and not tpu.is_tpu(tf.distribute.get_strategy()):
    rows = tf.IndexedSlices(
      tf.concat([grad.values for grad in present], axis=0),
      tf.concat([grad.indices for grad in present], axis=0),
      present[0].dense_shape,
    )
    return indexed_slices.merge_duplicates(rows)
  return tf.add_n([indexed_slices.to_dense(g, variable) for g in present])
