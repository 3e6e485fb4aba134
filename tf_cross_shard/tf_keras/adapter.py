"""An encapsulated optimizer of tf_keras, and the wrapper around it.

Everything that it does across replicas (its own reduction, merge calls for
weight decay and for moving averages) it does through the replica context that
it finds, which is isolated.
"""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf
import tf_keras

from tf_cross_shard.gradients import indexed_slices
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base, optimizer_state
from tf_cross_shard.wrapper import forwarding, loss_scaling

_LEGACY: Final = tf_keras.optimizers.legacy.Optimizer


class TfKerasOptimizer(base.InnerOptimizer):
  """An encapsulated `tf_keras.optimizers.Optimizer`."""

  # The first calls the others.
  _gradient_methods: tuple[str, ...] = ("compute_gradients",)

  def __init__(self, optimizer: Any) -> None:
    super().__init__(optimizer)
    self._trainable: list[Any] = []

  @property
  def strategy(self) -> tf.distribute.Strategy:
    """The strategy whose scope the optimizer was made in."""
    made_in = base.innermost(self.optimizer)._distribution_strategy
    # A legacy optimizer that was made outside all scopes has None.
    return made_in or tf.distribute.get_strategy()

  @property
  def is_built(self) -> bool:
    """Whether the slots exist."""
    return bool(getattr(base.innermost(self.optimizer), "_built", False))

  @property
  def scales_dynamically(self) -> bool:
    """Whether a LossScaleOptimizer with a dynamic scale is within or around."""
    return bool(getattr(self._loss_scaler, "dynamic", False))

  @property
  def trainable_variables(self) -> list[Any]:
    """The variables that the optimizer was built on, if it was built here."""
    return list(self._trainable)

  @property
  def state(self) -> list[Any]:
    """The variables, and the loss scale, which is none of them."""
    return self.variables + optimizer_state.loss_scale_of(self.optimizer)

  @property
  def _loss_scaler(self) -> Any:
    """The LossScaleOptimizer around or within, dynamic or not, or None."""
    is_within = hasattr(self.optimizer, "get_scaled_loss")
    return self.around or (self.optimizer if is_within else None)

  def make_variable(self, value: Any, name: str) -> Any:
    """A trainable variable of this Keras."""
    return tf.Variable(value, name=name)

  def make_tiny(self, weight: Any) -> Any:
    """A variable of one element with a weight's names, rank and dtype."""
    value = tf.zeros([1] * len(weight.shape), weight.dtype)
    return self.make_variable(value, weight._shared_name)

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they exist."""
    if not self.is_built:
      self._trainable = list(variables)
      # In a function that is being traced, they must outlive the trace.
      with tf.init_scope():
        self.optimizer.build(self._trainable)

  def _index(self, variable: Any) -> int | None:
    """The place of `variable` among those it was built on, or None."""
    last = base.innermost(self.optimizer)
    index: int | None = last._index_dict.get(last._var_key(variable))
    return index

  @property
  def computes_gradients(self) -> bool:
    """Whether the user's class overrides the way from a loss to gradients."""
    return self._overrides(*self._gradient_methods)

  def compute_gradients(
    self, loss: Any, variables: Sequence[Any], tape: tf.GradientTape
  ) -> list[tuple[Gradient, Any]]:
    """Calls the user's class with a loss that `tape` recorded."""
    compute = getattr(base.innermost(self.optimizer), self._gradient_methods[0])
    return list(compute(loss, list(variables), tape=tape))

  def check_class(self) -> None:
    """Raises `ValueError` for a class with a method that cannot run.

    `fit` of plain tf_keras calls `minimize`; here gradients must be summed
    between its two halves.
    """
    if self._overrides("minimize"):
      kind = type(base.innermost(self.optimizer)).__name__
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
    type(self.around).apply_gradients(
      self.around, pairs, skip_gradients_aggregation=True
    )

  def slots(self, variable: Any) -> dict[str, Any]:
    """The slots of `variable`, by name."""
    if self.plain is not None:
      return dict(self.plain.slots(variable))
    if not self.is_built or self._index(variable) is None:
      return {}
    key = base.innermost(self.optimizer)._var_key(variable)
    return self._slots_of(key, variable.name)

  def slot_names(self) -> list[str]:
    """The name of every slot, once."""
    if not self.is_built:
      return []
    slots = map(self._slots_of, base.innermost(self.optimizer)._index_dict)
    return list(dict.fromkeys(name for each in slots for name in each))

  def _slots_of(self, *keys: Any) -> dict[str, Any]:
    """The slots of a variable with these keys, Keras' first, by name."""
    last = base.innermost(self.optimizer)
    places = last._index_dict
    slots = [
      slot
      for _, slot in base.slots_at(last, places[keys[0]], len(places), keys)
    ]
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

  @property
  def variables(self) -> list[Any]:
    """All variables of the optimizer."""
    return list(self.optimizer.variables())

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots for `variables`, unless they exist."""
    known = {id(v) for v in self._trainable}
    new = [v for v in variables if id(v) not in known]
    if new:
      with tf.init_scope():
        base.innermost(self.optimizer)._create_all_weights(list(variables))
      self._trainable += new

  def knows(self, variable: Any) -> bool:
    """True: legacy optimizers take any variable at any time."""
    return True

  def slots(self, variable: Any) -> dict[str, Any]:
    """The slots of `variable`, by name."""
    last = base.innermost(self.optimizer)
    found = {}
    for name in last.get_slot_names():
      try:
        found[name] = last.get_slot(variable, name)
      except (AttributeError, KeyError):
        continue  # No variable, or one that no slots were made for.
    return found

  def slot_names(self) -> list[str]:
    """The name of every slot, once."""
    return list(self.optimizer.get_slot_names())


def as_pairs(
  grads: Sequence[Gradient], variables: Sequence[Any]
) -> list[tuple[Gradient, Any]]:
  """What tf_keras takes: pairs, with gradients of their variables' dtypes."""
  return [
    (indexed_slices.cast(grad, variable), variable)
    for grad, variable in zip(grads, variables, strict=True)
  ]


