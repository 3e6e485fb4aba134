"""Which object makes a variable, and what the variable is called for it.

Keras numbers what it names itself on and on: "dense/kernel" of the first call
of a model function is "dense_7/kernel" of a later one. What users name stays,
unless it looks like a name of Keras': a Dense that a user named "dense_1" and
one named "dense_2" are taken for the same. So a variable's name is made of the
names that users gave and, for what Keras named, of the class. Who makes it,
only the calling frames tell.
"""

import functools
import inspect
import re
from types import FrameType
from typing import Any, Final, NamedTuple

import tensorflow as tf

_LAYERS: Final = ("Layer",)
_METRICS: Final = ("Metric",)
_SEEDS: Final = ("SeedGenerator",)
_OPTIMIZERS: Final = ("Optimizer", "BaseOptimizer", "OptimizerV2")
_MAKERS: Final = _LAYERS + _METRICS + _SEEDS + _OPTIMIZERS
_VARIABLES: Final = ("Variable", "KerasVariable")
_KERASES: Final = ("keras", "tf_keras", "tf_cross_shard")
_CALLER: Final = "tf_cross_shard.towers.replicated_model_fn"  # of model_fn
_UNNAMED: Final = re.compile(r"(v|V)ariable(_\d+)*")


class Known(NamedTuple):
  """What a variable is known by."""

  name: str
  is_numbered: bool
  owner: Any


def known_as(parts: list[str]) -> Known:
  """What the variable that is being made is known by."""
  frames = _frames()
  callers = _callers(frames)
  makers = [each for each in callers if _is_a(each, _MAKERS)]
  variable: Any = next((v for v in callers if _is_a(v, _VARIABLES)), None)
  if any(frame.f_code.co_name == "_deferred_initialize" for frame in frames):
    # Keras 3 makes those of a layer without build() at the end of the call of
    # the outermost, in its scope.
    holders = find_holders(variable, makers)
    inner = [h for h in holders if not any(h is each for each in makers)]
    if inner:
      names = [_name(each) for each in reversed(inner)]
      parts = [*parts[:-1], *names, parts[-1]]
    else:
      parts = _joined(parts[:-1], variable.path.split("/"))
    callers = _each_once(holders + callers)
    makers = [each for each in callers if _is_a(each, _MAKERS)]
  numbered = bool(_UNNAMED.fullmatch(parts[-1]))
  if numbered:
    parts = [*parts[:-1], parts[-1].split("_")[0]]
  first = makers[0] if makers else None
  scopes: list[tuple[str, Any]] = [
    (part, next((m for m in makers if _is_scope_of(part, m)), None))
    for part in parts
  ]
  if _is_a(first, _METRICS + _SEEDS):
    # They are made with their owner, outside of its scope. Those of tf_keras
    # have no scope at all.
    inside = [maker for _, maker in scopes]
    outside = [m for m in makers if not any(m is each for each in inside)]
    scopes = [(_name(m), m) for m in reversed(outside) if _name(m)] + scopes
  named = []
  for part, maker in scopes:
    name, has_number = _given(part, maker, makers, frames)
    named.append(name)
    numbered = numbered or has_number
  if _is_a(first, _OPTIMIZERS):
    # Slots are named after variables, whose names have numbers too. There are
    # as many as there are variables, in order.
    return Known(unnumbered("/".join(named)), False, first)
  owner = next((c for c in callers if not _is_a(c, _VARIABLES)), None)
  return Known(
    "/".join(named), numbered, None if _is_a(owner, _METRICS) else owner
  )


def unnumbered(name: str) -> str:
  """A name without the numbers that Keras made it unique by."""
  return re.sub(r"_\d+(?=_|/|$)", "", name)


def optimizer_calling() -> str | None:
  """The class of the optimizer that the caller is called by, in a tower."""
  for caller in _callers(_frames()):
    if _is_a(caller, _OPTIMIZERS):
      return type(caller).__name__
  return None


def without_doubtful(name: str) -> str:
  """A name without numbers before which scopes are called as Keras calls."""
  return _doubtful().sub(r"\1", name)


@functools.cache
def _doubtful() -> re.Pattern[str]:
  """A scope that begins with a name that Keras gives, and a number."""
  layers = vars(tf.keras.layers).values()
  kinds = {_snake(each.__name__) for each in layers if inspect.isclass(each)}
  return re.compile(rf"(?<![^/])({'|'.join(sorted(kinds))})_\d+(?=_[^/]*/)")


