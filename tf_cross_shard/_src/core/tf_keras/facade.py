"""The facade with what the checkpoints of tf_keras ask an optimizer for."""

# Checkpoints use private methods.

from typing import Any

import tf_keras

from tf_cross_shard._src.core.facade import facade
from tf_cross_shard._src.core.tf_keras import binding


class TfKerasFacade(facade.Facade, tf_keras.optimizers.Optimizer):
  """A tf_keras optimizer that forwards everything except its step."""

  _keras_binding = binding.BINDING

  # One is around ours only while `compile` runs, which may run again.
  _is_wrapped_by_loss_scale_optimizer = property(
    lambda self: False, lambda self, value: None
  )

  def __reduce__(self) -> tuple[Any, ...]:
    """Returns the configuration, to be pickled or copied, and no values.

    tf_keras' own optimizers cannot be pickled.
    """
    return type(self).from_config, (self.get_config(),)

  def _track_trackable(
    self, trackable: Any, name: str, *args: Any, **k: Any
  ) -> Any:
    """Leaves out the scale that `compile` creates around ours and moves."""
    if name == "loss_scale":
      return trackable
    return super()._track_trackable(trackable, name, *args, **k)