class TfKerasWrapper(
  forwarding.OptimizerWrapper, tf_keras.optimizers.Optimizer
):
  """A tf_keras optimizer that is another one in all but its update step."""

  _package = "tf_keras"

  # Keras reads these of any optimizer; legacy ones do not have them.
  _mesh = None
  _run_with_dtensor = False
  _is_exported = False

  def __init__(self, opt: Any, name: str, **clipping: float | None) -> None:
    # Not Keras' constructor, which makes variables.
    self.name = name
    if clipping["clipnorm"] and clipping["global_clipnorm"]:
      raise ValueError(
        "At most one of `clipnorm` and `global_clipnorm` can be set; got"
        f" {clipping}."
      )
    for argument, limit in clipping.items():
      setattr(self, argument, limit)
    inner = adapter(opt)
    inner.check_class()
    self._encapsulate(inner)

  def get_slot(self, var: Any, name: str) -> Any:
    """The variable that the encapsulated optimizer made for `var`, or None.

    A checkpoint asks for the slots of everything that it saves.
    """
    return self._inner.slot(var, name)

  def __dir__(self) -> list[str]:
    """Adds the names by which a checkpoint finds slots of legacy optimizers."""
    names = super().__dir__()
    if self._is_legacy and not self._is_exported:
      names += ["get_slot", "get_slot_names"]
    return names

  def __setattr__(self, name: str, value: Any) -> None:
    """Writes where the attribute is; notices who encapsulates this one."""
    super().__setattr__(name, value)
    if name == "_is_wrapped_by_loss_scale_optimizer":
      kind = tf_keras.mixed_precision.LossScaleOptimizer
      around = loss_scaling.find_caller(self, kind)
      if around is not None:
        self._reduce_before(around, loss_scaling.TfKerasMethods(self))

  def _reduce_before(self, around: Any, methods: Any) -> None:
    """Also lets a checkpoint of `around` find legacy optimizers' slots."""
    super()._reduce_before(around, methods)
    if self._is_legacy:
      vars(around).update(
        get_slot=self.get_slot,
        # In a SavedModel there are to be none, as in ours.
        get_slot_names=lambda: (
          [] if self._is_exported else self.get_slot_names()
        ),
        _create_or_restore_slot_variable=self._create_or_restore_slot_variable,
      )

  @staticmethod
  def _serialize(opt: Any) -> Any:
    """An optimizer as a dictionary."""
    return tf_keras.saving.serialize_keras_object(opt)

  @staticmethod
  def _deserialize(config: Any, custom_objects: Any) -> Any:
    """The optimizer that a dictionary describes, not built."""
    try:
      return tf_keras.saving.deserialize_keras_object(config, custom_objects)
    except ValueError:
      # While HDF5 files and SavedModels are read, Keras' own classes have other
      # names.
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
    """Whether the encapsulated optimizer is a legacy one."""
    return isinstance(self._inner, LegacyOptimizer)

  def _trackable_children(self, save_type: str = "checkpoint", **k: Any) -> Any:
    """What a checkpoint or a SavedModel saves."""
    self.__dict__["_is_exported"] = save_type == "savedmodel"
    if self._is_exported and self._is_legacy:
      # The loader takes this one for a new optimizer and looks for these two
      # names. Nothing is lost: Keras restores no optimizer from a SavedModel.
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
    """Restores objects that were added after the checkpoint was read."""
    checkpointed = self._checkpointed()
    return checkpointed._handle_deferred_dependencies(name, trackable)

  def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:
    """Restores a slot of a legacy optimizer."""
    optimizer = self._inner.optimizer
    return optimizer._create_or_restore_slot_variable(*args, **kwargs)


def adapter(opt: Any) -> TfKerasOptimizer:
  """The encapsulated form of a new or a legacy optimizer."""
  legacy = isinstance(base.innermost(opt), _LEGACY)
  return LegacyOptimizer(opt) if legacy else TfKerasOptimizer(opt)
