"""The facade: a Keras optimizer that forwards everything except its step.

You read, write, save and restore the variables and settings of the wrapped
optimizer through the facade, as if the facade were not there. A file that was
saved without it loads with it, and vice versa. There are three ways to save:
`get_config` (settings), Keras' files, and `tf.train.Checkpoint`. For pickles
and copies, Keras 3 writes such a file and reads it again
(`KerasSaveable.__reduce__`); tf_keras' facade takes the configuration.
"""

import copy
import reprlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import loss_factor, single_program, validation
from tf_cross_shard._src.core.facade import arguments
from tf_cross_shard._src.core.gradients import differentiate
from tf_cross_shard._src.core.wrapped import keras_classes, overriding
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib

# Names that `dir` does not list. Keras saves each optimizer that it finds under
# a listed name, and tf.train.Checkpoint saves the slots of an object that lists
# `get_slot_names`. Both would save the same variables twice.
_HIDDEN: Final = frozenset(("inner_optimizer", "get_slot_names"))
# Not every way to take a step calls these.
_FINAL: Final = (
  *("aggregate_gradients", "apply", "compute_gradients", "update_step"),
)
# The optimizer whose overridden `apply_gradients` runs. Replicas of a
# MirroredStrategy are threads.
_calls = threading.local()


class VariableList(list[Any]):
  """A list for `variables` that, as in TensorFlow 1, can be called."""

  def __call__(self) -> "VariableList":
    return self


def forwarded(name: str) -> property:
  """Returns a property that forwards to the wrapped optimizer."""

  def get(self: Any) -> Any:
    wrapped = wrapped_lib.find(self)
    return None if wrapped is None else getattr(wrapped.optimizer, name)

  def set_value(self: Any, value: Any) -> None:
    wrapped = wrapped_lib.find(self)
    if wrapped is not None:  # It is None while Keras' constructor runs.
      setattr(wrapped.optimizer, name, value)

  return property(get, set_value, doc=f"`{name}` of the wrapped optimizer.")


