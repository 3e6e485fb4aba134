"""The facade with what the checkpoints of tf_keras ask an optimizer for."""

# ruff: noqa: SLF001  # Checkpoints use private methods.

from typing import Any

import tf_keras

from tf_cross_shard._src.core.facade import facade
from tf_cross_shard._src.core.tf_keras import binding
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


class TfKerasFacade(facade.Facade, tf_keras.optimizers.Optimizer):
  """A tf_keras optimizer that forwards everything except its step."""

  _keras_binding = binding.BINDING

  def __reduce__(self) -> tuple[Any, ...]:
    """Returns the configuration, to be pickled or copied, and no values.

    tf_keras' own optimizers cannot be pickled.
    """
    return type(self).from_config, (self.get_config(),)

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
