"""The wrapper: an optimizer that forwards everything except its step.

You read, write, save and restore the variables and settings of the wrapped
optimizer through the wrapper, as if the wrapper were not there.

The subclasses in `keras3.wrapper` and `tf_keras.wrapper` are also optimizers of
Keras 3 and tf_keras.
"""

import difflib
import functools
import inspect
import reprlib
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import tensorflow as tf

from tf_cross_shard._src.core import single_program, validation, wrapper_state
from tf_cross_shard._src.core.facade import saving, v1_methods
from tf_cross_shard._src.core.wrapped import names as names_lib
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib
from tf_cross_shard._src.core.wrapped import v1

# Names that `dir` does not list. Keras saves each optimizer that it finds under
# a listed name, and tf.train.Checkpoint saves the slots of an object that lists
# `get_slot_names`. Both would save the same variables twice.
_HIDDEN: Final = frozenset(("inner_optimizer", "get_slot_names"))


_Class = TypeVar("_Class", bound=type[Any])
_Function = TypeVar("_Function", bound=Callable[..., None])


class VariableList(list[Any]):
  """A list for `variables` that, as in TensorFlow 1, can be called."""

  def __call__(self) -> "VariableList":
    return self


def _forwarded(name: str) -> property:
  """Returns a property that forwards to the wrapped optimizer."""

  def get(self: Any) -> Any:
    own = wrapper_state.find(self)
    return None if own is None else getattr(own.wrapped.optimizer, name)

  def set_value(self: Any, value: Any) -> None:
    own = wrapper_state.find(self)
    if own is not None:  # It is None while Keras' constructor runs.
      setattr(own.wrapped.optimizer, name, value)

  return property(get, set_value, doc=f"`{name}` of the wrapped optimizer.")


