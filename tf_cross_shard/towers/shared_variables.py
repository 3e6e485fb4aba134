"""One set of variables for all towers and all calls.

A model function makes its variables each time it is called. The first time they
are made; every other time, in the next tower or the next step, it is given
those of the first again. `tf_cross_shard.towers.owners` says what a variable is
known by; several of one name are told apart by their order.

What would be a guess is an error. If Keras named a layer, only its place among
its like tells which it is: they must be as many in each call. What the first
tower did not need, no other makes. And a layer or tf.Module that was there
before, and is built in a call, keeps its variables to itself.
"""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_cross_shard.towers import owners

_MUST = "`model_fn` must make the same variables in every tower and every call;"
_REMEDY = "name them, or make them outside of model_fn"


class _Shared:
  """A variable, who made it, and the number it started from."""

  def __init__(self, variable: Any, owner: Any, start: Any, call: int) -> None:
    self.variable = variable
    self.owner = None if owner is None else weakref.ref(owner)
    self.start = start
    self.call = call


class SharedVariables:
  """The variables that a function makes, made once."""

  def __init__(self) -> None:
    """Starts without variables."""
    self.variables: list[Any] = []
    self._known: dict[str, list[_Shared]] = {}
    self._call = 0
    self._here = threading.local()
    self._lock = threading.RLock()

  @contextlib.contextmanager
  def kept(self) -> Iterator[None]:
    """Begins a call, whose new variables are forgotten if it fails.

    In a trace they would stay without values, which a tf.function gives them at
    the end. Threads wait for each other, unless they are replicas, which meet.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    with self._lock if replicas == 1 else contextlib.nullcontext():
      before = len(self.variables)
      self._call += 1
      self._here.tower = 0
      try:
        yield
      except BaseException:
        self._forget(self.variables[before:])
        raise
      finally:
        self._here.tower = None

  @contextlib.contextmanager
  def reused(self) -> Iterator[None]:
    """Begins one tower, whose variables are shared."""
    used: dict[str, list[_Shared]] = {}
    counted: set[str] = set()
    errors: list[ValueError] = []
    outside = tf.get_current_name_scope()

    def creator(make: Callable[..., Any], **kwargs: Any) -> Any:
      within = getattr(self._here, "within", "")
      if within is None:
        return make(**kwargs)
      parts = _parts(kwargs.get("name"), outside)
      if within:
        name = f"{within}/{owners.unnumbered('/'.join(parts))}"
        known = owners.Known(name, False, None)
      else:
        known = owners.known_as(parts)
      if known.is_numbered:
        counted.add(known.name)
      try:
        return self._get(known, used, lambda: make(**kwargs), kwargs)
      except ValueError as error:
        errors.append(error)
        raise

    with tf.variable_creator_scope(creator):
      yield
    if errors:  # tf_keras' Sequential goes on after any.
      raise ValueError(str(errors[0])) from errors[0]
    for name in sorted(counted):
      self._check_count(name, len(used[name]))
    if getattr(self._here, "tower", None) is not None:
      self._here.tower += 1

  @contextlib.contextmanager
  def updating(self, place: int | None) -> Iterator[None]:
    """Begins an update, whose optimizer makes its slots."""
    outer = getattr(self._here, "within", "")
    self._here.within = None if place is None else f"update_{place}"
    try:
      yield
    finally:
      self._here.within = outer

  def _get(
    self,
    known: owners.Known,
    used: dict[str, list[_Shared]],
    make: Callable[[], Any],
    kwargs: dict[str, Any],
  ) -> Any:
    """The variable that is known by this name in this tower."""
    there = self._known.setdefault(known.name, [])
    at = len(used.setdefault(known.name, []))
    if at < len(there):
      shared = there[at]
      self._check_owner(known, shared)
      _check(known.name, shared, kwargs)
    else:
      self._check_tower(known.name)
      if known.is_numbered and any(s.call != self._call for s in there):
        raise ValueError(
          f"{_MUST} of {known.name} there were {len(there)}, and one more is"
          f" asked for. Only their order tells them apart: {_REMEDY}."
        )
      self._check_doubtful(known.name, used)
      shared = _Shared(make(), known.owner, _start(kwargs), self._call)
      there.append(shared)
      self.variables.append(shared.variable)
    used[known.name].append(shared)
    return shared.variable

  def _check_owner(self, known: owners.Known, shared: _Shared) -> None:
    """Raises `ValueError` for a variable that another object still holds."""
    if shared.owner is None or shared.owner() is known.owner:
      return
    if shared.call == self._call:
      # Every tower makes its own. What was there before is built once. So this
      # is no owner, though TensorFlow may keep it: the gradients that a layer
      # defines stay in a registry.
      shared.owner = None
      return
    if shared.owner() is not None:
      gc.collect()  # Keras' objects refer to themselves.
    owner = shared.owner()
    shared.owner = None if owner is None else shared.owner
    if owner is not None:
      asks = getattr(known.owner, "name", "model_fn")
      raise ValueError(
        f"{_MUST} {known.name} was made by {owner.name!r}, which is still"
        f" there, and {asks!r} asks for one of the same name. If both are to"
        " have their own, build them before the first call. If model_fn makes"
        " them, let it keep none of them."
      )

  def _check_tower(self, name: str) -> None:
    """Raises `ValueError` if a tower is to make what the first did not."""
    tower = getattr(self._here, "tower", None)
    if tower and not getattr(self._here, "within", ""):
      raise ValueError(
        f"{_MUST} tower {tower} asks for one more of {name} than tower 0."
        " Where a name is made of another that Keras numbered, each tower has"
        f" its own: {_REMEDY}."
      )

  def _check_doubtful(self, name: str, used: dict[str, list[_Shared]]) -> None:
    """Raises `ValueError` if a new name may be another's with a new number."""
    rest = owners.without_doubtful(name)
    for other, there in self._known.items():
      if (
        other != name
        and not used.get(other)
        and any(shared.call != self._call for shared in there)
        and owners.without_doubtful(other) == rest
      ):
        raise ValueError(
          f"{_MUST} {name} is asked for, and {other} was in another call. The"
          f" number may be one that Keras gave: {_REMEDY}."
        )

  def _check_count(self, name: str, count: int) -> None:
    """Raises `ValueError` if a tower made fewer variables than others did."""
    expected = len(self._known[name])
    if count != expected:
      raise ValueError(
        f"{_MUST} of {name} there were {expected}, and now {count}. Only their"
        f" order tells them apart: {_REMEDY}."
      )

  def _forget(self, variables: list[Any]) -> None:
    """Makes them anew when they are asked for again."""
    gone = set(map(id, variables))
    self.variables = [v for v in self.variables if id(v) not in gone]
    for name, known in self._known.items():
      self._known[name] = [s for s in known if id(s.variable) not in gone]


