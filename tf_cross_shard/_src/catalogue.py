"""What `help` shows of public classes and functions: module and docstring.

    class in _src/core/keras3/classes.py      where it is written
    tf_cross_shard/keras3.py, __all__         where users import it from
    cls.__module__ = "tf_cross_shard.keras3"  what `publish` sets

`help`, `repr`, the documentation and pickles show `__module__`. They then show
the public module, which is stable, rather than a module in `_src`, which may
move.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type[Any])


def publish(module: Mapping[str, Any]) -> Callable[[], list[str]]:
  """Makes a module, given its `globals()`, the home of the names in `__all__`.

  Returns a function for the module's `__dir__`, which returns the public names.
  """
  names = module["__all__"]
  for name in names:
    member = module[name]
    is_named = isinstance(member, (type, types.FunctionType))
    # If several modules name it, the first one that is imported is its home.
    if is_named and member.__module__.startswith("tf_cross_shard._src"):
      member.__module__ = module["__name__"]
  return lambda: sorted(names)


def documented(cls: _Class) -> _Class:
  """Joins the docstrings of a class, of its first base and of the constructor.

  The class for each Keras documents only what differs.
  """
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
