"""Small models and data for programs that TPUs run."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import virtual_tpu
from tf_cross_shard.virtual_tpu import lowering, replica_context

_layers = tf.keras.layers


def dense() -> Any:
  """A network of dense layers."""
  return tf.keras.Sequential(
    [
      tf.keras.Input((6,)),
      _layers.Dense(8, activation="tanh"),
      _layers.Dense(3),
    ]
  )


def convolution() -> Any:
  """A network with convolutions."""
  return tf.keras.Sequential(
    [
      tf.keras.Input((6, 6, 2)),
      _layers.Conv2D(4, 3, strides=2, activation="tanh"),
      _layers.DepthwiseConv2D(2, padding="same"),
      _layers.Flatten(),
      _layers.Dense(3),
    ]
  )


def embedding() -> Any:
  """A network that looks rows up, so that gradients are sparse."""
  return tf.keras.Sequential(
    [
      tf.keras.Input((2,), dtype="int32"),
      _layers.Embedding(64, 4),
      _layers.Flatten(),
      _layers.Dense(3),
    ]
  )


MODELS: dict[str, Callable[[], Any]] = {
  "dense": dense,
  "convolution": convolution,
  "embedding": embedding,
}


@dataclasses.dataclass(frozen=True)
class Task:
  """A model and different data for every replica and step.

  Attributes:
    make: Makes the model, with the same weights each time.
    x: Inputs, [steps, replicas, examples, ...].
    y: Targets, [steps, replicas, examples, 3].
  """

  make: Callable[[], Any]
  x: np.ndarray
  y: np.ndarray

  def model(self) -> Any:
    """The model with its initial weights."""
    tf.keras.utils.set_random_seed(3)
    return self.make()


def task(make: Callable[[], Any], num_replicas: int, steps: int = 10) -> Task:
  """A task for a model; no row of an embedding is looked up twice in a step.

  Plain Keras squares repeated rows one by one, which dense sums do not.
  """
  examples = 4
  rng = np.random.default_rng(num_replicas)
  batch = (steps, num_replicas, examples)
  if make is embedding:
    ids = [rng.permutation(64) for _ in range(steps)]
    ids = [each[: num_replicas * examples * 2] for each in ids]
    x = np.stack(ids).reshape(*batch, 2).astype("int32")
  else:
    shape = make().input_shape[1:]
    x = rng.normal(size=(*batch, *shape)).astype("float32")
  y = rng.normal(size=(*batch, 3)).astype("float32")
  flat = x.reshape(steps, num_replicas, -1)
  assert (flat[:, 1:] != flat[:, :1]).any(axis=(0, 2)).all(), "same data"
  return Task(make, x, y)


def loss(model: Any, x: Any, y: Any) -> tf.Tensor:
  """The squared error, averaged over the examples handed in."""
  return tf.reduce_mean((model(x, training=True) - y) ** 2)


def weights_of(model: Any, num_replicas: int) -> list[list[np.ndarray]]:
  """Every replica's weights; asserts that there are so many replicas."""
  by_variable = [testbed.copies(variable) for variable in model.variables]
  assert {len(each) for each in by_variable} == {num_replicas}
  assert num_replicas > 1
  return [[each[r] for each in by_variable] for r in range(num_replicas)]


def largest(weights: Sequence[np.ndarray]) -> float:
  """The largest absolute value in a model."""
  return max(float(np.abs(weight).max()) for weight in weights)


def furthest(
  actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> float:
  """The largest difference between two models."""
  return max(
    float(np.abs(a - b).max()) for a, b in zip(actual, expected, strict=True)
  )


def trace(
  strategy: virtual_tpu.VirtualTPUStrategy,
  fn: Callable[..., Any],
  *specs: tf.TensorSpec,
) -> lowering.Traced:
  """The graph of a replica's function on a virtual TPU."""

  def replica_fn(*tensors: tf.Tensor) -> Any:
    with strategy.scope(), replica_context.TracedReplicaContext(strategy, 0):
      return fn(*tensors)

  return lowering.trace(
    replica_fn, specs, lambda: strategy.extended.known_variables
  )
