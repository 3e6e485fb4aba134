"""One set of variables for all towers and all calls of a model function.

The i-th variable that a tower makes is the i-th of the first tower of the first
call. In another mode the same holds for all but optimizers and metrics: a mode
may make its own, after the others. `tf.compat.v1.get_variable` goes by name.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tf_cross_shard import variables as variables_lib

_MUST = "`model_fn` must make the same variables in every tower and every call;"
_REMEDY = (
  "Make and build what only some need outside of model_fn, before its first"
  " call."
)


class SharedVariables:
  """The variables and optimizers that a model function makes, made once."""

  def __init__(self) -> None:
    self.weights: list[Any] = []  # all but metrics' and optimizers'
    self.orders: dict[str, list[Any]] = {}  # of each mode, all in order
    self.named: dict[str, Any] = {}
    self.optimizers: dict[tuple[str, int], Any] = {}
    self._lock = threading.RLock()

  @property
  def variables(self) -> list[Any]:
    """All that was made so far, slots too, each once."""
    made = [variable for order in self.orders.values() for variable in order]
    made += self.named.values()
    for optimizer in self.optimizers.values():
      made += _state(optimizer)
    return list({id(variable): variable for variable in made}.values())

  @contextlib.contextmanager
  def call(self, mode: str) -> Iterator["CallVariables"]:
    """Begins a call, whose new variables are forgotten if it fails.

    In a trace they would stay without values, which a tf.function gives them at
    the end. Threads wait for each other, unless they are replicas, which meet.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    with self._lock if replicas == 1 else contextlib.nullcontext():
      before = {
        name: copy.copy(value)
        for name, value in vars(self).items()
        if not name.startswith("_")
      }
      try:
        yield CallVariables(self, mode)
      except BaseException:
        vars(self).update(before)
        raise


