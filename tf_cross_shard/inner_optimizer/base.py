"""What the flow of a gradient asks of an encapsulated optimizer."""

import abc
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard.gradients.clipping import Gradient


class InnerOptimizer(abc.ABC):
  """An encapsulated optimizer: one class per Keras."""

  def __init__(self, optimizer: Any) -> None:
    """Keeps the optimizer."""
    self.optimizer = optimizer

  @property
  def name(self) -> str:
    """The optimizer's name."""
    optimizer = self.optimizer
    if not hasattr(optimizer, "name"):  # A loss scaling one of tf_keras.
      optimizer = innermost(optimizer)
    # Older ones of tf_keras keep it to themselves.
    return str(getattr(optimizer, "name", None) or optimizer._name)

  @property
  @abc.abstractmethod
  def strategy(self) -> tf.distribute.Strategy:
    """The strategy whose scope the optimizer was made in."""

  @property
  @abc.abstractmethod
  def is_built(self) -> bool:
    """Whether the slots are there."""

  @property
  @abc.abstractmethod
  def scales_dynamically(self) -> bool:
    """Whether steps that overflow are skipped and change a loss scale."""

  @property
  def divides(self) -> bool:
    """Whether `apply_reduced` divides by a loss scale."""
    return False

  @property
  @abc.abstractmethod
  def trainable_variables(self) -> list[Any]:
    """What the built optimizer was built on, in order."""

  @property
  def variables(self) -> list[Any]:
    """All variables that the optimizer has so far."""
    return list(self.optimizer.variables)

  @property
  def state(self) -> list[Any]:
    """The variables, and those that loss scaling keeps apart from them."""
    return self.variables

  @property
  def encapsulated(self) -> "InnerOptimizer":
    """The adapter for the encapsulated optimizer alone."""
    return self

  @property
  def is_within(self) -> bool:
    """Whether a loss scaling optimizer around ours is handing down its step."""
    return False

  def path(self, variable: Any) -> str:
    """The name by which a variable is known in a pickle."""
    return str(variable.name)

  @abc.abstractmethod
  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they are there."""

  @abc.abstractmethod
  def knows(self, variable: Any) -> bool:
    """Whether the built optimizer was built on `variable`."""

  @abc.abstractmethod
  def as_built(self, variable: Any) -> Any:
    """The object that the optimizer was built on, for any form of it."""

  @abc.abstractmethod
  def scale_loss(self, loss: Any) -> Any:
    """Multiplies by the optimizer's own loss scale, if it has one."""

  def scale_limit(self, limit: float) -> Any:
    """Brings a limit of gradients to the scale that gradients come in."""
    return self.scale_loss(limit)

  def wire_scale(self) -> Any:
    """What gradients are multiplied by where they travel in float16."""
    return None

  def unscale(self, grads: Sequence[Gradient]) -> list[Gradient]:
    """Gradients of a scaled loss, as `apply_reduced` takes them."""
    return list(grads)

  @abc.abstractmethod
  def apply_reduced(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Applies gradients that are sums already, exactly once."""

  @abc.abstractmethod
  def iterations(self) -> tf.Tensor:
    """How many times gradients were applied, int64."""

  @abc.abstractmethod
  def slots(self, variable: Any) -> dict[str, Any]:
    """The variables made for `variable`, by the name each was given."""

  @abc.abstractmethod
  def slot_names(self) -> list[str]:
    """Every name of a slot, in order of creation, once."""


def innermost(optimizer: Any) -> Any:
  """The optimizer that keeps the slots, below any loss scaling."""
  while hasattr(optimizer, "inner_optimizer"):
    optimizer = optimizer.inner_optimizer
  return optimizer


def slots_at(
  optimizer: Any, index: int, count: int, variables: Sequence[Any]
) -> Iterator[tuple[str, Any]]:
  """What an optimizer keeps for one of the variables it was built on.

  It keeps each kind of slot as one list along these variables.
  """
  own = set(map(id, variables))
  for attribute, values in list(vars(optimizer).items()):
    if (
      isinstance(values, list)
      and len(values) == count
      and attribute not in ("_variables", "_trainable_variables")
      and id(values[index]) in own
    ):
      yield attribute, values[index]
