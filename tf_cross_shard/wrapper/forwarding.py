"""An optimizer that is another one in all but its update step.

What belongs to the encapsulated optimizer is read, written, saved and restored
through the wrapper as if the wrapper were not there. `keras3.wrapper`
and `tf_keras.wrapper` make it an optimizer of one Keras.
"""

import inspect
import reprlib
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import tensorflow as tf

from tf_cross_shard import validation
from tf_cross_shard.inner_optimizer import base, optimizer_state
from tf_cross_shard.wrapper import loss_scaling, minimizer, saving

# Keras saves each optimizer that it finds among an object's names, and
# tf.train.Checkpoint takes an object with slot names for a version 1 optimizer.
# Both would save the same variables twice.
_HIDDEN: Final = frozenset(("inner_optimizer", "get_slot_names"))


_Class = TypeVar("_Class", bound=type[Any])

# Converts an optimizer of version 1 to one of a Keras, "keras" or "tf_keras":
# `migration` is above this module, and puts its function here.
v1_converters: Final[list[Callable[[Any, str], Any]]] = []


class VariableList(list[Any]):
  """Variables that read as a property and, as in version 1, as a method."""

  def __call__(self) -> "VariableList":
    """Returns itself."""
    return self


def _forwarded(name: str) -> property:
  """A property that is the encapsulated optimizer's."""

  def get(self: Any) -> Any:
    inner = self.__dict__.get("_inner")
    return None if inner is None else getattr(inner.optimizer, name)

  def set_value(self: Any, value: Any) -> None:
    inner = self.__dict__.get("_inner")
    if inner is not None:  # Keras' constructor sets its defaults before.
      setattr(inner.optimizer, name, value)

  return property(
    get, set_value, doc=f"`{name}` of the encapsulated optimizer."
  )


class OptimizerWrapper(minimizer.Minimizer, saving.SavedState):
  """Forwards state and settings to an encapsulated optimizer.

  The name and the clipping arguments are the wrapper's own.
  """

  _package: str  # "keras" or "tf_keras"
  _argument = "opt"  # The constructor's name for the encapsulated optimizer.
  clipnorm: float | None
  global_clipnorm: float | None
  clipvalue: float | None

  def __init__(self, opt: Any, name: str, **clipping: float | None) -> None:
    """Makes the wrapper; each Keras has its way."""
    raise NotImplementedError

  @classmethod
  def _keras(cls) -> Any:
    """Returns the Keras that this is an optimizer of."""
    return sys.modules[cls._package]

  @classmethod
  def _serialize(cls, opt: Any) -> Any:
    """An optimizer as a dictionary."""
    return cls._keras().saving.serialize_keras_object(opt)

  @classmethod
  def _deserialize(cls, config: Any, custom_objects: Any) -> Any:
    """The optimizer that a dictionary describes, not built."""
    # Not optimizers.deserialize: that of Keras 3 lacks Lamb.
    return cls._keras().saving.deserialize_keras_object(config, custom_objects)

  learning_rate = _forwarded("learning_rate")
  iterations = _forwarded("iterations")
  exclude_from_weight_decay = _forwarded("exclude_from_weight_decay")
  update_step = _forwarded("update_step")

  def _encapsulate(self, inner: base.InnerOptimizer) -> None:
    """Keeps the encapsulated optimizer; from here on it is seen through."""
    self._inner = inner
    self._keep_until_built([])

  @classmethod
  def _as_optimizer(cls, opt: Any) -> Any:
    """`opt` as an optimizer of this Keras, checked."""
    if isinstance(opt, (str, dict)):
      try:
        opt = cls._keras().optimizers.get(opt)
      except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
          f"`{cls._argument}` must name a Keras optimizer; got {opt!r}. Use"
          ' a name such as "adam", or an optimizer object.'
        ) from error
    elif isinstance(opt, tf.compat.v1.train.Optimizer):
      opt = v1_converters[0](opt, cls._package)
    for layer in optimizer_state.nested_optimizers(opt):
      if isinstance(layer, OptimizerWrapper):
        cls._check_wrapper_within(layer, opt)
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
      " Encapsulate its inner optimizer."
    )

  def _reduce_before(self, around: Any, methods: Any) -> None:
    """Changes places with a LossScaleOptimizer around this optimizer."""
    loss_scaling.change_places(self, around, methods)

  def __getattr__(self, name: str) -> Any:
    """Reads what the wrapper does not have from the encapsulated optimizer."""
    inner = self.__dict__.get("_inner")
    if inner is None or (name.startswith("__") and name.endswith("__")):
      raise AttributeError(
        f"{type(self).__name__!r} object has no attribute {name!r}"
      )
    return getattr(inner.optimizer, name)

  def __setattr__(self, name: str, value: Any) -> None:
    """Writes what only the encapsulated optimizer has to that one."""
    inner = self.__dict__.get("_inner")
    if (
      inner is not None
      and name not in self.__dict__
      and not hasattr(type(self), name)
      and hasattr(inner.optimizer, name)
    ):
      setattr(inner.optimizer, name, value)
    else:
      super().__setattr__(name, value)

  def __repr__(self) -> str:
    """The class, what it encapsulates, and what differs from the defaults."""
    if "_inner" not in self.__dict__:  # Keras' constructor is at work.
      return object.__repr__(self)
    opt = self._inner.optimizer
    is_wrapper = isinstance(opt, OptimizerWrapper)
    shown = [repr(opt) if is_wrapper else type(opt).__name__]
    for name, value in self._differing().items():
      shown.append(f"{name}={reprlib.repr(value)}")
    return f"{type(self).__name__}({', '.join(shown)})"

  def _differing(self) -> dict[str, Any]:
    """The other arguments that differ from their defaults."""
    return {}

  def __dir__(self) -> list[str]:
    """The wrapper's own names, but those by which savers would save twice."""
    return [name for name in super().__dir__() if name not in _HIDDEN]

  @property
  def inner_optimizer(self) -> Any:
    """The encapsulated optimizer itself."""
    return self._inner.optimizer

  @property
  def variables(self) -> VariableList:
    """The encapsulated optimizer's variables, and none of the wrapper's."""
    return VariableList(self._inner.unsharded_state.variables)

  def get_name(self) -> str:
    """Returns the name given to the constructor."""
    return str(self.name)

  def get_slot(self, var: Any, name: str) -> Any:
    """The variable that the encapsulated optimizer made for `var`, or None.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> weight = tf.Variable([1.0, 2.0])
    >>> optimizer = CrossShardOptimizer("adam")
    >>> optimizer.build([weight])
    >>> velocity = optimizer.get_slot_names()[-1]
    >>> optimizer.get_slot(weight, velocity).shape.as_list()
    [2]

    Args:
      var: A variable that the optimizer was built on.
      name: One of `get_slot_names()`.

    Returns:
      The slot; None where there is none. Under `shard_update` it is read only.

    Raises:
      TypeError: If `var` is not a variable.
    """
    validation.check_variable("var", var)
    return self._inner.unsharded_state.view(var, name)

  def get_slot_names(self) -> list[str]:
    """Names of the slots; empty before the optimizer is built."""
    return self._inner.slot_names()

  def build(self, variables: Any) -> None:
    """Makes the encapsulated optimizer's slots.

    Values that were pickled wait for the slots: restore a checkpoint after
    `build`.

    Args:
      variables: All variables that will ever be trained.

    Raises:
      ValueError: If pickled values have other shapes.
      RuntimeError: If saved values wait for the slots and this is called by
        one of several replicas, whose slots alone would receive them.
    """
    waits = self._unrestored or getattr(
      self._inner.checkpointed, "waits", False
    )
    if waits and not tf.distribute.in_cross_replica_context():
      replicas = tf.distribute.get_strategy().num_replicas_in_sync
      if replicas > 1:
        raise RuntimeError(
          f"{self.name} was unpickled, copied or restored and is not built;"
          f" each of the {replicas} replicas would build it for itself. Call"
          " build(variables) inside `with strategy.scope():` before the first"
          " step."
        )
    self._build_inner(variables)
    if self._unrestored:
      # Traced into a function it would happen in every step.
      with tf.init_scope():
        self._restore(self._unrestored)

  def _build_inner(self, variables: list[Any]) -> None:
    """Makes the slots."""
    self._inner.build(variables)

  def finalize_variable_values(self, var_list: Any) -> None:
    """Writes moving averages into the variables where EMA is used."""
    self._inner.write_averages(var_list)


