"""Trains on handwritten digits in towers: one model function on each device.

    python examples/towers.py --towers=4
    python examples/towers.py --towers=1    # ends with the same losses

Towers are copies of a model function in one program. They share one set of
variables, like the towers of tf.contrib.estimator.replicate_model_fn. They run
on all GPUs of the machine. If there is no GPU, they run on logical devices of
the CPU.
"""

import command_line  # First: it makes TensorFlow quiet.
import digits_dataset
import replicas
import tensorflow as tf

from tf_cross_shard import (
  ModeKeys,
  TowerOptimizer,
  TowerSpec,
  replicate_model_fn,
)

FLAGS = command_line.parse(
  __doc__,
  towers=(4, "Number of logical CPUs, if there is no GPU."),
  epochs=(15, "Number of epochs."),
  batch_size=(64, "Images in each step."),
  data_dir=(None, "Folder for the prepared data, instead of your cache."),
)


def main() -> None:
  """Trains, and evaluates after each epoch."""
  tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * FLAGS.towers,
  )
  tf.keras.utils.set_random_seed(0)
  layers = tf.keras.layers
  model = tf.keras.Sequential(  # Without dropout, so that all towers are alike.
    [
      layers.Input(digits_dataset.IMAGE_SHAPE),
      layers.Conv2D(32, 3, padding="same", activation="relu"),
      layers.MaxPooling2D(),
      layers.Flatten(),
      layers.Dense(digits_dataset.NUM_CLASSES),
    ]
  )
  optimizer = TowerOptimizer(tf.keras.optimizers.Adam(0.005))
  optimizer.build(model.trainable_variables)
  accuracy = tf.keras.metrics.SparseCategoricalAccuracy()

  def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> TowerSpec:
    """Runs a step of one tower on its share of the batch."""
    logits = model(features, training=mode == ModeKeys.TRAIN)
    loss = tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )
    if mode == ModeKeys.TRAIN:
      train_op = optimizer.minimize(loss, var_list=model.trainable_variables)
      return TowerSpec(mode, loss, train_op)
    accuracy.update_state(labels, logits)
    return TowerSpec(mode, loss, metrics={"accuracy": accuracy})

  # The shares have equal sizes. So the mean of the towers' means is the mean
  # over the batch.
  replicated = replicate_model_fn(model_fn, "mean")
  towers = len(replicated.devices)
  print(f"{towers} towers on {', '.join(replicated.devices)}")

  @tf.function
  def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Runs a step of all towers at the same time; returns the loss."""
    return replicated(images, labels, ModeKeys.TRAIN).loss

  @tf.function
  def evaluate(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the accuracy on the examples of all towers."""
    return replicated(images, labels, ModeKeys.EVAL).metrics["accuracy"]

  train, test = digits_dataset.load(
    replicas.divisible(FLAGS.batch_size, towers), FLAGS.data_dir
  )
  ((test_images, test_labels),) = test
  used = replicas.divisible(len(test_labels), towers)
  for epoch in range(FLAGS.epochs):
    for batch in train:
      loss = train_step(*batch)
    replicated.reset_metrics()
    right = float(evaluate(test_images[:used], test_labels[:used]))
    print(
      f"epoch {epoch + 1}: loss {float(loss):.5f}, test accuracy {right:.2%}"
    )


if __name__ == "__main__":
  main()
