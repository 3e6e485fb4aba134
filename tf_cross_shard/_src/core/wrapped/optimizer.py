"""The wrapped optimizer: the user's `opt`, inside CrossShardOptimizer.

`WrappedOptimizer` has one set of members for the optimizers of Keras 3 and
tf_keras. It builds the optimizer, lets it apply gradients, and answers
questions about it. `keras3.adapter` and `tf_keras.adapter` implement it.
"""

import abc
import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import clipping
from tf_cross_shard._src.core.gradients.clipping import Gradient
from tf_cross_shard._src.core.keras_types import Optimizer, Variable
from tf_cross_shard._src.core.wrapped import (
  fused,
  keras_private,
  overriding,
)

_KERAS: Final = ("keras.src.", "tf_keras.src.")

# Replaces `update_step` for row-sparse gradients: it receives `update_step`
# and then the arguments of `update_step`.
RowStep = Callable[..., None]


# The attribute of a wrapper that holds its WrappedOptimizer.
ATTRIBUTE: Final = "_wrapped"


class WrappedOptimizer(abc.ABC):
  """The user's optimizer, with the same members for Keras 3 and tf_keras.

  `base_optimizer` keeps the slots, inside any loss scaling. `sharded_state`
  shows whole slots of sharded state, or is None. `sums_rows`: the optimizer
  adds up rows of the same index first, and clips rows as they are.
  """

  package: str  # "keras" or "tf_keras"
  sums_rows: bool

  # The name of the dictionary that maps a variable's key to its index.
  _index_attribute: str

  def __init__(self, optimizer: Optimizer) -> None:
    self.optimizer = optimizer
    self.base_optimizer = base_optimizer(optimizer)
    self.fused: bool | None = False
    self.moves_loss_scale = False
    self.sharded_state: Any = None
    self.checkpoint_view: Any = None
    # A TowerOptimizer may wrap an optimizer whose state is sharded.
    self._within = find(optimizer)

  @property
  def name(self) -> str:
    # tf_keras' LossScaleOptimizer has no name.
    has_name = hasattr(self.optimizer, "name")
    return keras_private.name(
      self.optimizer if has_name else self.base_optimizer
    )

  @property
  def strategy(self) -> tf.distribute.Strategy:
    return keras_private.strategy(self.base_optimizer)

  @property
  @abc.abstractmethod
  def is_built(self) -> bool:
    """Whether the slots exist."""

  def build(self, variables: Sequence[Variable]) -> None:
    """Creates the slots for `variables`, unless they exist."""
    if self.is_built:
      return
    if not keras_private.has_waiting(
      self.base_optimizer, self._weight_copy_attribute
    ):
      has_slots = keras_private.is_built(self.base_optimizer)
      self.optimizer.build(list(variables))
      if not has_slots:
        self._start_at_weights(variables)
      return
    # Deferred checkpoint values are assigned when slots are created.
    # ScheduleFreeAdamW would then overwrite them with the weights.
    with overriding.overriding(self.base_optimizer, assign=lambda *_: None):
      self.optimizer.build(list(variables))

  def _start_at_weights(self, variables: Sequence[Variable]) -> None:
    """Sets slots that start as copies of the weights to each replica's weights.

    Keras has set them to the weights of the first replica on all replicas.
    """
    if single_program.num_copies(self.strategy) == 1:
      return  # Keras may create the weights in the function being traced.
    slots = getattr(self.base_optimizer, self._weight_copy_attribute, ())
    copies = self.strategy.experimental_local_results
    with tf.init_scope():
      for slot, variable in zip(slots, variables, strict=False):
        into, weights = map(variables_lib.native, (slot, variable))
        if hasattr(into, "set_copies"):  # One stack of all copies.
          into.set_copies(weights.whole_copies())
          continue
        for copy, weight in zip(copies(into), copies(weights), strict=True):
          copy.assign(weight)

  @property
  @abc.abstractmethod
  def _weight_copy_attribute(self) -> str:
    """The attribute whose slots start as copies of the weights, or ""."""

  def fuse(self, wanted: bool | None) -> None:
    """Chooses kernels for the update steps: the setting `fused_update`."""
    if wanted and fused.find_kernel(self.base_optimizer) is None:
      raise ValueError(
        "`fused_update` is True, but TensorFlow has no kernel for"
        f" {type(self.base_optimizer).__name__} with these settings. Pass None"
        " to use Keras' operations, which compile(..., jit_compile=True)"
        " compiles."
      )
    self.fused = wanted

  def _overrides(self, *names: str) -> bool:
    """Returns whether the user's class overrides one of these Keras methods."""
    kind = type(self.base_optimizer)
    return any(
      not getattr(kind, name).__module__.startswith(_KERAS) for name in names
    )

  @property
  @abc.abstractmethod
  def trainable_variables(self) -> Sequence[Variable]:
    """The variables that the optimizer was built on, in order."""

  @property
  def places(self) -> dict[Any, int]:
    """The index of each trained variable, by Keras' key of the variable."""
    return getattr(self.base_optimizer, self._index_attribute)

  def index(self, variable: Variable) -> Any:
    """Returns the variable's index among the trained variables, or None."""
    return self.places.get(keras_private.key(self.base_optimizer, variable))

  def as_built(self, variable: Variable) -> Variable:
    """Returns the Keras variable of a `tf.Variable`."""
    return variable

  @property
  def checkpointed(self) -> Any:
    """The object whose children a checkpoint saves."""
    return self.checkpoint_view or self.optimizer

  @property
  def whole(self) -> Any:
    """The state with whole slots: this object, unless the state is sharded."""
    within = self._within and self._within.sharded_state
    return self.sharded_state or within or self

  @property
  def variables(self) -> list[Variable]:
    """The variables that the optimizer itself lists."""
    return keras_private.listed(self.optimizer)

  def knows(self, variable: Variable) -> bool:
    return self.whole.index(variable) is not None

  @abc.abstractmethod
  def slots(self, variable: Variable) -> dict[str, Variable]:
    """Returns the slots of a variable by name; empty for an unknown one."""

  @abc.abstractmethod
  def slot_names(self) -> list[str]:
    """Returns the name of every slot, once, in order of creation."""

  def view(self, variable: Variable, name: str) -> Any:
    return self.slots(variable).get(name)

  def set_weights(self, weights: Any) -> None:
    self.optimizer.set_weights(weights)

  def save_own_variables(self, store: Any) -> None:
    self.optimizer.save_own_variables(store)

  def load_own_variables(self, store: Any) -> None:
    self.optimizer.load_own_variables(store)

  @property
  @abc.abstractmethod
  def skips_overflows(self) -> bool:
    """Whether a dynamic loss scale skips steps that overflow, and changes."""

  @property
  def divides_gradients(self) -> bool:
    return False

  @abc.abstractmethod
  def scale_loss(self, loss: Any) -> Any:
    """Multiplies a loss, or the seed of its gradient, by the loss scale."""

  def unscale(self, grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the gradients of a scaled loss, divided by the loss scale."""
    return list(grads)

  def scale_limit(self, limit: float) -> Any:
    """Returns a clipping limit, multiplied by the scale of the gradients."""
    return limit

  def wire_scale(self) -> Any:
    """Returns the factor of gradients while they are sent in float16, or None.

    Without this factor, float16 would round gradients that are divided by the
    loss scale to zero.
    """
    return None

  def iterations(self) -> tf.Tensor:
    """Returns how many times gradients were applied, an int64 scalar."""
    return tf.convert_to_tensor(self.optimizer.iterations)

  @property
  def averages(self) -> list[Variable]:
    """The moving averages of the trained variables; empty without averages."""
    return keras_private.averages(self.base_optimizer)

  @property
  def finalizes(self) -> bool:
    """Whether the optimizer changes variables when `fit` ends."""
    return bool(self.averages) or self._overrides("finalize_variable_values")

  def write_averages(self, variables: Sequence[Variable]) -> None:
    self.optimizer.finalize_variable_values(variables)

  @abc.abstractmethod
  def make_variable(self, value: Any, name: str) -> Variable:
    """Creates a trainable variable of this Keras."""

  def make_tiny(self, weight: Variable) -> Variable:
    """Creates a one-element variable with a weight's names, rank and dtype."""
    shape = [1] * len(weight.shape)
    value = tf.zeros(shape, variables_lib.native(weight).dtype)
    return self.make_variable(value, str(weight.name).split(":")[0])

  @property
  def computes_gradients(self) -> bool:
    """Whether the user's class overrides how gradients are computed."""
    return False

  # Calls the override, with a loss that the tape recorded.
  compute_gradients: Callable[
    [Any, Sequence[Any], tf.GradientTape], list[tuple[Gradient, Any]]
  ]

  @property
  def accumulates(self) -> int | None:
    """How many calls make one step of this optimizer; None for one call."""
    return getattr(self.base_optimizer, "gradient_accumulation_steps", None)

  def decays(self, variable: Variable) -> bool:
    """Returns whether weight decay, if it is set, applies to a variable."""
    return keras_private.decays(self.base_optimizer, variable)

  def without_decay(
    self, variables: Sequence[Variable]
  ) -> contextlib.AbstractContextManager[Any]:
    """Returns a context without weight decay for `variables`."""
    hidden = set(map(self.index, variables))
    decay = getattr(self.base_optimizer, keras_private.DECAY)
    decay_others = {
      keras_private.DECAY: lambda seen: decay(
        [v for v in seen if self.index(v) not in hidden]
      )
    }
    return overriding.overriding(self.base_optimizer, **decay_others)

  def clipping_rows(
    self, sums_rows: bool
  ) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that clips by the optimizer's limits, not by its code.

    Keras would clip whole tables, and cannot clip gradients of several dtypes
    by one norm. `sums_rows` is whether rows of the same index are added up.
    """
    clip = {
      keras_private.CLIP: lambda grads: clipping.clip(
        grads, **clipping.limits_of(self.base_optimizer), sums_rows=sums_rows
      )
    }
    return overriding.overriding(self.base_optimizer, **clip)

  @property
  def clips_to_dense(self) -> bool:
    """Whether Keras' clipping makes row-sparse gradients dense."""
    limit = clipping.limits_of(self.base_optimizer)["global_clipnorm"]
    return not self.sums_rows and limit is not None

  def apply(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Variable],
    through_apply: bool = False,
    row_step: RowStep | None = None,
    **options: Any,
  ) -> None:
    """Applies the group's sums through the user's optimizer."""
    with fused.updating(self.base_optimizer, self.index, self.fused, row_step):
      self._apply(grads, variables, through_apply, **options)

  @abc.abstractmethod
  def _apply(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Variable],
    through_apply: bool,
    **options: Any,
  ) -> None:
    """Calls the optimizer's method that the caller used."""


