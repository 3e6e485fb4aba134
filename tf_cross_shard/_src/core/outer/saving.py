"""Saves and restores the wrapped optimizer as if it were not wrapped.

So a file that was saved without the wrapper loads with it, and vice versa.
There are four ways to save: `get_config` (settings), pickling and copying
(settings and values), Keras' files, and `tf.train.Checkpoint`.
"""

import copy
from collections.abc import Callable
from typing import Any

from tf_cross_shard._src.core import parts
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.inner import exclusions, keras_private
from tf_cross_shard._src.core.inner import inner as inner_lib


class Wrapping:
  """Base class of the mixins: gives access to the objects behind a wrapper."""

  @property
  def _components(self) -> components.Components:
    """The objects behind this wrapper."""
    own = parts.find(self)
    assert own is not None
    return own

  @property
  def _inner(self) -> inner_lib.Inner:
    """The wrapped optimizer."""
    return self._parts.inner


class SavedState(Wrapping):
  """Mixin that saves and restores the wrapped optimizer's state."""

  _argument: str  # The constructor's name for the wrapped optimizer.
  # Each Keras has its own implementation.
  _serialize: Callable[[Any], Any]
  _deserialize: Callable[[Any, Any], Any]

  def get_config(self) -> dict[str, Any]:
    """Returns the constructor's arguments in serializable form."""
    opt = self._serialize(self._inner.optimizer)
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
      custom_objects: Classes that the wrapped optimizer may need, by name.

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
    """Assigns values to the wrapped optimizer's variables, in order."""
    self._inner.whole.set_weights(weights)

  def save_own_variables(self, store: Any) -> None:
    """Saves what the wrapped optimizer would save."""
    self._before_saving()
    self._inner.whole.save_own_variables(store)

  def load_own_variables(self, store: Any) -> None:
    """Loads what the wrapped optimizer saved, wrapped or not."""
    self._inner.whole.load_own_variables(store)

  def __reduce__(self) -> tuple[Any, ...]:
    """Returns settings and state, to be pickled or copied."""
    self._before_saving()
    own, inner = self._components, self._inner
    excluded = own.excluded
    if not (inner.is_built and excluded):
      excluded = exclusions.current(inner, excluded)
    current = [
      (variables_lib.path_of(v), v.numpy()) for v in inner.all_variables
    ]
    # A value that still waits for its variable is saved unchanged.
    waiting = enumerate(own.unrestored)
    state = [saved or current[i] for i, saved in waiting] or current
    attributes = own.unrestored_attributes | {
      name: variable.numpy() for name, variable in _attributes_of(inner).items()
    }
    arguments = type(self), self.get_config(), state, excluded, attributes
    return _unpickle, arguments

  def _restore(self, state: list[Any], attributes: dict[str, Any]) -> None:
    """Assigns saved values to existing variables, and keeps the other values.

    `build` restores the slots of an optimizer that is not built yet. A value
    that is assigned becomes None in the list, because its variable may change
    before the slots are created.
    """
    variables = self._inner.all_variables
    complete = len(variables) == len(state)
    waiting = list(state)
    for i, (saved, variable) in enumerate(zip(state, variables, strict=False)):
      # The order alone identifies variables only when all of them exist.
      if saved and (complete or variables_lib.path_of(variable) == saved[0]):
        variable.assign(saved[1])
        waiting[i] = None
    own = self._components
    own.unrestored = [] if complete else waiting
    existing = _attributes_of(self._inner)
    for name in existing.keys() & attributes.keys():
      existing[name].assign(attributes[name])
    own.unrestored_attributes = {
      name: value for name, value in attributes.items() if name not in existing
    }

  # tf.train.Checkpoint sees the wrapped optimizer instead of the wrapper.

  def _checkpointed(self) -> Any:
    """Returns the object whose children a checkpoint saves.

    While Keras' constructor runs, it is the wrapper itself.
    """
    own = parts.find(self)
    return super() if own is None else own.inner.checkpointed

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


def _attributes_of(inner: inner_lib.Inner) -> dict[str, Any]:
  """Returns the variables that only an attribute of an optimizer holds."""
  return keras_private.unlisted_attributes(inner.innermost)


def _unpickle(
  cls: type[Any],
  config: dict[str, Any],
  state: list[Any],
  excluded: Any = None,
  attributes: Any = None,
) -> Any:
  """Reverses `SavedState.__reduce__`. Pickles contain the function's name.

  Pickles of older versions do not have the last two arguments.
  """
  optimizer = cls.from_config(config)
  own = parts.find(optimizer)
  assert own is not None
  own.excluded = excluded
  optimizer._restore(state, attributes or {})  # noqa: SLF001  # of this module
  return optimizer
