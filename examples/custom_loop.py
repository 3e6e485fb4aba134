"""Trains on handwritten digits in a loop of your own, with local clipping.

    python examples/custom_loop.py --replicas=4 --group_size=2 --clip_norm=1

Between `compute_gradients` and `apply_gradients`, a gradient still belongs to
one replica. Each replica clips its own gradients by their norm, before they are
summed. So an outlier in one replica cannot dominate the sum.
"""

import os

# TensorFlow reads these variables when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from collections.abc import Sequence

import command_line
import digits_dataset
import group_history
import replicas
import tensorflow as tf
from absl import app, flags, logging

import tf_cross_shard
from tf_cross_shard import callbacks
from tf_cross_shard import groups as groups_lib

_REPLICAS = flags.DEFINE_integer(
  "replicas", 4, "Number of devices to train on.", 1
)
_GROUP_SIZE = flags.DEFINE_integer(
  "group_size",
  2,
  "Replicas in each group. The program uses fewer if that many would give only"
  " one group, or do not divide --replicas.",
  1,
)
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Number of epochs.", 1)
_BATCH_SIZE = flags.DEFINE_integer(
  "batch_size", 48, "Images in each step, for all replicas together.", 1, 1024
)
_CLIP_NORM = flags.DEFINE_float(
  "clip_norm", 1.0, "Largest norm of the gradients of a replica's loss.", 0
)
_LOSS = flags.DEFINE_enum(
  "loss",
  "plain",
  ["plain", "keras"],
  "plain: tf.reduce_mean; keras: a Keras loss.",
)
_PICTURE = command_line.define_picture("custom_loop.png", "File for the plot.")
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder for the prepared data. Default: your cache folder."
)


def main(argv: Sequence[str]) -> None:
  """Trains in groups, prints a table and draws a plot."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}")
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow log a lot.
  num_replicas = _REPLICAS.value
  strategy = tf_cross_shard.local_strategy(num_replicas)
  groups = replicas.choose_groups(num_replicas, _GROUP_SIZE.value)
  groups = groups or groups_lib.singletons(num_replicas)
  print(f"{groups.draw()}\n")

  batch_size = replicas.divisible(_BATCH_SIZE.value, num_replicas)
  train_data, test_data = digits_dataset.load(batch_size, _DATA_DIR.value)
  # After the data, since preparing the data consumes random numbers.
  tf.keras.utils.set_random_seed(0)
  with strategy.scope():
    model = digits_dataset.make_model()
    keras_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # For the mean, the optimizer has to know what the loss is averaged over.
    # tf.reduce_mean averages over the examples of one replica: "replica", the
    # default of compute_gradients. Under a strategy, a Keras loss object has
    # already divided by the number of replicas: "global".
    optimizer = tf_cross_shard.CrossShardOptimizer(
      tf.keras.optimizers.Adam(0.002),
      group_assignment=groups,
      loss_averaged_over="global" if _LOSS.value == "keras" else "replica",
    )
    # Make the slots before the step is traced, because they are variables.
    optimizer.build(model.trainable_variables)
    # Only `GroupMetrics` needs this. The loop uses the loss below.
    model.compile(optimizer, keras_loss, metrics=["accuracy"])

  def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Runs a step on one replica; returns 1.0 if it clipped gradients."""

    def loss() -> tf.Tensor:
      logits = model(images, training=True)
      if _LOSS.value == "keras":
        return keras_loss(labels, logits)
      return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
      )

    pairs = optimizer.compute_gradients(loss, model.trainable_variables)
    grads, variables = zip(*pairs, strict=True)
    # compute_gradients multiplied the loss by 1 / group_size, so that the sum
    # over the group is a mean. Scale the limit like the gradients.
    limit = _CLIP_NORM.value / groups.group_size
    grads, norm = tf.clip_by_global_norm(grads, limit)
    optimizer.apply_gradients(zip(grads, variables, strict=True))
    return tf.cast(norm > limit, tf.float32)

  @tf.function
  def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Runs a step on all replicas; returns the share that clipped."""
    clipped = strategy.run(replica_step, (images, labels))
    return strategy.reduce("MEAN", clipped, axis=None)

  metrics = callbacks.GroupMetrics(test_data)
  history = group_history.GroupHistory(groups)
  for each in (metrics, history):
    each.set_model(model)
  steps = len(train_data)
  batches = iter(strategy.experimental_distribute_dataset(train_data.repeat()))
  for epoch in range(_EPOCHS.value):
    clipped = sum(float(train_step(*next(batches))) for _ in range(steps))
    logs: dict[str, float] = {}
    metrics.on_epoch_end(epoch, logs)
    history.on_epoch_end(epoch, logs)
    accuracies = " ".join(f"{a:.2%}" for a in history.accuracy[-1])
    print(
      f"epoch {epoch + 1}: test accuracy of each group {accuracies};"
      f" {clipped / steps:.0%} of the gradients clipped"
    )
  runs = {f"{_LOSS.value} loss": history}
  print(f"\n{group_history.table(runs)}")
  group_history.draw(runs, _PICTURE.value)


if __name__ == "__main__":
  command_line.run(main)
