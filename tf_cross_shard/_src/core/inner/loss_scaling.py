"""How losses and gradients are scaled by a LossScaleOptimizer."""

import abc
from collections.abc import Sequence
from typing import Any

from tf_cross_shard._src.core.gradients.clipping import Gradient


class LossScaling(abc.ABC):
  """The loss scale of a wrapped optimizer; 1 if it has none.

  Attributes:
    outer_scaler: The LossScaleOptimizer that wraps *our* optimizer, or
      None.
      `wrapper.outer_loss_scaling` sets it.
  """

  def __init__(self, optimizer: Any) -> None:
    """Keeps the user's optimizer, which may be a LossScaleOptimizer."""
    self._optimizer = optimizer
    self.outer_scaler: Any = None

  @property
  @abc.abstractmethod
  def is_dynamic(self) -> bool:
    """Whether steps that overflow are skipped and change the loss scale."""

  @property
  def divides(self) -> bool:
    """Whether the optimizer divides the gradients that it applies."""
    return False

  @abc.abstractmethod
  def scale_loss(self, loss: Any) -> Any:
    """Multiplies a loss, or the seed of its gradient, by the loss scale."""

  def unscale(self, grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the gradients of a scaled loss, divided by the loss scale."""
    return list(grads)

  def scale_limit(self, limit: float) -> Any:
    """Returns a clipping limit, multiplied by the scale of the gradients."""
    return limit

  def wire_scale(self) -> Any:
    """Returns the factor of gradients while they are sent in float16, or None.

    Without this factor, float16 would round gradients that are divided by the
    loss scale to zero.
    """
    return None
