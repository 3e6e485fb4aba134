"""Ways to call towers, devices, and state to compare, for their tests."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import TowerSpec

MODES = ("eager", "function")
TWO = ("CPU:0", "CPU:1")
FOUR = ("CPU:0", "CPU:1", "CPU:2", "CPU:3")
BATCH = ((1.0,), (2.0,))


def caller(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
  return function if mode == "eager" else tf.function(function)


def batch(*rows: Sequence[float]) -> tf.Tensor:
  """Returns a batch of floats, which is `BATCH` by default."""
  return tf.constant(rows or BATCH, tf.float32)


def linear(c: Any, optimizer: Any, step: Any = None) -> Callable[..., Any]:
  """Returns a model function with the loss `c * features`."""

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_sum(c * features)
    return TowerSpec(mode, loss, optimizer.minimize(loss, step, [c]))

  return model_fn


def named(variables: Iterable[Any], name: str) -> Any:
  """Returns the first variable with this name.

  Variables of optimizers come later in the list, so they are not found.
  """
  return next(
    v for v in variables if v.name.split("/")[-1].split(":")[0] == name
  )


def values(variables: Iterable[Any]) -> list[Any]:
  return [np.asarray(variable.numpy()).tolist() for variable in variables]


def sgd(learning_rate: Any = 1.0, **options: Any) -> Any:
  """Returns an optimizer whose arithmetic is exact on small whole numbers."""
  return tf.keras.optimizers.SGD(learning_rate, **options)
