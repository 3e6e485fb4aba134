"""The wrapper as an optimizer of tf_keras."""

# ruff: noqa: SLF001  # Checkpoints of legacy optimizers use private methods.

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras

from tf_cross_shard._src.core import wrapper_state
from tf_cross_shard._src.core.facade import loss_scaler
from tf_cross_shard._src.core.facade import wrapper as wrapper_lib
from tf_cross_shard._src.core.tf_keras import adapter, v1_optimizers


class TfKerasWrapper(
  wrapper_lib.OptimizerWrapper, tf_keras.optimizers.Optimizer
):
  """A tf_keras optimizer that forwards everything except its step."""

  _package = "tf_keras"
  _v1_classes = v1_optimizers

  # Keras reads these attributes of any optimizer. Legacy ones do not have them.
  _mesh = None
  _run_with_dtensor = False
  _is_exported = False

  def __init__(self, opt: Any, name: str, **clipping: float | None) -> None:
    # Do not call Keras' constructor, which creates variables.
    self.name = name
    if clipping["clipnorm"] and clipping["global_clipnorm"]:
      raise ValueError(
        "At most one of `clipnorm` and `global_clipnorm` can be set; got"
        f" {clipping}."
      )
    for argument, limit in clipping.items():
      setattr(self, argument, limit)
    wrapped = adapter.adapter(opt)
    wrapped.check_class()
    self._wrap(wrapped)

  def get_slot(self, var: Any, name: str) -> Any:
    """Returns the wrapped optimizer's slot for `var`, or None.

    It accepts any object, because a checkpoint asks for the slots of everything
    that it saves.
    """
    return self._wrapped.whole.view(var, name)

  def __dir__(self) -> list[str]:
    names = super().__dir__()
    if self._is_legacy and not self._is_exported:
      names += ["get_slot", "get_slot_names"]
    return names

  def __setattr__(self, name: str, value: Any) -> None:
    """Forwards the assignment.

    The constructor of a LossScaleOptimizer around this optimizer assigns
    `_is_wrapped_by_loss_scale_optimizer`. Ours then replace its methods.
    """
    super().__setattr__(name, value)
    if name == "_is_wrapped_by_loss_scale_optimizer":
      kind = tf_keras.mixed_precision.LossScaleOptimizer
      outer_loss_scaler = loss_scaler.find_caller(self, kind)
      if outer_loss_scaler is not None:
        self._reduce_before(outer_loss_scaler, self._methods_of_outer_scaler())

  def _reduce_before(self, outer_loss_scaler: Any, methods: Any) -> None:
    super()._reduce_before(outer_loss_scaler, methods)
    if self._is_legacy:
      vars(outer_loss_scaler).update(
        get_slot=self.get_slot,
        # As in CrossShardOptimizer, a SavedModel must find no slots.
        get_slot_names=lambda: (
          [] if self._is_exported else self.get_slot_names()
        ),
        _create_or_restore_slot_variable=self._create_or_restore_slot_variable,
      )

  def __reduce__(self) -> tuple[Any, ...]:
    """Returns the configuration, to be pickled or copied, and no values.

    tf_keras' own optimizers cannot be pickled.
    """
    return type(self).from_config, (self.get_config(),)

  @classmethod
  def _deserialize(cls, config: Any, custom_objects: Any) -> Any:
    own = config["config"]
    wrapped = own.get("inner_optimizer")
    if wrapped and wrapped["config"].get("is_legacy_optimizer") is False:
      # A LossScaleOptimizer would make Keras 3's Lion and Adafactor.
      wrapped = cls._deserialize(wrapped, custom_objects)
      config = {**config, "config": {**own, "inner_optimizer": wrapped}}
    try:
      return super()._deserialize(config, custom_objects)
    except ValueError:
      # While Keras reads HDF5 files and SavedModels, its own classes have other
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

  @property
  def _is_legacy(self) -> bool:
    return isinstance(self._wrapped, adapter.LegacyOptimizer)

  def _trackable_children(self, save_type: str = "checkpoint", **k: Any) -> Any:
    self.__dict__["_is_exported"] = save_type == "savedmodel"
    if self._is_exported and self._is_legacy:
      # The loader assumes that the wrapper is a new optimizer, and looks for
      # these two names. No state is lost: Keras restores no optimizer from a
      # SavedModel.
      count = self._wrapped.optimizer.iterations
      every = tf.__internal__.tracking.wrap([count])
      return {"_iterations": count, "_variables": every}
    return super()._trackable_children(save_type, **k)

  def _track_trackable(
    self, trackable: Any, name: str, *args: Any, **k: Any
  ) -> Any:
    """Tracks an object that a LossScaleOptimizer adds to checkpoints."""
    own = wrapper_state.find(self)
    if own is None:
      return super()._track_trackable(trackable, name, *args, **k)
    optimizer = own.wrapped.optimizer
    optimizer._maybe_initialize_trackable()
    if name == "loss_scale" and optimizer._lookup_dependency(name) is not None:
      return trackable  # Of two loss scales, the wrapped one is used.
    return optimizer._track_trackable(trackable, name, *args, **k)

  def _handle_deferred_dependencies(self, name: str, trackable: Any) -> Any:
    """Restores an object that is added after the checkpoint was read."""
    checkpointed = self._checkpointed()
    return checkpointed._handle_deferred_dependencies(name, trackable)

  def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:
    optimizer = self._wrapped.optimizer
    return optimizer._create_or_restore_slot_variable(*args, **kwargs)

  def _methods_of_outer_scaler(self) -> dict[str, Callable[..., Any]]:
    """Returns replacements for methods of a LossScaleOptimizer around `self`.

    As in tf_keras, our optimizer gets gradients without the loss scale.
    """
    return {
      "get_scaled_loss": self._scaled_loss,
      "get_unscaled_gradients": self._wrapped.unscale,
      "compute_gradients": lambda loss, var_list, tape=None: (
        self.compute_gradients(loss, var_list, tape=tape)
      ),
      # Our `minimize` treats a loss with a tape as a loss of Keras.
      "minimize": lambda loss, var_list, tape=None: self.minimize(
        loss, var_list=var_list, tape=tape
      ),
      "aggregate_gradients": self.aggregate_gradients,
      "apply_gradients": self._apply_around,
    }

  def _scaled_loss(self, loss: Any) -> Any:
    """Scales a loss by the loss scale and by the factor of the mean."""
    if callable(loss):
      return lambda: self._scaled_loss(loss())
    return self._wrapped.scale_loss(self.scale_loss(loss))

  def _apply_around(
    self,
    grads_and_vars: Any,
    skip_gradients_aggregation: Any = False,
    **options: Any,
  ) -> Any:
    """Replaces `apply_gradients` of a LossScaleOptimizer: reduces first.

    The second positional argument may be a name, as in other optimizers.
    """
    if isinstance(skip_gradients_aggregation, str):
      options["name"] = skip_gradients_aggregation
    else:
      options["skip_gradients_aggregation"] = skip_gradients_aggregation
    return self.apply_gradients(grads_and_vars, **options)
