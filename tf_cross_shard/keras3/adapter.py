"""An encapsulated optimizer of Keras 3.

Keras 3 sums gradients over all replicas inside `apply`, with no switch to
turn that off. It does so through the replica context that it finds, and so
`apply_reduced` is called inside `Engine.isolate()`, whose context has no other
replicas. Nothing of the user's optimizer is replaced.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base, libraries, optimizer_state


class Keras3Optimizer(base.InnerOptimizer):
  """An encapsulated `keras.optimizers.Optimizer`."""

  _decay_method = "_apply_weight_decay"
  _clip_method = "_clip_gradients"
  _places = "_trainable_variables_indices"

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
  def trainable_variables(self) -> Sequence[Any]:
    """The variables that the optimizer was built on, in order."""
    # No copy: `as_built` asks for it once for each variable and replica.
    variables: Sequence[Any] = self.innermost._trainable_variables
    return variables

  @property
  def begin_as_weights(self) -> Sequence[Any]:
    """The points that ScheduleFreeAdamW averages."""
    kind = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
    is_one = isinstance(self.innermost, kind)
    return self.innermost._momentums if is_one else ()

  def make_variable(self, value: Any, name: str) -> Any:
    """A trainable variable of this Keras."""
    return keras.Variable(value, dtype=value.dtype.name, name=name)

  def make_tiny(self, weight: Any) -> Any:
    """A variable of one element with a weight's names, rank and dtype."""
    if not isinstance(weight, keras.Variable):  # Keras names others otherwise.
      zeros = tf.zeros([1] * len(weight.shape), weight.dtype)
      return tf.Variable(zeros, name=str(weight.name).split(":")[0])
    tiny = super().make_tiny(weight)
    tiny._path = weight.path
    return tiny

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
    factor = self.innermost.loss_scale_factor
    return bool(self.accumulates) and not is_own and not factor

  @property
  def accumulated_calls(self) -> Any:
    """The variable in which the optimizer itself counts calls."""
    return self.innermost._iterations

  def accumulated_gradient(self, variable: Any) -> Any:
    """Returns the variable in which it adds up gradients of `variable`."""
    return libraries.accumulated(self.innermost)[self.index(variable)]

  def accumulate(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Lets Keras add to its sums, count, and move averages of weights."""
    self.innermost.apply(list(grads), [self.as_built(v) for v in variables])

  def scale_loss(self, loss: Any) -> Any:
    """Multiplies by `loss_scale_factor` or the dynamic scale."""
    around = self.outer_loss_scaler
    if around is None:
      return self.optimizer.scale_loss(loss)
    return type(around).scale_loss(around, loss)  # Its own is now ours.

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

  def slots(self, variable: Any) -> dict[str, Any]:
    """The slots of `variable`, by name.

    Keras joins the variable's name and the slot's: "dense_kernel" and
    "velocity" make "dense_kernel_velocity".
    """
    index = self.index(variable) if self.is_built else None
    if index is None:
      return {}
    reference = self.trainable_variables[index]
    path = getattr(reference, "path", None)
    prefixes = [
      str(name).replace("/", "_").replace(":", "_") + "_"
      for name in (path, reference.name)
      if name
    ]
    names, slots = [], []
    # A MultiOptimizer has others, each for some of the variables.
    for layer in libraries.nested(self.innermost) or [self.innermost]:
      keys = (layer._var_key(reference), path, reference.name)
      index = layer._trainable_variables_indices.get(keys[0])
      if index is None:
        continue
      count = len(layer._trainable_variables)
      for attribute, slot in base.slots_at(layer, index, count, keys):
        name = slot.name
        kinds = [name.removeprefix(p) for p in prefixes if name.startswith(p)]
        # Adafactor names its row and column statistics after the variable only.
        names.append(kinds[0] if kinds else attribute.strip("_"))
        slots.append(slot)
    return dict(zip(optimizer_state.unique(names), slots, strict=True))

  def slot_names(self) -> list[str]:
    """The name of every slot, once."""
    whole = self.unsharded_state
    slots = (whole.slots(v) for v in whole.trainable_variables if self.is_built)
    return list(dict.fromkeys(name for by_name in slots for name in by_name))
