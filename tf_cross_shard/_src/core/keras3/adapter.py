"""The wrapped optimizer of Keras 3.

Keras 3 sums gradients over all replicas inside `apply`, and this sum cannot be
turned off. Keras finds the replicas through the replica context. So
`apply` is called inside `Engine.isolate()`, whose replica context has
no other replicas.
"""

# ruff: noqa: SLF001  # Slots, paths and counts are private in Keras 3.

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_cross_shard._src.core.gradients import clipping
from tf_cross_shard._src.core.gradients.clipping import Gradient
from tf_cross_shard._src.core.keras_types import Variable
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import names as names_lib
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


class Keras3Adapter(wrapped_lib.WrappedOptimizer):
  """A wrapped `keras.optimizers.Optimizer`."""

  package = "keras"
  sums_rows = False
  _index_attribute = "_trainable_variables_indices"

  @property
  def is_built(self) -> bool:
    return bool(self.optimizer.built)

  def build(self, variables: Sequence[Variable]) -> None:
    super().build(variables)
    if self.optimizer is not self.base_optimizer:
      keras_private.show_averages(self.optimizer, self.averages)

  @property
  def trainable_variables(self) -> Sequence[Variable]:
    # Do not copy: `as_built` reads this property for each variable and replica.
    return self.base_optimizer._trainable_variables

  @property
  def _weight_copy_attribute(self) -> str:
    kind = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
    return "_momentums" if isinstance(self.base_optimizer, kind) else ""

  def make_variable(self, value: Any, name: str) -> Variable:
    return keras.Variable(value, dtype=value.dtype.name, name=name)

  def make_tiny(self, weight: Variable) -> Variable:
    # Keras names slots of a `tf.Variable` differently.
    if not isinstance(weight, keras.Variable):
      zeros = tf.zeros([1] * len(weight.shape), weight.dtype)
      return tf.Variable(zeros, name=str(weight.name).split(":")[0])
    tiny = super().make_tiny(weight)
    tiny._path = weight.path
    return tiny

  def as_built(self, variable: Variable) -> Variable:
    if isinstance(variable, keras.Variable) or not self.is_built:
      return variable
    whole = self.whole
    index = whole.index(variable)
    return variable if index is None else whole.trainable_variables[index]

  def slots(self, variable: Variable) -> dict[str, Variable]:
    """Returns the slots of a variable by name; empty for an unknown one.

    Keras joins the variable's name and the slot's name: "dense_kernel" and
    "velocity" become "dense_kernel_velocity".
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
    layer = self.base_optimizer
    keys = (layer._var_key(reference), path, reference.name)
    count = len(layer._trainable_variables)
    for attribute, slot in wrapped_lib.slots_at(layer, index, count, keys):
      name = slot.name
      kinds = [name.removeprefix(p) for p in prefixes if name.startswith(p)]
      # Adafactor names its row and column statistics after the variable only.
      names.append(kinds[0] if kinds else attribute.strip("_"))
      slots.append(slot)
    return dict(zip(names_lib.unique(names), slots, strict=True))

  def slot_names(self) -> list[str]:
    whole = self.whole
    slots = (whole.slots(v) for v in whole.trainable_variables if self.is_built)
    return list(dict.fromkeys(name for by_name in slots for name in by_name))

  @property
  def skips_overflows(self) -> bool:
    return hasattr(self.optimizer, "dynamic_growth_steps")

  @property
  def divides_gradients(self) -> bool:
    return self.skips_overflows

  def scale_loss(self, loss: Any) -> Any:
    return self.optimizer.scale_loss(loss)

  def scale_limit(self, limit: float) -> Any:
    return self.scale_loss(limit)

  def _apply(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Variable],
    through_apply: bool,
    **options: Any,
  ) -> None:
    del options  # In Keras 3 these methods have no other arguments.
    variables = [self.as_built(v) for v in variables]
    if self.skips_overflows:
      # Of rows that share an index, Keras 3 looks for NaN in the last one only.
      grads = list(map(clipping.spread_nonfinite, grads))
    if through_apply:
      self.optimizer.apply(list(grads), variables)
    else:
      pairs = zip(grads, variables, strict=True)
      self.optimizer.apply_gradients(list(pairs))


adapter = Keras3Adapter  # tf_keras has two kinds of optimizers.
