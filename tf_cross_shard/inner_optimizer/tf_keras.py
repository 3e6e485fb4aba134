"""An encapsulated optimizer of tf_keras, and what encapsulates it.

Both kinds have a switch that turns their own reduction off. What else they do
across replicas (merge calls for weight decay and for moving averages) they do
through the replica context they find, which is one without peers.
"""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf
import tf_keras

from tf_cross_shard.gradients import indexed_slices
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import (
  base,
  loss_scaling,
  optimizer_state,
  tf_keras_loss_scaling,
  wrapper,
)

_LEGACY: Final = tf_keras.optimizers.legacy.Optimizer


class TfKerasOptimizer(base.InnerOptimizer):
  """The adapter for `tf_keras.optimizers.Optimizer`."""

  def __init__(self, optimizer: Any) -> None:
    """Keeps the optimizer."""
    super().__init__(optimizer)
    self._trainable: list[Any] = []

  @property
  def strategy(self) -> tf.distribute.Strategy:
    """The strategy whose scope the optimizer was made in."""
    made_in = base.innermost(self.optimizer)._distribution_strategy
    # Of the older kind one that was made outside of all scopes has None.
    return made_in or tf.distribute.get_strategy()

  @property
  def is_built(self) -> bool:
    """Whether the slots are there."""
    return bool(getattr(base.innermost(self.optimizer), "_built", False))

  @property
  def scales_dynamically(self) -> bool:
    """Whether a LossScaleOptimizer with a dynamic scale stands within."""
    return bool(getattr(self.optimizer, "dynamic", False))

  @property
  def trainable_variables(self) -> list[Any]:
    """What the optimizer was built on, if it was built here."""
    return list(self._trainable)

  @property
  def state(self) -> list[Any]:
    """The variables, and the loss scale, which is none of them."""
    return self.variables + optimizer_state.loss_scale_of(self.optimizer)

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they are there."""
    if not self.is_built:
      self._trainable = list(variables)
      # In a function that is being traced, they are to outlive the trace.
      with tf.init_scope():
        self.optimizer.build(self._trainable)

  def knows(self, variable: Any) -> bool:
    """Whether the built optimizer was built on `variable`."""
    last = base.innermost(self.optimizer)
    return last._var_key(variable) in last._index_dict

  def as_built(self, variable: Any) -> Any:
    """The variable: tf_keras has none of its own."""
    return variable

  def scale_loss(self, loss: Any) -> Any:
    """Multiplies by the loss scale."""
    if self._is_loss_scaled:
      return self.optimizer.get_scaled_loss(tf.convert_to_tensor(loss))
    return loss

  def scale_limit(self, limit: float) -> Any:
    """Gradients come in divided by the loss scale."""
    return limit

  def wire_scale(self) -> Any:
    """The loss scale, which gradients came in divided by."""
    return self.optimizer.loss_scale if self._is_loss_scaled else None

  def unscale(self, grads: Sequence[Gradient]) -> list[Gradient]:
    """Divides by the loss scale, which `apply_gradients` does not do."""
    if self._is_loss_scaled:
      return list(self.optimizer.get_unscaled_gradients(list(grads)))
    return list(grads)

  def apply_reduced(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Applies gradients that are sums already."""
    pairs = paired(grads, variables)
    self.optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)

  def iterations(self) -> tf.Tensor:
    """The count of applied steps."""
    return tf.convert_to_tensor(self.optimizer.iterations)

  def slots(self, variable: Any) -> dict[str, Any]:
    """The variables that were made for `variable`."""
    if not self.is_built or not self.knows(variable):
      return {}
    last = base.innermost(self.optimizer)
    index = last._index_dict[last._var_key(variable)]
    return self._slots_at(last, index, len(last._index_dict))

  def slot_names(self) -> list[str]:
    """Every name of a slot, once."""
    if not self.is_built:
      return []
    last = base.innermost(self.optimizer)
    count = len(last._index_dict)
    slots = (self._slots_at(last, index, count) for index in range(count))
    return list(dict.fromkeys(name for each in slots for name in each))

  def _slots_at(self, last: Any, index: int, count: int) -> dict[str, Any]:
    """The slots of the index-th variable, by name."""
    found = base.slots_at(last, index, count, last.variables)
    # "m/dense/kernel:0" is what Adam calls "m" of "dense/kernel".
    return {slot.name.split("/")[0]: slot for _, slot in found}

  @property
  def _is_loss_scaled(self) -> bool:
    """Whether a LossScaleOptimizer, dynamic or not, stands within."""
    return hasattr(self.optimizer, "get_scaled_loss")