def _frames() -> list[FrameType]:
  """The frames of a tower, the innermost first."""
  found = []
  frame = inspect.currentframe()
  while frame is not None and frame.f_globals.get("__name__") != _CALLER:
    found.append(frame)
    frame = frame.f_back
  return found


def _callers(frames: list[FrameType]) -> list[Any]:
  """Objects whose methods are running, each once, the innermost first."""
  selves = _each_once([frame.f_locals.get("self") for frame in frames])
  kinds = _MAKERS + _VARIABLES
  return [s for s in selves if isinstance(s, tf.Module) or _is_a(s, kinds)]


def _each_once(values: list[Any]) -> list[Any]:
  """The same objects in the same order."""
  return list({id(each): each for each in values}.values())


def _is_a(value: Any, names: tuple[str, ...]) -> bool:
  """Whether a class of Keras with one of these names is a base of it."""
  return any(
    kind.__name__ in names and kind.__module__.split(".")[0] in _KERASES
    for kind in type(value).__mro__
  )


def _joined(scopes: list[str], path: list[str]) -> list[str]:
  """Scopes and a path that goes on from them, or from where they end."""
  for common in range(min(len(scopes), len(path)), 0, -1):
    if all(map(_is_like, scopes[-common:], path)):
      return scopes[:-common] + path
  return scopes + path


def _given(
  part: str, maker: Any, makers: list[Any], frames: list[FrameType]
) -> tuple[str, bool]:
  """A scope without numbers that Keras gave, and whether there were any."""
  if maker is not None and _is_named_by_keras(maker):
    return _kind(maker), True
  name = part if maker is None else _name(maker)
  where, _, rest = name.partition("_")
  if (
    where in ("forward", "backward")
    and re.fullmatch(rf"{_kind(maker)}(_\d+)?", rest)
    and any(type(each).__name__ == "Bidirectional" for each in makers)
  ):  # It names its layers after the one that it was given.
    return f"{where}_{_kind(maker)}", True
  if re.search(r"_\d+_", name):
    others = [o for o in _around(makers, frames) if _is_named_by_keras(o)]
    for each in sorted(others, key=lambda o: -len(_name(o))):
      if name.startswith(_name(each) + "_"):
        return _kind(each) + name[len(_name(each)) :], True
  return name, False


def _around(makers: list[Any], frames: list[FrameType]) -> list[Any]:
  """Layers by whose names users may have named others."""
  values = [v for frame in frames for v in frame.f_locals.values()]
  values += [v for maker in makers for v in vars(maker).values()]
  for each in list(values):
    if isinstance(each, (list, tuple)):
      values += each
    elif isinstance(each, dict):
      values += each.values()
  return [each for each in values if _is_a(each, _LAYERS)]


def _name(maker: Any) -> str:
  """What an object is called; nothing before it knows itself."""
  name = getattr(maker, "name", None)
  return name if isinstance(name, str) else ""


def _is_scope_of(part: str, maker: Any) -> bool:
  """Whether a scope is an object's."""
  return bool(_name(maker)) and _is_like(part, _name(maker))


def _is_like(part: str, name: str) -> bool:
  """Whether a scope is of a name, in a graph perhaps with a number more."""
  return bool(re.fullmatch(rf"{re.escape(name)}(_\d+)?", part))


def _is_named_by_keras(maker: Any) -> bool:
  """Whether an object has the name that it gets if the user gives none."""
  # tf_keras says "private" where the name of the class begins with "_".
  kind = rf"(private)?{re.escape(_kind(maker))}(_\d+)?"
  return bool(re.fullmatch(kind, _name(maker)))


def _kind(maker: Any) -> str:
  """The name that Keras numbers for an object."""
  return _snake(type(maker).__name__)


def _snake(name: str) -> str:
  """A class' name as Keras writes it in names."""
  name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
  return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def find_holders(variable: Any, makers: list[Any]) -> list[Any]:
  """Keras 3's objects within others of which a variable is a part."""
  found: list[Any] = []
  for maker in makers:
    for layer in getattr(maker, "_flatten_layers", list)():
      if any(variable is each for each in layer.variables):
        found.append(layer)
        seeds = getattr(layer, "_seed_generators", ())
        found += [each for each in seeds if each.state is variable]
    if found:
      break
  return found[::-1]
