"""The gradients of one step: collected in every tower, applied after the last.

They are applied only when the last tower has returned and all is known to fit.
Applied any earlier, a second loss of the last tower would be computed from
other weights than the same loss of the other towers, and an error found later
would leave a step half done.
"""

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_cross_shard import validation
from tf_cross_shard.gradients import loss_factor
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.towers import gradient_sums

# Applies sums of gradients, by optimizer's own means, and answers the count.
Apply = Callable[[list[Gradient], list[Any]], Any]

# Begins an update by the optimizer that a tower made for its so-manyth call, or
# by one that was there before.
Updating = Callable[[int | None], contextlib.AbstractContextManager[Any]]

# What an optimizer that towers make is called without numbers, and its
# variables; by the place of its call, and by that name if its state has it too.
Orders = dict[tuple[int, str], tuple[str, list[Any]]]

_here = threading.local()  # Replicas may be threads, each with its towers.
_used = threading.Event()


@dataclasses.dataclass(frozen=True)
class Call:
  """One `apply_gradients` in one tower."""

  owner: Any
  optimizer: str
  grads: Sequence[Gradient]
  variables: Sequence[Any]
  apply: Apply
  check: Callable[[list[Any]], None]
  prepare: Callable[[list[Any]], None]


class Towers:
  """The towers of one step."""

  def __init__(
    self,
    count: int,
    reduction: str,
    trains: bool = True,
    updating: Updating = contextlib.nullcontext,
    orders: Orders | None = None,
  ) -> None:
    """Starts before the first tower."""
    self.count = count
    self._updating = updating
    self._orders: Orders = {} if orders is None else orders
    self._next = 0
    self.trains = trains
    self.reduction = reduction
    self.tape: tf.GradientTape | None = None
    self.made: list[Any] = []
    self._scaled: list[Any] = []
    self._calls: list[list[Call]] = []
    self._program = _program()

  @property
  def factor(self) -> float:
    """What every tower's loss is multiplied by."""
    return 1.0 / self.count if self.reduction == loss_factor.MEAN else 1.0

  @property
  def has_calls(self) -> bool:
    """Whether an optimizer was called in a tower."""
    return any(self._calls)

  @contextlib.contextmanager
  def one(self) -> Iterator[None]:
    """Runs one tower. What it called is checked against the first."""
    self._calls.append([])
    records = self.trains and tf.executing_eagerly()
    tape = tf.GradientTape(persistent=True) if records else None
    outer, _here.towers, self.tape = current(), self, tape
    try:
      with tape or contextlib.nullcontext():
        yield
    finally:
      _here.towers, self.tape = outer, None
    first, last = self._calls[0], self._calls[-1]
    if len(last) < len(first):
      raise ValueError(
        self._odd(
          f"called {len(last)} optimizers, tower 0 called {len(first)}:"
          f" {first[len(last)].optimizer} is missing"
        )
      )

  def collect(self, call: Call) -> None:
    """Keeps what one tower would apply."""
    if _program() is not self._program:
      raise ValueError(
        f"{call.optimizer} was called inside tf.cond, tf.while_loop or a"
        " tf.function of its own within `model_fn`. Its gradients must leave"
        " the tower to be added up: return the loss from there, and call the"
        " optimizer in model_fn itself."
      )
    is_divided = any(call.owner is each for each in self._scaled)
    if self.reduction == loss_factor.MEAN and not is_divided:
      logging.log_first_n(
        logging.WARNING,
        "%s is given gradients that it did not compute, in %d towers whose mean"
        " is wanted. They are summed: multiply the loss by %s before you"
        " differentiate it, or take them by compute_gradients or minimize.",
        1,
        *(call.optimizer, self.count, self.factor),
      )
    calls = self._calls[-1]
    at = len(calls)
    calls.append(call)
    if len(self._calls) == 1:
      return
    if at >= len(self._calls[0]):
      raise ValueError(
        self._odd(f"called {call.optimizer}, which tower 0 did not call")
      )
    first = self._calls[0][at]
    if not self._is_same(first, call):
      raise ValueError(
        self._odd(
          f"called {call.optimizer} where tower 0 called {first.optimizer}"
        )
      )
    if gradient_sums.counted(first.variables) != gradient_sums.counted(
      call.variables
    ):
      raise ValueError(
        self._odd(
          f"called {call.optimizer} with the variables"
          f" {gradient_sums.names(call.variables)}, tower 0 with"
          f" {gradient_sums.names(first.variables)}"
        )
      )

  def is_made_here(self, owner: Any) -> bool:
    """Whether a tower made an optimizer, and every tower has its own."""
    return any(owner is each for each in self.made)

  @contextlib.contextmanager
  def update(self, owner: Any, place: int | None = None) -> Iterator[int]:
    """Begins an update by an optimizer."""
    if place is None:
      place, self._next = self._next, self._next + 1
    with self._updating(place if self.is_made_here(owner) else None):
      yield place

  def prepare(self) -> None:
    """Makes slots, and finds what cannot be applied, before anything is."""
    last = self._calls[-1]
    wanted = [
      [v for each in last if each.owner is call.owner for v in each.variables]
      for call in last
    ]
    for call, variables in zip(last, wanted, strict=True):
      call.check(variables)
    for call in (call for calls in self._calls for call in calls):
      for grad, variable in zip(call.grads, call.variables, strict=True):
        validation.check_rows(grad, variable)
    ordered = [
      self.in_order(call.owner, call.optimizer, place, variables)
      for place, (call, variables) in enumerate(zip(last, wanted, strict=True))
    ]
    for place, (call, variables) in enumerate(zip(last, ordered, strict=True)):
      with self.update(call.owner, place):
        call.prepare(variables)

  def in_order(
    self, owner: Any, optimizer: str, place: int, variables: Sequence[Any]
  ) -> list[Any]:
    """What to build an optimizer on: slots are found again by their order."""
    unique = {gradient_sums.key(variable): variable for variable in variables}
    if not self.is_made_here(owner):
      return list(unique.values())
    mine = _unnumbered(optimizer)
    by_name = getattr(owner, "_state_has_its_name", True)
    known, first = self._orders.setdefault(
      (place, mine if by_name else ""), (mine, list(unique.values()))
    )
    if known != mine or set(map(gradient_sums.key, first)) != set(unique):
      remedy = "Make it outside of model_fn"
      if by_name:
        remedy += ", or give each optimizer a name of its own"
      raise ValueError(
        f"`model_fn` makes {optimizer} for {gradient_sums.names(variables)}, and"
        f" made {known} for {gradient_sums.names(first)} in its place before. What that has"
        f" kept would be taken for this one's. {remedy}. Nothing was applied."
      )
    return [unique[gradient_sums.key(variable)] for variable in first]

  def apply(self) -> Any:
    """Sums every call over the towers and applies each sum once."""
    calls = list(zip(*self._calls, strict=True))
    every = [g for each in calls for call in each for g in call.grads]
    # No variable changes before all gradients are there: an error in any of
    # them leaves the step undone. In eager execution they are there.
    result: Any = None
    with tf.control_dependencies(gradient_sums.tensors(every)):
      for place, same in enumerate(calls):
        variables = list(same[-1].variables)
        with self.update(same[-1].owner, place):
          result = same[-1].apply(
            gradient_sums.total(
              [(each.grads, each.variables) for each in same], variables
            ),
            variables,
          )
    return result

  def note_scaled(self, owner: Any) -> None:
    """Remembers that an optimizer divided this step's loss by the towers."""
    self._scaled.append(owner)

  def _is_same(self, first: Call, call: Call) -> bool:
    """Whether two towers called one optimizer, or each its own of one kind."""
    if call.owner is first.owner:
      return True
    owners = [each.owner for each in self._calls[0]]
    if any(call.owner is owner for owner in owners):
      return False
    if not all(map(self.is_made_here, (first.owner, call.owner))):
      return False  # They were there before, and are two.
    # One that a model function makes has another number in each call.
    return _unnumbered(call.optimizer) == _unnumbered(first.optimizer)

  def _odd(self, text: str) -> str:
    """The message for a tower that does other things than the first."""
    return (
      f"`model_fn` must call the same optimizers in the same order in every"
      f" tower; tower {len(self._calls) - 1} {text}. Nothing was applied. Call"
      " them whatever part of the batch the tower got."
    )


