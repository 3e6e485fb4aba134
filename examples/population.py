"""Trains a population on handwritten digits: four learning rates, one `fit`.

    python examples/population.py
    python examples/population.py --virtual_tpu

Each replica is a group with a learning rate of its own. Every few epochs the
worst group goes on from the best one's weights, with its own rate.
"""
# bazel: deps=:command_line,:digits_dataset,:replicas

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Before the imports.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from collections.abc import Sequence
from typing import Any

import command_line
import digits_dataset
import matplotlib as mpl
import numpy as np
import replicas
import tensorflow as tf
from absl import app, flags, logging

from tf_cross_shard import (
  CrossShardOptimizer,
  callbacks,
  groups,
  schedules,
  virtual_tpu,
)

mpl.use("Agg")  # Draws into files: no screen is needed.
from matplotlib import pyplot as plt

RATES = [0.03, 0.01, 0.003, 0.0001]
_VIRTUAL_TPU = flags.DEFINE_bool("virtual_tpu", False, "Run as a TPU would.")
_EPOCHS = flags.DEFINE_integer("epochs", 12, "Times to see all images.", 1)
_EVERY = flags.DEFINE_integer("every", 3, "Epochs from copy to copy.", 1)
_PICTURE = command_line.define_picture("population.png", "File to draw into.")
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder to prepare the data in; the user's cache if unset."
)


def accuracies(logs: dict[str, Any]) -> list[Any]:
  """Returns what `GroupMetrics` wrote, one item per group."""
  return [logs[f"val_accuracy/group_{i}"] for i in range(len(RATES))]


def draw(history: dict[str, list[float]], path: str) -> None:
  """Draws each group's accuracy over the epochs."""
  figure, axes = plt.subplots(figsize=(6.4, 4.8), layout="tight")
  for rate, values in zip(RATES, accuracies(history), strict=True):
    percents = 100 * np.array(values)
    axes.plot(range(1, len(values) + 1), percents, "o-", label=f"rate {rate}")
  axes.set(xlabel="epoch", ylabel="test accuracy (%)")
  axes.set_title(f"The worst copies the best every {_EVERY.value} epochs")
  axes.legend(loc="lower right")
  figure.savefig(path, dpi=110, format="png")
  plt.close(figure)


def main(argv: Sequence[str]) -> None:
  """Trains, prints who copied whom, and draws."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}")
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow tell much.
  strategy = (
    virtual_tpu.VirtualTPUStrategy(len(RATES))
    if _VIRTUAL_TPU.value
    else replicas.make_strategy(len(RATES))
  )
  train_data, test_data = digits_dataset.load(128, _DATA_DIR.value)
  if not _VIRTUAL_TPU.value:
    # After the datasets, whose functions it would make slow. Without it
    # TensorFlow may idle when it deletes iterators: docs/limits.md#tensorflow.
    tf.data.experimental.enable_debug_mode()
  tf.keras.utils.set_random_seed(0)
  with strategy.scope():
    model = digits_dataset.make_model()
    adam = tf.keras.optimizers.Adam(schedules.PerGroup(RATES))
    model.compile(
      CrossShardOptimizer(adam, group_assignment=groups.singletons(len(RATES))),
      loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=["accuracy"],
    )
  # It reads what GroupMetrics has put into the logs.
  population = callbacks.Population(
    "val_accuracy", every=_EVERY.value, explore=None
  )
  history = model.fit(
    train_data,
    epochs=_EPOCHS.value,
    shuffle=False,  # The pipeline does it.
    verbose=0,
    callbacks=[callbacks.GroupMetrics(test_data, ensemble=False), population],
  ).history
  for copy in population.copied:
    target, source = copy["target"], copy["source"]
    print(
      f"Epoch {copy['epoch'] + 1}: group {target} goes on from group {source}."
    )
  for rate, values in zip(RATES, accuracies(history), strict=True):
    print(f"rate {rate}: {values[-1]:.2%}")
  draw(history, _PICTURE.value)


if __name__ == "__main__":
  command_line.run(main)
