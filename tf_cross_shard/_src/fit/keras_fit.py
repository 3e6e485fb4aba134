"""Access to what Keras' `fit` and `compile` keep to themselves."""

# ruff: noqa: SLF001  # This file is about private names of Keras.

import re
import types
from collections.abc import Sequence
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
  """Returns names of metrics, without outputs'; None if unknown."""
  config = compile_arguments(model)
  if config is None or keras_private.overrides(model, _STEPS):
    return None
  given = [config.get(name) for name in ("metrics", "weighted_metrics")]
  names = ["loss", *(metric.name for metric in model.metrics)]
  for metric in tf.nest.flatten(given):
    name = getattr(metric, "name", None) or getattr(metric, "__name__", metric)
    names += [name] if isinstance(name, str) else []
  # Keras 3 lists these together before the first batch.
  return [n for n in dict.fromkeys(names) if n != "compile_metrics"]


def check_monitor(
  caller: str,
  monitor: str,
  prefixes: Sequence[str],
  names: Sequence[str] | None,
  is_exact: bool = False,
) -> None:
  """Raises `ValueError` if no metric of these names (None: unknown) fits."""
  metric = monitor
  for prefix in prefixes:
    metric = metric.removeprefix(prefix)
  # Keras adds the name of the output, and numbers repeated names.
  base = re.sub(r"_\d+$", "", metric)
  if names is None or metric in names:
    return
  if is_exact or not any(
    f"_{x}".endswith(f"_{y}") for x in (metric, base) for y in names
  ):
    listed = sorted(f"{prefix}{name}" for prefix in prefixes for name in names)
    raise ValueError(
      f"{caller} has monitor={monitor!r}, but `model` is compiled with the"
      f" metrics {listed}. Monitor one of them, or add the metric to `metrics`"
      " of compile()."
    )


def print_first() -> None:
  """Makes Keras print an epoch before callbacks add numbers of each model."""
  every: Any = keras_private.arguments_of_fit().get("callbacks")
  bar = keras_private.callback_of_fit("ProgbarLogger")
  if bar is not None:
    # A new list, because Keras iterates over the old one.
    every.callbacks = sorted(every.callbacks, key=lambda c: c is not bar)


def batches_per_call(model: Any) -> int:
  """Returns `steps_per_execution`; in tf_keras, fewer for the last call."""
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
  """Returns whether the calling `fit` may validate; False is certain."""
  arguments = keras_private.arguments_of_fit()
  return arguments.get("validation_data", ()) is not None


def begin_at(model: Any, epoch: int | None) -> None:
  """Makes `fit` begin at an epoch, or at `initial_epoch` if it is None."""
  if keras_private.keras_of(model).__name__ == "keras":
    model._initial_epoch = epoch
  elif epoch is None:
    model._training_state = None
  else:
    model._training_state = types.SimpleNamespace(
      maybe_load_initial_counters_from_ckpt=lambda *_, **__: (epoch, 0)
    )