class CallVariables:
  """Hands out the shared variables in one call of a model function."""

  def __init__(self, shared: SharedVariables, mode: str) -> None:
    self._shared = shared
    self._mode = mode
    self._is_paused = True
    self._known: list[Any] | None = None  # of this mode, before this tower
    self._made: list[Any] = []  # by this tower, or handed out to it
    self._optimizers: list[Any] = []  # made in this tower
    self._error: ValueError | None = None

  @contextlib.contextmanager
  def tower(self) -> Iterator[None]:
    """Begins one tower; `check_tower` is to be called after it."""
    self._known = self._shared.orders.get(self._mode)
    self._made, self._optimizers, self._error = [], [], None
    # In this collection TensorFlow finds by name what any graph has made, and
    # would share it with other functions; it fails there in eager execution.
    stores = tf.compat.v1.get_collection_ref(("__variable_store",))
    outer, stores[:] = list(stores), []
    with (
      tf.variable_creator_scope(self._create),
      tf.compat.v1.variable_scope(
        tf.compat.v1.get_variable_scope(),
        reuse=tf.compat.v1.AUTO_REUSE,
        custom_getter=self._get,
        auxiliary_name_scope=False,
      ),
    ):
      self._is_paused = False
      try:
        yield
      finally:
        self._is_paused = True
        stores[:] = outer
    if self._error is not None:  # Keras' models go on after any.
      raise ValueError(str(self._error)) from self._error

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Makes variables that are no part of the order, such as slots."""
    outer, self._is_paused = self._is_paused, True
    try:
      yield
    finally:
      self._is_paused = outer

  def optimizer(self, optimizer: Any) -> Any:
    """Returns the optimizer of the first call, if this is made in a tower.

    Only so its slots go on. Sharing them by order instead would need every
    optimizer to be built on the same variables in the same order.
    """
    if self._is_paused:  # outside of towers
      return optimizer
    _ = optimizer.iterations  # Legacy optimizers make it when it is first read.
    made = set(map(id, self._made))
    if not any(id(variable) in made for variable in _state(optimizer)):
      return optimizer
    key = (self._mode, len(self._optimizers))
    self._optimizers.append(optimizer)
    first = self._shared.optimizers.setdefault(key, optimizer)
    if _classes(optimizer) != _classes(first):
      raise ValueError(
        "`model_fn` must make the same optimizers in every tower and every"
        f" call; it made {_classes(first)} first, and now"
        f" {_classes(optimizer)}. Make optimizers outside of model_fn if they"
        " are to differ."
      )
    return first

  def check_tower(self, metrics: Mapping[str, Any] | None) -> None:
    """Checks the variables of a tower, and records those of the first."""
    shared, known, made = self._shared, self._known, self._made
    if known is None:
      holders = [*self._optimizers, *(metrics or {}).values()]
      own = {id(variable) for part in holders for variable in _state(part)}
      weights = [variable for variable in made if id(variable) not in own]
      if not shared.orders:
        shared.weights = weights
      elif list(map(id, weights)) != list(map(id, shared.weights)):
        raise ValueError(
          f"{_MUST} another mode made {[v.name for v in shared.weights]}, and"
          f" mode {self._mode!r} makes {[v.name for v in made]}. It may add"
          " optimizers and the `metrics` of its TowerSpec only, after these."
          f" {_REMEDY}"
        )
      shared.orders[self._mode] = made
    elif not made:
      # The known variables belong to layers and optimizers from outside, which
      # were built in the first tower and have them now.
      shared.orders[self._mode] = shared.weights = []
    elif len(made) < len(known):
      raise ValueError(
        f"{_MUST} there were {len(known)}, and now {len(made)}:"
        f" {known[len(made)].name} is missing. {_REMEDY}"
      )

  def _create(self, make: Callable[..., Any], **kwargs: Any) -> Any:
    """Hands out the next variable, or makes it in the first tower."""
    if self._is_paused:
      return make(**kwargs)
    order = self._shared.weights if self._known is None else self._known
    count = len(self._made)
    try:
      if count < len(order):
        variable = order[count]
        _check(variable, kwargs)
      elif self._known is None:
        variable = make(**kwargs)
      else:
        raise ValueError(
          f"{_MUST} there were {count}, and one more,"
          f" {kwargs.get('name') or 'Variable'}, is asked for. {_REMEDY}"
        )
    except ValueError as error:
      self._error = self._error or error
      raise
    self._made.append(variable)
    return variable

  def _get(self, getter: Callable[..., Any], name: str, **kwargs: Any) -> Any:
    """Returns the variable of a name to `get_variable`."""
    named = self._shared.named
    if name in named:
      _check(named[name], kwargs)
    else:
      with self.paused():
        named[name] = getter(name, **kwargs)
    return named[name]


def _state(holder: Any) -> list[Any]:
  """The variables of an optimizer or a metric, as TensorFlow's."""
  variables = holder.variables
  state = list(variables() if callable(variables) else variables)
  # The learning rate of tf_keras is none of them.
  state += [v for v in vars(holder).values() if isinstance(v, tf.Variable)]
  inner = getattr(holder, "inner_optimizer", None)
  state = list(map(variables_lib.native, state))
  return state if inner is None else state + _state(inner)


def _classes(optimizer: Any) -> str:
  """The names of an optimizer's class and of those that it encapsulates."""
  inner = getattr(optimizer, "inner_optimizer", None)
  name = type(optimizer).__name__
  return name if inner is None else f"{name}({_classes(inner)})"


def _check(variable: Any, kwargs: dict[str, Any]) -> None:
  """Raises `ValueError` where another shape or dtype is asked for."""
  value, shape = kwargs.get("initial_value"), kwargs.get("shape")
  make = value if callable(value) else None
  # Keras hands over initializers. In a graph nothing of them runs.
  with tf.Graph().as_default() if make else contextlib.nullcontext():
    try:
      value = tf.convert_to_tensor(make() if make else value)
    except Exception:  # There is none, or it is of another graph.
      value = None
  shape = tf.TensorShape(
    getattr(value, "shape", None) if shape is None else shape
  )
  dtype = kwargs.get("dtype") or getattr(value, "dtype", variable.dtype)
  dtype = tf.as_dtype(dtype)
  if dtype != variable.dtype or not shape.is_compatible_with(variable.shape):
    raise ValueError(
      f"{_MUST} {variable.name} has shape {variable.shape} and dtype"
      f" {variable.dtype.name}, and now {shape} and {dtype.name} is asked for."
      f" {_REMEDY}"
    )