class Facade:
  """Forwards state and settings to a wrapped optimizer.

  Subclasses take steps: `_gradients`, `_apply_pairs`, `apply_gradients`.
  """

  GATE_NONE = differentiate.GATE_NONE
  GATE_OP = differentiate.GATE_OP
  GATE_GRAPH = differentiate.GATE_GRAPH

  _package: str  # "keras" or "tf_keras"
  # Does what Keras' constructor does, with `opt`, a name and clipping limits.
  _start: Callable[[Any, str, dict[str, Any]], None]
  _wrapped: wrapped_lib.WrappedOptimizer
  _argument = "opt"  # The constructor's name for the wrapped optimizer.
  name: Any
  clipnorm: float | None
  global_clipnorm: float | None
  clipvalue: float | None

  apply_gradients: Callable[..., Any]
  # The arguments are a loss, the variables, a tape, what the loss is averaged
  # over by default, and options for graphs.
  _gradients: Callable[
    [Any, Any, Any, str, differentiate.GraphOptions], differentiate.Pairs
  ]
  # Takes the step of `apply`, with gradients and variables.
  _apply_pairs: Callable[[list[Any], list[Any]], None]

  def __init__(self, opt: Any, name: str, **limits: float | None) -> None:
    """Becomes an optimizer of Keras; then begins to forward attributes."""
    for method in filter(self._overrides, _FINAL):
      raise ValueError(
        f"{type(self).__name__} must not override {method}(), which not every"
        " way to take a step calls. Override apply_gradients(), or"
        " update_step() in the class of the wrapped optimizer."
      )
    self._start(opt, name, limits)
    wrapped = wrapped_lib.WrappedOptimizer(opt)
    if wrapped.is_built:
      validation.check_not_overwritten(wrapped.trainable_variables)
    vars(self)[wrapped_lib.ATTRIBUTE] = wrapped

  @classmethod
  def _overrides(cls, name: str) -> bool:
    """Returns whether a subclass outside of this package defines a method."""
    owners = (kind for kind in cls.__mro__ if name in vars(kind))
    package = __name__.partition(".")[0]
    return next(owners, Facade).__module__.partition(".")[0] != package

  @classmethod
  def _as_optimizer(cls, opt: Any) -> Any:
    """Returns `opt` as an optimizer of this Keras, or raises an error."""
    opt = arguments.to_optimizer(opt, cls._argument, cls._package)
    for nested in nested_lib.nested_optimizers(opt):
      if isinstance(nested, Facade):
        cls._check_facade_within(nested, opt)
      keras_classes.check_is_one(nested, cls._argument)
    arguments.check_class(opt, cls._argument, cls._package)
    return opt

  @classmethod
  def _check_facade_within(cls, facade: "Facade", opt: Any) -> None:
    """Raises `ValueError` for a facade that `opt` must not be or contain."""
    raise ValueError(
      f"`{cls._argument}` must not be or contain a {type(facade).__name__}"
      f" itself; got {facade.name!r}. Gradients would be reduced twice."
      " Pass the optimizer inside it."
    )

  # Attributes and settings.

  learning_rate = forwarded("learning_rate")
  iterations = forwarded("iterations")
  update_step = forwarded("update_step")

  def __getattr__(self, name: str) -> Any:
    """Reads a missing attribute from the wrapped optimizer."""
    wrapped = wrapped_lib.find(self)
    if wrapped is None or (name.startswith("__") and name.endswith("__")):
      raise AttributeError(
        f"{type(self).__name__!r} object has no attribute {name!r}"
      )
    return getattr(wrapped.optimizer, name)

  def __setattr__(self, name: str, value: Any) -> None:
    """Writes to the wrapped optimizer if only it has the attribute."""
    wrapped = wrapped_lib.find(self)
    if (
      wrapped is not None
      and name not in self.__dict__
      and not hasattr(type(self), name)
      and hasattr(wrapped.optimizer, name)
    ):
      setattr(wrapped.optimizer, name, value)
    else:
      super().__setattr__(name, value)

  def __repr__(self) -> str:
    """Returns the class, the wrapped optimizer, and changed arguments."""
    if wrapped_lib.find(self) is None:  # Keras' constructor is running.
      return object.__repr__(self)
    opt = self._wrapped.optimizer
    shown = [repr(opt) if isinstance(opt, Facade) else type(opt).__name__]
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
  def exclude_from_weight_decay(self) -> Any:
    """The method of the optimizer inside any loss scaling."""
    # A LossScaleOptimizer of Keras 3 would keep the exclusions to itself.
    return self._wrapped.base_optimizer.exclude_from_weight_decay

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

    >>> import tensorflow as tf
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
      variables: All variables that you will train with this optimizer.

    Raises:
      DisagreementError: If another worker has different variables, settings or
        libraries.
      NotImplementedError: If a variable is a float8 scale of Keras.
      RuntimeError: If a replica would create slots only for itself, or if
        restored values are waiting for their variables and only the slots of
        this replica would receive the values. Call `build` inside
        `strategy.scope()`, but outside `strategy.run`.
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

  # Gradients and steps.

  def compute_gradients(
    self,
    loss: Callable[[], Any] | tf.Tensor,
    var_list: "validation.Variables | None" = None,
    gate_gradients: int = differentiate.GATE_OP,
    aggregation_method: int | None = None,
    colocate_gradients_with_ops: bool = False,
    grad_loss: Any = None,
    *,
    tape: tf.GradientTape | None = None,
  ) -> differentiate.Pairs:
    """Scales the loss and returns this replica's, or this tower's, gradients.

    The gradients are not reduced yet, so you can clip or change the
    gradients of each replica. They include the loss factor, so their sum over
    the group is the mean.

    >>> import tensorflow as tf
    >>> from tf_cross_shard import CrossShardOptimizer
    >>> weight = tf.Variable(3.0)
    >>> optimizer = CrossShardOptimizer("sgd")
    >>> [(grad, _)] = optimizer.compute_gradients(lambda: weight**2)
    >>> float(grad)
    6.0

    Args:
      loss: A function of no arguments, a tensor recorded by `tape`, or a
        tensor of the graph that is being built. It must be a scalar for a mean
        over replicas. In a tower, it can be any tensor that was computed there.
      var_list: Trainable variables. None means all variables that the loss
        depends on. In this case, build the optimizer first, so that it knows
        which variables are Keras variables and which layers are frozen;
        tf_keras also trains frozen variables.
      gate_gradients: How graphs order gradients, a `GATE_` constant. This and
        the next three arguments have no effect in eager execution.
      aggregation_method: How graphs combine gradient terms, a constant of
        `tf.AggregationMethod`.
      colocate_gradients_with_ops: Whether graphs place gradients on the devices
        of their forward operations.
      grad_loss: The gradient with respect to `loss`, a tensor in the shape of
        `loss`; None for ones.
      tape: The tape that recorded `loss`.

    Returns:
      A list of (gradient, variable). The gradient is None for a variable of
      `var_list` that the loss does not depend on.

    Raises:
      RuntimeError: If you call it in the cross-replica context.
      ValueError: If an argument has no valid value.
      TypeError: If an argument has the wrong type.
    """
    options = differentiate.GraphOptions(
      gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
    )
    return self._gradients(loss, var_list, tape, loss_factor.REPLICA, options)

  def minimize(
    self,
    loss: Callable[[], Any] | tf.Tensor,
    global_step: "validation.Variable | None" = None,
    var_list: "validation.Variables | None" = None,
    gate_gradients: int = differentiate.GATE_OP,
    aggregation_method: int | None = None,
    colocate_gradients_with_ops: bool = False,
    name: str | None = None,
    grad_loss: Any = None,
    *,
    tape: tf.GradientTape | None = None,
  ) -> Any:
    """Calls `compute_gradients`, then `apply_gradients`.

    You can also call it as in Keras: `minimize(loss, var_list, tape=tape)`.

    >>> import tensorflow as tf
    >>> from tf_cross_shard import CrossShardOptimizer
    >>> weight = tf.Variable(3.0)
    >>> optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(0.5))
    >>> with tf.GradientTape() as tape:
    ...   loss = weight**2
    >>> int(optimizer.minimize(loss, [weight], tape=tape))
    1
    >>> float(weight.numpy())
    0.0

    Args:
      loss: As in `compute_gradients`.
      global_step: An integer variable, incremented by one afterwards.
      var_list: As in `compute_gradients`.
      gate_gradients: As in `compute_gradients`.
      aggregation_method: As in `compute_gradients`.
      colocate_gradients_with_ops: As in `compute_gradients`.
      name: The name scope of the operations; this optimizer's name if None.
      grad_loss: As in `compute_gradients`.
      tape: The tape that recorded `loss`.

    Returns:
      The iteration count after the step, as `apply_gradients` does.

    Raises:
      RuntimeError: As in `apply_gradients`.
      ValueError: As in `compute_gradients` and `apply_gradients`.
      TypeError: As in `compute_gradients` and `apply_gradients`.
    """
    if var_list is None and validation.is_var_list(global_step):
      global_step, var_list = None, global_step  # Keras' order of arguments.
    validation.check_global_step(global_step)
    is_empty = isinstance(var_list, (list, tuple)) and not var_list
    if is_empty and tape is not None:
      # `fit` of tf_keras, with a model that has nothing to train.
      return self._wrapped.iterations()
    options = differentiate.GraphOptions(
      gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
    )
    default = loss_factor.REPLICA if tape is None else loss_factor.GLOBAL
    pairs = self._gradients(loss, var_list, tape, default, options)
    return self.apply_gradients(pairs, global_step, name=name)

  @tf.autograph.experimental.do_not_convert
  def apply(
    self, grads: Sequence[Any], trainable_variables: Any = None
  ) -> None:
    """Takes a step, like `apply_gradients`, but with two lists; Keras calls it.

    In a custom loop, scale the loss with `scale_loss` first. Keras' losses are
    averaged over all replicas' examples, so a mean without groups needs no
    factor.

    Args:
      grads: This replica's gradients. An empty list does nothing.
      trainable_variables: The variables of the gradients. None means the
        variables that the optimizer was built on.

    Raises:
      ValueError: If the lists do not match or the optimizer is not built.
    """
    grads = list(grads)
    if not grads:
      return
    if trainable_variables is None:
      trainable_variables = self._wrapped.whole.trainable_variables
    trainable_variables = list(trainable_variables)
    if len(grads) != len(trainable_variables):
      raise ValueError(
        f"`grads` must contain one gradient per variable; got {len(grads)}"
        f" gradients for {len(trainable_variables)} variables. Pass the"
        " variables, or call build(variables) first."
      )
    pairs = zip(grads, trainable_variables, strict=True)
    if not self._overrides("apply_gradients"):
      self._apply_pairs(*validation.check_pairs(pairs))
      return
    if getattr(_calls, "overridden", None) is self:
      raise RuntimeError(
        f"apply_gradients of {type(self).__name__} calls apply(), which calls"
        " it again. Call super().apply_gradients(grads_and_vars) there."
      )
    with overriding.overriding(_calls, overridden=self):
      self.apply_gradients(pairs)

  # Saved state.

  def get_config(self) -> dict[str, Any]:
    """Returns the constructor's arguments in serializable form."""
    wrapped = self._wrapped
    opt = wrapped.keras.saving.serialize_keras_object(wrapped.optimizer)
    return {self._argument: opt, **self._config()}

  def _config(self) -> dict[str, Any]:
    return {}

  @classmethod
  def from_config(
    cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
  ) -> Any:
    """Creates an optimizer from the result of `get_config`.

    Args:
      config: A result of `get_config`; not changed.
      custom_objects: Classes that the wrapped optimizer may need, by name.

    Returns:
      A new optimizer, not built.
    """
    # A copy, because Keras changes the dictionary.
    opt = copy.deepcopy(config[cls._argument])
    opt = cls._deserialize(opt, custom_objects)
    return cls(**{**config, cls._argument: opt})

  @classmethod
  def _deserialize(cls, config: Any, custom_objects: Any) -> Any:
    """Returns the optimizer that a dictionary describes, not built."""
    # Do not use optimizers.deserialize, which does not know Lamb in Keras 3.
    saving = sys.modules[cls._package].saving
    return saving.deserialize_keras_object(config, custom_objects)

  def _before_saving(self) -> None:
    """Runs before TensorFlow or Keras save the state."""

  def set_weights(self, weights: Any) -> None:
    """Assigns values to the wrapped optimizer's variables, in order."""
    self._wrapped.whole.set_weights(weights)

  def save_own_variables(self, store: Any) -> None:
    """Saves what the wrapped optimizer would save."""
    self._before_saving()
    self._wrapped.whole.save_own_variables(store)

  def load_own_variables(self, store: Any) -> None:
    """Loads what the wrapped optimizer saved, wrapped or not."""
    self._wrapped.whole.load_own_variables(store)

  # tf.train.Checkpoint sees the wrapped optimizer instead of the facade.

  def _checkpointed(self) -> Any:
    wrapped = wrapped_lib.find(self)
    # While Keras' constructor runs, checkpoints see the facade itself.
    return super() if wrapped is None else wrapped.checkpointed

  def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
    self._before_saving()
    checkpointed = self._checkpointed()
    return checkpointed._trackable_children(*args, **kwargs)  # noqa: SLF001

  def _lookup_dependency(self, *args: Any, **kwargs: Any) -> Any:
    checkpointed = self._checkpointed()
    return checkpointed._lookup_dependency(*args, **kwargs)  # noqa: SLF001

  @property
  def _deferred_dependencies(self) -> Any:
    """The checkpoint's values that wait until the slots are created."""
    return self._checkpointed()._deferred_dependencies  # noqa: SLF001