class OptimizerWrapper(v1_methods.Minimizer, saving.SavedState):
  """Forwards state and settings to a wrapped optimizer.

  The wrapper has its own name and its own clipping limits.
  """

  _package: str  # "keras" or "tf_keras"
  _v1_classes: Any  # The module of this Keras' `v1_optimizers`.
  _argument = "opt"  # The constructor's name for the wrapped optimizer.
  clipnorm: float | None
  global_clipnorm: float | None
  clipvalue: float | None

  def __init__(self, opt: Any, name: str, **clipping: float | None) -> None:
    """Creates the wrapper; the class of each Keras overrides this method."""
    raise NotImplementedError

  @classmethod
  def _keras(cls) -> Any:
    return sys.modules[cls._package]

  @classmethod
  def _serialize(cls, opt: Any) -> Any:
    return cls._keras().saving.serialize_keras_object(opt)

  @classmethod
  def _deserialize(cls, config: Any, custom_objects: Any) -> Any:
    """Returns the optimizer that a dictionary describes, not built."""
    # Do not use optimizers.deserialize, which does not know Lamb in Keras 3.
    return cls._keras().saving.deserialize_keras_object(config, custom_objects)

  learning_rate = _forwarded("learning_rate")
  iterations = _forwarded("iterations")
  exclude_from_weight_decay = _forwarded("exclude_from_weight_decay")
  update_step = _forwarded("update_step")

  def _wrap(self, wrapped: wrapped_lib.WrappedOptimizer) -> None:
    """Stores the wrapped optimizer, and begins to forward attributes."""
    wrapper_state.attach(
      self, wrapper_state.WrapperState(wrapped, self._package)
    )
    if wrapped.is_built:
      validation.check_not_overwritten(wrapped.trainable_variables)

  @classmethod
  def _as_optimizer(cls, opt: Any) -> Any:
    """Returns `opt` as an optimizer of this Keras, or raises an error."""
    if isinstance(opt, (str, dict)):
      try:
        opt = cls._keras().optimizers.get(opt)
      except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
          f"`{cls._argument}` must name a Keras optimizer; got {opt!r}. Use"
          ' a name such as "adam", or an optimizer object.'
        ) from error
    elif isinstance(opt, tf.compat.v1.train.Optimizer):
      opt = v1.convert(opt, cls._package, cls._v1_classes)
    for nested in names_lib.nested_optimizers(opt):
      if isinstance(nested, OptimizerWrapper):
        cls._check_wrapper_within(nested, opt)
    if not isinstance(opt, _optimizer_classes(cls._package)):
      raise TypeError(
        f"`{cls._argument}` must be an optimizer of {cls._package}.optimizers"
        f" or its name; got {_kind(opt)}. {_remedy(opt, cls._package)}"
      )
    return opt

  @classmethod
  def _check_wrapper_within(cls, wrapper: "OptimizerWrapper", opt: Any) -> None:
    """Raises `ValueError` for a wrapper that `opt` must not be or contain."""
    raise ValueError(
      f"`{cls._argument}` must not be or contain a {type(wrapper).__name__}"
      f" itself; got {wrapper.name!r}. Gradients would be reduced twice."
      " Pass the optimizer inside it."
    )

  def _reduce_before(self, outer_loss_scaler: Any, methods: Any) -> None:
    """Lets an outer LossScaleOptimizer check reduced gradients only.

    `loss_scaler` says why. Our `methods` replace its methods of these names.
    """
    # An earlier LossScaleOptimizer is not used any more.
    self._wrapped.outer_loss_scaler = None
    # If `opt` is also a LossScaleOptimizer, only `opt` scales the loss.
    if not self._wrapped.skips_overflows:
      self._wrapped.outer_loss_scaler = outer_loss_scaler
    vars(outer_loss_scaler).update(methods)

  def __getattr__(self, name: str) -> Any:
    """Reads a missing attribute from the wrapped optimizer."""
    own = wrapper_state.find(self)
    if own is None or (name.startswith("__") and name.endswith("__")):
      raise AttributeError(
        f"{type(self).__name__!r} object has no attribute {name!r}"
      )
    return getattr(own.wrapped.optimizer, name)

  def __setattr__(self, name: str, value: Any) -> None:
    """Writes to the wrapped optimizer if only it has the attribute."""
    own = wrapper_state.find(self)
    if (
      own is not None
      and name not in self.__dict__
      and not hasattr(type(self), name)
      and hasattr(own.wrapped.optimizer, name)
    ):
      setattr(own.wrapped.optimizer, name, value)
    else:
      super().__setattr__(name, value)

  def __repr__(self) -> str:
    """Returns the class, the wrapped optimizer, and changed arguments."""
    if wrapper_state.find(self) is None:  # Keras' constructor is running.
      return object.__repr__(self)
    opt = self._wrapped.optimizer
    is_wrapper = isinstance(opt, OptimizerWrapper)
    shown = [repr(opt) if is_wrapper else type(opt).__name__]
    for name, value in self._differing().items():
      shown.append(f"{name}={reprlib.repr(value)}")
    return f"{type(self).__name__}({', '.join(shown)})"

  def _differing(self) -> dict[str, Any]:
    """Returns the other arguments that differ from their defaults."""
    return {}

  def __dir__(self) -> list[str]:
    """Returns attribute names, except those that savers would follow."""
    return [name for name in super().__dir__() if name not in _HIDDEN]

  @property
  def inner_optimizer(self) -> Any:
    """The wrapped optimizer itself."""
    return self._wrapped.optimizer

  @property
  def variables(self) -> VariableList:
    """The variables of the wrapped optimizer only."""
    return VariableList(self._wrapped.whole.variables)

  def get_name(self) -> str:
    """Returns the name given to the constructor."""
    return str(self.name)

  def get_slot(self, var: Any, name: str) -> Any:
    """Returns the slot that the wrapped optimizer created for a variable.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> weight = tf.Variable([1.0, 2.0])
    >>> optimizer = CrossShardOptimizer("adam")
    >>> optimizer.build([weight])
    >>> velocity = optimizer.get_slot_names()[-1]
    >>> optimizer.get_slot(weight, velocity).shape.as_list()
    [2]

    Args:
      var: A variable that the optimizer was built on.
      name: The slot's name, one of `get_slot_names()`.

    Returns:
      The slot, a variable in the shape of `var`; None if there is no slot of
      this name. With `shard_update` you can only read the slot.

    Raises:
      TypeError: If `var` is not a variable.
    """
    validation.check_variable("var", var)
    return self._wrapped.whole.view(var, name)

  def get_slot_names(self) -> list[str]:
    """Returns the names of all slots; empty before the optimizer is built."""
    return self._wrapped.slot_names()

  def build(self, variables: Any) -> None:
    """Creates the wrapped optimizer's slots.

    Args:
      variables: All variables that will ever be trained.

    Raises:
      NotImplementedError: If a variable is a float8 scale of Keras.
      RuntimeError: If restored values are waiting for their variables, and you
        call this method in one of several replicas. Only the slots of that
        replica would receive the values.
    """
    checkpointed = self._wrapped.checkpointed
    variables = list(variables)
    is_waiting = getattr(checkpointed, "has_waiting_values", False)
    if is_waiting and not tf.distribute.in_cross_replica_context():
      replicas = single_program.num_copies(tf.distribute.get_strategy())
      if replicas > 1:
        raise RuntimeError(
          f"{self.name} was restored but is not built; each of the {replicas}"
          " replicas would build it for itself. Call build(variables) inside"
          " `with strategy.scope():` before the first step."
        )
    if not self._wrapped.is_built:
      validation.check_not_overwritten(variables)
    self._build_slots(variables)

  def _build_slots(self, variables: list[Any]) -> None:
    self._wrapped.build(variables)

  def finalize_variable_values(self, var_list: Any) -> None:
    """Overwrites the variables with their moving averages, if there are any.

    Keras calls this method when `fit` ends.

    Args:
      var_list: The variables.
    """
    self._wrapped.write_averages(var_list)


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


