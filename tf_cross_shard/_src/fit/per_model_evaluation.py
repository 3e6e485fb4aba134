"""Reads the metrics of models in one program.

metric variables [n, ...] ─ get_metrics_result, n times ─▶ n results
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core.wrapped import nested


class MetricsOfModels:
  """What the metrics of each model show; Keras returns the models' mean."""

  def __init__(self, model: Any) -> None:
    self._model = model
    self._variables: list[Any] = []
    self._results: Any = None
    self._training: dict[str, list[Any]] = {}
    self._validation: dict[str, list[Any]] = {}
    # The logs of the last epoch, and what they report, for each model.
    self._logs: Any = None
    self._found: dict[str, list[Any]] = {}

  def read(self) -> dict[str, list[Any]]:
    """Returns the metrics by name, with a value for each model."""
    strategy = self._model.distribute_strategy
    variables = [v for metric in self._model.metrics for v in metric.variables]
    # Metrics get variables with their first batch, and others in `compile`.
    if list(map(id, variables)) != list(map(id, self._variables)):
      self._variables = variables
      function = tf.function(
        lambda: strategy.run(self._model.get_metrics_result), autograph=False
      )
      # TensorFlow warns of a function that is made again in each `fit`.
      self._results = function.get_concrete_function()
    return {
      name: list(map(as_value, strategy.experimental_local_results(values)))
      for name, values in flat(self._results()).items()
    }

  def begin_validation(self) -> None:
    """Reads the training metrics, which Keras is about to reset."""
    self._training = self.read()

  def end_validation(self) -> None:
    self._validation = {f"val_{name}": x for name, x in self.read().items()}

  def of_epoch(self, logs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the metrics that the logs of an epoch report, for each model."""
    if logs is not self._logs:
      self._logs = logs
      if not self._validation.keys() & logs.keys():  # None in this epoch.
        self._training = self.read()
      found = (self._training | self._validation).items()
      # Keras reports no metric that a step of the user's own does not return.
      self._found = {name: values for name, values in found if name in logs}
    return self._found


def by_key(
  model: Any, keys: Sequence[str], found: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
  """Returns `{"loss/model_0": value}` for `{"loss": values of the models}`."""
  groups = nested.groups_of(model.optimizer)
  return {
    f"{name}/{key}": values[members[0]]
    for name, values in found.items()
    for key, members in zip(keys, groups, strict=True)
  }


def as_value(value: Any) -> Any:
  """Returns the value of a metric: a float, or an array if it is a vector."""
  array = np.asarray(value)
  return array if array.ndim else float(array)


def flat(results: Mapping[str, Any]) -> dict[str, Any]:
  """Returns metrics by name, without the nesting by output that Keras uses."""
  found: dict[str, Any] = {}
  for key, value in results.items():
    found |= value if isinstance(value, dict) else {key: value}
  return found
