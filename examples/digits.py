"""Trains 16 models on handwritten digits in one `fit`, and counts the cost.

    python examples/digits.py --learning_rates=0.001,0.01,0.1

In the first run, the replicas of a virtual TPU share each batch and sum their
gradients: they train one model. In the second run, each replica trains a model
of its own, with its own learning rate, on all images. At last, plain Keras
trains two such models, one after the other, to compare the costs. You need no
download and no GPU.
"""

import os
import time

# TensorFlow reads these variables when it is imported. oneDNN is off because it
# rounds differently on different machines, and prints a message about it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from collections.abc import Callable, Sequence
from typing import Any

import command_line
import digits_dataset
import matplotlib as mpl
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  callbacks,
  schedules,
  virtual_tpu,
)

mpl.use("Agg")  # Draws into files: no screen is needed.
from matplotlib import pyplot as plt

_REPLICAS = flags.DEFINE_integer(
  "replicas", 4, "Replicas of the one model of the first run: 1, 2 or 4.", 1
)
_EPOCHS = flags.DEFINE_integer("epochs", 20, "Epochs of each run.", 1)
_BATCH_SIZE = flags.DEFINE_integer(
  "batch_size", 64, "Images in each step of a model.", 1, 1024
)
_RATES = flags.DEFINE_list(
  "learning_rates",
  [f"{rate:.2g}" for rate in np.geomspace(0.0001, 0.3, 16)],
  "Adam's learning rates, one for each model of the second run, at least two."
  " The first run uses the one in the middle.",
)
_SHARD_UPDATE = flags.DEFINE_bool(
  "shard_update", False, "Divide Adam's state among the replicas of a model."
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of the weights and of the order of the images."
)
_PICTURE = command_line.define_picture("digits.png", "File for the plot.")
_LOGS = flags.DEFINE_string(
  "logs", None, "Folder for the learning curves, for TensorBoard."
)
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder for the prepared data. Default: your cache folder."
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
    _BATCH_SIZE.value, _DATA_DIR.value, _SEED.value
  )
  # After the data, since preparing the data consumes random numbers.
  tf.keras.utils.set_random_seed(_SEED.value)
  hidden = [tf.keras.layers.Dense(64, "relu") for _ in range(2)]
  model = tf.keras.Sequential(
    [
      tf.keras.Input(digits_dataset.IMAGE_SHAPE),
      tf.keras.layers.Flatten(),
      *hidden,
      tf.keras.layers.Dense(digits_dataset.NUM_CLASSES),
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
    epochs=_EPOCHS.value,
    shuffle=False,  # The dataset is shuffled already.
    verbose=0,
    **({"validation_data": test} | options),
  ).history
  return history, time.process_time() - start


def fit_one(rate: float) -> tuple[list[float], float]:
  """Trains one model; returns its accuracy per epoch and the CPU seconds."""
  with virtual_tpu.VirtualTPUStrategy(_REPLICAS.value).scope():
    history, seconds = fit(
      lambda adam: CrossShardOptimizer(adam, shard_update=_SHARD_UPDATE.value),
      rate,
    )
  return history["val_accuracy"], seconds


def fit_all(rates: Sequence[float]) -> tuple[np.ndarray, list[float], float]:
  """Trains one model for each learning rate in one `fit`.

  Returns the accuracies, by epoch and model, those of the mean prediction of
  all models, and the cost.
  """
  _, test = digits_dataset.load(_BATCH_SIZE.value, _DATA_DIR.value)

  def report(epoch: int, logs: Any) -> None:
    found = [logs[f"val_accuracy/group_{i}"] for i in range(len(rates))]
    if (epoch + 1) % 5 == 0:
      best = int(np.argmax(found))
      print(f"epoch {epoch + 1}: {found[best]:.2%} with {rates[best]:g}")

  watching: list[Any] = [
    callbacks.GroupMetrics(test),
    tf.keras.callbacks.LambdaCallback(on_epoch_end=report),
  ]
  if _LOGS.value:
    watching.append(callbacks.GroupTensorBoard(_LOGS.value))
  with VectorizedStrategy(len(rates)).scope():
    history, seconds = fit(
      lambda adam: adam,  # Plain Keras: the strategy trains the models.
      schedules.PerGroup(list(rates)),
      validation_data=None,  # GroupMetrics evaluates each model.
      callbacks=watching,
    )
  accuracy = [history[f"val_accuracy/group_{i}"] for i in range(len(rates))]
  return np.transpose(accuracy), history["val_accuracy/ensemble"], seconds


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
  figure.savefig(_PICTURE.value, dpi=110, format="png")
  plt.close(figure)


def main(argv: Sequence[str]) -> None:
  """Trains one model and many, prints a table and draws a plot."""
  rates = [float(rate) for rate in _RATES.value]
  count = len(rates)
  if len(argv) > 1 or count < 2:
    raise app.UsageError(f"Unknown arguments, or one rate: {argv[1:]} {rates}")
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow log a lot.
  middle = rates[count // 2]
  print(f"One model on {_REPLICAS.value} replicas")
  one, seconds = fit_one(middle)
  print(f"{count} models in one fit")
  accuracy, ensemble, seconds_of_all = fit_all(rates)
  print("Two models by plain Keras, one after the other\n")
  two = sum(fit(lambda adam: adam, rate)[1] for rate in rates[:2])
  last = accuracy[-1]

  def row(*cells: str) -> str:
    return "{:24}  {:>13}  {:>8}  {:>8}".format(*cells).rstrip()

  print(row("", "learning rate", "accuracy", "CPU time"))
  replicas = f"one model, {_REPLICAS.value} replicas"
  print(row(replicas, f"{middle:g}", f"{one[-1]:.2%}", f"{seconds:.1f} s"))
  for i, rate in enumerate(rates):
    print(row(f"model {i} of {count}", f"{rate:g}", f"{last[i]:.2%}", ""))
  print(row("their mean prediction", "", f"{ensemble[-1]:.2%}", ""))
  print(row(f"{count} models in one fit", "", "", f"{seconds_of_all:.1f} s"))
  separate = f"{two * count / 2:.1f} s"
  print(row(f"{count} separate fits", "", "", separate))
  print(
    f"\nThe cost of {count} separate fits is {count / 2:g} times that of two"
    f" fits of plain Keras.\nThe best learning rate is"
    f" {rates[int(np.argmax(last))]:g}. The curves are in {_PICTURE.value}."
  )
  draw(rates, accuracy, ensemble)


if __name__ == "__main__":
  command_line.run(main)