def find(optimizer: Optimizer) -> WrappedOptimizer | None:
  """Returns what a complete wrapper of ours has inside, else None."""
  found = getattr(optimizer, "__dict__", {}).get(ATTRIBUTE)
  return found if isinstance(found, WrappedOptimizer) else None


def has_several_dtypes(values: Sequence[Any]) -> bool:
  return len({tf.as_dtype(v.dtype) for v in values if v is not None}) > 1


def base_optimizer(optimizer: Optimizer) -> Any:
  """Returns the optimizer that keeps the slots, inside any loss scaling."""
  while hasattr(optimizer, "inner_optimizer"):
    optimizer = optimizer.inner_optimizer
  return optimizer


def adapter_of(optimizer: Optimizer) -> WrappedOptimizer:
  """Returns the `WrappedOptimizer` of any Keras optimizer."""
  modules = (kind.__module__ for kind in type(optimizer).__mro__)
  is_tf_keras = any(module.startswith("tf_keras.") for module in modules)
  # Import by name: a Keras 3 optimizer does not need tf_keras, nor the reverse.
  core = __name__.partition(".wrapped")[0]
  home = importlib.import_module(
    f"{core}.{'tf_keras' if is_tf_keras else 'keras3'}.adapter"
  )
  return home.adapter(optimizer)


