"""An optimizer that is another one in all but its updates.

Everything that belongs to the encapsulated optimizer is read, written, saved
and restored through the wrapper as if the wrapper were not there. This half
knows no Keras; each Keras has a class of its own that derives from it and from
that Keras' optimizer.
"""

import sys
from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf
from absl import logging

from tf_cross_shard.inner_optimizer import base

_HIDDEN: Final = frozenset(("inner_optimizer", "get_slot", "get_slot_names"))


class VariableList(list[Any]):
  """Variables that read as a property and, as in version 1, as a method."""

  def __call__(self) -> "VariableList":
    """Answers itself."""
    return self


class Delegating:
  """Forwards state and settings to an encapsulated optimizer.

  The clipping arguments and the name stay this object's own.
  """

  _argument = "opt"  # what the constructor calls the encapsulated optimizer

  name: str
  clipnorm: float | None
  global_clipnorm: float | None
  clipvalue: float | None

  def __init__(self, opt: Any, name: str, **clipping: float | None) -> None:
    """Makes the wrapper; each Keras has its way."""
    raise NotImplementedError

  @classmethod
  def _as_optimizer(cls, opt: Any) -> Any:
    """`opt` as an optimizer of this Keras."""
    raise NotImplementedError

  @classmethod
  def _check_within(cls, wrapper: "Delegating") -> None:
    """Raises `ValueError` for a wrapper that this one must not encapsulate."""
    raise ValueError(
      f"`{cls._argument}` must not be or contain a {type(wrapper).__name__}"
      f" itself; got {wrapper.name!r}. Gradients would be reduced twice."
      " Encapsulate its inner optimizer."
    )

  @staticmethod
  def _serialize(opt: Any) -> Any:
    """An optimizer as a dictionary."""
    raise NotImplementedError

  @staticmethod
  def _deserialize(config: Any, custom_objects: Any) -> Any:
    """The optimizer that a dictionary describes, not built."""
    raise NotImplementedError

  def _before_saving(self) -> None:
    """Called before the state is saved by others than this package."""

  def _encapsulate(self, inner: base.InnerOptimizer) -> None:
    """Keeps the encapsulated optimizer; from here on it is seen through."""
    self._inner = inner
    self._wait_for_slots([])

  def _change_places(
    self,
    around: Any,
    adapter: Callable[[base.InnerOptimizer, Any], base.InnerOptimizer],
    instead: Any,
  ) -> None:
    """Reduces before a loss scaling optimizer around this one looks."""
    inner = self._inner.encapsulated  # What was around before is out of use.
    if inner.scales_dynamically:
      logging.info(
        "%s encapsulates a loss scaling optimizer and is encapsulated by one,"
        " as compile() does under mixed_float16. The inner one scales; the"
        " outer one hands all on.",
        self.name,
      )
    else:
      inner = adapter(inner, around)
    self._inner = inner
    for name in dir(instead):
      if not name.startswith("_"):
        vars(around)[name] = getattr(instead, name)

  def __getattr__(self, name: str) -> Any:
    """Whatever the wrapper does not have is the encapsulated optimizer's."""
    inner = self.__dict__.get("_inner")
    if inner is None or (name.startswith("__") and name.endswith("__")):
      raise AttributeError(
        f"{type(self).__name__!r} object has no attribute {name!r}"
      )
    return getattr(inner.optimizer, name)

  def __dir__(self) -> list[str]:
    """The wrapper's own names, but those by which savers would save twice.

    Keras saves each optimizer that it finds among an object's names beside
    the object. tf.train.Checkpoint takes an object with slot names for a
    version 1 optimizer and saves the slots apart from the variables.
    """
    return [name for name in super().__dir__() if name not in _HIDDEN]

  def __setattr__(self, name: str, value: Any) -> None:
    """Writes where the attribute lives."""
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

  def __delattr__(self, name: str) -> None:
    """Deletes where the attribute lives."""
    if name in self.__dict__ or hasattr(type(self), name):
      super().__delattr__(name)
    else:
      delattr(self._inner.optimizer, name)

  @property
  def inner_optimizer(self) -> Any:
    """The encapsulated optimizer itself."""
    return self._inner.optimizer

  @property
  def learning_rate(self) -> Any:
    """The encapsulated optimizer's learning rate."""
    return self._inner.optimizer.learning_rate

  @learning_rate.setter
  def learning_rate(self, learning_rate: Any) -> None:
    self._inner.optimizer.learning_rate = learning_rate

  @property
  def iterations(self) -> Any:
    """The encapsulated optimizer's iteration count."""
    return self._inner.optimizer.iterations

  @iterations.setter
  def iterations(self, iterations: Any) -> None:
    self._inner.optimizer.iterations = iterations

  @property
  def variables(self) -> VariableList:
    """The encapsulated optimizer's variables, and none of the wrapper's."""
    return VariableList(self._inner.variables)

  def build(self, variables: Any) -> None:
    """Makes the encapsulated optimizer's slots.

    What was pickled waits for the slots: restore a checkpoint after `build`.
    """
    if self._unrestored and not tf.distribute.in_cross_replica_context():
      replicas = tf.distribute.get_strategy().num_replicas_in_sync
      if replicas > 1:
        raise RuntimeError(
          f"{self.name} was unpickled or copied and is not built; each of the"
          f" {replicas} replicas would build it for itself. Call"
          " build(variables) inside `with strategy.scope():` before the first"
          " step."
        )
    self._inner.build(variables)
    if self._unrestored:
      # Once, now: traced into a function it would happen in every step.
      with tf.init_scope():
        self._restore(self._unrestored)

  def set_weights(self, weights: Any) -> None:
    """Sets the encapsulated optimizer's variables."""
    self._inner.optimizer.set_weights(weights)

  def save_own_variables(self, store: Any) -> None:
    """Saves what the encapsulated optimizer would save."""
    self._before_saving()
    self._inner.optimizer.save_own_variables(store)

  def load_own_variables(self, store: Any) -> None:
    """Loads what the encapsulated optimizer saved, wrapped or not."""
    self._inner.optimizer.load_own_variables(store)

  def exclude_from_weight_decay(
    self, var_list: Any = None, var_names: Any = None
  ) -> None:
    """Keeps variables out of the encapsulated optimizer's weight decay."""
    self._inner.optimizer.exclude_from_weight_decay(var_list, var_names)

  def update_step(self, gradient: Any, variable: Any, *rate: Any) -> None:
    """One variable's update by the encapsulated optimizer, not reduced."""
    self._inner.optimizer.update_step(gradient, variable, *rate)

  def finalize_variable_values(self, var_list: Any) -> None:
    """Writes moving averages into the variables where EMA is used."""
    self._inner.optimizer.finalize_variable_values(var_list)

  def __reduce__(self) -> tuple[Any, ...]:
    """Pickles and copies settings and state."""
    self._before_saving()
    current = [(self._inner.path(v), v.numpy()) for v in self._inner.state]
    waiting = enumerate(self._unrestored)
    state = [saved or current[i] for i, saved in waiting] or current
    return _unpickle, (type(self), self.get_config(), state)

  def _restore(self, state: list[Any]) -> None:
    """Assigns saved values to the variables there are; keeps the others.

    The slots of an optimizer that is not built yet are filled by `build`. What
    has its value becomes None in the list: it may change before the slots come.
    """
    variables = self._inner.state
    complete = len(variables) == len(state)
    if complete and any(
      saved and saved[1].shape != tuple(variable.shape)
      for saved, variable in zip(state, variables, strict=True)
    ):
      self._wait_for_slots([])
      raise ValueError(
        f"{self.name} was unpickled or copied with slots for variables of other"
        f" shapes than {self._shapes()}."
        " Build it on variables of the same shapes in the same order, or make"
        " a new optimizer."
      )
    waiting = list(state)
    for i, (saved, variable) in enumerate(zip(state, variables, strict=False)):
      # Order alone tells which is which only when all are there.
      if saved and (complete or self._inner.path(variable) == saved[0]):
        variable.assign(saved[1])
        waiting[i] = None
    self._wait_for_slots([] if complete else waiting)

  def _shapes(self) -> list[tuple[int, ...]]:
    """The shapes of what the optimizer was built on."""
    return [tuple(v.shape) for v in self._inner.trainable_variables]

  def _wait_for_slots(self, state: list[Any]) -> None:
    """Keeps saved values, as they are: assigned, a list would be tracked."""
    self.__dict__["_unrestored"] = state

  # tf.train.Checkpoint sees the encapsulated optimizer in this one's place.

  def _checkpointed(self) -> Any:
    """Whose children a checkpoint sees: its own while it is being made."""
    inner = self.__dict__.get("_inner")
    return super() if inner is None else inner.optimizer

  def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
    """What a checkpoint saves."""
    self._before_saving()
    return self._checkpointed()._trackable_children(*args, **kwargs)

  def _lookup_dependency(self, *args: Any, **kwargs: Any) -> Any:
    """Where a checkpoint restores to."""
    return self._checkpointed()._lookup_dependency(*args, **kwargs)

  @property
  def _deferred_dependencies(self) -> Any:
    """Saved values that wait for slots to be built."""
    return self._checkpointed()._deferred_dependencies


