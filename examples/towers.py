"""Trains on handwritten digits in towers: one model function on each device.

    python examples/towers.py --towers=4
    python examples/towers.py --towers=1    # ends with the same losses

Towers are copies of a model function in one program. They share one set of
variables, like the towers of tf.contrib.estimator.replicate_model_fn. They run
on all GPUs of the machine. If there is no GPU, they run on logical devices of
the CPU.
"""

import os

# TensorFlow reads these variables when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from collections.abc import Sequence
from typing import Any

import command_line
import digits_dataset
import matplotlib as mpl
import replicas
import tensorflow as tf
from absl import app, flags, logging

import tf_cross_shard

mpl.use("Agg")  # Draws into files: no screen is needed.
from matplotlib import pyplot as plt

_TOWERS = flags.DEFINE_integer(
  "towers", 4, "Number of logical CPUs, if there is no GPU.", 1
)
_EPOCHS = flags.DEFINE_integer("epochs", 15, "Number of epochs.", 1)
_BATCH_SIZE = flags.DEFINE_integer(
  "batch_size", 64, "Images in each step.", 1, 1024
)
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder for the prepared data. Default: your cache folder."
)
_PICTURE = command_line.define_picture(
  "towers.png", "File for the plot of losses."
)


def make_model() -> Any:
  """Returns a network without dropout: any number of towers learns the same."""
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      layers.Input(digits_dataset.IMAGE_SHAPE),
      layers.Conv2D(32, 3, padding="same", activation="relu"),
      layers.MaxPooling2D(),
      layers.Flatten(),
      layers.Dense(digits_dataset.NUM_CLASSES),
    ]
  )


def main(argv: Sequence[str]) -> None:
  """Trains, evaluates after each epoch, and draws the losses."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}")
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow log a lot.
  tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * _TOWERS.value,
  )
  tf.keras.utils.set_random_seed(0)
  model = make_model()
  optimizer = tf_cross_shard.TowerOptimizer(tf.keras.optimizers.Adam(0.005))
  optimizer.build(model.trainable_variables)
  accuracy = tf.keras.metrics.SparseCategoricalAccuracy()

  def model_fn(
    features: tf.Tensor, labels: tf.Tensor, mode: str
  ) -> tf_cross_shard.TowerSpec:
    """Runs a step of one tower on its share of the batch."""
    logits = model(features, training=mode == "train")
    loss = tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )
    if mode == tf_cross_shard.ModeKeys.TRAIN:
      train_op = optimizer.minimize(loss, var_list=model.trainable_variables)
      return tf_cross_shard.TowerSpec(mode, loss, train_op)
    accuracy.update_state(labels, logits)
    return tf_cross_shard.TowerSpec(mode, loss, metrics={"accuracy": accuracy})

  # The shares have equal sizes. So the mean of the towers' means is the mean
  # over the batch.
  replicated = tf_cross_shard.replicate_model_fn(model_fn, "mean")
  towers = len(replicated.devices)
  print(f"{towers} towers on {', '.join(replicated.devices)}")

  @tf.function
  def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Runs a step of all towers at the same time; returns the loss."""
    return replicated(images, labels, "train").loss

  @tf.function
  def evaluate(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the accuracy on the examples of all towers."""
    return replicated(images, labels, "eval").metrics["accuracy"]

  train_data, test_data = digits_dataset.load(
    replicas.divisible(_BATCH_SIZE.value, towers), _DATA_DIR.value
  )
  ((test_images, test_labels),) = test_data
  used = replicas.divisible(len(test_labels), towers)
  losses = []
  for epoch in range(_EPOCHS.value):
    losses += [float(train_step(*batch)) for batch in train_data]
    replicated.reset_metrics()
    right = float(evaluate(test_images[:used], test_labels[:used]))
    print(
      f"epoch {epoch + 1}: loss {losses[-1]:.5f}, test accuracy {right:.2%}"
    )

  plt.semilogy(losses)
  plt.xlabel("step")
  plt.ylabel(f"loss, mean over {towers} towers")
  plt.savefig(_PICTURE.value)


if __name__ == "__main__":
  command_line.run(main)