class LegacyOptimizer(TfKerasOptimizer):
  """The adapter for `tf_keras.optimizers.legacy.Optimizer`."""

  def __init__(self, optimizer: Any) -> None:
    """Keeps the optimizer, and lets it make its iteration count."""
    super().__init__(optimizer)
    # Made when it is first read, which may be in one of several replicas.
    with self.strategy.scope():
      _ = optimizer.iterations

  @property
  def is_built(self) -> bool:
    """Whether slots are there: more are made whenever they are needed."""
    return bool(self._trainable)

  @property
  def variables(self) -> list[Any]:
    """All variables that the optimizer has so far."""
    return list(self.optimizer.variables())

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they are there."""
    known = {id(v) for v in self._trainable}
    new = [v for v in variables if id(v) not in known]
    if new:
      with tf.init_scope():
        base.innermost(self.optimizer)._create_all_weights(list(variables))
      self._trainable += new

  def knows(self, variable: Any) -> bool:
    """These take any variable at any time."""
    return True

  def apply_reduced(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Applies gradients that are sums already."""
    self.optimizer.apply_gradients(
      paired(grads, variables), experimental_aggregate_gradients=False
    )

  def slots(self, variable: Any) -> dict[str, Any]:
    """The variables that were made for `variable`."""
    last = base.innermost(self.optimizer)
    found = {}
    for name in last.get_slot_names():
      try:
        found[name] = last.get_slot(variable, name)
      except (AttributeError, KeyError):
        continue  # One that no slots were made for, or no variable.
    return found

  def slot_names(self) -> list[str]:
    """Every name of a slot, once."""
    return list(self.optimizer.get_slot_names())


def paired(
  grads: Sequence[Gradient], variables: Sequence[Any]
) -> list[tuple[Gradient, Any]]:
  """What tf_keras takes: pairs, and gradients of their variables' dtypes."""
  return [
    (indexed_slices.cast(grad, variable), variable)
    for grad, variable in zip(grads, variables, strict=True)
  ]


