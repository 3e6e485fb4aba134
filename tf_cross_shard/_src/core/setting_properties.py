"""The optimizer's properties `clipnorm`, `wire_dtype` and so on."""

import dataclasses
from typing import Any, TypeVar

from tf_cross_shard._src.core import settings as settings_lib

_Class = TypeVar("_Class", bound=type[Any])


class Setting:
  """A property of the optimizer that returns the setting of the same name."""

  def __init__(self, field: "dataclasses.Field[Any]") -> None:
    self._name = field.name
    self._is_mutable = field.metadata["is_mutable"]
    self.__doc__ = field.metadata["doc"]

  def __get__(self, optimizer: Any, owner: Any = None) -> Any:
    """Returns the setting; None while the optimizer is being created."""
    if optimizer is None:
      return self
    pipeline = vars(optimizer).get("_pipeline")
    if pipeline is None:
      return None
    settings = pipeline.settings
    if self._name == "per_model":
      settings = pipeline.current_settings()
    return settings.read(self._name)

  def __set__(self, optimizer: Any, value: Any) -> None:
    """Replaces the setting, or raises `AttributeError` if it is fixed."""
    pipeline = vars(optimizer).get("_pipeline")
    if self._is_mutable:
      # It is None while Keras' constructor assigns its own defaults.
      if pipeline is not None:
        pipeline.replace(**{self._name: value})
      return
    raise AttributeError(
      f"`{self._name}` cannot be changed after construction. Create a new"
      f" optimizer with {self._name}={value!r}."
    )


def with_properties(cls: _Class) -> _Class:
  """Gives the optimizer's class a property for each setting except `name`."""
  for field in dataclasses.fields(settings_lib.Settings):
    if field.name != "name":
      setattr(cls, field.name, Setting(field))
  return cls
