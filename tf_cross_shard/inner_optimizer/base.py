"""The encapsulated optimizer, as the way of a gradient needs it."""

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import fused_update, libraries

_KERAS: Final = ("keras.src.", "tf_keras.src.")


class InnerOptimizer(abc.ABC):
  """The encapsulated optimizer, seen alike in both Kerases.

  Attributes:
    optimizer: The user's optimizer.
    outer_loss_scaler: A LossScaleOptimizer that encapsulates *our* optimizer,
      or None; see `loss_scaling`.
    unsharded_state: The optimizer's state as savers and users see it, whole
      also where the optimizer is built on parts of the weights.
    checkpointed: The object whose children a checkpoint sees: the optimizer, or
      what takes its place where its state is in parts.
    is_fused: Whether kernels may do the optimizer's steps; see `fused_update`.
    row_step: Takes the place of `update_step` for row-sparse gradients; is
      handed `update_step` itself before its arguments. None for nothing.
  """

  # The names of Keras' methods, which stand in the folder of that Keras.
  _decay_method: str
  _clip_method: str

  def __init__(self, optimizer: Any) -> None:
    self.optimizer = optimizer
    self.outer_loss_scaler: Any = None
    self.unsharded_state: Any = WholeState(self)
    self.checkpointed: Any = optimizer
    self.is_fused = False
    self.row_step: Callable[..., None] | None = None
    self._thread = threading.local()  # Replicas may be threads.

  @property
  def name(self) -> str:
    """The optimizer's name."""
    return str(self.optimizer.name)

  @property
  @abc.abstractmethod
  def strategy(self) -> tf.distribute.Strategy:
    """The strategy whose scope the optimizer was made in."""

  @property
  @abc.abstractmethod
  def is_built(self) -> bool:
    """Whether the slots exist."""

  @property
  @abc.abstractmethod
  def scales_dynamically(self) -> bool:
    """Whether a loss scale skips steps that overflow and then changes."""

  @property
  def divides(self) -> bool:
    """Whether `apply_reduced` divides gradients by a loss scale."""
    return False

  @property
  @abc.abstractmethod
  def trainable_variables(self) -> list[Any]:
    """The variables that the optimizer was built on, in order."""

  @property
  def averages(self) -> list[Any]:
    """The moving averages of what it was built on; empty without."""
    return []

  def write_averages(self, variables: Sequence[Any]) -> None:
    """Writes moving averages into variables, where there are averages."""
    self.optimizer.finalize_variable_values(variables)

  def decays(self, variable: Any) -> bool:
    """Whether `variable` has weight decay, should there be any."""
    del variable
    return True

  def listed(self) -> list[Any]:
    """Returns what the optimizer itself says are its variables."""
    return list(self.optimizer.variables)

  @property
  def variables(self) -> list[Any]:
    """All variables of the optimizer; whole ones in place of parts."""
    return list(self.unsharded_state.variables)

  @property
  def state(self) -> list[Any]:
    """The variables, and those that loss scaling keeps apart from them."""
    return self.variables

  @property
  def is_within(self) -> bool:
    """Whether the outer loss scaler is calling our optimizer to update."""
    return getattr(self._thread, "is_within", False)

  def fuse(self, wanted: bool | None) -> None:
    """Lets kernels do the steps; None where there is one.

    Raises:
      ValueError: If a kernel is wanted and there is none.
    """
    last = innermost(self.optimizer)
    if wanted and fused_update.find_kernel(last) is None:
      raise ValueError(
        "`fused_update` is True and TensorFlow has no kernel for"
        f" {type(last).__name__} with these settings. Leave it None, which uses"
        " Keras' operations where there is none."
      )
    self.is_fused = wanted is not False

  def path(self, variable: Any) -> str:
    """The name of a variable of the optimizer in a pickle; not unique."""
    return str(variable.name)

  @abc.abstractmethod
  def make_variable(self, value: Any, name: str) -> Any:
    """A trainable variable of this Keras."""

  @abc.abstractmethod
  def make_tiny(self, weight: Any) -> Any:
    """A variable of one element with a weight's names, rank and dtype."""

  @abc.abstractmethod
  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they exist."""

  def knows(self, variable: Any) -> bool:
    """Whether the built optimizer was built on `variable`."""
    return self.unsharded_state.index(variable) is not None

  def place_of(self, variable: Any) -> tuple[int, int]:
    """Returns the place of a variable, and among how many it was built on."""
    raise NotImplementedError

  def without_decay(
    self, variables: Sequence[Any]
  ) -> contextlib.AbstractContextManager[Any]:
    """A context in which the weights of `variables` do not decay."""
    hidden = set(map(self._index, variables))

    def decay_others(decay: Callable[..., None], seen: Sequence[Any]) -> None:
      decay([v for v in seen if self._index(v) not in hidden])

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

  @abc.abstractmethod
  def _index(self, variable: Any) -> Any:
    """The place of `variable` among those it was built on, or None."""

  def as_built(self, variable: Any) -> Any:
    """The Keras variable, for the native one that tapes and graphs report."""
    return variable

  @property
  def accumulates(self) -> int | None:
    """How many calls the optimizer itself makes one step of, if it does."""
    return getattr(
      innermost(self.optimizer), "gradient_accumulation_steps", None
    )

  @property
  def accumulates_own_gradients(self) -> bool:
    """Whether it can add up one replica's gradients, and be handed sums."""
    return False

  @property
  def accumulated_calls(self) -> Any:
    """The variable in which the optimizer itself counts calls."""
    raise NotImplementedError

  def accumulated_gradient(self, variable: Any) -> Any:
    """Returns the variable in which it adds up gradients of `variable`."""
    raise NotImplementedError

  def accumulate(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Adds this replica's gradients in a call that ends no window."""
    raise NotImplementedError

  def _overrides(self, *names: str) -> bool:
    """Whether the class of the innermost optimizer has its own such methods."""
    kind = type(innermost(self.optimizer))
    return any(
      not getattr(kind, name).__module__.startswith(_KERAS) for name in names
    )

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

  def compute_gradients(
    self, loss: Any, variables: Sequence[Any], tape: tf.GradientTape
  ) -> list[tuple[Gradient, Any]]:
    """Calls the user's class with a loss that `tape` recorded."""
    raise NotImplementedError

  @abc.abstractmethod
  def scale_loss(self, loss: Any) -> Any:
    """Multiplies a loss, or the seed of its gradient, by the loss scale."""

  def scale_limit(self, limit: float) -> Any:
    """A clipping limit, in the scale that incoming gradients have."""
    return limit

  def wire_scale(self) -> Any:
    """The factor of gradients that travel in float16, or None.

    Gradients that come in divided by the loss scale would be rounded to 0.
    """
    return None

  def unscale(self, grads: Sequence[Gradient]) -> list[Gradient]:
    """Gradients of the scaled loss, in the scale that `apply_reduced` takes."""
    return list(grads)

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
      last = innermost(self.optimizer)
      with fused_update.in_place(
        last, self._index, self.is_fused, self.row_step
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

  def iterations(self) -> tf.Tensor:
    """How many times gradients were applied, int64."""
    return tf.convert_to_tensor(self.optimizer.iterations)

  def slots(self, variable: Any) -> dict[str, Any]:
    """The slots of `variable`, by name; empty where there are none."""
    return dict(self.unsharded_state.slots(variable))

  @abc.abstractmethod
  def own_slots(self, variable: Any) -> dict[str, Any]:
    """The slots of a variable that the optimizer is built on, by name."""

  @abc.abstractmethod
  def slot_names(self) -> list[str]:
    """The name of every slot, once, in order of creation."""


class WholeState:
  """The state of an optimizer that keeps all of it.

  `step.sharded_state.PlainState` takes its place where state is in parts.
  """

  def __init__(self, inner: InnerOptimizer) -> None:
    self._inner = inner

  @property
  def variables(self) -> list[Any]:
    """All variables of the optimizer."""
    return self._inner.listed()

  @property
  def trainable_variables(self) -> list[Any]:
    """The variables that the optimizer was built on, in order."""
    return self._inner.trainable_variables

  def index(self, variable: Any) -> Any:
    """The place of `variable` among them, or None."""
    return self._inner._index(variable)

  def slots(self, variable: Any) -> dict[str, Any]:
    """The slots of `variable`, by name."""
    return self._inner.own_slots(variable)

  def view(self, variable: Any, name: str) -> Any:
    """A slot for the user; None where there is none."""
    return self.slots(variable).get(name)

  def set_weights(self, weights: Any) -> None:
    """Assigns values in the order of `variables`."""
    self._inner.optimizer.set_weights(weights)

  def save_own_variables(self, store: Any) -> None:
    """Saves the variables in Keras' form."""
    self._inner.optimizer.save_own_variables(store)

  def load_own_variables(self, store: Any) -> None:
    """Loads variables in Keras' form."""
    self._inner.optimizer.load_own_variables(store)


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
