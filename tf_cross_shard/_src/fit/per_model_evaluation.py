"""Evaluates plain models, and reads the metrics of models in one program.

    metric variables [n, ...] ─ get_metrics_result, n times ─▶ n results

`evaluate` of Keras takes 20 ms of Python, however small model and data are. A
`tf.function` over all batches takes less, for each group that is evaluated.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core.wrapped import keras_private, nested

_HOOKS = "evaluate", "make_test_function", "test_step", "reset_metrics"


def is_traceable(model: Any) -> bool:
  """Returns whether calling `test_step` does the same as Keras' `evaluate`.

  A model that overrides a step of the evaluation, or that runs eagerly, needs
  `evaluate` itself.
  """
  return not model.run_eagerly and not keras_private.overrides(model, _HOOKS)


def program(model: Any, data: tf.data.Dataset) -> Callable[[], Any]:
  """Returns a function that evaluates a model and returns its metrics."""
  for batch in data.take(1):
    model.test_step(batch)  # Creates metrics, which functions must not do.

  # An iterator: a dataset in a function is optimized again in each call.
  @tf.function
  def evaluate(iterator: Any) -> None:
    for batch in iterator:
      model.test_step(batch)

  def run() -> Any:
    model.reset_metrics()
    evaluate(iter(data))
    return model.get_metrics_result()

  return run


class MetricsOfModels:
  """Reads what the metrics of each model of a VectorizedStrategy show.

  Keras' `fit` and `evaluate` update the metrics of all models in one program,
  and return the mean over the models.
  """

  def __init__(self) -> None:
    self._variables: list[Any] = []
    self._results: Any = None

  def read(self, model: Any) -> dict[str, list[Any]]:
    """Returns the metrics by name, with a value for each model."""
    strategy = model.distribute_strategy
    variables = [v for metric in model.metrics for v in metric.variables]
    # Metrics get variables with their first batch, and others in `compile`.
    if list(map(id, variables)) != list(map(id, self._variables)):
      self._variables = variables
      function = tf.function(
        lambda: strategy.run(model.get_metrics_result), autograph=False
      )
      # TensorFlow warns of a function that is made again in each `fit`.
      self._results = function.get_concrete_function()
    return {
      name: list(map(as_value, strategy.experimental_local_results(values)))
      for name, values in flat(self._results()).items()
    }

  def by_group(
    self,
    model: Any,
    keys: Sequence[str],
    reported: Mapping[str, Any] | None = None,
  ) -> dict[str, Any]:
    """Returns each group's metrics; only those `reported`, if that is given.

    Keras reports no metric that a step of the user's own does not return.
    """
    groups = nested.groups_of(model.optimizer)
    return {
      f"{name}/{key}": of_model[members[0]]
      for name, of_model in self.read(model).items()
      if reported is None or name in flat(reported)
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
