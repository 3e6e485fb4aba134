"""Trains on handwritten digits in a loop of your own, with local clipping.

    python examples/custom_loop.py --replicas=4 --group_size=2 --clip_norm=0.5

Between `compute_gradients` and `apply_gradients`, a gradient still belongs to
one replica. Each replica clips its own gradients by their norm, before they are
summed. So an outlier in one replica cannot dominate the sum.
"""

import command_line  # First: it makes TensorFlow quiet.
import digits_dataset
import replicas
import tensorflow as tf

from tf_cross_shard import (
  CrossShardOptimizer,
  Models,
  callbacks,
  groups,
  local_strategy,
)

FLAGS = command_line.parse(
  __doc__,
  replicas=(4, "Number of devices to train on."),
  group_size=(2, "Replicas in each group; divides --replicas."),
  epochs=(10, "Number of epochs."),
  batch_size=(48, "Images in each step, for all replicas together."),
  clip_norm=(1.0, "Largest norm of the gradients of a replica's loss."),
  data_dir=(None, "Folder for the prepared data, instead of your cache."),
)


def main() -> None:
  """Trains in groups, and prints the accuracy of each group."""
  strategy = local_strategy(FLAGS.replicas)
  assignment = groups.contiguous(FLAGS.replicas, FLAGS.group_size)
  print(f"{assignment.draw()}\n")
  train, test = digits_dataset.load(
    replicas.divisible(FLAGS.batch_size, FLAGS.replicas), FLAGS.data_dir
  )
  # After the data, since preparing the data consumes random numbers.
  tf.keras.utils.set_random_seed(0)
  with strategy.scope():
    model = digits_dataset.make_model()
    # tf.reduce_mean averages the loss over the examples of one replica. A Keras
    # loss object has already divided by the number of replicas: for such a
    # loss, pass "global".
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(0.002),
      group_assignment=assignment,
      loss_averaged_over="replica",
    )
    # Make the slots before the step is traced, because they are variables.
    optimizer.build(model.trainable_variables)
    # Only `PerModelMetrics` needs this. The loop uses the loss below.
    model.compile(
      optimizer,
      tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=["accuracy"],
    )

  def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Runs a step on one replica; returns 1.0 if it clipped gradients."""

    def loss() -> tf.Tensor:
      logits = model(images, training=True)
      return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
      )

    pairs = optimizer.compute_gradients(loss, model.trainable_variables)
    grads, variables = zip(*pairs, strict=True)
    # compute_gradients multiplied the loss by 1 / group_size, so that the sum
    # over the group is a mean. Scale the limit like the gradients.
    limit = FLAGS.clip_norm / assignment.group_size
    grads, norm = tf.clip_by_global_norm(grads, limit)
    optimizer.apply_gradients(zip(grads, variables, strict=True))
    return tf.cast(norm > limit, tf.float32)

  @tf.function
  def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Runs a step on all replicas; returns the share that clipped."""
    clipped = strategy.run(replica_step, (images, labels))
    return strategy.reduce("MEAN", clipped, axis=None)

  metrics = callbacks.PerModelMetrics(test)
  metrics.set_model(model)
  steps = len(train)
  batches = iter(strategy.experimental_distribute_dataset(train.repeat()))
  for epoch in range(FLAGS.epochs):
    clipped = sum(float(train_step(*next(batches))) for _ in range(steps))
    logs: dict[str, float] = {}
    metrics.on_epoch_end(epoch, logs)
    print(
      f"epoch {epoch + 1}: {clipped / steps:.0%} of the gradients clipped; test"
      " accuracy",
      *(
        f"{logs[f'val_accuracy/model_{i}']:.2%}"
        for i in range(assignment.num_groups)
      ),
    )
  Models(model, optimizer).assert_in_sync()  # Members of a group are.


if __name__ == "__main__":
  main()
