"""An encapsulated optimizer of Keras 3.

Keras 3 sums gradients over all replicas inside `apply`, with no switch to
turn that off. It does so through the replica context it finds, and so the
caller puts `apply_reduced` into `Engine.alone()`, whose context has nobody to
sum with. Nothing of the user's optimizer is replaced.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard.clipping import Gradient
from tf_cross_shard.inner import base


class Keras3Optimizer(base.InnerOptimizer):
  """The adapter for `keras.optimizers.Optimizer`."""

  @property
  def strategy(self) -> tf.distribute.Strategy:
    """The strategy whose scope the optimizer was made in."""
    strategy: tf.distribute.Strategy = self.optimizer._distribution_strategy
    return strategy

  @property
  def is_built(self) -> bool:
    """Whether the slots are there."""
    return bool(self.optimizer.built)

  @property
  def scales_dynamically(self) -> bool:
    """Whether a LossScaleOptimizer stands within."""
    return hasattr(self.optimizer, "dynamic_growth_steps")

  @property
  def trainable_variables(self) -> list[Any]:
    """What the built optimizer was built on, in order."""
    return list(_innermost(self.optimizer)._trainable_variables)

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they are there."""
    if not self.is_built:
      self.optimizer.build(list(variables))

  def knows(self, variable: Any) -> bool:
    """Whether the built optimizer was built on `variable`."""
    return self._index(variable) is not None

  def as_built(self, variable: Any) -> Any:
    """The Keras variable, for the native one that tapes and graphs report."""
    if isinstance(variable, tf.keras.Variable) or not self.is_built:
      return variable
    index = self._index(variable)
    if index is None:
      return variable
    return _innermost(self.optimizer)._trainable_variables[index]

  def scale_loss(self, loss: Any) -> Any:
    """Multiplies by `loss_scale_factor` or the dynamic scale."""
    return self.optimizer.scale_loss(loss)

  def apply_reduced(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Applies gradients that are sums already."""
    self.optimizer.apply(list(grads), [self.as_built(v) for v in variables])

  def iterations(self) -> tf.Tensor:
    """The count of applied steps."""
    return tf.convert_to_tensor(self.optimizer.iterations)

  def slots(self, variable: Any) -> dict[str, Any]:
    """The variables that were made for `variable`."""
    index = self._index(variable) if self.is_built else None
    return {} if index is None else dict(self._slots_at(index))

  def slot_names(self) -> list[str]:
    """Every name of a slot, once."""
    if not self.is_built:
      return []
    count = len(self.trainable_variables)
    names = (name for i in range(count) for name, _ in self._slots_at(i))
    return list(dict.fromkeys(names))

  def _index(self, variable: Any) -> int | None:
    """Where `variable` stands among those the optimizer was built on."""
    last = _innermost(self.optimizer)
    index: int | None = last._trainable_variables_indices.get(
      last._var_key(variable)
    )
    return index

  def _slots_at(self, index: int) -> Iterator[tuple[str, Any]]:
    """Names and slots of the index-th variable.

    An optimizer keeps each kind of slot as one list along its variables. The
    list's items tell the variable's name and the slot's: "dense_kernel" and
    "velocity" make "dense_kernel_velocity".
    """
    last = _innermost(self.optimizer)
    reference = last._trainable_variables[index]
    prefixes = [
      str(name).replace("/", "_").replace(":", "_") + "_"
      for name in (getattr(reference, "path", None), reference.name)
      if name
    ]
    own = set(map(id, last.variables))
    for attribute, values in list(vars(last).items()):
      if (
        not isinstance(values, list)
        or len(values) != len(last._trainable_variables)
        or attribute in ("_variables", "_trainable_variables")
        or id(values[index]) not in own
      ):
        continue
      name = values[index].name
      kinds = [name.removeprefix(p) for p in prefixes if name.startswith(p)]
      # Adafactor names its row and column statistics after the variable only.
      yield kinds[0] if kinds else attribute.strip("_"), values[index]


def _innermost(optimizer: Any) -> Any:
  """The optimizer that keeps the slots, below any loss scaling."""
  while hasattr(optimizer, "inner_optimizer"):
    optimizer = optimizer.inner_optimizer
  return optimizer
