"""Sets `__module__` of public classes and functions to their public module.

    class in _src/core/keras3/classes.py      where it is written
    tf_cross_shard/keras3.py, __all__         where users import it from
    cls.__module__ = "tf_cross_shard.keras3"  what `publish` sets

`help`, `repr`, the documentation and pickles show `__module__`. They then show
the public module, which is stable, rather than a module in `_src`, which may
move.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any


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
