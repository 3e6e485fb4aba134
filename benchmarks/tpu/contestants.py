"""The training steps that program.py sets against each other.

Every contestant trains a model of its own, made of the same code and from the
same random seed, by Adam with the same settings, in the way that its users
would write.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import tf_cross_shard
from benchmarks import original
from benchmarks.tpu import models
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import virtual_tpu

ORIGINAL, BARE = "original", "original, no count"
KERAS, OURS, GROUPED = "plain Keras", "ours", "ours, two groups"
SHARDED = "ours, sharded"
NAMES = (ORIGINAL, BARE, KERAS, OURS, GROUPED, SHARDED)

_LEARNING_RATE = 0.001
_EPSILON = 1e-7  # The defaults of Keras and of TensorFlow 1 differ.


@dataclasses.dataclass(frozen=True)
class Contestant:
  """One way of training one model.

  Attributes:
    name: Whose way.
    model: The model.
    optimizer: Its optimizer.
    step: A replica's training step: inputs and labels to the loss.
    apply_step: A replica's step that has gradients and only applies them.
  """

  name: str
  model: Any
  optimizer: Any
  step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
  apply_step: Callable[[], None]

  @property
  def num_variables(self) -> int:
    """How many variables are trained."""
    return len(self.model.trainable_variables)

  @property
  def state(self) -> list[tf.Variable]:
    """Every variable of the model and of the optimizer."""
    own = [*self.model.variables, *self.optimizer.variables]
    return [original.native(variable) for variable in own]


def make(
  name: str,
  strategy: virtual_tpu.VirtualTPUStrategy,
  case: models.Case,
) -> Contestant:
  """Makes a model, its optimizer and its steps.

  Args:
    name: One of `NAMES`.
    strategy: Where it is trained.
    case: The model.

  Returns:
    The contestant.
  """
  tf.keras.utils.set_random_seed(0)
  with strategy.scope():
    model = case.make_model()
    make_steps = {
      ORIGINAL: _original,
      BARE: lambda *given: _original(*given, counts_steps=False),
      KERAS: _keras,
      OURS: _ours,
      GROUPED: lambda *given: _ours(*given, num_groups=2),
      SHARDED: lambda *given: _ours(*given, shard_update=True),
    }[name]
    return Contestant(name, model, *make_steps(strategy, case, model))


def _original(
  strategy: virtual_tpu.VirtualTPUStrategy,
  case: models.Case,
  model: Any,
  counts_steps: bool = True,
) -> tuple[Any, ...]:
  """TensorFlow 1's CrossShardOptimizer."""
  variables = model.trainable_variables
  adam = tf.compat.v1.train.AdamOptimizer(_LEARNING_RATE, epsilon=_EPSILON)
  optimizer = original.Original(
    strategy, adam, variables, counts_steps=counts_steps
  )

  def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    loss = case.loss(model, inputs, labels)
    optimizer.minimize(loss)
    return loss

  def apply_step() -> None:
    optimizer.apply(_some_gradients(variables))

  return optimizer, step, apply_step


def _keras(
  strategy: virtual_tpu.VirtualTPUStrategy, case: models.Case, model: Any
) -> tuple[Any, ...]:
  """A Keras optimizer, which sums gradients over all replicas by itself."""
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

  def apply_step() -> None:
    grads = _some_gradients(variables)
    optimizer.apply_gradients(zip(grads, variables, strict=True))

  return optimizer, step, apply_step


def _ours(
  strategy: virtual_tpu.VirtualTPUStrategy,
  case: models.Case,
  model: Any,
  num_groups: int = 1,
  shard_update: bool = False,
) -> tuple[Any, ...]:
  """This package's CrossShardOptimizer."""
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

  def apply_step() -> None:
    grads = _some_gradients(variables)
    optimizer.apply_gradients(zip(grads, variables, strict=True))

  return optimizer, step, apply_step


def _make_adam() -> Any:
  """The optimizer of Keras."""
  return tf.keras.optimizers.Adam(_LEARNING_RATE, epsilon=_EPSILON)


def _some_gradients(variables: Sequence[Any]) -> list[tf.Tensor]:
  """Gradients that cost little to trace."""
  return [tf.ones(variable.shape, variable.dtype) for variable in variables]
