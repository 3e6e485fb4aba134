"""Makes our wrapper an optimizer of tf_keras; see `facade.binding`."""

from typing import Any, Final

import tf_keras

from tf_cross_shard._src.core.facade import binding
from tf_cross_shard._src.core.keras_types import Optimizer
from tf_cross_shard._src.core.tf_keras import adapter


class TfKerasBinding(binding.Binding):
  """Binds facades to tf_keras."""

  package = "tf_keras"

  def start(
    self, facade: Any, opt: Optimizer, name: str, limits: dict[str, Any]
  ) -> adapter.TfKerasAdapter:
    # Do not call Keras' constructor, which creates variables.
    facade.name = name
    for argument, limit in limits.items():
      setattr(facade, argument, limit)
    wrapped = adapter.TfKerasAdapter(opt)
    wrapped.check_class()
    return wrapped

  def deserialize(self, config: Any, custom_objects: Any) -> Any:
    settings = config["config"]
    wrapped = settings.get("inner_optimizer")
    if wrapped:
      # A LossScaleOptimizer would make Keras 3's Lion and Adafactor.
      wrapped = self.deserialize(wrapped, custom_objects)
      config = {**config, "config": {**settings, "inner_optimizer": wrapped}}
    try:
      return super().deserialize(config, custom_objects)
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


BINDING: Final = TfKerasBinding()
