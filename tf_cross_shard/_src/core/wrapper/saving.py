"""Saves and restores the encapsulated optimizer as if it were not wrapped.

So a file that was saved without the wrapper loads with it, and vice versa.
There are four ways to save: `get_config` (settings), pickling and copying
(settings and values), Keras' files, and `tf.train.Checkpoint`.
"""

import copy
from collections.abc import Callable
from typing import Any

from tf_cross_shard._src.core import parts
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.encapsulated import encapsulated


class SavedState:
  """Mixin that saves and restores the encapsulated optimizer's state."""

  @property
  def _encapsulated(self) -> encapsulated.Encapsulated:
    """The encapsulated optimizer; `OptimizerWrapper` has it."""
    raise NotImplementedError

  # Pickled values, as pairs of path and value, that `build` assigns when it has
  # created the slots. A value that is already assigned is None.
  _unrestored: list[Any]
  _argument: str  # The constructor's name for the encapsulated optimizer.
  # Each Keras has its own implementation.
  _serialize: Callable[[Any], Any]
  _deserialize: Callable[[Any, Any], Any]

  def get_config(self) -> dict[str, Any]:
    """Returns the constructor's arguments in serializable form."""
    opt = self._serialize(self._encapsulated.optimizer)
    return {self._argument: opt, **self._config()}

  def _config(self) -> dict[str, Any]:
    """Returns the other arguments in serializable form."""
    return {}

  @classmethod
  def from_config(
    cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
  ) -> Any:
    """Creates an optimizer from the result of `get_config`.

    Args:
      config: A result of `get_config`; not changed.
      custom_objects: Classes that the encapsulated optimizer may need, by name.

    Returns:
      A new optimizer, not built.
    """
    config = cls._without_removed(config)
    # A copy, because Keras changes the dictionary.
    opt = copy.deepcopy(config[cls._argument])
    opt = cls._deserialize(opt, custom_objects)
    return cls(**{**config, cls._argument: opt})

  @classmethod
  def _without_removed(cls, config: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration without the arguments of older versions."""
    return config

  def _before_saving(self) -> None:
    """Runs before TensorFlow, Keras or pickle save the state."""

  def set_weights(self, weights: Any) -> None:
    """Assigns values to the encapsulated optimizer's variables, in order."""
    self._encapsulated.state.unsharded.set_weights(weights)

  def save_own_variables(self, store: Any) -> None:
    """Saves what the encapsulated optimizer would save."""
    self._before_saving()
    self._encapsulated.state.unsharded.save_own_variables(store)

  def load_own_variables(self, store: Any) -> None:
    """Loads what the encapsulated optimizer saved, wrapped or not."""
    self._encapsulated.state.unsharded.load_own_variables(store)

  def __reduce__(self) -> tuple[Any, ...]:
    """Returns settings and state, to be pickled or copied."""
    self._before_saving()
    current = [
      (variables_lib.path_of(v), v.numpy())
      for v in self._encapsulated.state.all_variables
    ]
    # A value that still waits for its variable is saved unchanged.
    waiting = enumerate(self._unrestored)
    state = [saved or current[i] for i, saved in waiting] or current
    return _unpickle, (type(self), self.get_config(), state)

  def _restore(self, state: list[Any]) -> None:
    """Assigns saved values to existing variables, and keeps the other values.

    `build` restores the slots of an optimizer that is not built yet. A value
    that is assigned becomes None in the list, because its variable may change
    before the slots are created.
    """
    variables = self._encapsulated.state.all_variables
    complete = len(variables) == len(state)
    waiting = list(state)
    for i, (saved, variable) in enumerate(zip(state, variables, strict=False)):
      # The order alone identifies variables only when all of them exist.
      if saved and (complete or variables_lib.path_of(variable) == saved[0]):
        variable.assign(saved[1])
        waiting[i] = None
    self._keep_until_built([] if complete else waiting)

  def _keep_until_built(self, state: list[Any]) -> None:
    """Stores values for `build`, where Keras does not track the list."""
    self.__dict__["_unrestored"] = state

  # tf.train.Checkpoint sees the encapsulated optimizer instead of the wrapper.

  def _checkpointed(self) -> Any:
    """Returns the object whose children a checkpoint saves.

    While Keras' constructor runs, it is the wrapper itself.
    """
    own = parts.parts_of(self)
    return super() if own is None else own.encapsulated.state.checkpointed

  def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
    """Returns the children that a checkpoint saves."""
    self._before_saving()
    checkpointed = self._checkpointed()
    return checkpointed._trackable_children(*args, **kwargs)  # noqa: SLF001

  def _lookup_dependency(self, *args: Any, **kwargs: Any) -> Any:
    """Returns the child that a checkpoint restores."""
    checkpointed = self._checkpointed()
    return checkpointed._lookup_dependency(*args, **kwargs)  # noqa: SLF001

  @property
  def _deferred_dependencies(self) -> Any:
    """The checkpoint's values that wait until the slots are created."""
    return self._checkpointed()._deferred_dependencies  # noqa: SLF001


def _unpickle(cls: type[Any], config: dict[str, Any], state: list[Any]) -> Any:
  """Reverses `SavedState.__reduce__`. Pickles contain the function's name."""
  optimizer = cls.from_config(config)
  optimizer._restore(state)  # noqa: SLF001  # a method of this module
  return optimizer
