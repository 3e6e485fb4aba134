"""A loss scaling optimizer that stands around ours.

Keras decides by each replica's own gradients, or by the first replica's, that a
step has overflowed, and leaves the others with other weights. So the two change
places: gradients are reduced first, and then each replica, alone, hands the
sums to the loss scaling optimizer, which decides alike on all members of a
group, and calls ours for the update.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base


class ScaledOptimizer(base.InnerOptimizer):
  """The adapter for an encapsulated optimizer whose wrapper is scaled.

  Subclasses say how a loss is scaled and a step is begun.
  """

  def __init__(self, inner: base.InnerOptimizer, around: Any) -> None:
    """Keeps both."""
    super().__init__(inner.optimizer)
    self._inner = inner
    self.around = around
    self._replica = threading.local()  # Replicas may be threads.

  @property
  def strategy(self) -> tf.distribute.Strategy:
    """The strategy whose scope the optimizer was made in."""
    return self._inner.strategy

  @property
  def is_built(self) -> bool:
    """Whether the slots are there."""
    return self._inner.is_built

  @property
  def trainable_variables(self) -> list[Any]:
    """What the built optimizer was built on, in order."""
    return self._inner.trainable_variables

  @property
  def variables(self) -> list[Any]:
    """All variables of the encapsulated optimizer."""
    return self._inner.variables

  @property
  def scales_dynamically(self) -> bool:
    """Whether overflow changes the loss scale."""
    return True

  @property
  def encapsulated(self) -> base.InnerOptimizer:
    """The adapter for the encapsulated optimizer alone."""
    return self._inner

  @property
  def is_within(self) -> bool:
    """Whether the loss scaling optimizer is handing down its step."""
    return getattr(self._replica, "is_within", False)

  def path(self, variable: Any) -> str:
    """The name by which a variable is known in a pickle."""
    return self._inner.path(variable)

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they are there."""
    self._inner.build(variables)

  def knows(self, variable: Any) -> bool:
    """Whether the built optimizer was built on `variable`."""
    return self._inner.knows(variable)

  def as_built(self, variable: Any) -> Any:
    """The object that the optimizer was built on."""
    return self._inner.as_built(variable)

  def iterations(self) -> tf.Tensor:
    """The count of applied steps."""
    return self._inner.iterations()

  def slots(self, variable: Any) -> dict[str, Any]:
    """The variables that were made for `variable`."""
    return self._inner.slots(variable)

  def slot_names(self) -> list[str]:
    """Every name of a slot, once."""
    return self._inner.slot_names()

  def apply_reduced(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Hands sums to the loss scaling optimizer, and what it answers on."""
    if self.is_within:
      self._inner.apply_reduced(grads, variables)
      return
    with self._within():
      self._begin(grads, variables)

  def _begin(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    """Lets the loss scaling optimizer apply sums."""
    raise NotImplementedError

  @contextlib.contextmanager
  def _within(self) -> Iterator[None]:
    """Marks the calls that the loss scaling optimizer makes."""
    self._replica.is_within = True
    try:
      yield
    finally:
      self._replica.is_within = False


def caller_around(optimizer: Any, kind: type[Any]) -> Any:
  """The loss scaling optimizer that is setting an attribute of `optimizer`.

  Its constructor marks what it encapsulates, and that is all that the latter
  learns of it. Who it is, only the calling frame tells.
  """
  caller = sys._getframe(2).f_locals.get("self")
  if isinstance(caller, kind) and caller.inner_optimizer is optimizer:
    return caller
  return None
