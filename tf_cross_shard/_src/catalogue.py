"""What `help` shows of public classes and functions: module and docstring.

Pickles name `__module__`, too: the public module, not one that may move.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type[Any])


def publish(module: Mapping[str, Any]) -> Callable[[], list[str]]:
  """Makes a module the home of its `__all__`; returns its `__dir__`."""
  names = module["__all__"]
  for name in names:
    member = module[name]
    is_named = isinstance(member, (type, types.FunctionType))
    # If several modules name it, the first one that is imported is its home.
    if is_named and member.__module__.startswith("tf_cross_shard._src"):
      member.__module__ = module["__name__"]
  return lambda: sorted(names)


def documented(cls: _Class) -> _Class:
  """Joins the docstrings of a class, of its first base and its constructor."""
  first = cls.__bases__[0]
  specific, shared = map(inspect.getdoc, (cls, first))
  constructor = vars(first).get("__init__")
  init = constructor and inspect.getdoc(constructor)
  if specific and shared:  # python -OO removes all docstrings.
    _, _, more = shared.partition("\n\n")
    more, mark, references = more.partition("References:")
    whole = [specific, more.strip(), init, mark + references]
    cls.__doc__ = "\n\n".join(filter(None, whole))
  return cls
