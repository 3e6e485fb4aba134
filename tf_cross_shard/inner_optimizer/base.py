"""The encapsulated optimizer, as the way of a gradient needs it."""

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import (
  fused_update,
  libraries,
  optimizer_state,
)

_KERAS: Final = ("keras.src.", "tf_keras.src.")


class InnerOptimizer(abc.ABC):
  """The encapsulated optimizer, seen alike in both Kerases.

  Attributes:
    optimizer: The user's optimizer.
    innermost: The optimizer that keeps the slots, below any loss scaling.
    outer_loss_scaler: A LossScaleOptimizer that encapsulates *our* optimizer,
      or None; see `loss_scaling`.
    whole_state: `step.sharded_state.PlainState` where state is in parts; else
      None.
    checkpointed: The object whose children a checkpoint sees: the optimizer, or
      what takes its place where its state is in parts.
    fused: Whether kernels or XLA do the optimizer's steps; see `fused_update`.
    row_step: Takes the place of `update_step` for row-sparse gradients; is
      handed `update_step` itself before its arguments. None for nothing.
  """

  # The names of Keras' methods, which stand in the folder of that Keras.
  _decay_method: str
  _clip_method: str
  # The dictionary of places, by a variable's key.
  _places: str

  def __init__(self, optimizer: Any) -> None:
    self.optimizer = optimizer
    self.innermost = innermost(optimizer)
    self.outer_loss_scaler: Any = None
    self.whole_state: Any = None
    self.checkpointed: Any = optimizer
    self.fused: bool | None = False
    self.row_step: Callable[..., None] | None = None
    self._thread = threading.local()  # Replicas may be threads.

  @property
  def name(self) -> str:
    """The optimizer's name."""
    # tf_keras' LossScaleOptimizer has none, legacy optimizers a private one.
    for optimizer in (self.optimizer, self.innermost):
      if hasattr(optimizer, "name"):
        return str(optimizer.name)
    return libraries.name(self.innermost)

  @property
  def strategy(self) -> tf.distribute.Strategy:
    """The strategy whose scope the optimizer was made in."""
    made_in = self.innermost._distribution_strategy
    # A legacy optimizer that was made outside all scopes has None.
    return made_in or tf.distribute.get_strategy()

  @property
  @abc.abstractmethod
  def is_built(self) -> bool:
    """Whether the slots exist."""

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they exist."""
    if not self.is_built:
      self.optimizer.build(list(variables))
      self._start_at_weights(variables)

  def _start_at_weights(self, variables: Sequence[Any]) -> None:
    """Gives slots that begin as weights each replica's: Keras reads one's."""
    if self.strategy.num_replicas_in_sync == 1:
      return  # Keras may make the weights in the function that is being traced.
    copies = self.strategy.experimental_local_results
    with tf.init_scope():
      for slot, variable in zip(self.begin_as_weights, variables, strict=False):
        natives = map(variables_lib.native, (slot, variable))
        for own, weight in zip(*map(copies, natives), strict=True):
          own.assign(weight)

  @property
  def begin_as_weights(self) -> Sequence[Any]:
    """The slots, along the variables, that begin as these; empty without."""
    return ()

  def fuse(self, wanted: bool | None) -> None:
    """Lets kernels or XLA do the steps; None where that is faster.

    Raises:
      ValueError: If it is wanted and neither can.
    """
    last = self.innermost
    has_kernel = fused_update.find_kernel(last) is not None
    if wanted and not has_kernel and not fused_update.can_compile(last):
      raise ValueError(
        "`fused_update` is True and TensorFlow has no kernel for"
        f" {type(last).__name__} with these settings. Leave it None, which uses"
        " Keras' operations where there is none."
      )
    self.fused = wanted

  def _overrides(self, *names: str) -> bool:
    """Whether the class of the innermost optimizer has its own such methods."""
    kind = type(self.innermost)
    return any(
      not getattr(kind, name).__module__.startswith(_KERAS) for name in names
    )

  @property
  def variables(self) -> list[Any]:
    """What the optimizer itself says are its variables."""
    return optimizer_state.listed(self.optimizer)

  @property
  def unsharded_state(self) -> Any:
    """The state as savers and users see it: this object if it is not in parts.

    Towers may encapsulate an optimizer that keeps it in parts.
    """
    return (
      self.whole_state or optimizer_state.sharded_state(self.optimizer) or self
    )

  @property
  def state(self) -> list[Any]:
    """The variables, whole, and those that loss scaling keeps apart."""
    whole = self.unsharded_state.variables
    return [*whole, *libraries.loss_scale(self.optimizer)]

  @property
  @abc.abstractmethod
  def trainable_variables(self) -> Sequence[Any]:
    """The variables that the optimizer was built on, in order."""

  def index(self, variable: Any) -> Any:
    """The place of `variable` among those it was built on, or None."""
    places = getattr(self.innermost, self._places)
    return places.get(libraries.key(self.innermost, variable))

  def place_of(self, variable: Any) -> tuple[int, int]:
    """Returns the place of a variable, and among how many it was built on."""
    index = self.index(variable)
    assert index is not None
    return index, len(getattr(self.innermost, self._places))

  def knows(self, variable: Any) -> bool:
    """Whether the built optimizer was built on `variable`."""
    return self.unsharded_state.index(variable) is not None

  def as_built(self, variable: Any) -> Any:
    """The Keras variable, for the native one that tapes and graphs report."""
    return variable

  @abc.abstractmethod
  def slots(self, variable: Any) -> dict[str, Any]:
    """The slots of a variable that the optimizer is built on, by name."""

  @abc.abstractmethod
  def slot_names(self) -> list[str]:
    """The name of every slot, once, in order of creation."""

  def view(self, variable: Any, name: str) -> Any:
    """A slot for the user; None where there is none."""
    return self.slots(variable).get(name)

  def set_weights(self, weights: Any) -> None:
    """Assigns values in the order of `variables`."""
    self.optimizer.set_weights(weights)

  def save_own_variables(self, store: Any) -> None:
    """Saves the variables in Keras' form."""
    self.optimizer.save_own_variables(store)

  def load_own_variables(self, store: Any) -> None:
    """Loads variables in Keras' form."""
    self.optimizer.load_own_variables(store)

  def iterations(self) -> tf.Tensor:
    """How many times gradients were applied, int64."""
    return tf.convert_to_tensor(self.optimizer.iterations)

  @property
  def averages(self) -> list[Any]:
    """The moving averages of what it was built on; empty without."""
    return libraries.averages(self.innermost)

  @property
  def finalizes(self) -> bool:
    """Whether it changes variables when `fit` ends."""
    return bool(self.averages) or self._overrides("finalize_variable_values")

  def write_averages(self, variables: Sequence[Any]) -> None:
    """Writes moving averages into variables, where there are averages."""
    self.optimizer.finalize_variable_values(variables)

  @abc.abstractmethod
  def make_variable(self, value: Any, name: str) -> Any:
    """A trainable variable of this Keras."""

  def make_tiny(self, weight: Any) -> Any:
    """A variable of one element with a weight's names, rank and dtype."""
    shape = [1] * len(weight.shape)
    value = tf.zeros(shape, variables_lib.native(weight).dtype)
    return self.make_variable(value, str(weight.name).split(":")[0])

  def is_overwritten(self, variable: Any) -> bool:
    """Whether the gradient of `variable` is its next value.

    Keras' float8 scales are such variables. What replicas or towers found is
    averaged for them: neither scaled nor clipped nor rounded nor summed.
    """
    whole = self.as_built(variable)
    return bool(getattr(whole, "overwrite_with_gradient", False))

  @property
  def computes_gradients(self) -> bool:
    """Whether the user's class overrides the way from a loss to gradients."""
    return False

  # Calls it, with a loss that a tape recorded.
  compute_gradients: Callable[
    [Any, Sequence[Any], tf.GradientTape], list[tuple[Gradient, Any]]
  ]

  @property
  @abc.abstractmethod
  def scales_dynamically(self) -> bool:
    """Whether a loss scale skips steps that overflow and then changes."""

  @property
  def divides(self) -> bool:
    """Whether `apply_reduced` divides gradients by a loss scale."""
    return False

  @abc.abstractmethod
  def scale_loss(self, loss: Any) -> Any:
    """Multiplies a loss, or the seed of its gradient, by the loss scale."""

  def unscale(self, grads: Sequence[Gradient]) -> list[Gradient]:
    """Gradients of the scaled loss, in the scale that `apply_reduced` takes."""
    return list(grads)

  def scale_limit(self, limit: float) -> Any:
    """A clipping limit, in the scale that incoming gradients have."""
    return limit

  def wire_scale(self) -> Any:
    """The factor of gradients that travel in float16, or None.

    Gradients that come in divided by the loss scale would be rounded to 0.
    """
    return None

  @property
  def accumulates(self) -> int | None:
    """How many calls the optimizer itself makes one step of, if it does."""
    return getattr(self.innermost, "gradient_accumulation_steps", None)

  @property
  def accumulates_own_gradients(self) -> bool:
    """Whether it can add up one replica's gradients, and be handed sums."""
    return False

  # Where it can: the variable in which it counts calls, the one in which it
  # adds up the gradients of a variable, and what adds them up.
  accumulated_calls: Any
  accumulated_gradient: Callable[[Any], Any]
  accumulate: Callable[[Sequence[Gradient], Sequence[Any]], None]

  def decays(self, variable: Any) -> bool:
    """Whether `variable` has weight decay, should there be any."""
    return libraries.decays(self.innermost, variable)

  def without_decay(
    self, variables: Sequence[Any]
  ) -> contextlib.AbstractContextManager[Any]:
    """A context in which the weights of `variables` do not decay."""
    hidden = set(map(self.index, variables))

    def decay_others(decay: Callable[..., None], seen: Sequence[Any]) -> None:
      decay([v for v in seen if self.index(v) not in hidden])

    last = innermost(self.optimizer)
    return libraries.replacing(last, self._decay_method, decay_others)

  def clipping_by(
    self, clip: Callable[[Any, Sequence[Gradient]], list[Gradient]]
  ) -> contextlib.AbstractContextManager[Any]:
    """A context in which `clip(optimizer, grads)` does the optimizer's own."""
    last = innermost(self.optimizer)
    return libraries.replacing(
      last, self._clip_method, lambda _, grads: clip(last, grads)
    )

  @property
  def is_within(self) -> bool:
    """Whether the outer loss scaler is calling our optimizer to update."""
    return getattr(self._thread, "is_within", False)

  def apply_reduced(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    through_apply: bool = False,
  ) -> None:
    """Applies sums over the group, exactly once.

    `through_apply` tells that the caller used Keras 3's `apply`, which does not
    run what the user's class overrides in `apply_gradients`.

    A LossScaleOptimizer around ours goes first: it looks at the sums, and if
    they are finite it calls our optimizer, and so this method, once more.
    """
    if self.outer_loss_scaler is None or self.is_within:
      with fused_update.in_place(
        self.innermost, self.index, self.fused, self.row_step
      ):
        self._apply(grads, variables, through_apply)
      return
    self._thread.is_within = True
    try:
      self._apply_around(grads, variables)
    finally:
      self._thread.is_within = False

  @abc.abstractmethod
  def _apply(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    through_apply: bool,
  ) -> None:
    """Hands sums to the optimizer."""

  @abc.abstractmethod
  def _apply_around(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Hands sums to the LossScaleOptimizer around ours."""


def innermost(optimizer: Any) -> Any:
  """The optimizer that keeps the slots, below any loss scaling."""
  while hasattr(optimizer, "inner_optimizer"):
    optimizer = optimizer.inner_optimizer
  return optimizer


def slots_at(
  optimizer: Any, index: int, count: int, keys: Sequence[Any]
) -> Iterator[tuple[str, Any]]:
  """Yields attribute and slot of the index-th of `count` trained variables.

  An optimizer keeps each kind of slot as a list along these variables, or as a
  dict by one of the `keys` that identify one. Dicts may hold such lists and
  dicts.
  """
  own = set(map(id, optimizer.variables))

  def find(values: Any, is_of_variable: bool = False) -> Iterator[Any]:
    if id(values) in own:
      if is_of_variable:
        own.remove(id(values))  # Each once.
        yield values
    elif isinstance(values, list) and len(values) == count:
      yield from find(values[index], is_of_variable=True)
    elif isinstance(values, dict):
      own_part = [values[key] for key in (*keys, index) if key in values][:1]
      is_of_variable = is_of_variable or bool(own_part)
      for part in own_part or list(values.values()):
        yield from find(part, is_of_variable)

  for attribute, values in list(vars(optimizer).items()):
    # "_self_": TensorFlow's own, which has all that a checkpoint saves.
    if not attribute.startswith(("_variables", "_trainable_", "_self_")):
      for slot in find(values):
        yield attribute, slot
