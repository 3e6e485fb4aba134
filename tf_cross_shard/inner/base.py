"""What the flow of a gradient asks of an encapsulated optimizer."""

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard.clipping import Gradient


class InnerOptimizer(abc.ABC):
  """An encapsulated optimizer: one class per Keras.

  Attributes:
    optimizer: The optimizer itself.
  """

  def __init__(self, optimizer: Any) -> None:
    """Keeps the optimizer.

    Args:
      optimizer: An optimizer of the Keras that this class is for.
    """
    self.optimizer = optimizer

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
    """Whether gradients are divided by a loss scale that overflow changes."""

  @property
  @abc.abstractmethod
  def trainable_variables(self) -> list[Any]:
    """What the built optimizer was built on, in order."""

  @abc.abstractmethod
  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they are there."""

  @abc.abstractmethod
  def knows(self, variable: Any) -> bool:
    """Whether the built optimizer was built on `variable`."""

  @abc.abstractmethod
  def as_built(self, variable: Any) -> Any:
    """The object that the optimizer was built on, for any form of it.

    Args:
      variable: A variable, perhaps the native one of a Keras variable.

    Returns:
      The Keras variable, which knows its constraint; `variable` itself where
      there is none.
    """

  @abc.abstractmethod
  def scale_loss(self, loss: Any) -> Any:
    """Multiplies by the optimizer's own loss scale, if it has one.

    Args:
      loss: A loss, the seed of its gradient, or a limit of its gradients.

    Returns:
      The scaled loss.
    """

  @abc.abstractmethod
  def apply_reduced(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Applies gradients that are sums already, exactly once.

    Args:
      grads: The sums; None for a variable to leave alone.
      variables: What they belong to.
    """

  @abc.abstractmethod
  def iterations(self) -> tf.Tensor:
    """How many times gradients were applied, int64."""

  @abc.abstractmethod
  def slots(self, variable: Any) -> dict[str, Any]:
    """The variables made for `variable`, by the name each was given."""

  @abc.abstractmethod
  def slot_names(self) -> list[str]:
    """Every name of a slot, in order of creation, once."""
