"""Converts and checks the arguments of the constructors of our wrappers."""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf

from tf_cross_shard._src.core.wrapped import keras_private, v1
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib

_Function = TypeVar("_Function", bound=Callable[..., None])


def to_optimizer(opt: Any, argument: str, package: str) -> Any:
  """Converts a name, a configuration or an optimizer of TensorFlow 1."""
  if isinstance(opt, tf.compat.v1.train.Optimizer):
    return v1.convert(opt, package)
  if not isinstance(opt, (str, dict)):
    return opt
  optimizers = sys.modules[package].optimizers
  try:
    found = optimizers.get(opt)
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"`{argument}` must name a Keras optimizer; got {opt!r}. Use"
      ' a name such as "adam", or an optimizer object.'
    ) from error
  # In graphs, and on some machines, a name of tf_keras means a legacy class.
  is_name = isinstance(opt, str)
  return getattr(optimizers, type(found).__name__)() if is_name else found


def check_class(opt: Any, argument: str, package: str) -> None:
  """Raises `TypeError` for what is not an optimizer of this Keras."""
  keras_private.check_not_legacy(opt, argument)
  if not _is_of(package, opt):
    raise TypeError(
      f"`{argument}` must be an optimizer of {package}.optimizers"
      f" or its name; got {_kind(opt)}. {_remedy(opt, package)}"
    )
  if package != "tf_keras":  # Keras 3 calls no methods of these names.
    return
  base = wrapped_lib.base_optimizer(opt)
  for method in ("compute_gradients", "minimize"):
    if keras_private.is_overridden(base, method):
      kind = type(base).__name__
      raise ValueError(
        f"`{argument}` must not override {method}(), as {kind} does:"
        " gradients are computed before they are summed over the replicas."
        " Override apply_gradients()."
      )


def suggesting(init: _Function) -> _Function:
  """Lets a wrapper's constructor give a remedy for an argument it lacks."""
  names = list(inspect.signature(init).parameters)

  @functools.wraps(init)
  def checked(self: Any, *args: Any, **kwargs: Any) -> None:
    optimizer = kwargs.get("opt", args[0] if args else None)
    for name in kwargs.keys() - names:
      near = difflib.get_close_matches(name, names, 2, 0.5)
      remedy = ""
      if near:
        remedy = f". Did you mean {' or '.join(map(repr, near))}?"
      elif hasattr(optimizer, name):
        remedy = f". Pass it to {type(optimizer).__name__}."
      raise TypeError(
        f"{init.__qualname__}() got an unexpected keyword argument"
        f" {name!r}{remedy}"
      )
    init(self, *args, **kwargs)

  return cast("_Function", checked)


def _is_of(package: str, opt: Any) -> bool:
  # If the Keras is not imported, no object of its classes can exist.
  optimizers = getattr(sys.modules.get(package), "optimizers", None)
  return isinstance(opt, getattr(optimizers, "Optimizer", ()))


def _kind(opt: Any) -> str:
  kind = opt if isinstance(opt, type) else type(opt)
  prefix = "the class " if kind is opt else ""
  return f"{prefix}{kind.__module__}.{kind.__qualname__}"


def _remedy(opt: Any, package: str) -> str:
  if isinstance(opt, type):
    return f"Pass an object, not the class: {opt.__name__}()."
  for other in keras_private.KERASES:
    if _is_of(other, opt):
      module = "keras3" if other == "keras" else other
      return (
        f"This is an optimizer of {other}. Wrap it in the class for"
        f" {other}: from tf_cross_shard.{module} import CrossShardOptimizer"
      )
  return f"Use an optimizer such as {package}.optimizers.Adam()."