def as_optimizer(
  wrapper: type[Delegating],
  opt: Any,
  get: Callable[[Any], Any],
  kinds: tuple[type[Any], ...],
  spelling: str,
  convert: Callable[[Any], Any],
) -> Any:
  """`opt` as an optimizer that a `Delegating` of one Keras can encapsulate."""
  if isinstance(opt, (str, dict)):
    try:
      opt = get(opt)
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(
        f"`{wrapper._argument}` must name a Keras optimizer; got {opt!r}. Use"
        ' a name such as "adam", or an optimizer object.'
      ) from error
  opt = convert(opt)
  layers = [opt]
  while layers:
    layer = layers.pop()
    if isinstance(layer, Delegating):
      wrapper._check_within(layer)
    within = getattr(layer, "inner_optimizer", None)
    layers += [each for each in (within,) if each is not None]
    layers += getattr(layer, "_inner_optimizers", ())  # a MultiOptimizer's
  if not isinstance(opt, kinds):
    found = f"{type(opt).__module__}.{type(opt).__qualname__}"
    raise TypeError(
      f"`{wrapper._argument}` must be an optimizer of {spelling} or its name;"
      f" got {found}."
      f" {_remedy(opt, spelling)}"
    )
  return opt


def _remedy(opt: Any, spelling: str) -> str:
  """What to do with something that is no optimizer of this Keras."""
  for package, module in (("keras", "keras3"), ("tf_keras", "tf_keras")):
    # Nobody has an optimizer of a Keras that is not loaded.
    optimizers = getattr(sys.modules.get(package), "optimizers", None)
    kinds = [
      getattr(where, "Optimizer", None)
      for where in (optimizers, getattr(optimizers, "legacy", None))
    ]
    if isinstance(opt, tuple(kind for kind in kinds if kind)):
      return (
        f"That is an optimizer of {package}. Encapsulate it in the class for"
        f" it: from tf_cross_shard.{module} import CrossShardOptimizer"
      )
  return f"Use one such as {spelling}.Adam()."


def _unpickle(cls: type[Any], config: dict[str, Any], state: list[Any]) -> Any:
  """The reverse of `DelegatingOptimizer.__reduce__`."""
  optimizer = cls.from_config(config)
  optimizer._restore(state)
  return optimizer
