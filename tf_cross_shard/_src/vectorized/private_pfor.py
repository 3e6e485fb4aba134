"""A private copy of TensorFlow's vectorizer, the module pfor.

pfor keeps converters in dictionaries of its module. `tf.vectorized_map` and
jacobians, also those in other threads, do not see those of a copy.
"""

import builtins
import importlib.util
import sys
import types
from typing import Any, Final

import tensorflow as tf

_NAME: Final = "tensorflow.python.ops.parallel_for.pfor"


class _Log:
  """pfor's log, which would print hundreds of lines of an error.

  Instead, the error's attribute `operation` is what pfor was converting.
  """

  def error(self, message: str, *args: Any) -> None:
    error = sys.exc_info()[1]
    operations = [x for x in args if isinstance(x, tf.Operation)]
    if operations and not hasattr(error, "operation"):
      error.operation = operations[0]  # type: ignore[union-attr]

  def ignore(self, *args: Any) -> None:
    pass

  debug = info = warning = warn = vlog = ignore


def load() -> Any:
  """Runs the code of pfor in a new module, which is not in `sys.modules`."""
  # The code defines a command-line flag, which only one module may do. So its
  # import of `flags` gets a module whose flags are not registered.
  spec = importlib.util.find_spec(_NAME)
  if spec is None or spec.loader is None:
    raise ImportError(f"there is no module {_NAME}")
  flags = types.SimpleNamespace(DEFINE_bool=lambda *args: None)

  def import_module(name: str, *args: Any, **kwargs: Any) -> Any:
    found = builtins.__import__(name, *args, **kwargs)
    if name != "tensorflow.python.platform" or args[2] != ("flags",):
      return found
    return types.SimpleNamespace(flags=flags)

  module = importlib.util.module_from_spec(spec)
  names = vars(module)
  names["__builtins__"] = {**vars(builtins), "__import__": import_module}
  code = spec.loader.get_code(_NAME)  # type: ignore[attr-defined]
  exec(code, names)
  names["logging"] = _Log()
  return module
