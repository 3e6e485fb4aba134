"""The wrapped optimizer: the user's `opt`, inside CrossShardOptimizer.

`WrappedOptimizer` builds the optimizer, lets it apply gradients, and answers
questions about it. Keras 3 sums gradients over all replicas inside `apply`, and
tf_keras in `apply_gradients`; both find the replicas through the replica
context. So both are called inside `Engine.isolate()`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import clipping, row_sparse
from tf_cross_shard._src.core.variables import Gradient, Optimizer, Variable
from tf_cross_shard._src.core.wrapped import (
  fused,
  keras_private,
  overriding,
)

# Replaces `update_step` for row-sparse gradients: it receives `update_step`
# and then the arguments of `update_step`.
RowStep = Callable[..., None]


# The attribute of a wrapper that holds its WrappedOptimizer.
ATTRIBUTE: Final = "_wrapped"


class WrappedOptimizer:
  """The user's optimizer, with the same members for Keras 3 and tf_keras.

  `base_optimizer` keeps the slots, inside any loss scaling. `sharded_state`
  shows whole slots of sharded state, or is None. `sums_rows`: the optimizer
  adds up rows of the same index first, and clips rows as they are.
  """

  def __init__(self, optimizer: Optimizer) -> None:
    self.optimizer = optimizer
    self.base_optimizer = base_optimizer(optimizer)
    self.keras = keras_private.keras_of(optimizer)
    self.package: str = self.keras.__name__
    self._is_keras3 = self.package == "keras"
    self.sums_rows = not self._is_keras3
    self.fused: bool | None = False
    self.moves_loss_scale = False
    self.sharded_state: Any = None
    self.checkpoint_view: Any = None
    self._built_on: list[Variable] = []  # tf_keras keeps no variables.
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
  def is_built(self) -> bool:
    """Whether the slots exist."""
    # Keras 3 builds a LossScaleOptimizer after the optimizer inside it.
    opt = self.optimizer if self._is_keras3 else self.base_optimizer
    return keras_private.is_built(opt)

  def build(self, variables: Sequence[Variable]) -> None:
    """Creates the slots for `variables`, unless they exist."""
    if not self.is_built:
      self._create_slots(variables)
    if self._is_keras3 and self.optimizer is not self.base_optimizer:
      keras_private.show_averages(self.optimizer, self.averages)

  def _create_slots(self, variables: Sequence[Variable]) -> None:
    self._built_on = list(variables)
    base = self.base_optimizer
    has_slots = keras_private.is_built(base)
    kept: dict[str, Any] = {}
    if keras_private.has_waiting(base, keras_private.copies_of_weights(base)):
      # Deferred checkpoint values are assigned when slots are created.
      # ScheduleFreeAdamW would then overwrite them with the weights.
      kept["assign"] = lambda *_: None
    # Slots of tf_keras must outlive a function that is being traced.
    outside = contextlib.nullcontext if self._is_keras3 else tf.init_scope
    with outside(), overriding.overriding(base, **kept):
      self.optimizer.build(self._built_on)
    if not (kept or has_slots):
      self._start_at_weights(variables)

  def _start_at_weights(self, variables: Sequence[Variable]) -> None:
    """Sets slots that start as copies of the weights to each replica's weights.

    Keras has set them to the weights of the first replica on all replicas.
    """
    if single_program.num_copies(self.strategy) == 1:
      return  # Keras may create the weights in the function being traced.
    attribute = keras_private.copies_of_weights(self.base_optimizer)
    slots = getattr(self.base_optimizer, attribute, ())
    copies = self.strategy.experimental_local_results
    with tf.init_scope():
      for slot, variable in zip(slots, variables, strict=False):
        into, weights = map(variables_lib.native, (slot, variable))
        if hasattr(into, "set_copies"):  # One stack of all copies.
          into.set_copies(weights.whole_copies())
          continue
        for copy, weight in zip(copies(into), copies(weights), strict=True):
          copy.assign(weight)

  def fuse(self, wanted: bool | None) -> None:
    """Chooses kernels for the update steps: the setting `fused_update`."""
    if wanted and fused.find_kernel(self.base_optimizer)[0] is None:
      raise ValueError(
        "`fused_update` is True, but TensorFlow has no kernel for"
        f" {type(self.base_optimizer).__name__} with these settings. Pass None"
        " to use Keras' operations, which compile(..., jit_compile=True)"
        " compiles."
      )
    self.fused = wanted

  @property
  def trainable_variables(self) -> Sequence[Variable]:
    """The variables that the optimizer was built on, in order."""
    # Do not copy: `as_built` reads this property for each variable and replica.
    return keras_private.trained(self.base_optimizer) or self._built_on

  def index(self, variable: Variable) -> Any:
    """Returns the variable's index among the trained variables, or None."""
    key = keras_private.key(self.base_optimizer, variable)
    return keras_private.indices(self.base_optimizer).get(key)

  def as_built(self, variable: Variable) -> Variable:
    """Returns the Keras variable of a `tf.Variable`."""
    if not self._is_keras3 or isinstance(variable, self.keras.Variable):
      return variable
    index = self.whole.index(variable) if self.is_built else None
    return variable if index is None else self.whole.trainable_variables[index]

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

  def slots(self, variable: Variable) -> dict[str, Variable]:
    """Returns the slots of a variable by name; empty for an unknown one."""
    index = self.index(variable) if self.is_built else None
    if index is None:
      return {}
    key = keras_private.key(self.base_optimizer, variable)
    return self._slots_at(index, key, [variable.name])

  def slot_names(self) -> list[str]:
    """Returns the name of every slot, once, in order of creation."""
    if not self.is_built:
      return []
    indices = keras_private.indices(self.base_optimizer)
    slots = (self._slots_at(index, key) for key, index in indices.items())
    return list(dict.fromkeys(name for by_name in slots for name in by_name))

  def _slots_at(
    self, index: int, key: Any, names: Sequence[str] = ()
  ) -> dict[str, Variable]:
    """Returns the slots, by name, of the trained variable at an index."""
    opt = self.base_optimizer
    paths: list[str] = []
    for known in keras_private.trained(opt)[index : index + 1]:
      paths = list(filter(None, [getattr(known, "path", None), known.name]))
    count = len(keras_private.indices(opt))
    found = list(slots_at(opt, index, count, (key, *(paths or names))))
    kinds = [keras_private.kind_of_slot(*each, paths) for each in found]
    slots = [slot for _, slot in found]
    return dict(zip(variables_lib.unique(kinds), slots, strict=True))

  def view(self, variable: Variable, name: str) -> Any:
    return self.slots(variable).get(name)

  def set_weights(self, weights: Any) -> None:
    self.optimizer.set_weights(weights)

  def save_own_variables(self, store: Any) -> None:
    self.optimizer.save_own_variables(store)

  def load_own_variables(self, store: Any) -> None:
    self.optimizer.load_own_variables(store)

  @property
  def skips_overflows(self) -> bool:
    """Whether a dynamic loss scale skips steps that overflow, and changes."""
    steps = getattr(self.optimizer, "dynamic_growth_steps", None)
    return steps is not None  # It is None for a fixed scale of tf_keras.

  # In tf_keras, the user multiplies the loss by the loss scale and divides the
  # gradients by it. In Keras 3, the optimizer divides them.

  @property
  def divides_gradients(self) -> bool:
    return self._is_keras3 and self.skips_overflows

  @property
  def _tf_keras_scaler(self) -> Any:
    """The LossScaleOptimizer, dynamic or not; or None."""
    has_scale = hasattr(self.optimizer, "get_scaled_loss")
    return self.optimizer if has_scale else None

  def scale_loss(self, loss: Any) -> Any:
    """Multiplies a loss, or the seed of its gradient, by the loss scale."""
    if self._is_keras3:
      return self.optimizer.scale_loss(loss)
    if self._tf_keras_scaler is None:
      return loss
    return self._tf_keras_scaler.get_scaled_loss(tf.convert_to_tensor(loss))

  def unscale(self, grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the gradients of a scaled loss, divided by the loss scale."""
    if self._tf_keras_scaler is None:
      return list(grads)
    return list(self._tf_keras_scaler.get_unscaled_gradients(list(grads)))

  def scale_limit(self, limit: float) -> Any:
    """Returns a clipping limit, multiplied by the scale of the gradients."""
    return self.scale_loss(limit) if self._is_keras3 else limit

  def wire_scale(self) -> Any:
    """Returns the factor of gradients that are sent in float16, or None."""
    scaler = self._tf_keras_scaler
    return None if scaler is None else scaler.loss_scale

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
    return bool(self.averages) or keras_private.is_overridden(
      self.base_optimizer, "finalize_variable_values"
    )

  def write_averages(self, variables: Sequence[Variable]) -> None:
    self.optimizer.finalize_variable_values(variables)

  def make_variable(self, value: Any, name: str) -> Variable:
    """Creates a trainable variable of this Keras."""
    if not self._is_keras3:
      return tf.Variable(value, name=name)
    return self.keras.Variable(value, dtype=value.dtype.name, name=name)

  def make_tiny(self, weight: Variable) -> Variable:
    """Creates a one-element variable with a weight's names, rank and dtype."""
    shape = [1] * len(weight.shape)
    value = tf.zeros(shape, variables_lib.native(weight).dtype)
    name = str(weight.name).split(":")[0]
    # Keras 3 names slots of a `tf.Variable` differently.
    if not hasattr(weight, "path"):
      return tf.Variable(value, name=name)
    tiny = self.make_variable(value, name)
    tiny._path = weight.path  # noqa: SLF001
    return tiny

  @property
  def accumulates(self) -> int | None:
    """How many calls make one step of this optimizer; None for one call."""
    return getattr(self.base_optimizer, "gradient_accumulation_steps", None)

  def decays(self, variable: Variable) -> bool:
    """Returns whether weight decay, if it is set, applies to a variable."""
    return keras_private.decays(self.base_optimizer, variable)

  def clipping_rows(
    self, sums_rows: bool, tables: Sequence[Variable] = ()
  ) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that clips by limits, and does not decay `tables`.

    Keras would clip, and decay, whole tables, and cannot clip gradients of
    several dtypes by one norm. `sums_rows`: rows of one index are added up.
    """
    hidden = set(map(self.index, tables))
    decay = getattr(self.base_optimizer, keras_private.DECAY)
    overridden = {
      keras_private.CLIP: lambda grads: clipping.clip(
        grads, **clipping.limits_of(self.base_optimizer), sums_rows=sums_rows
      ),
      keras_private.DECAY: lambda variables: decay(
        [v for v in variables if self.index(v) not in hidden]
      ),
    }
    return overriding.overriding(self.base_optimizer, **overridden)

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
    """Lets the user's optimizer apply the summed gradients of a group.

    tf_keras also aggregates the sums. In isolation this changes nothing, and
    runs methods that the user's class overrides: no switch turns it off.
    """
    variables = [self.as_built(v) for v in variables]
    if self.sums_rows:
      grads = list(map(row_sparse.cast, grads, variables))
    elif self.skips_overflows:
      # Of rows that share an index, Keras 3 looks for NaN in the last one only.
      grads = list(map(clipping.spread_nonfinite, grads))
    opt = self.base_optimizer
    with (
      fused.updating(opt, self.index, self.fused, row_step),
      keras_private.counting_once(opt),
    ):
      if through_apply and self._is_keras3:  # tf_keras has no `apply`.
        self.optimizer.apply(list(grads), variables)
        return
      pairs = list(zip(grads, variables, strict=True))
      # In Keras 3 the method has no other arguments.
      kwargs = {} if self._is_keras3 else options
      self.optimizer.apply_gradients(pairs, **kwargs)


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
