"""An encapsulated optimizer of Keras 3, and what encapsulates it.

Keras 3 sums gradients over all replicas inside `apply`, with no switch to
turn that off. It does so through the replica context it finds, and so the
caller puts `apply_reduced` into `Engine.alone()`, whose context has nobody to
sum with. Nothing of the user's optimizer is replaced.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base, loss_scaling, wrapper

# What Keras' constructor puts on every optimizer and what stays our own.
_OWN: Final = frozenset(
  ("name", "clipnorm", "global_clipnorm", "clipvalue", "_lock", "_tracker")
)


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
  def divides(self) -> bool:
    """Whether a LossScaleOptimizer stands within."""
    return self.scales_dynamically

  @property
  def trainable_variables(self) -> list[Any]:
    """What the built optimizer was built on, in order."""
    return list(base.innermost(self.optimizer)._trainable_variables)

  def path(self, variable: Any) -> str:
    """The name with the scopes around it."""
    return str(variable.path)

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they are there."""
    if not self.is_built:
      self.optimizer.build(list(variables))

  def knows(self, variable: Any) -> bool:
    """Whether the built optimizer was built on `variable`."""
    return self._index(variable) is not None

  def as_built(self, variable: Any) -> Any:
    """The Keras variable, for the native one that tapes and graphs report."""
    if isinstance(variable, keras.Variable) or not self.is_built:
      return variable
    index = self._index(variable)
    if index is None:
      return variable
    return base.innermost(self.optimizer)._trainable_variables[index]

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
    last = base.innermost(self.optimizer)
    index: int | None = last._trainable_variables_indices.get(
      last._var_key(variable)
    )
    return index

  def _slots_at(self, index: int) -> Iterator[tuple[str, Any]]:
    """Names and slots of the index-th variable.

    The list's items tell the variable's name and the slot's: "dense_kernel" and
    "velocity" make "dense_kernel_velocity".
    """
    last = base.innermost(self.optimizer)
    reference = last._trainable_variables[index]
    prefixes = [
      str(name).replace("/", "_").replace(":", "_") + "_"
      for name in (getattr(reference, "path", None), reference.name)
      if name
    ]
    count = len(last._trainable_variables)
    for attribute, slot in base.slots_at(last, index, count, last.variables):
      name = slot.name
      kinds = [name.removeprefix(p) for p in prefixes if name.startswith(p)]
      # Adafactor names its row and column statistics after the variable only.
      yield kinds[0] if kinds else attribute.strip("_"), slot


class ScaledKeras3Optimizer(loss_scaling.ScaledOptimizer):
  """The adapter where a LossScaleOptimizer of Keras 3 stands around ours."""

  @property
  def divides(self) -> bool:
    """It divides what it hands on."""
    return True

  def scale_loss(self, loss: Any) -> Any:
    """Multiplies by the dynamic scale."""
    return type(self.around).scale_loss(self.around, loss)

  def _begin(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    """Looks at the sums, and calls ours if they are finite."""
    variables = [self.as_built(v) for v in variables]
    type(self.around).apply(self.around, list(grads), variables)


class _Around:
  """What a LossScaleOptimizer around ours does instead of its own."""

  def __init__(self, around: Any, ours: Any) -> None:
    self._around = around
    self._ours = ours

  def scale_loss(self, loss: Any) -> Any:
    """Scales by the mean's factor too."""
    return self._ours.scale_loss(loss)

  def apply(self, grads: Any, trainable_variables: Any = None) -> None:
    """Reduces first."""
    if not self._around.built:
      self._around.build(list(trainable_variables))
    self._ours.apply(grads, trainable_variables)


class Keras3Delegate(wrapper.Delegating, keras.optimizers.Optimizer):
  """A Keras 3 optimizer that is another one in all but its updates."""

  def __init__(self, opt: Any, name: str, **clipping: float | None) -> None:
    """Makes the wrapper."""
    # Not the next in line: that one keeps what follows.
    keras.optimizers.Optimizer.__init__(
      self, learning_rate=0.0, name=name, **clipping
    )
    # Keras made an iteration count, a learning rate and settings of its own.
    # Without them the encapsulated optimizer's are found by __getattr__.
    for attribute in set(vars(self)) - _OWN:
      if hasattr(opt, attribute) and not attribute.startswith("_self_"):
        del self.__dict__[attribute]
    self._encapsulate(Keras3Optimizer(opt))

  def __setattr__(self, name: str, value: Any) -> None:
    """Writes where the attribute lives; notices who encapsulates this one."""
    if name == "loss_scale_factor":
      kind = keras.optimizers.LossScaleOptimizer
      around = loss_scaling.caller_around(self, kind)
      if around is not None:
        self._change_places(
          around, ScaledKeras3Optimizer, _Around(around, self)
        )
    super().__setattr__(name, value)

  @classmethod
  def _as_optimizer(cls, opt: Any) -> Any:
    """`opt` as a Keras 3 optimizer."""
    return wrapper.as_optimizer(
      cls,
      opt,
      get=keras.optimizers.get,
      kinds=(keras.optimizers.Optimizer,),
      spelling="keras.optimizers",
      convert=_convert,
    )

  @staticmethod
  def _serialize(opt: Any) -> Any:
    """An optimizer as a dictionary."""
    return keras.saving.serialize_keras_object(opt)

  @staticmethod
  def _deserialize(config: Any, custom_objects: Any) -> Any:
    """The optimizer that a dictionary describes, not built."""
    from tf_cross_shard import migration  # which stands above this module

    migration.v1_classes("keras")  # Keras finds what is registered only.
    # Not optimizers.deserialize: it lacks Lamb.
    return keras.saving.deserialize_keras_object(config, custom_objects)


def _convert(opt: Any) -> Any:
  """`opt`, or what it is in this Keras if it is of TensorFlow 1."""
  from tf_cross_shard import migration  # which stands above this module

  return migration.convert_optimizer(opt, "keras")
