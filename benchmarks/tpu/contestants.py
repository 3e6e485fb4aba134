"""The training steps that program.py compares.

Every contestant trains its own model, created by the same code from the
same random seed, with the same settings of Adam. The steps are written as users
of that optimizer would write them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tf_cross_shard
from benchmarks.tpu import models
from tests.support import original
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import virtual_tpu

ORIGINAL, BARE = "original", "original, no count"
KERAS, OURS, GROUPED = "plain Keras", "ours", "ours, two groups"
SHARDED = "ours, sharded"
NAMES = (ORIGINAL, BARE, KERAS, OURS, GROUPED, SHARDED)

_LEARNING_RATE = 0.001
# Explicit, since the defaults of Keras and TensorFlow 1 differ.
_EPSILON = 1e-7


@dataclasses.dataclass(frozen=True)
class Contestant:
  """One model with one optimizer.

  Attributes:
    name: The name of the contestant.
    model: The model.
    optimizer: The optimizer of the model.
    step: The training step of a replica. It takes inputs and labels, and
      returns the loss.
  """

  name: str
  model: Any
  optimizer: Any
  step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def make(
  name: str,
  strategy: virtual_tpu.VirtualTPUStrategy,
  case: models.Case,
) -> Contestant:
  """Builds one contestant: a model, an optimizer and a training step.

  Args:
    name: One of `NAMES`.
    strategy: The strategy to train under.
    case: The kind of model.

  Returns:
    The contestant.
  """
  tf.keras.utils.set_random_seed(0)
  with strategy.scope():
    model = case.make_model()
    make_step = {
      ORIGINAL: _original,
      BARE: lambda *given: _original(*given, counts_steps=False),
      KERAS: _keras,
      OURS: _ours,
      GROUPED: lambda *given: _ours(*given, num_groups=2),
      SHARDED: lambda *given: _ours(*given, shard_update=True),
    }[name]
    return Contestant(name, model, *make_step(strategy, case, model))


def _original(
  strategy: virtual_tpu.VirtualTPUStrategy,
  case: models.Case,
  model: Any,
  counts_steps: bool = True,
) -> tuple[Any, ...]:
  """Returns TensorFlow 1's CrossShardOptimizer and its step."""
  variables = model.trainable_variables
  adam = tf.compat.v1.train.AdamOptimizer(_LEARNING_RATE, epsilon=_EPSILON)
  optimizer = original.Original(
    strategy, adam, variables, counts_steps=counts_steps
  )

  def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    loss = case.loss(model, inputs, labels)
    optimizer.minimize(loss)
    return loss

  return optimizer, step


def _keras(
  strategy: virtual_tpu.VirtualTPUStrategy, case: models.Case, model: Any
) -> tuple[Any, ...]:
  """Returns a Keras optimizer, which sums over all replicas, and its step."""
  variables = model.trainable_variables
  optimizer = _make_adam()
  optimizer.build(variables)

  def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
      loss = case.loss(model, inputs, labels)
      scaled = loss / strategy.num_replicas_in_sync
    grads = tape.gradient(scaled, variables)
    optimizer.apply_gradients(zip(grads, variables, strict=True))
    return loss

  return optimizer, step


def _ours(
  strategy: virtual_tpu.VirtualTPUStrategy,
  case: models.Case,
  model: Any,
  num_groups: int = 1,
  shard_update: bool = False,
) -> tuple[Any, ...]:
  """Returns this package's CrossShardOptimizer and its step."""
  variables = model.trainable_variables
  count = strategy.num_replicas_in_sync
  optimizer = tf_cross_shard.CrossShardOptimizer(
    _make_adam(),
    group_assignment=groups_lib.contiguous(count, count // num_groups)
    if num_groups > 1
    else None,
    loss_averaged_over="replica",
    shard_update=shard_update,
  )
  optimizer.build(variables)

  def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
      loss = case.loss(model, inputs, labels)
    pairs = optimizer.compute_gradients(loss, variables, tape=tape)
    optimizer.apply_gradients(pairs)
    return loss

  return optimizer, step


def _make_adam() -> Any:
  """Returns Keras' Adam."""
  return tf.keras.optimizers.Adam(_LEARNING_RATE, epsilon=_EPSILON)
