"""An encapsulated optimizer of tf_keras.

Everything that it does across replicas (its own reduction, merge calls for
weight decay and for moving averages) it does through the replica context that
it finds, which is isolated.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf
import tf_keras

from tf_cross_shard.gradients import indexed_slices
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base, optimizer_state

_LEGACY: Final = tf_keras.optimizers.legacy.Optimizer


class TfKerasOptimizer(base.InnerOptimizer):
  """An encapsulated `tf_keras.optimizers.Optimizer`."""

  _decay_method = "_apply_weight_decay"
  _clip_method = "_clip_gradients"
  _places = "_index_dict"
  # The first calls the others.
  _gradient_methods: tuple[str, ...] = ("compute_gradients",)

  def __init__(self, optimizer: Any) -> None:
    super().__init__(optimizer)
    self._trainable: list[Any] = []

  @property
  def is_built(self) -> bool:
    """Whether the slots exist."""
    return bool(getattr(self.innermost, "_built", False))

  @property
  def scales_dynamically(self) -> bool:
    """Whether a LossScaleOptimizer with a dynamic scale is within or around."""
    return bool(getattr(self._loss_scaler, "dynamic", False))

  @property
  def trainable_variables(self) -> list[Any]:
    """The variables that the optimizer was built on, if it was built here."""
    return list(self._trainable)

  @property
  def _loss_scaler(self) -> Any:
    """The LossScaleOptimizer around or within, dynamic or not, or None."""
    is_within = hasattr(self.optimizer, "get_scaled_loss")
    return self.outer_loss_scaler or (self.optimizer if is_within else None)

  def make_variable(self, value: Any, name: str) -> Any:
    """A trainable variable of this Keras."""
    return tf.Variable(value, name=name)

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they exist."""
    if not self.is_built:
      self._trainable = list(variables)
      # In a function that is being traced, they must outlive the trace.
      with tf.init_scope():
        super().build(self._trainable)

  @property
  def begin_as_weights(self) -> Sequence[Any]:
    """The moving averages."""
    return self.averages

  @property
  def computes_gradients(self) -> bool:
    """Whether the user's class overrides the way from a loss to gradients."""
    return self._overrides(*self._gradient_methods)

  def compute_gradients(
    self, loss: Any, variables: Sequence[Any], tape: tf.GradientTape
  ) -> list[tuple[Gradient, Any]]:
    """Calls the user's class with a loss that `tape` recorded."""
    compute = getattr(self.innermost, self._gradient_methods[0])
    return list(compute(loss, list(variables), tape=tape))

  def check_class(self) -> None:
    """Raises `ValueError` for a class with a method that cannot run.

    `fit` of plain tf_keras calls `minimize`; here gradients must be summed
    between its two halves.
    """
    if self._overrides("minimize"):
      kind = type(self.innermost).__name__
      raise ValueError(
        f"`opt` must not override minimize(), as {kind} does: gradients are"
        " summed over the replicas between its halves. Override"
        f" {self._gradient_methods[0]}() or apply_gradients()."
      )

  def scale_loss(self, loss: Any) -> Any:
    """Multiplies by the loss scale."""
    scaler = self._loss_scaler
    if scaler is None:
      return loss
    # Of one around ours the instance's method is replaced by ours.
    return type(scaler).get_scaled_loss(scaler, tf.convert_to_tensor(loss))

  def wire_scale(self) -> Any:
    """The loss scale, which gradients came in divided by."""
    scaler = self._loss_scaler
    return None if scaler is None else scaler.loss_scale

  def unscale(self, grads: Sequence[Gradient]) -> list[Gradient]:
    """Divides by the loss scale, which `apply_gradients` does not do."""
    scaler = self._loss_scaler
    if scaler is None:
      return list(grads)
    return list(type(scaler).get_unscaled_gradients(scaler, list(grads)))

  def _apply(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    through_apply: bool,
  ) -> None:
    """Hands sums to the optimizer.

    It aggregates them in isolation, which changes nothing, and so runs what the
    user's class overrides. Its switches (`skip_gradients_aggregation`,
    `experimental_aggregate_gradients`) would switch that off too.
    """
    del through_apply  # tf_keras has no `apply`.
    self.optimizer.apply_gradients(as_pairs(grads, variables))

  def _apply_around(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Hands sums to the LossScaleOptimizer around ours."""
    pairs = zip(grads, variables, strict=True)
    type(self.outer_loss_scaler).apply_gradients(
      self.outer_loss_scaler, pairs, skip_gradients_aggregation=True
    )

  def slots(self, variable: Any) -> dict[str, Any]:
    """The slots of a variable that the optimizer is built on, by name."""
    if not self.is_built or self.index(variable) is None:
      return {}
    return self._slots_of(self.innermost._var_key(variable), variable.name)

  def slot_names(self) -> list[str]:
    """The name of every slot, once."""
    keys = self.innermost._index_dict if self.is_built else ()
    slots = map(self._slots_of, keys)
    return list(dict.fromkeys(name for by_name in slots for name in by_name))

  def _slots_of(self, *keys: Any) -> dict[str, Any]:
    """The slots of a variable with these keys, Keras' first, by name."""
    places = self.innermost._index_dict
    index, count = places[keys[0]], len(places)
    found = base.slots_at(self.innermost, index, count, keys)
    slots = [slot for _, slot in found]
    # "m/dense/kernel:0" is Adam's slot "m" of "dense/kernel".
    names = optimizer_state.unique([slot.name.split("/")[0] for slot in slots])
    return dict(zip(names, slots, strict=True))


class LegacyOptimizer(TfKerasOptimizer):
  """An encapsulated `tf_keras.optimizers.legacy.Optimizer`."""

  _gradient_methods = (
    "_compute_gradients",
    "_get_gradients",
    "_transform_loss",
  )

  def __init__(self, optimizer: Any) -> None:
    super().__init__(optimizer)
    # The count is made when it is first read, which may be in one of several
    # replicas.
    with self.strategy.scope():
      _ = optimizer.iterations

  @property
  def is_built(self) -> bool:
    """Whether slots exist; more are made whenever they are needed."""
    return bool(self._trainable)

  def write_averages(self, variables: Sequence[Any]) -> None:
    """Does nothing: legacy optimizers average no weights."""

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they exist."""
    known = {id(v) for v in self._trainable}
    new = [v for v in variables if id(v) not in known]
    if new:
      with tf.init_scope():
        self.innermost._create_all_weights(list(variables))
      self._trainable += new

  def knows(self, variable: Any) -> bool:
    """True: legacy optimizers take any variable at any time."""
    return True

  def slots(self, variable: Any) -> dict[str, Any]:
    """The slots of `variable`, by name."""
    slots = {}
    for name in self.innermost.get_slot_names():
      # No variable, or one that no slots were made for.
      with contextlib.suppress(AttributeError, KeyError):
        slots[name] = self.innermost.get_slot(variable, name)
    return slots

  def slot_names(self) -> list[str]:
    """The name of every slot, once."""
    return list(self.optimizer.get_slot_names())

  def save_own_variables(self, store: Any) -> None:
    """Saves the variables in the form of Keras' other optimizers."""
    for i, variable in enumerate(self.variables):
      store[str(i)] = variable.numpy()

  def load_own_variables(self, store: Any) -> None:
    """Loads what was saved; Keras checks number and shapes."""
    self.set_weights([store[str(i)] for i in range(len(store.keys()))])


def as_pairs(
  grads: Sequence[Gradient], variables: Sequence[Any]
) -> list[tuple[Gradient, Any]]:
  """Returns pairs, with gradients of their variables' dtypes."""
  return [
    (indexed_slices.cast(grad, variable), variable)
    for grad, variable in zip(grads, variables, strict=True)
  ]


def adapter(opt: Any) -> TfKerasOptimizer:
  """The encapsulated form of a new or a legacy optimizer."""
  legacy = isinstance(base.innermost(opt), _LEGACY)
  return LegacyOptimizer(opt) if legacy else TfKerasOptimizer(opt)