def documented(cls: _Class) -> _Class:
  """Gives the class that people import the text of its first base, too.

  The two Kerases' classes say what is theirs; what is the same in both, and
  the constructor's arguments, are written once.
  """
  base = cls.__bases__[0]
  own, shared, init = map(inspect.getdoc, (cls, base, vars(base)["__init__"]))
  if own and shared and init:  # python -OO leaves all of them out.
    _, _, more = shared.partition("\n\n")
    more, mark, references = more.partition("References:")
    whole = [own, more.strip(), init, mark + references]
    cls.__doc__ = "\n\n".join(filter(None, whole))
  return cls


def _optimizer_classes(package: str) -> tuple[type[Any], ...]:
  """The optimizer classes of a Keras, of which tf_keras has an older one."""
  # Nobody has an optimizer of a Keras that is not loaded.
  optimizers = getattr(sys.modules.get(package), "optimizers", None)
  legacy = getattr(optimizers, "legacy", None)
  kinds = (getattr(home, "Optimizer", None) for home in (optimizers, legacy))
  return tuple(kind for kind in kinds if kind is not None)


def _kind(opt: Any) -> str:
  """Returns the class of an object, in words."""
  kind = opt if isinstance(opt, type) else type(opt)
  prefix = "the class " if kind is opt else ""
  return f"{prefix}{kind.__module__}.{kind.__qualname__}"


def _remedy(opt: Any, package: str) -> str:
  """Returns the remedy for an object that is no optimizer of this Keras."""
  if isinstance(opt, type):
    return f"Make an optimizer of it: {opt.__name__}()."
  for other in ("keras", "tf_keras"):
    if isinstance(opt, _optimizer_classes(other)):
      module = "keras3" if other == "keras" else other
      return (
        f"That is an optimizer of {other}. Encapsulate it in the class for it:"
        f" from tf_cross_shard.{module} import CrossShardOptimizer"
      )
  return f"Use one such as {package}.optimizers.Adam()."
