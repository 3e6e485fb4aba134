"""The state of an encapsulated optimizer, saved as if it were not wrapped."""

import copy
from collections.abc import Callable
from typing import Any

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.inner_optimizer import base


class SavedState:
  """Saves, pickles and restores what the encapsulated optimizer has."""

  _inner: base.InnerOptimizer
  _unrestored: list[Any]  # Pickled values that wait until slots are made.
  _argument: str  # The constructor's name for the encapsulated optimizer.
  # Each Keras has its way.
  _serialize: Callable[[Any], Any]
  _deserialize: Callable[[Any, Any], Any]

  def get_config(self) -> dict[str, Any]:
    """Everything the constructor needs, in serializable form."""
    opt = self._serialize(self._inner.optimizer)
    return {self._argument: opt, **self._config()}

  def _config(self) -> dict[str, Any]:
    """The other arguments, in serializable form."""
    return {}

  @classmethod
  def from_config(
    cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
  ) -> Any:
    """Makes the optimizer that `get_config` described, not built.

    Args:
      config: What `get_config` returned; not changed.
      custom_objects: Classes that the encapsulated optimizer may need, by name.

    Returns:
      A new optimizer.
    """
    opt = copy.deepcopy(config[cls._argument])  # Keras changes it.
    opt = cls._deserialize(opt, custom_objects)
    return cls(**{**config, cls._argument: opt})

  def _before_saving(self) -> None:
    """Called before the state is saved by others than this package."""

  def set_weights(self, weights: Any) -> None:
    """Sets the encapsulated optimizer's variables, in their order."""
    self._inner.unsharded_state.set_weights(weights)

  def save_own_variables(self, store: Any) -> None:
    """Saves what the encapsulated optimizer would save."""
    self._before_saving()
    self._inner.unsharded_state.save_own_variables(store)

  def load_own_variables(self, store: Any) -> None:
    """Loads what the encapsulated optimizer saved, wrapped or not."""
    self._inner.unsharded_state.load_own_variables(store)

  def __reduce__(self) -> tuple[Any, ...]:
    """Pickles and copies settings and state."""
    self._before_saving()
    current = [(variables_lib.path_of(v), v.numpy()) for v in self._inner.state]
    waiting = enumerate(self._unrestored)
    state = [saved or current[i] for i, saved in waiting] or current
    return _unpickle, (type(self), self.get_config(), state)

  def _restore(self, state: list[Any]) -> None:
    """Assigns saved values to existing variables, and keeps the others.

    `build` restores the slots of an optimizer that is not built yet. A value
    that is assigned becomes None in the list, since its variable may change
    before the slots are made.
    """
    variables = self._inner.state
    complete = len(variables) == len(state)
    waiting = list(state)
    for i, (saved, variable) in enumerate(zip(state, variables, strict=False)):
      # The order alone identifies variables only when all of them exist.
      if saved and (complete or variables_lib.path_of(variable) == saved[0]):
        variable.assign(saved[1])
        waiting[i] = None
    self._keep_until_built([] if complete else waiting)

  def _keep_until_built(self, state: list[Any]) -> None:
    """Keeps saved values; Keras would track a list that is assigned."""
    self.__dict__["_unrestored"] = state

  # tf.train.Checkpoint sees the encapsulated optimizer in place of this one.

  def _checkpointed(self) -> Any:
    """Whose children a checkpoint sees: its own while it is being made."""
    inner = self.__dict__.get("_inner")
    return super() if inner is None else inner.checkpointed

  def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
    """Returns the children that a checkpoint saves."""
    self._before_saving()
    return self._checkpointed()._trackable_children(*args, **kwargs)

  def _lookup_dependency(self, *args: Any, **kwargs: Any) -> Any:
    """Where a checkpoint restores to."""
    return self._checkpointed()._lookup_dependency(*args, **kwargs)

  @property
  def _deferred_dependencies(self) -> Any:
    """Saved values that wait until the slots are built."""
    return self._checkpointed()._deferred_dependencies


def _unpickle(cls: type[Any], config: dict[str, Any], state: list[Any]) -> Any:
  """The reverse of `SavedState.__reduce__`."""
  optimizer = cls.from_config(config)
  optimizer._restore(state)
  return optimizer
