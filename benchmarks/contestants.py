"""The training steps that step_time.py compares.

All contestants update the same variables with the same data. Each step is one
`strategy.run` inside one `tf.function`.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf

import tf_cross_shard
from tf_cross_shard import groups as groups_lib
from tf_cross_shard._src.core.gradients import packing
from tf_cross_shard._src.core.reduce import engine as engine_lib
from tf_cross_shard._src.core.reduce import mirrored

KERAS, OURS, GROUPED = "plain Keras", "ours", "ours, grouped"
_PARAMETERS = 12_000_000
# So small that weights stay finite, however often a step is repeated.
_LEARNING_RATE = 1e-7

Step = Callable[[], Any]
Reducer = Callable[[list[tf.Tensor]], list[tf.Tensor]]


def layer_width(num_variables: int, parameters: int = _PARAMETERS) -> int:
  """Returns the width at which `num_variables / 2` layers hold `parameters`."""
  return round((parameters / (num_variables / 2)) ** 0.5)


def shapes_of(num_variables: int) -> list[list[int]]:
  """Returns the shapes of matrices and their biases, half of each."""
  width = layer_width(num_variables)
  return [[width, width], [width]] * (num_variables // 2)


def make_copies(
  strategy: tf.distribute.Strategy, shapes: Sequence[Sequence[int]]
) -> list[tf.Variable]:
  """Returns variables whose values are used as gradients.

  Reading a variable costs nothing, and TensorFlow cannot fold the value into a
  constant.
  """
  with strategy.scope():
    return [tf.Variable(tf.random.normal(shape)) for shape in shapes]


def reduction_step(
  strategy: tf.distribute.Strategy,
  grads: Sequence[tf.Variable],
  reducer: Reducer,
) -> Step:
  """Returns a step that reduces `grads` and does nothing else.

  It returns one element of each sum. Otherwise TensorFlow would prune sums that
  nobody uses.
  """

  def replica_step() -> tf.Tensor:
    sums = reducer([grad.read_value() for grad in grads])
    return tf.stack([tf.reshape(total, [-1])[-1] for total in sums])

  return tf.function(lambda: strategy.run(replica_step), autograph=False)


def keras_reducer(grads: list[tf.Tensor]) -> list[tf.Tensor]:
  """Sums gradients in the same way as a Keras optimizer."""
  context = tf.distribute.get_replica_context()
  sums: list[tf.Tensor] = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)
  return sums


def packed_reducer(engine: engine_lib.Engine, bucket_bytes: int) -> Reducer:
  """Returns our reduction with buckets of the given size."""

  def reduce(grads: list[tf.Tensor]) -> list[tf.Tensor]:
    if engine.bucket_bytes is None:  # The engine packs buckets by itself.
      with mock.patch.object(mirrored, "_MERGE_BUCKET_BYTES", bucket_bytes):
        return engine.all_reduce_sum(grads)
    buffers, unpack = packing.pack(grads, bucket_bytes)
    return unpack(engine.all_reduce_sum(buffers))

  return reduce


def make_model(width: int, num_variables: int) -> Any:
  """Returns dense layers, initialized so that activations keep their size."""
  layers = [
    tf.keras.layers.Dense(width, "relu", kernel_initializer="he_normal")
    for _ in range(num_variables // 2)
  ]
  return tf.keras.Sequential([tf.keras.Input([width]), *layers])


def make_optimizers(name: str, num_replicas: int) -> dict[str, Any]:
  """Returns the contestants by name. All of them sum gradients."""
  half = groups_lib.contiguous(num_replicas, num_replicas // 2)

  def make_inner() -> Any:
    optimizer = tf.keras.optimizers.get(name)
    optimizer.learning_rate = _LEARNING_RATE
    return optimizer

  def make_ours(groups: groups_lib.Groups | None) -> Any:
    return tf_cross_shard.CrossShardOptimizer(
      make_inner(), reduction="sum", group_assignment=groups
    )

  return {
    KERAS: make_inner(),
    OURS: make_ours(None),
    GROUPED: make_ours(half),
  }


def training_steps(
  strategy: tf.distribute.Strategy,
  optimizer_name: str,
  *,
  width: int,
  num_variables: int,
  batch_size: int,
) -> tuple[dict[str, Step], dict[str, Step]]:
  """Returns two dictionaries of steps, by contestant, of one model.

  The first one has optimizer steps, which apply given gradients. The second one
  has training steps, which also compute the gradients.
  """
  with strategy.scope():
    model = make_model(width, num_variables)
    optimizers = make_optimizers(optimizer_name, strategy.num_replicas_in_sync)
    for optimizer in optimizers.values():
      optimizer.build(model.trainable_variables)
  weights = model.trainable_variables
  grads = make_copies(strategy, [weight.shape for weight in weights])
  inputs, targets = make_copies(strategy, [[batch_size, width]] * 2)

  def optimizer_step(optimizer: Any) -> None:
    values = [grad.read_value() for grad in grads]
    optimizer.apply_gradients(zip(values, weights, strict=True))

  def training_step(optimizer: Any) -> None:
    with tf.GradientTape() as tape:
      error = model(inputs.read_value(), training=True) - targets
      loss = tf.reduce_mean(error**2) / strategy.num_replicas_in_sync
    values = tape.gradient(loss, weights)
    optimizer.apply_gradients(zip(values, weights, strict=True))

  def on_replicas(replica_step: Callable[[Any], None], optimizer: Any) -> Step:
    return tf.function(
      lambda: strategy.run(replica_step, args=(optimizer,)), autograph=False
    )

  return (
    {name: on_replicas(optimizer_step, o) for name, o in optimizers.items()},
    {name: on_replicas(training_step, o) for name, o in optimizers.items()},
  )
