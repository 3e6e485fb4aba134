"""One set of variables for all towers and all calls.

A model function makes its variables each time it is called. The first time they
are made; every other time, in the next tower or the next step, it is given
those of the first again.

They are known by name. Keras numbers the names of its layers on and on, so that
"dense/kernel" of the first call is "dense_7/kernel" of a later one: a name that
is not known is matched without its numbers, in order of creation.
From then on numbers tell nothing of these: they begin anew in another graph, or
when Keras' session is cleared, and "dense_1" may then be another layer.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


@dataclasses.dataclass
class _Shared:
  """A variable, the name it was made by, and the number it started from."""

  name: str
  variable: Any
  start: Any


class SharedVariables:
  """The variables that a function makes, made once.

  >>> shared = SharedVariables()
  >>> def count():
  ...   with shared.reused():
  ...     return tf.Variable(1.0, name="count").assign_add(1.0)
  >>> float(count()), float(count())
  (2.0, 3.0)
  >>> len(shared.variables)
  1

  Attributes:
    variables: All of them, in order of creation.
  """

  def __init__(self) -> None:
    """Starts without variables."""
    self.variables: list[Any] = []
    self._by_kind: dict[str, list[_Shared]] = {}
    self._numbered: set[str] = set()  # Kinds that were met by two names.

  @contextlib.contextmanager
  def kept(self) -> Iterator[None]:
    """Begins a step, whose variables are forgotten if its trace fails.

    They would stay without a value: a tf.function gives them one at the end.

    Yields:
      None.
    """
    before = len(self.variables)
    try:
      yield
    except BaseException:
      if not tf.executing_eagerly():
        self._forget(self.variables[before:])
      raise

  @contextlib.contextmanager
  def reused(self, within: str = "") -> Iterator[None]:
    """Begins one call of the function, whose variables are shared.

    Args:
      within: What is put before the names. Calls that make other variables in
        between have their own.

    Yields:
      None.
    """
    used: set[int] = set()
    outside = tf.get_current_name_scope()

    def creator(make: Callable[..., Any], **kwargs: Any) -> Any:
      name = _full_name(kwargs.get("name"), outside, within)
      return self._get(name, used, lambda: make(**kwargs), kwargs)

    with tf.variable_creator_scope(creator):
      yield

  def _get(
    self,
    name: str,
    used: set[int],
    make: Callable[[], Any],
    kwargs: dict[str, Any],
  ) -> Any:
    """The variable that stands for `name` in this call."""
    kind = re.sub(r"(_\d+)+(?=/|$)", "", name)
    known = self._by_kind.get(kind, [])
    if kind not in self._numbered:
      known = [s for s in known if s.name == name] + known
    shared = next((s for s in known if id(s) not in used), None)
    if shared is None:
      shared = _Shared(name, make(), _start(kwargs))
      self.variables.append(shared.variable)
      self._by_kind.setdefault(kind, []).append(shared)
    else:
      _check(name, shared, kwargs)
      if shared.name != name:
        self._numbered.add(kind)
    used.add(id(shared))
    return shared.variable

  def _forget(self, variables: list[Any]) -> None:
    """Makes them anew when they are asked for again."""
    gone = set(map(id, variables))
    self.variables = [v for v in self.variables if id(v) not in gone]
    for kind, known in self._by_kind.items():
      self._by_kind[kind] = [s for s in known if id(s.variable) not in gone]


def _full_name(name: Any, outside: str, within: str) -> str:
  """A variable's name in its scopes, those of the tower left out."""
  scope = tf.get_current_name_scope()
  if outside and (scope + "/").startswith(outside + "/"):
    scope = scope[len(outside) + 1 :]
  return "/".join(filter(None, (within, scope, str(name or "Variable"))))


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
  shape = kwargs.get("shape")
  value = kwargs.get("initial_value")
  if shape is None and value is not None and not callable(value):
    shape = tf.convert_to_tensor(value).shape
  known = tf.TensorShape(shared.variable.shape)
  if shape is not None and not known.is_compatible_with(tf.TensorShape(shape)):
    raise ValueError(
      f"`model_fn` must make the same variables in every tower and every call;"
      f" {name} has shape {known}, and now {tf.TensorShape(shape)} is asked"
      " for. Make the variables in the same order, name them, or make them"
      " outside of model_fn."
    )
  dtype = kwargs.get("dtype")
  if dtype is not None and tf.as_dtype(dtype) != shared.variable.dtype:
    raise ValueError(
      f"`model_fn` must make the same variables in every tower and every call;"
      f" {name} has dtype {shared.variable.dtype.name}, and now"
      f" {tf.as_dtype(dtype).name} is asked for. Make the variables in the same"
      " order, name them, or make them outside of model_fn."
    )
  start = _start(kwargs)
  is_known = start is not None and shared.start is not None
  # A NaN is like no number, and so not like itself.
  if is_known and start != shared.start and start == start:
    raise ValueError(
      f"`model_fn` must make the same variables in every tower and every call;"
      f" {name} started from {shared.start} and is to start from {start} now,"
      " but is not made again. Make it, or the optimizer that it belongs to,"
      " outside of model_fn, and assign to it."
    )