def current() -> Towers | None:
  """The towers that the caller runs in, or None."""
  towers: Towers | None = getattr(_here, "towers", None)
  return towers


@contextlib.contextmanager
def not_recording() -> Iterator[None]:
  """Keeps what is computed for an update off the tower's tape."""
  towers = current()
  if towers is None or towers.tape is None:
    yield
  else:
    with towers.tape.stop_recording():
      yield


def note_made(owner: Any) -> None:
  """Remembers that a tower made an optimizer, as each of them may."""
  towers = current()
  if towers is not None:
    towers.made.append(owner)


def note_use() -> None:
  """Remembers that gradients were applied by an optimizer that can collect."""
  _used.set()


def has_been_used() -> bool:
  """Whether such an optimizer applied gradients in this program."""
  return _used.is_set()


def check_trains(optimizer: str) -> None:
  """Checks that an optimizer is not called where nothing is to be trained."""
  towers = current()
  if towers is not None and not towers.trains:
    raise ValueError(
      f'`model_fn` must call optimizers in the mode "train" only; it called'
      f" {optimizer} in another. Nothing was applied. Look at `mode` first."
    )


def check_outside(optimizer: str) -> None:
  """Checks that an optimizer that cannot collect is not called in a tower."""
  towers = current()
  if towers is not None and towers.count > 1:
    raise ValueError(not_a_tower(optimizer, towers.count))


def not_a_tower(optimizer: str, count: int) -> str:
  """The message for an optimizer that every tower would apply by itself."""
  return (
    f"`model_fn` must apply gradients through a TowerOptimizer when it is"
    f" replicated; it calls {optimizer}, which would apply the gradients of"
    f" each of the {count} towers by themselves. Nothing was applied. Use"
    f" TowerOptimizer({optimizer})."
  )


def _program() -> Any:
  """What operations are added to; None where they run at once."""
  if tf.executing_eagerly():
    return None
  return tf.compat.v1.get_default_graph()


def _unnumbered(name: str) -> str:
  """A name without the number that Keras made it unique by."""
  return re.sub(r"_\d+", "", name)
