"""Shares one set of variables among all towers and calls of a model function.

Variables are matched by order: the i-th variable that a tower creates is the
i-th variable of the first tower in the first call.

    tower 0 of the first call   creates     kernel   bias   ...
                                              │       │
    every tower after it        receives    kernel   bias   ...

A new mode receives the same variables and may create optimizers and metrics of
its own after them. `tf.compat.v1.get_variable` finds its variable by name.
"""

import contextlib
import copy
import threading
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
  """All variables and optimizers that a model function has created.

  Attributes:
    weights: The variables that belong to no metric and no optimizer.
    orders: For each mode, all variables in the order of their creation.
    named: The variables of `tf.compat.v1.get_variable`, by name.
    optimizers: The optimizers created in model_fn, by mode and order.
  """

  def __init__(self) -> None:
    self.weights: list[Any] = []
    self.orders: dict[str, list[Any]] = {}
    self.named: dict[str, Any] = {}
    self.optimizers: dict[tuple[str, int], Any] = {}
    self._lock = threading.RLock()

  @property
  def variables(self) -> list[Any]:
    """Every variable created so far, including slots, once."""
    made = [variable for order in self.orders.values() for variable in order]
    made += self.named.values()
    for optimizer in self.optimizers.values():
      made += _variables_of(optimizer)
    return list({id(variable): variable for variable in made}.values())

  @contextlib.contextmanager
  def call(self, mode: str) -> Iterator["CallVariables"]:
    """Begins a call of the model function; a failed call leaves no variables.

    Variables of a trace that fails never receive values: a tf.function
    initializes them at the end of its trace. Threads call one after the other,
    unless they are replicas, which have to wait for each other inside the call.
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
    # The variables of this mode in order; None in the first tower of the mode.
    self._known: list[Any] | None = None
    # The variables that the current tower has created or received.
    self._made: list[Any] = []
    # The optimizers that the current tower has created.
    self._optimizers: list[Any] = []
    # The first error of the current tower.
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
    # Keras' models swallow errors, so one that was raised while a variable
    # was created has to be raised again.
    if self._error is not None:
      raise ValueError(str(self._error)) from self._error

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Suspends sharing: variables created here are not matched by order."""
    outer, self._is_paused = self._is_paused, True
    try:
      yield
    finally:
      self._is_paused = outer

  def optimizer(self, optimizer: Any) -> Any:
    """Replaces an optimizer of a tower with the optimizer of the first call.

    The optimizer of the first call has the slots of all steps so far. Sharing
    slots by order instead would require that every optimizer is built on the
    same variables in the same order.
    """
    if self._is_paused:  # Outside towers.
      return optimizer
    # Legacy optimizers create their iteration count when it is first read.
    _ = optimizer.iterations
    made = set(map(id, self._made))
    if not any(id(v) in made for v in _variables_of(optimizer)):
      return optimizer  # It was created outside this tower.
    key = (self._mode, len(self._optimizers))
    self._optimizers.append(optimizer)
    known = self._shared.optimizers
    if self._known is None:  # The first tower of this mode.
      known.setdefault(key, optimizer)
    first = known.get(key)
    number = len(self._optimizers)
    made_first = f"no optimizer {number}" if first is None else _classes(first)
    if _classes(optimizer) != made_first:
      raise ValueError(
        "`model_fn` must create the same optimizers in every tower and every"
        f" call; it first created {made_first}, but now {_classes(optimizer)}."
        " If towers need different optimizers, create them outside model_fn."
      )
    return first

  def check_tower(self, metrics: Mapping[str, Any] | None) -> None:
    """Checks a tower's variables; records those of the mode's first tower."""
    shared, known, made = self._shared, self._known, self._made
    if known is None:
      # The first tower of this mode. Its weights are all variables that belong
      # to no optimizer and no metric; they must be the weights of other modes.
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
    elif len(made) < len(known):
      raise ValueError(
        f"{_MUST} the first tower or call created {len(known)}, but this one"
        f" created only {len(made)}: {known[len(made)].name} is missing."
        f" {_REMEDY}"
      )

  def _create(self, make: Callable[..., Any], **kwargs: Any) -> Any:
    """Returns the next shared variable; creates it in the first tower."""
    if self._is_paused:
      return make(**kwargs)
    # The first tower of a new mode begins with the weights of other modes.
    order = self._shared.weights if self._known is None else self._known
    count = len(self._made)
    try:
      if count < len(order):
        variable = order[count]
        _check(variable, kwargs)
      elif self._known is None:
        variable = make(**kwargs)
      else:
        error = ValueError(
          f"{_MUST} the first tower or call created {count}, but this one also"
          f" creates {kwargs.get('name') or 'Variable'}. {_REMEDY}"
        )
        if not _may_be_of_optimizer(kwargs):
          raise error
        # Raise it at the end of the tower. Before that, `optimizer` raises an
        # error that names the optimizer.
        self._error = self._error or error
        variable = make(**kwargs)
    except ValueError as error:
      self._error = self._error or error
      raise
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


def _classes(optimizer: Any) -> str:
  """Names the classes of an optimizer and of the optimizers inside it."""
  wrapped = getattr(optimizer, "inner_optimizer", None)
  name = type(optimizer).__name__
  return name if wrapped is None else f"{name}({_classes(wrapped)})"


def _may_be_of_optimizer(kwargs: dict[str, Any]) -> bool:
  """Returns whether an optimizer's constructor may create this variable.

  Such variables are scalars that are not trained, such as the iteration count.
  """
  shape, _ = _asked_for(kwargs)
  return kwargs.get("trainable") is False and shape.rank == 0


def _check(variable: Any, kwargs: dict[str, Any]) -> None:
  shape, dtype = _asked_for(kwargs)
  dtype = dtype or variable.dtype
  if dtype != variable.dtype or not shape.is_compatible_with(variable.shape):
    raise ValueError(
      f"{_MUST} {variable.name} has shape {variable.shape} and dtype"
      f" {variable.dtype.name}, but this tower or call needs shape {shape} and"
      f" dtype {dtype.name}. {_REMEDY}"
    )


def _asked_for(
  kwargs: dict[str, Any],
) -> tuple[tf.TensorShape, tf.DType | None]:
  """Returns the shape and the dtype of a variable; None if it is not known."""
  value, shape = kwargs.get("initial_value"), kwargs.get("shape")
  make = value if callable(value) else None
  # Keras passes an initializer instead of a value. Called in its own graph,
  # it tells the shape and dtype, and computes nothing.
  with tf.Graph().as_default() if make else contextlib.nullcontext():
    try:
      value = tf.convert_to_tensor(make() if make else value)
    except Exception:  # There is no value, or it belongs to another graph.
      value = None
  shape = tf.TensorShape(
    getattr(value, "shape", None) if shape is None else shape
  )
  dtype = kwargs.get("dtype") or getattr(value, "dtype", None)
  return shape, dtype and tf.as_dtype(dtype)
