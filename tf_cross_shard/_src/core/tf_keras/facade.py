"""The facade as an optimizer of tf_keras."""

from typing import Any

import tf_keras

from tf_cross_shard._src.core.facade import facade


class TfKerasFacade(facade.Facade, tf_keras.optimizers.Optimizer):
  """A tf_keras optimizer that forwards everything except its step."""

  _package = "tf_keras"

  # One is around ours only while `compile` runs, which may run again.
  _is_wrapped_by_loss_scale_optimizer = property(
    lambda self: False, lambda self, value: None
  )

  def _start(self, opt: Any, name: str, limits: dict[str, Any]) -> None:
    # Do not call Keras' constructor, which creates variables.
    self.name = name
    for argument, limit in limits.items():
      setattr(self, argument, limit)

  @classmethod
  def _deserialize(cls, config: Any, custom_objects: Any) -> Any:
    settings = config["config"]
    wrapped = settings.get("inner_optimizer")
    if wrapped:
      # A LossScaleOptimizer would make Keras 3's Lion and Adafactor.
      wrapped = cls._deserialize(wrapped, custom_objects)
      config = {**config, "config": {**settings, "inner_optimizer": wrapped}}
    try:
      return super()._deserialize(config, custom_objects)
    except ValueError:
      # While Keras reads HDF5 files and SavedModels, its own classes have other
      # names.
      if "inner_optimizer" in config["config"]:
        return tf_keras.optimizers.deserialize(
          config, custom_objects, use_legacy_format="module" not in config
        )
      kind = getattr(tf_keras.optimizers, config["class_name"], None)
      if kind is None:
        raise
      return kind.from_config(config["config"])

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
