"""Saves and restores the wrapped optimizer as if it were not wrapped.

So a file that was saved without the wrapper loads with it, and vice versa.
There are three ways to save: `get_config` (settings), Keras' files, and
`tf.train.Checkpoint`.

For pickles and copies, Keras 3 writes such a file and reads it again
(`KerasSaveable.__reduce__`); `TfKerasWrapper` takes the configuration.
"""

import copy
from collections.abc import Callable
from typing import Any

from tf_cross_shard._src.core import wrapper_state
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


class Wrapping:
  """Base class of the mixins: gives access to the objects behind a wrapper."""

  @property
  def _wrapper_state(self) -> wrapper_state.WrapperState:
    found = wrapper_state.find(self)
    assert found is not None
    return found

  @property
  def _wrapped(self) -> wrapped_lib.WrappedOptimizer:
    return self._wrapper_state.wrapped


class SavedState(Wrapping):
  """Mixin that saves and restores the wrapped optimizer's state."""

  _argument: str  # The constructor's name for the wrapped optimizer.
  # Each Keras has its own implementation.
  _serialize: Callable[[Any], Any]
  _deserialize: Callable[[Any, Any], Any]

  def get_config(self) -> dict[str, Any]:
    """Returns the constructor's arguments in serializable form."""
    opt = self._serialize(self._wrapped.optimizer)
    return {self._argument: opt, **self._config()}

  def _config(self) -> dict[str, Any]:
    return {}

  @classmethod
  def from_config(
    cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
  ) -> Any:
    """Creates an optimizer from the result of `get_config`.

    Args:
      config: A result of `get_config`; not changed.
      custom_objects: Classes that the wrapped optimizer may need, by name.

    Returns:
      A new optimizer, not built.
    """
    # A copy, because Keras changes the dictionary.
    opt = copy.deepcopy(config[cls._argument])
    opt = cls._deserialize(opt, custom_objects)
    return cls(**{**config, cls._argument: opt})

  def _before_saving(self) -> None:
    """Runs before TensorFlow or Keras save the state."""

  def set_weights(self, weights: Any) -> None:
    """Assigns values to the wrapped optimizer's variables, in order."""
    self._wrapped.whole.set_weights(weights)

  def save_own_variables(self, store: Any) -> None:
    """Saves what the wrapped optimizer would save."""
    self._before_saving()
    self._wrapped.whole.save_own_variables(store)

  def load_own_variables(self, store: Any) -> None:
    """Loads what the wrapped optimizer saved, wrapped or not."""
    self._wrapped.whole.load_own_variables(store)

  # tf.train.Checkpoint sees the wrapped optimizer instead of the wrapper.

  def _checkpointed(self) -> Any:
    own = wrapper_state.find(self)
    # While Keras' constructor runs, checkpoints see the wrapper itself.
    return super() if own is None else own.wrapped.checkpointed

  def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
    self._before_saving()
    checkpointed = self._checkpointed()
    return checkpointed._trackable_children(*args, **kwargs)  # noqa: SLF001

  def _lookup_dependency(self, *args: Any, **kwargs: Any) -> Any:
    checkpointed = self._checkpointed()
    return checkpointed._lookup_dependency(*args, **kwargs)  # noqa: SLF001

  @property
  def _deferred_dependencies(self) -> Any:
    """The checkpoint's values that wait until the slots are created."""
    return self._checkpointed()._deferred_dependencies  # noqa: SLF001
