"""The facade with what the checkpoints of tf_keras ask an optimizer for."""

# ruff: noqa: SLF001  # Checkpoints of legacy optimizers use private methods.

from typing import Any

import tensorflow as tf
import tf_keras

from tf_cross_shard._src.core.facade import facade
from tf_cross_shard._src.core.tf_keras import adapter, binding
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


class TfKerasFacade(facade.Facade, tf_keras.optimizers.Optimizer):
  """A tf_keras optimizer that forwards everything except its step."""

  _keras_binding = binding.BINDING

  # Keras reads these attributes of any optimizer. Legacy ones do not have them.
  _mesh = None
  _run_with_dtensor = False
  _is_exported = False

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

  def slot_methods(self) -> dict[str, Any]:
    """Returns the methods by which checkpoints find slots, if ours has them."""
    if not self._is_legacy:
      return {}
    return {
      "get_slot": self.get_slot,
      # As in `__dir__`, a SavedModel must find no slots.
      "get_slot_names": lambda: (
        [] if self._is_exported else self.get_slot_names()
      ),
      "_create_or_restore_slot_variable": self._create_or_restore_slot_variable,
    }

  def __reduce__(self) -> tuple[Any, ...]:
    """Returns the configuration, to be pickled or copied, and no values.

    tf_keras' own optimizers cannot be pickled.
    """
    return type(self).from_config, (self.get_config(),)

  @property
  def _is_legacy(self) -> bool:
    return isinstance(self._wrapped, adapter.LegacyOptimizer)

  def _trackable_children(self, save_type: str = "checkpoint", **k: Any) -> Any:
    self.__dict__["_is_exported"] = save_type == "savedmodel"
    if self._is_exported and self._is_legacy:
      # The loader assumes that the facade is a new optimizer, and looks for
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
    wrapped = wrapped_lib.find(self)
    if wrapped is None:
      return super()._track_trackable(trackable, name, *args, **k)
    optimizer = wrapped.optimizer
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
