"""Which object makes a variable, and what the variable is called for it.

Keras numbers what it names itself on and on: "dense/kernel" of the first call
of a model function is "dense_7/kernel" of a later one. What users name stays.
So a variable's name is made of the names that users gave and, for what Keras
named, of the class. Who makes it, only the calling frames tell.
"""

import inspect
import re
from typing import Any, Final, NamedTuple

_LAYERS: Final = ("Layer",)
_METRICS: Final = ("Metric",)
_OPTIMIZERS: Final = ("Optimizer", "BaseOptimizer", "OptimizerV2")
_KERASES: Final = ("keras", "tf_keras", "tf_cross_shard")
_CALLER: Final = "tf_cross_shard.towers.replicate"  # of model_fn
_UNNAMED: Final = re.compile(r"(v|V)ariable(_\d+)*")


class Known(NamedTuple):
  """What a variable is known by.

  Attributes:
    name: The name, without numbers where Keras gave them.
    is_numbered: Whether only the order tells several of that name apart.
    owner: The layer or optimizer that makes it; None for a metric, which makes
      its variables when it is made itself, and for nobody.
  """

  name: str
  is_numbered: bool
  owner: Any


def known_as(parts: list[str]) -> Known:
  """What the variable that is being made is known by.

  >>> known_as(["block", "w_1"])[:2], known_as(["variable_7"])[:2]
  (('block/w_1', False), ('variable', True))

  Args:
    parts: Its scopes within the tower, and its name.

  Returns:
    Name and owner.
  """
  makers = _makers()
  numbered = bool(_UNNAMED.fullmatch(parts[-1]))
  if numbered:
    parts = [*parts[:-1], parts[-1].split("_")[0]]
  named = []
  for part in parts:
    maker = next((m for m in makers if _is_scope_of(part, m)), None)
    if maker is None:
      named.append(part)
    elif _is_named_by_keras(maker):
      numbered = True
      named.append(_snake(type(maker).__name__))
    else:
      named.append(str(maker.name))
  first = makers[0] if makers else None
  if first is not None and _is_a(first, _OPTIMIZERS):
    # Slots are named after variables, whose names have numbers too. There are
    # as many as there are variables, in order.
    return Known(unnumbered("/".join(named)), False, first)
  return Known(
    "/".join(named), numbered, None if _is_a(first, _METRICS) else first
  )


def unnumbered(name: str) -> str:
  """A name without the numbers that Keras made it unique by.

  >>> unnumbered("adam_3/dense_12_kernel_momentum")
  'adam/dense_kernel_momentum'

  Args:
    name: A name with its scopes.

  Returns:
    The rest.
  """
  return re.sub(r"_\d+(?=_|/|$)", "", name)


def optimizer_calling() -> str | None:
  """The class of the optimizer that the caller is called by, in a tower.

  >>> optimizer_calling() is None
  True

  Returns:
    Its name; None if no optimizer of Keras calls.
  """
  for maker in _makers():
    if _is_a(maker, _OPTIMIZERS):
      return type(maker).__name__
  return None


def _makers() -> list[Any]:
  """Objects of Keras whose methods are running, the innermost first."""
  found: list[Any] = []
  frame = inspect.currentframe()
  while frame is not None and frame.f_globals.get("__name__") != _CALLER:
    caller = frame.f_locals.get("self")
    if _is_a(caller, _LAYERS + _METRICS + _OPTIMIZERS) and not any(
      caller is each for each in found
    ):
      found.append(caller)
    frame = frame.f_back
  return found


def _is_a(value: Any, names: tuple[str, ...]) -> bool:
  """Whether a class of Keras with one of these names is a base of it."""
  return any(
    kind.__name__ in names and kind.__module__.split(".")[0] in _KERASES
    for kind in type(value).__mro__
  )


def _is_scope_of(part: str, maker: Any) -> bool:
  """Whether a scope is an object's, in a graph perhaps with a number more."""
  name = getattr(maker, "name", None)
  return isinstance(name, str) and bool(
    re.fullmatch(rf"{re.escape(name)}(_\d+)?", part)
  )


def _is_named_by_keras(maker: Any) -> bool:
  """Whether an object has the name that it gets if the user gives none."""
  kind = _snake(type(maker).__name__)
  return bool(re.fullmatch(rf"{re.escape(kind)}(_\d+)?", str(maker.name)))


def _snake(name: str) -> str:
  """A class' name as Keras writes it in names."""
  name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
  return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
