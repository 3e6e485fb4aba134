"""An encapsulated optimizer of Keras 3, and the wrapper around it.

Keras 3 sums gradients over all replicas inside `apply`, with no switch to
turn that off. It does so through the replica context that it finds, and so
`apply_reduced` is called inside `Engine.isolate()`, whose context has no other
replicas. Nothing of the user's optimizer is replaced.
"""

from collections.abc import Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base, optimizer_state
from tf_cross_shard.step import accumulation
from tf_cross_shard.wrapper import forwarding, loss_scaling

# What Keras' constructor puts on every optimizer and what stays our own.
_OWN: Final = frozenset(
  ("name", "clipnorm", "global_clipnorm", "clipvalue", "_lock", "_tracker")
)


class Keras3Optimizer(base.InnerOptimizer):
  """An encapsulated `keras.optimizers.Optimizer`."""

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
    return is_within or self.around is not None

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
    if self.plain is not None:
      at = self.plain.index(variable)
      return variable if at is None else self.plain.trainable_variables[at]
    index = self._index(variable)
    if index is None:
      return variable
    return base.innermost(self.optimizer)._trainable_variables[index]

  def own_window(self) -> accumulation.Window | None:
    """That of `gradient_accumulation_steps`.

    A class of the user's that overrides how gradients are applied is handed
    sums in every call, as without a window. So is one that divides them by
    `loss_scale_factor`, in every call too.
    """
    last, steps = base.innermost(self.optimizer), self.accumulates
    is_own = self._overrides("apply", "apply_gradients")
    if not steps or is_own or last.loss_scale_factor:
      return None

    def pass_by(grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
      # It adds to its sums, counts, and moves averages of weights.
      last.apply(list(grads), [self.as_built(v) for v in variables])

    return accumulation.Window(
      steps,
      last._iterations,
      lambda variable: last._accumulated_gradients[self._index(variable)],
      divisor=1,  # It divides.
      pass_by=pass_by,
    )

  def scale_loss(self, loss: Any) -> Any:
    """Multiplies by `loss_scale_factor` or the dynamic scale."""
    if self.around is not None:  # Its own method is replaced by ours.
      return type(self.around).scale_loss(self.around, loss)
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
    type(self.around).apply(self.around, list(grads), variables)

  def slots(self, variable: Any) -> dict[str, Any]:
    """The slots of `variable`, by name.

    Keras joins the variable's name and the slot's: "dense_kernel" and
    "velocity" make "dense_kernel_velocity".
    """
    if self.plain is not None:
      return dict(self.plain.slots(variable))
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
    trained = (self.plain or self).trainable_variables
    slots = (self.slots(v) for v in trained if self.is_built)
    return list(dict.fromkeys(name for each in slots for name in each))

  def _index(self, variable: Any) -> int | None:
    """The place of `variable` among those it was built on, or None."""
    last = base.innermost(self.optimizer)
    index: int | None = last._trainable_variables_indices.get(
      last._var_key(variable)
    )
    return index


class Keras3Wrapper(forwarding.OptimizerWrapper, keras.optimizers.Optimizer):
  """A Keras 3 optimizer that is another one in all but its update step."""

  _package = "keras"

  def __init__(self, opt: Any, name: str, **clipping: float | None) -> None:
    # Keras makes an iteration count, a learning rate and settings of its own.
    # Without them __getattr__ finds the encapsulated optimizer's. The two are
    # not even variables: model functions would share and list them.
    with tf.variable_creator_scope(lambda *_, **__: opt.variables[0]):
      # Not super(), whose next class is the wrapper.
      keras.optimizers.Optimizer.__init__(
        self, learning_rate=0.0, name=name, **clipping
      )
    for attribute in set(vars(self)) - _OWN:
      if hasattr(opt, attribute) and not attribute.startswith("_self_"):
        del self.__dict__[attribute]
    self._encapsulate(Keras3Optimizer(opt))

  def __setattr__(self, name: str, value: Any) -> None:
    """Writes where the attribute is; notices who encapsulates this one."""
    if name == "loss_scale_factor":
      kind = keras.optimizers.LossScaleOptimizer
      around = loss_scaling.find_caller(self, kind)
      if around is not None:
        methods = loss_scaling.Keras3Methods(around, self)
        self._reduce_before(around, methods)
    super().__setattr__(name, value)

  @staticmethod
  def _serialize(opt: Any) -> Any:
    """An optimizer as a dictionary."""
    return keras.saving.serialize_keras_object(opt)

  @staticmethod
  def _deserialize(config: Any, custom_objects: Any) -> Any:
    """The optimizer that a dictionary describes, not built."""
    # Not optimizers.deserialize: it lacks Lamb.
    return keras.saving.deserialize_keras_object(config, custom_objects)