def _parts(name: Any, outside: str) -> list[str]:
  """A variable's scopes and name, the scopes of the tower left out."""
  scope = tf.get_current_name_scope()
  if outside and (scope + "/").startswith(outside + "/"):
    scope = scope[len(outside) + 1 :]
  return [*filter(None, scope.split("/")), *str(name or "Variable").split("/")]


def _start(kwargs: dict[str, Any]) -> Any:
  """The number a scalar starts from; None for what is not known or is none."""
  value = kwargs.get("initial_value")
  if value is None or callable(value):
    return None
  try:
    static = tf.get_static_value(tf.convert_to_tensor(value))
  except (TypeError, ValueError):
    return None
  is_scalar = static is not None and getattr(static, "shape", ()) == ()
  return static if is_scalar else None


def _check(name: str, shared: _Shared, kwargs: dict[str, Any]) -> None:
  """Raises `ValueError` where another variable than the first is asked for."""
  shape, dtype = _asked_for(kwargs)
  known = tf.TensorShape(shared.variable.shape)
  if shape is not None and not known.is_compatible_with(shape):
    raise ValueError(
      f"{_MUST} {name} has shape {known}, and now {shape} is asked for. Make"
      f" them in the same order, {_REMEDY}."
    )
  if dtype is not None and tf.as_dtype(dtype) != shared.variable.dtype:
    raise ValueError(
      f"{_MUST} {name} has dtype {shared.variable.dtype.name}, and now"
      f" {tf.as_dtype(dtype).name} is asked for. Make them in the same order,"
      f" {_REMEDY}."
    )
  start = _start(kwargs)
  is_known = start is not None and shared.start is not None
  # A NaN is like no number, and so not like itself.
  if is_known and start != shared.start and start == start:
    raise ValueError(
      f"{_MUST} {name} started from {shared.start} and is to start from"
      f" {start} now, but is not made again. Make it, or the optimizer that it"
      " belongs to, outside of model_fn, and assign to it."
    )


def _asked_for(kwargs: dict[str, Any]) -> tuple[Any, Any]:
  """Shape and dtype of the variable that is asked for; None for unknown."""
  value, dtype = kwargs.get("initial_value"), kwargs.get("dtype")
  if kwargs.get("shape") is not None:
    return tf.TensorShape(kwargs["shape"]), dtype
  if value is None:
    return None, dtype
  if callable(value):
    # Keras hands over initializers. In a graph nothing of it runs.
    with tf.Graph().as_default():
      try:
        value = tf.convert_to_tensor(value())
      except Exception:  # one that does not work in another graph
        return None, dtype
  return tf.convert_to_tensor(value).shape, dtype
