"""Makes our wrapper an optimizer of tf_keras; see `facade.binding`."""

import functools
from typing import Any, Final

import tf_keras

from tf_cross_shard._src.core.facade import binding
from tf_cross_shard._src.core.keras_types import Optimizer
from tf_cross_shard._src.core.tf_keras import adapter, v1_optimizers


class TfKerasBinding(binding.Binding):
  """Binds facades to tf_keras."""

  package = "tf_keras"
  v1_optimizers = v1_optimizers
  scaler_class = tf_keras.mixed_precision.LossScaleOptimizer
  scaler_attribute = "_is_wrapped_by_loss_scale_optimizer"

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
    if wrapped and wrapped["config"].get("is_legacy_optimizer") is False:
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

  def scaler_methods(self, facade: Any, scaler: Any) -> dict[str, Any]:
    """Returns replacements; as in tf_keras, ours gets unscaled gradients."""

    def apply_gradients(
      grads_and_vars: Any,
      skip_gradients_aggregation: Any = False,
      **options: Any,
    ) -> Any:
      # The second argument may be a name, as in other optimizers.
      is_name = isinstance(skip_gradients_aggregation, str)
      key = "name" if is_name else "skip_gradients_aggregation"
      options[key] = skip_gradients_aggregation
      return facade.apply_gradients(grads_and_vars, **options)

    methods = {
      "get_scaled_loss": functools.partial(_scaled, facade),
      "get_unscaled_gradients": facade._wrapped.unscale,  # noqa: SLF001
      "compute_gradients": lambda loss, var_list, tape=None: (
        facade.compute_gradients(loss, var_list, tape=tape)
      ),
      # Our `minimize` treats a loss with a tape as a loss of Keras.
      "minimize": lambda loss, var_list, tape=None: facade.minimize(
        loss, var_list=var_list, tape=tape
      ),
      "aggregate_gradients": facade.aggregate_gradients,
      "apply_gradients": apply_gradients,
    }
    return methods


def _scaled(facade: Any, loss: Any) -> Any:
  """Scales a loss by the loss scale and by the factor of the mean."""
  if callable(loss):
    return lambda: _scaled(facade, loss())
  return facade._wrapped.scale_loss(facade.scale_loss(loss))  # noqa: SLF001


BINDING: Final = TfKerasBinding()