def slots_at(
  optimizer: Optimizer, index: int, count: int, keys: Sequence[Any]
) -> Iterator[tuple[str, Any]]:
  """Yields each slot of one trained variable, with its attribute's name.

  Each attribute with slots is a list in the order of the `count` trained
  variables, or a dictionary whose keys identify them, also of such lists.
  """
  not_found_yet = set(map(id, optimizer.variables))

  def find(values: Any, is_of_variable: bool = False) -> Iterator[Any]:
    if id(values) in not_found_yet:
      if is_of_variable:
        not_found_yet.remove(id(values))  # Yield each slot only once.
        yield values
    elif isinstance(values, list) and len(values) == count:
      yield from find(values[index], is_of_variable=True)
    elif isinstance(values, dict):
      # If the variable's key is in this dictionary, follow it. Otherwise search
      # all values.
      by_key = [values[key] for key in (*keys, index) if key in values][:1]
      is_of_variable = is_of_variable or bool(by_key)
      for part in by_key or list(values.values()):
        yield from find(part, is_of_variable)

  for attribute, values in list(vars(optimizer).items()):
    # Skip lists of all variables. Attributes with "_self_" are TensorFlow's
    # own, and contain everything that a checkpoint saves.
    if not attribute.startswith(("_variables", "_trainable_", "_self_")):
      for slot in find(values):
        yield attribute, slot
