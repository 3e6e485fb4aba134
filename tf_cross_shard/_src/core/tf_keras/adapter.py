"""The wrapped optimizer of tf_keras.

tf_keras reaches other replicas (to sum gradients, for weight decay and for
moving averages) through the replica context. So `apply` is called
inside `Engine.isolate()`, whose replica context has no other replicas.
"""

# ruff: noqa: SLF001  # Slots and how they are found are private in tf_keras.

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras
from tensorflow.python.distribute import distribute_lib

from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.gradients.clipping import Gradient
from tf_cross_shard._src.core.keras_types import Optimizer, Variable
from tf_cross_shard._src.core.wrapped import names as names_lib
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib
from tf_cross_shard._src.core.wrapped import overriding


class TfKerasAdapter(wrapped_lib.WrappedOptimizer):
  """A wrapped `tf_keras.optimizers.Optimizer`."""

  package = "tf_keras"
  sums_rows = True
  _index_attribute = "_index_dict"

  def __init__(self, optimizer: Optimizer) -> None:
    self._trainable: list[Variable] = []
    super().__init__(optimizer)

  @property
  def is_built(self) -> bool:
    return bool(getattr(self.base_optimizer, "_built", False))

  @property
  def trainable_variables(self) -> list[Variable]:
    return list(self._trainable)

  def make_variable(self, value: Any, name: str) -> Variable:
    return tf.Variable(value, name=name)

  def build(self, variables: Sequence[Variable]) -> None:
    if not self.is_built:
      self._trainable = list(variables)
      # Slots must outlive a function that is being traced.
      with tf.init_scope():
        super().build(self._trainable)

  @property
  def _weight_copy_attribute(self) -> str:
    return "_model_variables_moving_average"

  @property
  def computes_gradients(self) -> bool:
    return self._overrides("compute_gradients")

  def compute_gradients(
    self, loss: Any, variables: Sequence[Variable], tape: tf.GradientTape
  ) -> list[tuple[Gradient, Any]]:
    compute = self.base_optimizer.compute_gradients
    return list(compute(loss, list(variables), tape=tape))

  def check_class(self) -> None:
    """Raises `ValueError` for a class that overrides `minimize`.

    `fit` of plain tf_keras calls `minimize`. With the wrapper that override
    cannot run, because gradients must be summed between its two halves.
    """
    if self._overrides("minimize"):
      kind = type(self.base_optimizer).__name__
      raise ValueError(
        f"`opt` must not override minimize(), as {kind} does: gradients are"
        " summed over the replicas between its halves. Override"
        " compute_gradients() or apply_gradients()."
      )

  def slots(self, variable: Variable) -> dict[str, Variable]:
    if not self.is_built or self.index(variable) is None:
      return {}
    return self._slots_of(self.base_optimizer._var_key(variable), variable.name)

  def slot_names(self) -> list[str]:
    keys = self.base_optimizer._index_dict if self.is_built else ()
    slots = map(self._slots_of, keys)
    return list(dict.fromkeys(name for by_name in slots for name in by_name))

  def _slots_of(self, *keys: Any) -> dict[str, Any]:
    """Returns the slots, by name, of the variable that has these keys."""
    places = self.base_optimizer._index_dict
    index, count = places[keys[0]], len(places)
    found = wrapped_lib.slots_at(self.base_optimizer, index, count, keys)
    slots = [slot for _, slot in found]
    # "m/dense/kernel:0" is the slot "m" of "dense/kernel" in Adam.
    names = names_lib.unique([slot.name.split("/")[0] for slot in slots])
    return dict(zip(names, slots, strict=True))

  # The user multiplies the loss by the loss scale and divides the gradients by
  # the loss scale. So our optimizer gets gradients without the loss scale.

  @property
  def skips_overflows(self) -> bool:
    return bool(getattr(self._scaler, "dynamic", False))

  @property
  def _scaler(self) -> Any:
    """The LossScaleOptimizer, dynamic or not; or None."""
    has_scale = hasattr(self.optimizer, "get_scaled_loss")
    return self.optimizer if has_scale else None

  def scale_loss(self, loss: Any) -> Any:
    scaler = self._scaler
    if scaler is None:
      return loss
    return scaler.get_scaled_loss(tf.convert_to_tensor(loss))

  def wire_scale(self) -> Any:
    scaler = self._scaler
    return None if scaler is None else scaler.loss_scale

  def unscale(self, grads: Sequence[Gradient]) -> list[Gradient]:
    scaler = self._scaler
    if scaler is None:
      return list(grads)
    return list(scaler.get_unscaled_gradients(list(grads)))

  def _apply(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Variable],
    through_apply: bool,
    **options: Any,
  ) -> None:
    """Applies sums through the optimizer.

    The optimizer also aggregates the sums. In isolation this changes nothing,
    and the aggregation runs methods that the user's class overrides. The
    switches `skip_gradients_aggregation` and `experimental_aggregate_gradients`
    would turn these overrides off.
    """
    del through_apply  # tf_keras has no `apply`.
    pairs = [
      (row_sparse.cast(grad, variable), variable)
      for grad, variable in zip(grads, variables, strict=True)
    ]
    opt, counter = self.base_optimizer, {}
    # Without isolation, replicas are threads that share one update of all
    # copies, so only the first thread replaces Nadam's counter.
    if isinstance(opt, tf_keras.optimizers.Nadam) and not isinstance(
      opt._u_product_counter, _OncePerStep
    ):
      counter["_u_product_counter"] = _OncePerStep()
    with overriding.overriding(opt, **counter):
      self.optimizer.apply_gradients(pairs, **options)


class _OncePerStep:
  """Replaces Nadam's `_u_product_counter` during one step.

  Nadam multiplies its product of momentums when it updates the first variable
  of a step. It finds the first variable by an attribute that counts updates in
  Python: wrong in a function, which is traced once, on several replicas, which
  all count, and in a resumed program, which starts at 1. Nadam compares
  this object once for each variable. `__eq__` returns False for the first
  variable of a step and True for the rest, on each replica.
  """

  __hash__ = None  # type: ignore[assignment]

  def __init__(self) -> None:
    self._replicas: set[Any] = set()

  def __eq__(self, other: object) -> Any:
    """Returns, as a tensor, whether this step has multiplied the product."""
    # The replica whose copies Keras is updating; None in isolation. With one
    # replica it is the variable.
    replica = distribute_lib.get_update_replica_id()
    replica = replica if isinstance(replica, int) else None
    is_multiplied = replica in self._replicas
    self._replicas.add(replica)
    return tf.constant(is_multiplied)

  def __add__(self, other: int) -> "_OncePerStep":
    return self


adapter = TfKerasAdapter
