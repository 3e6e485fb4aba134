"""Collects the gradients of all towers of a step, then applies their sums.

tower 0  apply_gradients ─▶ collect ┐
tower 1  apply_gradients ─▶ collect ┼─▶ all returned ─▶ sum ─▶ apply once
tower 2  apply_gradients ─▶ collect ┘
"""

# Applying a sum earlier, inside the last tower, would have two faults: a second
# loss of that tower would be computed with different weights than the same loss
# in the other towers, and an error found later would leave the step half done.

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import loss_factor, single_program
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.variables import Gradient
from tf_cross_shard._src.towers import shared_variables

# Applies gradients to variables as the optimizer does; returns the step count.
Apply = Callable[[list[Gradient], list[Any]], Any]

_OUTSIDE_OF_TOWERS: Final = shared_variables.CallVariables(
  shared_variables.SharedVariables(), ""
)
# Each replica may run in its own thread and have its own towers.
_local = threading.local()


@dataclasses.dataclass(frozen=True)
class CollectedCall:
  """One call of `apply_gradients` in one tower, to be applied later."""

  optimizer: Any  # The TowerOptimizer.
  wrapped: Any  # The optimizer in it, which identifies calls in all towers.
  grads: list[Gradient]
  variables: list[Any]
  apply: Apply

  @property
  def key(self) -> tuple[int, ...]:
    """A key that is equal for calls of one optimizer with equal variables."""
    return id(self.wrapped), *map(id, map(variables_lib.native, self.variables))

  def __str__(self) -> str:
    paths = [variables_lib.path_of(variable) for variable in self.variables]
    name = f"{type(self.wrapped).__name__}({self.optimizer.get_name()!r})"
    return f"{name} with the variables {paths}"


class GradientCollector:
  """Collects the calls of `apply_gradients` in all towers of one step."""

  def __init__(
    self,
    count: int,
    reduction: str,
    variables: shared_variables.CallVariables,
    is_training: bool,
  ) -> None:
    self.count = count
    self.variables = variables
    self.is_training = is_training
    # Records the current tower in eager execution.
    self.tape: tf.GradientTape | None = None
    # For a mean, every tower's loss is divided by the number of towers, so
    # that the gradients only need to be summed.
    self._factor = 1.0 / count if reduction == loss_factor.MEAN else 1.0
    self._optimizers_that_scaled: set[int] = set()
    self._calls: list[list[CollectedCall]] = []  # One list for each tower.
    self._graph = tf.compat.v1.get_default_graph()

  @property
  def has_calls(self) -> bool:
    return any(self._calls)

  @contextlib.contextmanager
  def tower(self) -> Iterator[None]:
    """Runs one tower, then checks that its calls match those of tower 0."""
    self._calls.append([])
    if self.is_training and tf.executing_eagerly():
      self.tape = tf.GradientTape(persistent=True)
    _local.collector = self
    try:
      with self.tape or contextlib.nullcontext():
        yield
    finally:
      _local.collector = self.tape = None
    for first, call in itertools.zip_longest(self._calls[0], self._calls[-1]):
      if first is None or call is None or call.key != first.key:
        raise ValueError(
          "`model_fn` must call the same optimizers in the same order in every"
          f" tower; tower {len(self._calls) - 1} called"
          f" {call or 'no optimizer'}, but tower 0 called"
          f" {first or 'no optimizer'}. Nothing was applied; do not let the"
          " calls depend on the data."
        )

  def scale(self, optimizer: Any) -> float:
    """Returns the factor of a loss; records that an optimizer applied it."""
    self._optimizers_that_scaled.add(id(optimizer))
    return self._factor

  def collect(self, call: CollectedCall) -> None:
    """Keeps the gradients of a call until all towers have returned."""
    if tf.compat.v1.get_default_graph() is not self._graph:
      raise ValueError(
        f"{call} was called inside tf.cond, tf.while_loop or a tf.function"
        " within `model_fn`. Return the loss from there, and call the"
        " optimizer in model_fn itself."
      )
    was_scaled = id(call.wrapped) in self._optimizers_that_scaled
    if self._factor != 1.0 and not was_scaled:
      logging.log_first_n(
        logging.WARNING,
        '%s did not compute these gradients. loss_reduction is "mean" over %d'
        " towers, but they are summed: multiply the loss by %s before you"
        " differentiate it, or use compute_gradients or minimize.",
        1,
        *(call, self.count, self._factor),
      )
    self._calls[-1].append(call)

  def prepare(self) -> None:
    """Checks all calls and creates missing slots before anything is applied."""
    calls = self._calls[-1]
    for call in calls:
      call.optimizer.check_known(call.variables)
    # Keras builds an optimizer once, so it must see the variables of all
    # of its calls together.
    for call in calls:
      same = [other for other in calls if other.wrapped is call.wrapped]
      call.optimizer.prepare([v for other in same for v in other.variables])

  def apply(self) -> Any:
    """Applies the sums of all calls; returns the last one's step count."""
    grads = [g for call in itertools.chain(*self._calls) for g in call.grads]
    # No variable changes before all gradients are computed: an error in any of
    # them leaves the step undone. In eager execution they are computed already.
    needed = [getattr(g, "values", g) for g in grads if g is not None]
    result: Any = None
    with tf.control_dependencies(needed):
      # Apply one call at a time, summed over all towers, in the order of the
      # program.
      for calls in zip(*self._calls, strict=True):
        last = calls[-1]
        columns = zip(*(call.grads for call in calls), strict=True)
        sums = [
          _sum(column, variable)
          for column, variable in zip(columns, last.variables, strict=True)
        ]
        result = last.apply(sums, last.variables)
    return result


def current() -> GradientCollector | None:
  """Returns the collector of the tower that the caller runs in, or None."""
  return getattr(_local, "collector", None)


def variables() -> shared_variables.CallVariables:
  """Returns the current tower's variables; outside towers, shares none."""
  collector = current()
  return _OUTSIDE_OF_TOWERS if collector is None else collector.variables


def _sum(grads: Sequence[Gradient], variable: Any) -> Gradient:
  """Sums the towers' gradients of one variable; None if there are none."""
  present = [grad for grad in grads if grad is not None]
  if not present:
    return None
  # Towers may have different dtypes, which neither concat nor add_n accept.
  if len({grad.dtype for grad in present}) > 1:
    present = [row_sparse.cast(grad, variable) for grad in present]
  is_sparse = all(isinstance(grad, tf.IndexedSlices) for grad in present)
  # Merging equal rows gives a shape that depends on data, which TPUs do not
  # support.
  if (
    is_sparse
    and single_program.of_strategy(tf.distribute.get_strategy()) is None
  ):
    rows = tf.IndexedSlices(
      tf.concat([grad.values for grad in present], axis=0),
      tf.concat([grad.indices for grad in present], axis=0),
      present[0].dense_shape,
    )
    return row_sparse.merge_duplicates(rows)
  return tf.add_n([row_sparse.to_dense(g, variable) for g in present])
