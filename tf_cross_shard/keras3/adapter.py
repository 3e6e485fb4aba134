"""An encapsulated optimizer of Keras 3, and the wrapper around it.

Keras 3 sums gradients over all replicas inside `apply`, with no switch to
turn that off. It does so through the replica context that it finds, and so
`apply_reduced` is called inside `Engine.isolate()`, whose context has no other
replicas. Nothing of the user's optimizer is replaced.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base, libraries, optimizer_state


class Keras3Optimizer(base.InnerOptimizer):
  """An encapsulated `keras.optimizers.Optimizer`."""

  _decay_method = "_apply_weight_decay"
  _clip_method = "_clip_gradients"

  @property
  def strategy(self) -> tf.distribute.Strategy:
    """The strategy whose scope the optimizer was made in."""
    strategy: tf.distribute.Strategy = self.optimizer._distribution_strategy
    return strategy

  @property
  def is_built(self) -> bool:
    """Whether the slots exist."""
    return bool(self.optimizer.built)

  @property
  def scales_dynamically(self) -> bool:
    """Whether a LossScaleOptimizer is within or around."""
    is_within = hasattr(self.optimizer, "dynamic_growth_steps")
    return is_within or self.outer_loss_scaler is not None

  @property
  def divides(self) -> bool:
    """Whether a LossScaleOptimizer is within or around."""
    return self.scales_dynamically

  @property
  def trainable_variables(self) -> list[Any]:
    """The variables that the optimizer was built on, in order."""
    return list(base.innermost(self.optimizer)._trainable_variables)

  def path(self, variable: Any) -> str:
    """The name with the scopes around it."""
    return str(variable.path)

  def make_variable(self, value: Any, name: str) -> Any:
    """A trainable variable of this Keras."""
    return keras.Variable(value, dtype=value.dtype.name, name=name)

  def make_tiny(self, weight: Any) -> Any:
    """A variable of one element with a weight's names, rank and dtype."""
    value = tf.zeros(
      [1] * len(weight.shape), variables_lib.native(weight).dtype
    )
    tiny = self.make_variable(value, str(weight.name).split(":")[0])
    tiny._path = str(getattr(weight, "path", tiny.path))
    return tiny

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they exist."""
    if not self.is_built:
      self.optimizer.build(list(variables))

  def as_built(self, variable: Any) -> Any:
    """The Keras variable, for the native one that tapes and graphs report."""
    if isinstance(variable, keras.Variable) or not self.is_built:
      return variable
    state = self.unsharded_state
    index = state.index(variable)
    return variable if index is None else state.trainable_variables[index]

  @property
  def accumulates_own_gradients(self) -> bool:
    """Whether `gradient_accumulation_steps` is ours to run.

    A class of the user's that overrides how gradients are applied is handed
    sums in every call, as without a window. So is one that divides them by
    `loss_scale_factor`, in every call too.
    """
    is_own = self._overrides("apply", "apply_gradients")
    factor = base.innermost(self.optimizer).loss_scale_factor
    return bool(self.accumulates) and not is_own and not factor

  @property
  def accumulated_calls(self) -> Any:
    """The variable in which the optimizer itself counts calls."""
    return base.innermost(self.optimizer)._iterations

  def accumulated_gradient(self, variable: Any) -> Any:
    """Returns the variable in which it adds up gradients of `variable`."""
    last = base.innermost(self.optimizer)
    return last._accumulated_gradients[self._index(variable)]

  def accumulate(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Lets Keras add to its sums, count, and move averages of weights."""
    last = base.innermost(self.optimizer)
    last.apply(list(grads), [self.as_built(v) for v in variables])

  def place_of(self, variable: Any) -> tuple[int, int]:
    """Returns the place of a variable, and among how many it was built on."""
    last = base.innermost(self.optimizer)
    index = self._index(variable)
    assert index is not None
    return index, len(last._trainable_variables)

  @property
  def averages(self) -> list[Any]:
    """The moving averages of what it was built on; empty without."""
    last = base.innermost(self.optimizer)
    return list(getattr(last, "_model_variables_moving_average", ()))

  def decays(self, variable: Any) -> bool:
    """Whether `variable` has weight decay, should there be any."""
    last = base.innermost(self.optimizer)
    return bool(last._use_weight_decay(variable))

  def scale_loss(self, loss: Any) -> Any:
    """Multiplies by `loss_scale_factor` or the dynamic scale."""
    if (
      self.outer_loss_scaler is not None
    ):  # Its own method is replaced by ours.
      return type(self.outer_loss_scaler).scale_loss(
        self.outer_loss_scaler, loss
      )
    return self.optimizer.scale_loss(loss)

  def scale_limit(self, limit: float) -> Any:
    """Gradients come in multiplied by the loss scale."""
    return self.scale_loss(limit)

  def _apply(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    through_apply: bool,
  ) -> None:
    """Hands sums to the optimizer, by the method that the caller used."""
    variables = [self.as_built(v) for v in variables]
    if through_apply:
      self.optimizer.apply(list(grads), variables)
    else:
      pairs = zip(grads, variables, strict=True)
      self.optimizer.apply_gradients(list(pairs))

  def _apply_around(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Hands sums to the LossScaleOptimizer around ours."""
    variables = [self.as_built(v) for v in variables]
    type(self.outer_loss_scaler).apply(
      self.outer_loss_scaler, list(grads), variables
    )

  def own_slots(self, variable: Any) -> dict[str, Any]:
    """The slots of `variable`, by name.

    Keras joins the variable's name and the slot's: "dense_kernel" and
    "velocity" make "dense_kernel_velocity".
    """
    index = self._index(variable) if self.is_built else None
    if index is None:
      return {}
    reference = self.trainable_variables[index]
    path = getattr(reference, "path", None)
    prefixes = [
      str(name).replace("/", "_").replace(":", "_") + "_"
      for name in (path, reference.name)
      if name
    ]
    names, found = [], []
    last = base.innermost(self.optimizer)
    # A MultiOptimizer has others, each for some of the variables.
    for each in getattr(last, "_inner_optimizers", (last,)):
      keys = (each._var_key(reference), path, reference.name)
      index = each._trainable_variables_indices.get(keys[0])
      if index is None:
        continue
      count = len(each._trainable_variables)
      for attribute, slot in base.slots_at(each, index, count, keys):
        name = slot.name
        kinds = [name.removeprefix(p) for p in prefixes if name.startswith(p)]
        # Adafactor names its row and column statistics after the variable only.
        names.append(kinds[0] if kinds else attribute.strip("_"))
        found.append(slot)
    unique = optimizer_state.unique(names)
    return dict(zip(unique, found, strict=True))

  def slot_names(self) -> list[str]:
    """The name of every slot, once."""
    trained = self.unsharded_state.trainable_variables
    slots = (self.slots(v) for v in trained if self.is_built)
    return list(dict.fromkeys(name for by_name in slots for name in by_name))

  def _index(self, variable: Any) -> int | None:
    """The place of `variable` among those it was built on, or None."""
    last = base.innermost(self.optimizer)
    index: int | None = last._trainable_variables_indices.get(
      last._var_key(variable)
    )
    return index


class Keras3(libraries.Library):
  """The private names of Keras 3 that other modules need."""

  package = "keras"

  def layers(self, model: Any) -> list[Any]:
    """Returns a model and all layers within it, nested ones too."""
    return list(model._flatten_layers())

  def compile_arguments(self, model: Any) -> dict[str, Any] | None:
    """Returns what a model was compiled with; None if it was not."""
    compiled = getattr(model, "_compile_config", None)
    return None if compiled is None else dict(compiled.config)

  def nested(self, optimizer: Any) -> Sequence[Any]:
    """Returns the optimizers of a MultiOptimizer."""
    nested: Sequence[Any] = vars(optimizer).get("_inner_optimizers", ())
    return nested

  def learning_rates(self, optimizer: Any) -> list[Any]:
    """Returns what an optimizer keeps as its rate: a variable or a schedule."""
    return [getattr(optimizer, "_learning_rate", None)]

  def trained(self, optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built on."""
    return list(getattr(optimizer, "_trainable_variables", ()))

  def accumulated(self, optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer adds gradients up in."""
    return list(getattr(optimizer, "_accumulated_gradients", ()))


libraries.register(Keras3())
