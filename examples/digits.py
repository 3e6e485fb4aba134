"""Trains 16 models on handwritten digits in one `fit`, and counts the cost.

    python examples/digits.py --learning_rates=0.001,0.01,0.1

In the first run, the replicas of a virtual TPU share each batch and sum their
gradients: they train one model. The second run trains 16 models in one `fit`,
each with its own learning rate and on all images. At last, plain Keras trains
two such models, one after the other, to compare the costs. You need no download
and no GPU.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import command_line  # First: it makes TensorFlow quiet.
import digits_dataset
import matplotlib as mpl
import numpy as np
import tensorflow as tf

from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  callbacks,
  schedules,
  virtual_tpu,
)

mpl.use("Agg")  # Draws into files: no screen is needed.
from matplotlib import pyplot as plt

FLAGS = command_line.parse(
  __doc__,
  replicas=(4, "Replicas of the one model of the first run: 1, 2 or 4."),
  epochs=(20, "Epochs of each run."),
  batch_size=(64, "Images in each step of a model."),
  learning_rates=(
    ",".join(f"{rate:.2g}" for rate in np.geomspace(0.0001, 0.3, 16)),
    "Adam's learning rates, one for each model of the second run, at least two."
    " The first run uses the one in the middle.",
  ),
  seed=(0, "Seed of the weights and of the order of the images."),
  picture=("digits.png", "File for the plot."),
  data_dir=(None, "Folder for the prepared data, instead of your cache."),
)


def fit(
  optimizer: Callable[[Any], Any], rate: Any, **options: Any
) -> tuple[dict[str, list[float]], float]:
  """Trains a model; returns its history, and the seconds of CPU time.

  Args:
    optimizer: Wraps Adam, or returns it as it is.
    rate: Adam's learning rate.
    **options: Arguments of Keras' `fit`.
  """
  # Each run has its own dataset, so all see the images in the same order.
  train, test = digits_dataset.load(
    FLAGS.batch_size, FLAGS.data_dir, FLAGS.seed
  )
  # After the data, since preparing the data consumes random numbers.
  tf.keras.utils.set_random_seed(FLAGS.seed)
  layers = tf.keras.layers
  model = tf.keras.Sequential(
    [
      tf.keras.Input(digits_dataset.IMAGE_SHAPE),
      layers.Flatten(),
      layers.Dense(64, "relu"),
      layers.Dense(64, "relu"),
      layers.Dense(digits_dataset.NUM_CLASSES),
    ]
  )
  model.compile(
    optimizer(tf.keras.optimizers.Adam(rate)),
    tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
  )
  start = time.process_time()
  history = model.fit(
    train,
    epochs=FLAGS.epochs,
    shuffle=False,  # The dataset is shuffled already.
    verbose=0,
    **({"validation_data": test} | options),
  ).history
  return history, time.process_time() - start


def fit_all(rates: Sequence[float]) -> tuple[np.ndarray, list[float], float]:
  """Trains one model for each learning rate in one `fit`.

  Returns the accuracies, by epoch and model, those of the mean prediction of
  all models, and the cost.
  """
  names = [f"val_accuracy/model_{i}" for i in range(len(rates))]

  def report(epoch: int, logs: Any) -> None:
    found = [logs[name] for name in names]
    if (epoch + 1) % 5 == 0:
      best = int(np.argmax(found))
      print(f"epoch {epoch + 1}: {found[best]:.2%} with {rates[best]:g}")

  _, test = digits_dataset.load(FLAGS.batch_size, FLAGS.data_dir)
  with VectorizedStrategy(len(rates)).scope():
    history, seconds = fit(
      lambda adam: adam,  # Plain Keras: the strategy trains the models.
      schedules.PerModel(list(rates)),
      validation_data=None,  # PerModelMetrics evaluates all, and their mean.
      callbacks=[
        callbacks.PerModelMetrics(test),
        tf.keras.callbacks.LambdaCallback(on_epoch_end=report),
      ],
    )
  accuracy = np.transpose([history[name] for name in names])
  return accuracy, history["val_accuracy/ensemble"], seconds


def draw(
  rates: Sequence[float], accuracy: np.ndarray, ensemble: Sequence[float]
) -> None:
  """Draws the accuracy of each model, by epoch and by learning rate."""
  percents = 100 * accuracy
  epochs = range(1, len(percents) + 1)
  colors = plt.get_cmap("viridis")(np.linspace(0, 0.95, len(rates)))
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(13, 5), sharey=True, layout="constrained"
  )
  for i, rate in enumerate(rates):
    left.plot(epochs, percents[:, i], color=colors[i], label=f"{rate:g}")
  mean = {"color": "black", "linestyle": "--", "label": "mean prediction"}
  left.plot(epochs, 100 * np.array(ensemble), **mean)
  left.set(xlabel="epoch", ylabel="accuracy on the test images (%)")
  left.set(title=f"{len(rates)} models in one fit", ylim=(0, 102))
  right.scatter(rates, percents[-1], color=colors, zorder=3)
  right.plot(rates, percents[-1], color="#BBBBBB")
  right.axhline(100 * ensemble[-1], **mean)
  right.set(xlabel="learning rate", xscale="log", title="After the last epoch")
  left.xaxis.get_major_locator().set_params(integer=True)
  for axes in (left, right):
    axes.grid(alpha=0.3)
  lines, labels = left.get_legend_handles_labels()
  figure.legend(lines, labels, loc="outside right upper", title="learning rate")
  figure.savefig(FLAGS.picture, dpi=110, format="png")


def row(*cells: str) -> None:
  """Prints a line of the table."""
  print("{:24}  {:>13}  {:>8}  {:>8}".format(*cells).rstrip())


def main() -> None:
  """Trains one model and many, prints a table and draws a plot."""
  rates = [float(rate) for rate in FLAGS.learning_rates.split(",")]
  count = len(rates)
  middle = rates[count // 2]
  print(f"One model on {FLAGS.replicas} replicas")
  with virtual_tpu.VirtualTPUStrategy(FLAGS.replicas).scope():
    one, seconds = fit(CrossShardOptimizer, middle)
  print(f"{count} models in one fit")
  accuracy, ensemble, seconds_of_all = fit_all(rates)
  print("Two models by plain Keras, one after the other\n")
  two = sum(fit(lambda adam: adam, rate)[1] for rate in rates[:2])
  last = accuracy[-1]

  row("", "learning rate", "accuracy", "CPU time")
  replicas, reached = (
    f"one model, {FLAGS.replicas} replicas",
    one["val_accuracy"],
  )
  row(replicas, f"{middle:g}", f"{reached[-1]:.2%}", f"{seconds:.1f} s")
  for i, rate in enumerate(rates):
    row(f"model {i} of {count}", f"{rate:g}", f"{last[i]:.2%}", "")
  row("their mean prediction", "", f"{ensemble[-1]:.2%}", "")
  row(f"{count} models in one fit", "", "", f"{seconds_of_all:.1f} s")
  row(f"{count} separate fits", "", "", f"{two * count / 2:.1f} s")
  print(
    f"\nThe cost of {count} separate fits is {count / 2:g} times that of two"
    f" fits of plain Keras.\nThe best learning rate is"
    f" {rates[int(np.argmax(last))]:g}. The curves are in {FLAGS.picture}."
  )
  draw(rates, accuracy, ensemble)


if __name__ == "__main__":
  main()
