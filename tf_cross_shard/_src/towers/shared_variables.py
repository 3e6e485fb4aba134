"""Shares one set of variables among all towers and calls of a model function.

tower 0 of the first call   creates     kernel   bias   ...
                                          │       │
every tower after it        receives    kernel   bias   ...
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib

_MUST = (
  "`model_fn` must create the same variables in every tower and every call;"
)
_REMEDY = (
  "If only some towers or calls need a variable, create and build it outside"
  " model_fn, before its first call."
)


class SharedVariables:
  """All variables and optimizers that a model function has created."""

  def __init__(self) -> None:
    # Without those of metrics and optimizers, which differ between modes.
    self.weights: list[Any] = []
    # For each mode, all variables in the order of their creation.
    self.orders: dict[str, list[Any]] = {}
    # The variables of `tf.compat.v1.get_variable`.
    self.named: dict[str, Any] = {}
    self.optimizers: dict[tuple[str, int], Any] = {}  # By mode and order.

  @property
  def variables(self) -> list[Any]:
    """Every variable created so far, including slots, once."""
    made = [variable for order in self.orders.values() for variable in order]
    made += self.named.values()
    for optimizer in self.optimizers.values():
      made += _variables_of(optimizer)
    return list({id(variable): variable for variable in made}.values())


class CallVariables:
  """Hands out the shared variables in one call of a model function."""

  def __init__(self, shared: SharedVariables, mode: str) -> None:
    self._shared = shared
    self._mode = mode
    self._is_paused = True
    # The variables of this mode in order; None in the first tower of the mode.
    self._known: list[Any] | None = None
    # What the current tower has created or received.
    self._made: list[Any] = []
    self._optimizers: list[Any] = []
    self._error: ValueError | None = None

  @contextlib.contextmanager
  def tower(self) -> Iterator[None]:
    """Shares variables in one tower; call `check_tower` after it."""
    self._known = self._shared.orders.get(self._mode)
    self._made, self._optimizers, self._error = [], [], None
    # TensorFlow keeps all variables of `get_variable` in this collection. It
    # would share them with other model functions, and fails in eager execution,
    # so the collection is empty while a tower runs.
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
    if self._error is not None:  # Keras' models swallow errors.
      raise self._error

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Suspends sharing: variables created here are not matched by order."""
    outer, self._is_paused = self._is_paused, True
    try:
      yield
    finally:
      self._is_paused = outer

  def optimizer(self, optimizer: Any) -> Any:
    """Replaces an optimizer of a tower with the optimizer of the first call."""
    # It has the slots of all steps so far. Sharing slots by order instead would
    # require that every optimizer is built on the same variables in the same
    # order.
    if self._is_paused:  # Outside towers.
      return optimizer
    made = set(map(id, self._made))
    if not any(id(v) in made for v in _variables_of(optimizer)):
      return optimizer  # It was created outside this tower.
    key = (self._mode, len(self._optimizers))
    self._optimizers.append(optimizer)
    if self._known is None:  # The first tower of this mode.
      self._shared.optimizers[key] = optimizer
    first = self._shared.optimizers.get(key)
    made_first = (
      f"no optimizer {key[1] + 1}" if first is None else _names(first)
    )
    if _names(optimizer) != made_first:
      raise ValueError(
        "`model_fn` must create the same optimizers in every tower and every"
        f" call; it first created {made_first}, but now {_names(optimizer)}."
        " If towers need different optimizers, create them outside model_fn."
      )
    return first

  def check_tower(self, metrics: Mapping[str, Any] | None) -> None:
    """Checks a tower's variables; records those of the mode's first tower."""
    shared, known, made = self._shared, self._known, self._made
    if known is None:
      # The weights are all variables that belong to no optimizer and no metric;
      # they must be the weights of other modes.
      holders = [*self._optimizers, *(metrics or {}).values()]
      of_holders = {id(v) for holder in holders for v in _variables_of(holder)}
      weights = [v for v in made if id(v) not in of_holders]
      if not shared.orders:
        shared.weights = weights
      elif list(map(id, weights)) != list(map(id, shared.weights)):
        raise ValueError(
          f"{_MUST} another mode created {[v.name for v in shared.weights]},"
          f" but mode {self._mode!r} creates {[v.name for v in made]}. A mode"
          " may add optimizers and the `metrics` of its TowerSpec only, after"
          f" the other variables. {_REMEDY}"
        )
      shared.orders[self._mode] = made
    elif not made:
      # This tower created no variables. So the variables that the first tower
      # created belong to layers and optimizers from outside model_fn, which are
      # already built.
      shared.orders[self._mode] = shared.weights = []
    elif len(made) != len(known):
      odd = max(made, known, key=len)[min(len(made), len(known))]
      raise ValueError(
        f"{_MUST} the first tower or call created {len(known)}, but this one"
        f" created {len(made)}: only one of them has {odd.name}. {_REMEDY}"
      )

  def _create(self, make: Callable[..., Any], **kwargs: Any) -> Any:
    """Returns the next shared variable; creates it if there is none."""
    if self._is_paused:
      return make(**kwargs)
    # The first tower of a new mode begins with the weights of other modes.
    order = self._shared.weights if self._known is None else self._known
    if len(self._made) < len(order):
      variable = order[len(self._made)]
      try:
        _check(variable, kwargs)
      except ValueError as error:
        self._error = error
        raise
    else:
      # If there is one too many, `optimizer` or `check_tower` says so: it may
      # belong to an optimizer, which only they can name.
      variable = make(**kwargs)
    self._made.append(variable)
    return variable

  def _get(self, getter: Callable[..., Any], name: str, **kwargs: Any) -> Any:
    """Finds or creates the variable of a name for `get_variable`."""
    named = self._shared.named
    if name in named:
      _check(named[name], kwargs)
    else:
      with self.paused():
        named[name] = getter(name, **kwargs)
    return named[name]


def _variables_of(holder: Any) -> list[Any]:
  variables = holder.variables
  state = list(variables() if callable(variables) else variables)
  # In tf_keras, `variables` lacks the learning rate.
  state += [v for v in vars(holder).values() if isinstance(v, tf.Variable)]
  wrapped = getattr(holder, "inner_optimizer", None)
  state = list(map(variables_lib.native, state))
  return state if wrapped is None else state + _variables_of(wrapped)


def _names(optimizer: Any) -> str:
  """Names the classes of an optimizer and of the optimizers inside it."""
  wrapped = getattr(optimizer, "inner_optimizer", None)
  name = type(optimizer).__name__
  return name if wrapped is None else f"{name}({_names(wrapped)})"


def _check(variable: Any, kwargs: dict[str, Any]) -> None:
  """Raises an error if a variable with another shape or dtype is asked for."""
  value, shape = kwargs.get("initial_value"), kwargs.get("shape")
  # Keras passes an initializer instead of a value. In its own graph, it tells
  # the shape and dtype, and computes nothing.
  with contextlib.suppress(Exception), tf.Graph().as_default():
    value = tf.convert_to_tensor(value() if callable(value) else value)
  shape = getattr(value, "shape", None) if shape is None else shape
  dtype = kwargs.get("dtype") or getattr(value, "dtype", variable.dtype)
  is_same = variable.shape.is_compatible_with(tf.TensorShape(shape))
  if not is_same or tf.as_dtype(dtype) != variable.dtype:
    raise ValueError(
      f"{_MUST} {variable.name} has shape {variable.shape} and dtype"
      f" {variable.dtype.name}, but this tower or call needs shape {shape} and"
      f" dtype {tf.as_dtype(dtype).name}. {_REMEDY}"
    )