def documented(cls: _Class) -> _Class:
  """Joins the docstrings of a class, of its first base and of the constructor.

  The class for each Keras documents only what differs.
  """
  first = cls.__bases__[0]
  own, shared = map(inspect.getdoc, (cls, first))
  constructor = vars(first).get("__init__")
  init = constructor and inspect.getdoc(constructor)
  if own and shared:  # python -OO removes all docstrings.
    _, _, more = shared.partition("\n\n")
    more, mark, references = more.partition("References:")
    whole = [own, more.strip(), init, mark + references]
    cls.__doc__ = "\n\n".join(filter(None, whole))
  return cls


def _optimizer_classes(package: str) -> tuple[type[Any], ...]:
  """Returns the optimizer base classes of a Keras; tf_keras has two of them."""
  # Empty if the Keras is not imported: no object of its classes can exist.
  optimizers = getattr(sys.modules.get(package), "optimizers", None)
  legacy = getattr(optimizers, "legacy", None)
  kinds = (getattr(home, "Optimizer", None) for home in (optimizers, legacy))
  return tuple(kind for kind in kinds if kind is not None)


def _kind(opt: Any) -> str:
  kind = opt if isinstance(opt, type) else type(opt)
  prefix = "the class " if kind is opt else ""
  return f"{prefix}{kind.__module__}.{kind.__qualname__}"


def _remedy(opt: Any, package: str) -> str:
  if isinstance(opt, type):
    return f"Pass an object, not the class: {opt.__name__}()."
  for other in ("keras", "tf_keras"):
    if isinstance(opt, _optimizer_classes(other)):
      module = "keras3" if other == "keras" else other
      return (
        f"This is an optimizer of {other}. Wrap it in the class for"
        f" {other}: from tf_cross_shard.{module} import CrossShardOptimizer"
      )
  return f"Use an optimizer such as {package}.optimizers.Adam()."
