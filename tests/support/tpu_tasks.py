"""Small models and data for programs that TPUs run."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_layers = tf.keras.layers


def dense() -> Any:
  return tf.keras.Sequential(
    [
      tf.keras.Input((6,)),
      _layers.Dense(8, activation="tanh"),
      _layers.Dense(3),
    ]
  )


def embedding() -> Any:
  """Returns a network with an embedding table, which has sparse gradients."""
  return tf.keras.Sequential(
    [
      tf.keras.Input((2,), dtype="int32"),
      _layers.Embedding(64, 4),
      _layers.Flatten(),
      _layers.Dense(3),
    ]
  )


MODELS: dict[str, Callable[[], Any]] = {"dense": dense, "embedding": embedding}


def loss(model: Any, x: Any, y: Any) -> tf.Tensor:
  """Returns the squared error, averaged over the given examples."""
  return tf.reduce_mean((model(x, training=True) - y) ** 2)
