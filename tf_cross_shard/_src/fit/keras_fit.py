"""Access to what Keras' `fit` and `compile` keep to themselves."""

# ruff: noqa: SLF001  # This file is about private names of Keras.

import types
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core.wrapped import keras_private


def compile_arguments(model: Any) -> dict[str, Any] | None:
  """Returns the arguments of `compile`; None for a model not compiled."""
  compiled = getattr(model, "_compile_config", None)
  return None if compiled is None else dict(compiled.config)


# What decides the names of metrics, if a model does not override it.
_STEPS: Final = (
  *("evaluate", "make_test_function", "test_step", "compute_metrics"),
  *("get_metrics_result", "metrics"),
)


def names_of_metrics(model: Any) -> list[str] | None:
  """Returns names of the metrics, as given to `compile` before a first batch.

  Keras adds the names of outputs to them. None if the user's code decides.
  """
  config = compile_arguments(model)
  if config is None or keras_private.overrides(model, _STEPS):
    return None
  given = [config.get(name) for name in ("metrics", "weighted_metrics")]
  names = ["loss", *(metric.name for metric in model.metrics)]
  for metric in tf.nest.flatten(given):
    name = getattr(metric, "name", None) or getattr(metric, "__name__", metric)
    names += [name] if isinstance(name, str) else []
  return list(dict.fromkeys(names))


def batches_per_call(model: Any) -> int:
  """Returns `steps_per_execution`.

  In tf_keras, it is smaller for the last call of an epoch.
  """
  if keras_private.keras_of(model).__name__ == "keras":
    return int(model.steps_per_execution)
  return int(model._steps_per_execution.numpy())


def shuffles_arrays() -> bool:
  """Returns whether the `fit` that calls this package shuffles arrays."""
  arguments = keras_private.arguments_of_fit()
  # A dataset, a generator and a `PyDataset` have no shape, and Keras ignores
  # `shuffle` for most of them.
  data = tf.nest.flatten(arguments.get("x"))
  are_arrays = all(hasattr(array, "shape") for array in data)
  return bool(arguments.get("shuffle")) and are_arrays


def may_validate() -> bool:
  """Returns whether the `fit` that calls this package may have validation data.

  False is certain. No attribute tells it before the first evaluation.
  """
  arguments = keras_private.arguments_of_fit()
  return arguments.get("validation_data", ()) is not None


def begin_at(model: Any, epoch: int | None) -> None:
  """Makes `fit` begin at an epoch. Call it in `on_train_begin`.

  If the epoch is None, `fit` begins at its argument `initial_epoch`.
  """
  if keras_private.keras_of(model).__name__ == "keras":
    model._initial_epoch = epoch
  elif epoch is None:
    model._training_state = None
  else:
    model._training_state = types.SimpleNamespace(
      maybe_load_initial_counters_from_ckpt=lambda *_, **__: (epoch, 0)
    )
