"""Evaluates plain models in `tf.function`s: one model, or those of all groups.

    test_step of the twin ─ vectorize ─▶ test steps of all groups, on one batch
    variables of the twin ───────────▶ stacks with a row for each group

`evaluate` of Keras takes 20 ms of Python, however small model and data are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core.inner import keras_private
from tf_cross_shard._src.replica_state import archive
from tf_cross_shard._src.vectorized import exchanges, vectorizer

_HOOKS = "evaluate", "make_test_function", "test_step", "reset_metrics"
_autograph = tf.__internal__.autograph


def is_traceable(model: Any) -> bool:
  """Returns whether calling `test_step` does the same as Keras' `evaluate`.

  A model that overrides a step of the evaluation, or that runs eagerly, needs
  `evaluate` itself.
  """
  base, kind = keras_private.keras_of(model).Model, type(model)
  return not model.run_eagerly and all(
    getattr(kind, hook) is getattr(base, hook) for hook in _HOOKS
  )


def program(model: Any, data: tf.data.Dataset) -> Callable[[], Any]:
  """Returns a function that evaluates a model and returns its metrics."""
  create_metrics(model, data)

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


def create_metrics(model: Any, data: tf.data.Dataset) -> None:
  """Evaluates a batch eagerly: functions must not create metrics."""
  for batch in data.take(1):
    model.test_step(batch)


class Stacks:
  """The values that a twin's variables have in each group.

  Attributes:
    groups: The number of groups.
  """

  def __init__(self, groups: int, variables: Mapping[str, Any]) -> None:
    """Creates the stacks.

    Args:
      groups: The number of groups.
      variables: The twin's variables, by name.
    """
    self.groups = groups
    self._by_name = {
      name: self._stack_of(variable) for name, variable in variables.items()
    }
    self._handles = {
      id(variable.handle): self._by_name[name].handle
      for name, variable in variables.items()
    }

  def assign(self, values: Mapping[str, archive.Array]) -> None:
    """Sets the values of variables, `[groups, ...]`, by name."""
    for name, stack in self._by_name.items():
      stack.assign(values[name])

  def program(
    self, model: Any, data: tf.data.Dataset
  ) -> Callable[[], dict[str, np.ndarray]]:
    """Returns a function that evaluates a model in all groups.

    It returns the metrics by name, with a number for each group.
    """
    create_metrics(model, data)
    own = [
      replicas_lib.native(variable)
      for metric in model.metrics
      for variable in metric.variables
    ]
    stacks = [self._stack_of(variable) for variable in own]
    handles = {
      **self._handles,
      **{id(v.handle): x.handle for v, x in zip(own, stacks, strict=True)},
    }

    names: list[str] = []

    @tf.autograph.experimental.do_not_convert
    def in_groups(step: Callable[..., Any], *args: Any) -> list[tf.Tensor]:
      # A batch is captured, as what all groups have alike.
      function = tf.function(lambda: step(*args), autograph=False)
      outputs = vectorizer.vectorize(
        function.get_concrete_function(), self.groups, [], handles
      )
      return [vectorizer.with_count(x, self.groups) for x in outputs]

    def results() -> list[Any]:
      metrics = flat(model.get_metrics_result())
      names[:] = metrics
      return list(metrics.values())

    @tf.function
    def evaluate(iterator: Any) -> list[tf.Tensor]:
      status = _autograph.control_status_ctx()
      test_step = _autograph.tf_convert(model.test_step, status)
      in_groups(model.reset_metrics)
      for batch in iterator:
        in_groups(lambda x: (test_step(x), None)[1], batch)
      return in_groups(results)

    def run() -> dict[str, np.ndarray]:
      values = evaluate(iter(data))
      return {n: x.numpy() for n, x in zip(names, values, strict=True)}

    # Functions hold handles, and not what they belong to.
    run.stacks = stacks  # type: ignore[attr-defined]
    return run

  def _stack_of(self, variable: Any) -> tf.Variable:
    shape = tf.TensorShape([self.groups]).concatenate(variable.shape)
    value = tf.repeat(variable.read_value()[tf.newaxis], self.groups, axis=0)
    return tf.Variable(value, trainable=False, shape=shape)


def mean_over_groups(tensor: tf.Tensor, groups: int) -> tf.Tensor:
  """Averages a tensor over all groups, inside the program that has them all."""
  if tf.executing_eagerly():  # To create metrics: there is one group only.
    return tensor
  return exchanges.cross_replica_sum(tensor, [[*range(groups)]]) / groups


def flat(results: Mapping[str, Any]) -> dict[str, Any]:
  """Returns metrics by name, without the nesting by output that Keras uses."""
  found: dict[str, Any] = {}
  for key, value in results.items():
    found |= value if isinstance(value, dict) else {key: value}
  return found
