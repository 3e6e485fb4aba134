"""One set of variables for all towers and all calls of a model function.

The i-th variable that a tower makes is the i-th of the first tower of the first
call. In another mode the same holds for all but optimizers and metrics: a mode
may make its own, after the others. `tf.compat.v1.get_variable` goes by name.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import tensorflow as tf

from tf_cross_shard import variables as variables_lib

# TensorFlow's name of the collection.
_STORES: Final = ("__variable_store",)
_MUST = "`model_fn` must make the same variables in every tower and every call;"
_REMEDY = (
  "Make and build what only some need outside of model_fn, before its first"
  " call."
)


class _Made(NamedTuple):
  """A variable, and the number it started from."""

  variable: Any
  start: Any


class SharedVariables:
  """The variables and optimizers that a model function makes, made once."""

  def __init__(self) -> None:
    """Starts without variables."""
    self.weights: list[_Made] = []  # all but metrics' and optimizers'
    self.orders: dict[str, list[_Made]] = {}  # of each mode, all in order
    self.confirmed: set[str] = set()  # modes that had a second tower or call
    self.named: dict[str, Any] = {}
    self.optimizers: dict[tuple[str, int], tuple[Any, Any]] = {}
    self._lock = threading.RLock()

  @property
  def variables(self) -> list[Any]:
    """All that was made so far, slots too, each once."""
    made = [each.variable for order in self.orders.values() for each in order]
    made += self.named.values()
    for optimizer, _ in self.optimizers.values():
      made += map(variables_lib.native, _state(optimizer))
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
    """Starts before the first tower."""
    self._shared = shared
    self._mode = mode
    self.new: set[int] = set()  # ids of what this call has made
    self._is_paused = True
    self._begin()

  def _begin(self) -> None:
    """Starts counting the variables of one tower."""
    self._known = self._shared.orders.get(self._mode)
    self._made: list[_Made] = []
    self._own: list[Any] = []  # those that optimizers hold
    self._optimizers = 0
    self._error: ValueError | None = None

  @contextlib.contextmanager
  def tower(self) -> Iterator[None]:
    """Begins one tower; `check_tower` is to be called after it."""
    self._begin()
    scope = tf.compat.v1.get_variable_scope()
    # There TensorFlow finds by name what any graph has made, and would share it
    # with other functions; it fails there in eager execution.
    stores = tf.compat.v1.get_collection_ref(_STORES)
    outer, stores[:] = list(stores), []
    with (
      tf.variable_creator_scope(self._create),
      tf.compat.v1.variable_scope(
        scope,
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
    if self._error is not None:  # tf_keras' Sequential goes on after any.
      raise ValueError(str(self._error)) from self._error

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Makes variables that are no part of the order, such as slots."""
    outer, self._is_paused = self._is_paused, True
    try:
      yield
    finally:
      self._is_paused = outer

  @contextlib.contextmanager
  def owned(self) -> Iterator[None]:
    """Makes variables of an optimizer, which are part of its mode's order."""
    begin = len(self._made)
    yield
    self._own += [each.variable for each in self._made[begin:]]

  def optimizer(self, optimizer: Any) -> Any:
    """The optimizer to use: that of the first call, if it is made in a tower.

    Only so its slots go on. Sharing them by order instead would need every
    optimizer to be built on the same variables in the same order.
    """
    if self._is_paused:  # outside of towers
      return optimizer
    _ = optimizer.iterations  # Legacy optimizers make it when it is first read.
    state = list(map(variables_lib.native, _state(optimizer)))
    if not set(map(id, state)) & {id(each.variable) for each in self._made}:
      return optimizer
    self._own += state
    key = (self._mode, self._optimizers)
    self._optimizers += 1
    settings = _settings(optimizer)
    first, known = self._shared.optimizers.setdefault(
      key, (optimizer, settings)
    )
    if settings != known:
      raise ValueError(
        f"`model_fn` must make the same optimizers in every tower and every"
        f" call; it made {known} first, and now {settings}. Make optimizers"
        " outside of model_fn if they are to differ."
      )
    return first

  def check_tower(self, metrics: Mapping[str, Any] | None) -> None:
    """Checks what a tower has made, and records what the first did."""
    if self._known is not None:
      if not self._made and self._mode not in self._shared.confirmed:
        # What the first tower made belongs to layers and optimizers from
        # outside, which were built in it and have it now.
        self._shared.orders[self._mode] = self._shared.weights = []
      elif len(self._made) < len(self._known):
        raise ValueError(
          f"{_MUST} there were {len(self._known)}, and now {len(self._made)}:"
          f" {self._known[len(self._made)].variable.name} is missing. {_REMEDY}"
        )
      self._shared.confirmed.add(self._mode)
      return
    for metric in (metrics or {}).values():
      self._own += map(variables_lib.native, _state(metric))
    own = set(map(id, self._own))
    is_own = [id(each.variable) in own for each in self._made]
    weights = self._shared.weights
    own_count = len(is_own) - len(weights)
    if not self._shared.orders:
      self._shared.weights = [
        each for each, mine in zip(self._made, is_own, strict=True) if not mine
      ]
    elif is_own != [False] * len(weights) + [True] * own_count:
      first, now = ([m.variable.name for m in x] for x in (weights, self._made))
      raise ValueError(
        f"{_MUST} another mode made {first}, and mode {self._mode!r} makes"
        f" {now}. It may add optimizers and the `metrics` of its TowerSpec"
        f" only, after these. {_REMEDY}"
      )
    self._shared.orders[self._mode] = self._made

  def _create(self, make: Callable[..., Any], **kwargs: Any) -> Any:
    """Hands out the next variable, or makes it in the first tower."""
    if self._is_paused:
      return self._make(make, kwargs)
    at = len(self._made)
    order = self._shared.weights if self._known is None else self._known
    try:
      if at < len(order):
        made = order[at]
        _check(f"number {at + 1}, ", made, kwargs)
      elif self._known is None:
        made = _Made(self._make(make, kwargs), _start(kwargs))
      else:
        raise ValueError(
          f"{_MUST} there were {at}, and one more,"
          f" {kwargs.get('name') or 'Variable'}, is asked for. {_REMEDY}"
        )
    except ValueError as error:
      self._error = self._error or error
      raise
    self._made.append(made)
    return made.variable

  def _make(self, make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Makes a variable, and remembers that it is new."""
    variable = make(**kwargs)
    self.new.add(id(variable))
    return variable

  def _get(self, getter: Callable[..., Any], name: str, **kwargs: Any) -> Any:
    """What `get_variable` returns: the variable of this name."""
    named = self._shared.named
    if name in named:
      _check("", _Made(named[name], None), {**kwargs, "initial_value": None})
      return named[name]
    with self.paused():
      named[name] = getter(name, **kwargs)
    return named[name]


def _state(holder: Any) -> list[Any]:
  """The variables of an optimizer or a metric."""
  variables = holder.variables
  state = list(variables() if callable(variables) else variables)
  # The learning rate of tf_keras is none of them.
  state += [v for v in vars(holder).values() if isinstance(v, tf.Variable)]
  inner = getattr(holder, "inner_optimizer", None)
  return state if inner is None else state + _state(inner)


def _settings(part: Any) -> list[Any]:
  """What an optimizer was told, as far as it is plain. Names have numbers."""
  found: list[Any] = [type(part).__name__]
  values = {**vars(part), **vars(part).get("_hyper", {})}
  for name, value in sorted(values.items()):
    if isinstance(value, (bool, int, float, str)):
      found += [(name, value)] if name not in ("name", "_name") else []
    elif hasattr(value, "get_config"):  # a schedule
      found.append((name, _settings(value)))
  inner = getattr(part, "inner_optimizer", None)
  return found if inner is None else [*found, _settings(inner)]


def _start(kwargs: dict[str, Any]) -> Any:
  """The number a scalar starts from; None for what is not known or is none."""
  value = kwargs.get("initial_value")
  if value is None or callable(value):
    return None
  static = tf.get_static_value(tf.convert_to_tensor(value))
  is_scalar = static is not None and getattr(static, "shape", ()) == ()
  return static if is_scalar else None


def _check(place: str, made: _Made, kwargs: dict[str, Any]) -> None:
  """Raises `ValueError` where another variable than the first is asked for."""
  variable, start = made.variable, _start(kwargs)
  shape, dtype = _asked_for(kwargs)
  found = f"{_MUST} {place}{variable.name}"
  if not shape.is_compatible_with(variable.shape) or (
    tf.as_dtype(dtype or variable.dtype) != variable.dtype
  ):
    raise ValueError(
      f"{found} has shape {variable.shape} and dtype {variable.dtype.name}, and"
      f" now {shape} and {dtype and tf.as_dtype(dtype).name} is asked for."
      f" {_REMEDY}"
    )
  is_known = start is not None and made.start is not None
  # A NaN is like no number, and so not like itself.
  if is_known and start != made.start and start == start:
    raise ValueError(
      f"{found} started from {made.start} and is to start from {start} now, but"
      " is not made again. Make it, or the optimizer that it belongs"
      " to, outside of model_fn, and assign to it."
    )


def _asked_for(kwargs: dict[str, Any]) -> tuple[tf.TensorShape, Any]:
  """Shape and dtype of the variable that is asked for, as far as known."""
  value, dtype = kwargs.get("initial_value"), kwargs.get("dtype")
  if callable(value):
    # Keras hands over initializers. In a graph nothing of it runs.
    with tf.Graph().as_default():
      try:
        value = tf.convert_to_tensor(value())
      except Exception:  # one that does not work in another graph
        value = None
  elif value is not None:
    value = tf.convert_to_tensor(value)
  shape = kwargs.get("shape")
  if shape is None and value is not None:
    shape = value.shape
  return tf.TensorShape(shape), dtype or getattr(value, "dtype", None)
