"""A plain model of the mean predictions of all models.

`Models.ensemble` is of no use to callbacks: it clones the models again,
and it supports functional models only.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.fit import keras_fit


def of_members(members: list[Any]) -> Callable[[Any], Any]:
  """Returns a function that gives outputs and losses of each plain model."""

  def predict(inputs: Any) -> Any:
    results = []
    for member in members:
      outputs = member(inputs, training=False)
      results.append((outputs, list(member.losses)))
    return tf.nest.map_structure(
      lambda *of_replicas: tf.add_n(of_replicas) / len(of_replicas), *results
    )

  return predict


def of_models(model: Any) -> Callable[[Any], Any]:
  """Returns a function that gives mean outputs and losses of all models."""
  strategy = model.distribute_strategy

  def of_one(inputs: Any) -> Any:
    return model(inputs, training=False), list(model.losses)

  def predict(inputs: Any) -> Any:
    with strategy.scope():
      results = strategy.run(of_one, args=(inputs,))
      return tf.nest.map_structure(
        lambda values: strategy.reduce("MEAN", values, axis=None), results
      )

  return predict


def mean_of(predict: Callable[[Any], Any], like: Any) -> Any:
  """Returns a model of what `predict` returns: mean outputs, added losses."""
  keras = keras_private.keras_of(like)
  added: list[Any] = []

  class Mean(keras.Model):  # type: ignore[name-defined]
    def call(self, inputs: Any) -> Any:
      outputs, added[:] = predict(inputs)
      return outputs

    @property
    def losses(self) -> Any:
      return list(added)

  mean = Mean()
  # Keras assigns losses and metrics to several outputs by these names.
  mean.output_names = getattr(like, "output_names", None)
  return mean


def compile_like(source: Any, target: Any) -> None:
  """Compiles a model with copies of another model's loss and metrics."""
  config = keras_fit.compile_arguments(source)
  if config is None:
    raise ValueError(
      f"PerModelMetrics copies loss and metrics of {type(source).__name__},"
      " whose compile() of Keras was not called. Compile the model, or pass"
      " `twin`, a function that returns a compiled plain model."
    )
  del config["optimizer"]
  target.compile(**tf.nest.map_structure(_copy, config))


def _copy(value: Any) -> Any:
  """Returns a copy of a metric, because metrics have state; else `value`."""
  is_metric = hasattr(value, "update_state") and hasattr(value, "from_config")
  return value.from_config(value.get_config()) if is_metric else value