class TfKerasDelegate(wrapper.Delegating, tf_keras.optimizers.Optimizer):
  """A tf_keras optimizer that is another one in all but its updates."""

  # What Keras asks of an optimizer, and older ones do not have.
  _mesh = None
  _run_with_dtensor = False
  _is_exported = False

  def __init__(self, opt: Any, name: str, **clipping: float | None) -> None:
    """Makes the wrapper."""
    # Not Keras' constructor, which makes variables.
    self.name = name
    if clipping["clipnorm"] and clipping["global_clipnorm"]:
      raise ValueError(
        "At most one of `clipnorm` and `global_clipnorm` can be set; got"
        f" {clipping}."
      )
    for argument, limit in clipping.items():
      setattr(self, argument, limit)
    self._encapsulate(_adapter(opt))

  def __dir__(self) -> list[str]:
    """A checkpoint finds the slots of older optimizers by their names."""
    names = super().__dir__()
    if self._is_legacy and not self._is_exported:
      names += ["get_slot", "get_slot_names"]
    return names

  def __setattr__(self, name: str, value: Any) -> None:
    """Writes where the attribute lives; notices who encapsulates this one."""
    super().__setattr__(name, value)
    if name == "_is_wrapped_by_loss_scale_optimizer":
      kind = tf_keras.mixed_precision.LossScaleOptimizer
      around = loss_scaling.caller_around(self, kind)
      if around is not None:
        tf_keras_loss_scaling.change_places(self, around)

  @classmethod
  def _as_optimizer(cls, opt: Any) -> Any:
    """`opt` as an optimizer of tf_keras."""
    return wrapper.as_optimizer(
      cls,
      opt,
      get=tf_keras.optimizers.get,
      kinds=(tf_keras.optimizers.Optimizer, _LEGACY),
      spelling="tf_keras.optimizers",
      convert=_convert,
    )

  @staticmethod
  def _serialize(opt: Any) -> Any:
    """An optimizer as a dictionary."""
    return tf_keras.saving.serialize_keras_object(opt)

  @staticmethod
  def _deserialize(config: Any, custom_objects: Any) -> Any:
    """The optimizer that a dictionary describes, not built."""
    from tf_cross_shard import migration  # which stands above this module

    migration.v1_classes("tf_keras")  # Keras finds what is registered only.
    try:
      return tf_keras.saving.deserialize_keras_object(config, custom_objects)
    except ValueError:
      # While HDF5 files and SavedModels are read, it knows Keras' own classes
      # by other names.
      if "inner_optimizer" in config["config"]:
        return tf_keras.optimizers.deserialize(
          config, custom_objects, use_legacy_format="module" not in config
        )
      legacy = config["config"].get("is_legacy_optimizer", True)
      home = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
      if not hasattr(home, config["class_name"]):
        raise
      return getattr(home, config["class_name"]).from_config(config["config"])

  def save_own_variables(self, store: Any) -> None:
    """Saves the encapsulated optimizer's variables."""
    if not self._is_legacy:
      super().save_own_variables(store)
      return
    self._before_saving()
    for i, variable in enumerate(self._inner.variables):
      store[str(i)] = variable.numpy()

  def load_own_variables(self, store: Any) -> None:
    """Loads what was saved."""
    if not self._is_legacy:
      super().load_own_variables(store)
      return
    variables = self._inner.variables
    if len(variables) != len(store.keys()):
      raise ValueError(
        f"{self.name} has {len(variables)} variables, and {len(store.keys())}"
        " were saved. Build it on the model's trainable variables, with the"
        " settings that it was saved with."
      )
    for i, variable in enumerate(variables):
      variable.assign(store[str(i)])

  def finalize_variable_values(self, var_list: Any) -> None:
    """Writes moving averages into the variables where EMA is used."""
    if not self._is_legacy:
      super().finalize_variable_values(var_list)

  @property
  def _is_legacy(self) -> bool:
    """Whether an older optimizer is within."""
    return isinstance(self._inner.encapsulated, LegacyOptimizer)

  def _trackable_children(self, save_type: str = "checkpoint", **k: Any) -> Any:
    """What a checkpoint or a SavedModel saves."""
    self.__dict__["_is_exported"] = save_type == "savedmodel"
    if self._is_exported and self._is_legacy:
      # Who loads it takes this one for a new optimizer, and looks for what
      # that has. No more is lost than usual: Keras takes no optimizer's state
      # from there.
      count = self._inner.optimizer.iterations
      every = tf.__internal__.tracking.wrap([count])
      return {"_iterations": count, "_variables": every}
    return super()._trackable_children(save_type, **k)

  def _track_trackable(
    self, trackable: Any, name: str, *args: Any, **k: Any
  ) -> Any:
    """Keeps what a LossScaleOptimizer around this one adds to checkpoints."""
    inner = self.__dict__.get("_inner")
    if inner is None:
      return super()._track_trackable(trackable, name, *args, **k)
    optimizer = inner.optimizer
    optimizer._maybe_initialize_trackable()
    if name == "loss_scale" and optimizer._lookup_dependency(name) is not None:
      return trackable  # Of two loss scales the inner one is used.
    return optimizer._track_trackable(trackable, name, *args, **k)

  def _handle_deferred_dependencies(self, name: str, trackable: Any) -> Any:
    """Restores what was added after the checkpoint was read."""
    checkpointed = self._checkpointed()
    return checkpointed._handle_deferred_dependencies(name, trackable)

  def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:
    """Restores a slot of an older optimizer."""
    optimizer = self._inner.optimizer
    return optimizer._create_or_restore_slot_variable(*args, **kwargs)


def _adapter(opt: Any) -> TfKerasOptimizer:
  """The adapter for an optimizer of either kind."""
  legacy = isinstance(base.innermost(opt), _LEGACY)
  return LegacyOptimizer(opt) if legacy else TfKerasOptimizer(opt)


def _convert(opt: Any) -> Any:
  """`opt`, or what it is in this Keras if it is of TensorFlow 1."""
  from tf_cross_shard import migration  # which stands above this module

  return migration.convert_optimizer(opt, "tf_keras")
