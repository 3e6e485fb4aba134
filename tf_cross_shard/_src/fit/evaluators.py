"""Evaluate every model on the same data.

    VectorizedStrategy    the model itself: all models in one program
    other strategies      a plain model, the twin, with each model's weights
    the ensemble          a plain model of the mean predictions

Each evaluator has a method `evaluate`, which returns `{"metric/model": value}`.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.fit import (
  evaluation_data,
  keras_fit,
  mean_model,
  per_model_evaluation,
)
from tf_cross_shard._src.models import group_state, plain_models


class PlainEvaluator:
  """Evaluates plain models, on the first worker."""

  def __init__(
    self,
    strategy: tf.distribute.Strategy,
    data: evaluation_data.EvaluationData,
  ) -> None:
    self._strategy = strategy
    self._data = data

  def evaluate(
    self, model: Any, key: str, one_batch: bool = False
  ) -> dict[str, Any]:
    """Returns the metrics of a model, under the name of one of n models."""
    workers = workers_lib.of_strategy(self._strategy)
    metrics: dict[str, Any] = {}
    if workers is None or workers.index == 0:
      with variables_lib.outside_of_strategies():
        batches = self._data.arguments(one_batch)
        result = model.evaluate(**batches, verbose=0, return_dict=True)
      flat = per_model_evaluation.flat(result)
      metrics = {n: per_model_evaluation.as_value(v) for n, v in flat.items()}
    if workers is not None:
      text = json.dumps({n: np.asarray(v).tolist() for n, v in metrics.items()})
      [text, *_] = workers_lib.exchange(
        workers, f"evaluating {key}", text, workers.step_timeout
      )
      received = json.loads(text).items()
      metrics = {n: per_model_evaluation.as_value(v) for n, v in received}
    return {f"{name}/{key}": value for name, value in metrics.items()}


class ModelsEvaluator:
  """Evaluates the models of a VectorizedStrategy, in one program."""

  def __init__(
    self,
    model: Any,
    keys: Sequence[str],
    data: evaluation_data.EvaluationData,
    metrics: per_model_evaluation.MetricsOfModels,
    has_ensemble: bool,
  ) -> None:
    self._model, self._keys = model, keys
    self._data, self._metrics = data, metrics
    self._plain = PlainEvaluator(model.distribute_strategy, data)
    self._mean: Any = None
    if has_ensemble and not data.is_by_model:
      self._mean = mean_model.mean_of(mean_model.of_models(model), model)
      mean_model.compile_like(model, self._mean)

  def evaluate(self, one_batch: bool = False) -> dict[str, Any]:
    """Returns the metrics of all models, and those of the ensemble."""
    with _keeping_state(self._model):
      arguments = self._data.arguments(one_batch)
      logs = self._model.evaluate(**arguments, verbose=0, return_dict=True)
      reported = per_model_evaluation.flat(logs)
      found = per_model_evaluation.by_key(
        *(self._model, self._keys),
        {n: x for n, x in self._metrics.read().items() if n in reported},
      )
      if self._mean is not None:
        found |= self._plain.evaluate(self._mean, "ensemble", one_batch)
    return found


class TwinEvaluator:
  """Evaluates the models one after the other, in a plain model."""

  def __init__(
    self,
    model: Any,
    keys: Sequence[str],
    data: evaluation_data.EvaluationData,
    twin: Callable[[], Any] | None,
    has_ensemble: bool,
  ) -> None:
    """Creates the twins, and compiles those that are evaluated."""

    def make() -> Any:
      into = None if twin is None else twin()
      return plain_models.load(model, 0, model.optimizer, into=into)

    self._model, self._keys = model, keys
    self._evaluator = PlainEvaluator(model.distribute_strategy, data)
    self._plain = make()
    if keras_fit.compile_arguments(self._plain) is None:
      mean_model.compile_like(model, self._plain)
    self._members: list[Any] = []
    self._mean: Any = None
    if has_ensemble:
      self._members = [make() for _ in keys]
      mean = mean_model.of_members(self._members)
      self._mean = mean_model.mean_of(mean, self._plain)
      mean_model.compile_like(self._plain, self._mean)

  def evaluate(self, one_batch: bool = False) -> dict[str, Any]:
    """Returns the metrics of all models, and those of the ensemble."""
    model, metrics = self._model, dict[str, Any]()
    state = group_state.GroupState(model.optimizer, model, with_optimizer=False)
    for i, key in enumerate(self._keys[:1] if one_batch else self._keys):
      values = plain_models.values_of(state, i)
      for plain in (self._plain, *self._members[i : i + 1]):
        plain_models.assign(state, values, plain)
      metrics |= self._evaluator.evaluate(self._plain, key, one_batch)
    if self._mean is not None:
      metrics |= self._evaluator.evaluate(self._mean, "ensemble", one_batch)
    return metrics


@contextlib.contextmanager
def _keeping_state(model: Any) -> Iterator[None]:
  """Restores what layers store when they are evaluated."""
  copies = replicas_lib.Copies(model.distribute_strategy)
  variables = [v for v in group_state.variables_of(model) if not v.trainable]
  for layer in keras_private.layers(model):
    # Keras does not list the states of a stateful recurrent layer.
    states = tf.nest.flatten(getattr(layer, "states", None))
    variables += filter(variables_lib.is_variable, states)
  kept = [(variable, copies.here(variable)) for variable in variables]
  yield
  for variable, arrays in kept:
    copies.write(variable, arrays)
