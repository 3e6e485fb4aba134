"""The state of a wrapped optimizer, as users and savers see it."""

import abc
from collections.abc import Sequence
from typing import Any

from tf_cross_shard._src.core.inner import keras_private
from tf_cross_shard._src.core.inner import names as names_lib


class State(abc.ABC):
  """The variables of a wrapped optimizer.

  If its state is sharded, `update.plain_state.PlainState` has the same members
  for savers, with whole slots.

  Attributes:
    whole: The `PlainState` of an optimizer whose state is sharded, or None.
    checkpointed: The object whose children a checkpoint saves: the optimizer,
      or the view of a sharded optimizer.
  """

  def __init__(self, owner: Any) -> None:
    """Creates the state of the `Inner` object `owner`."""
    self._owner = owner
    self._optimizer = owner.optimizer
    self.whole: Any = None
    self.checkpointed: Any = owner.optimizer

  @property
  def unsharded(self) -> Any:
    """The state with whole slots: this object, unless the state is sharded.

    A TowerOptimizer may wrap an optimizer whose state is sharded.
    """
    return self.whole or names_lib.sharded_state(self._optimizer) or self

  @property
  def variables(self) -> list[Any]:
    """The variables that the optimizer itself lists."""
    return names_lib.listed(self._optimizer)

  @property
  def all_variables(self) -> list[Any]:
    """The variables with whole slots, and the loss scale of tf_keras."""
    loss_scale = keras_private.loss_scale(self._optimizer)
    return [*self.unsharded.variables, *loss_scale]

  @property
  def trainable_variables(self) -> Sequence[Any]:
    """The variables that the optimizer was built on, in order."""
    return self._owner.trainable_variables

  def index(self, variable: Any) -> Any:
    """Returns the index of a variable among the trained variables, or None."""
    return self._owner.index(variable)

  def knows(self, variable: Any) -> bool:
    """Returns whether the optimizer was built on a variable."""
    return self.unsharded.index(variable) is not None

  @abc.abstractmethod
  def slots(self, variable: Any) -> dict[str, Any]:
    """Returns the slots of a variable by name; empty for an unknown one."""

  @abc.abstractmethod
  def slot_names(self) -> list[str]:
    """Returns the name of every slot, once, in order of creation."""

  def view(self, variable: Any, name: str) -> Any:
    """Returns a slot for the user; None if there is no slot with this name."""
    return self.slots(variable).get(name)

  def set_weights(self, weights: Any) -> None:
    """Assigns values in the order of `variables`."""
    self._optimizer.set_weights(weights)

  def save_own_variables(self, store: Any) -> None:
    """Saves the variables in Keras' form."""
    self._optimizer.save_own_variables(store)

  def load_own_variables(self, store: Any) -> None:
    """Loads variables in Keras' form."""
    self._optimizer.load_own_variables(store)
