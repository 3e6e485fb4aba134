"""Trains on handwritten digits on several replicas, without and with groups.

    python examples/digits.py --replicas=8 --group_size=2

In the first run, all replicas sum their gradients together. In the second run,
only the replicas of a group do. Each group then trains its own model, on its
own share of the data, with its own learning rate, in the same call of `fit`.
Then plain Keras trains such models one after the other, to compare the costs.
You need no download and no GPU.
"""

import os
import time

# TensorFlow reads these variables when it is imported. oneDNN is off because it
# rounds differently on different machines, and prints a message about it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from collections.abc import Sequence

import command_line
import digits_dataset
import group_history
import numpy as np
import replicas
import tensorflow as tf
from absl import app, flags, logging

from tf_cross_shard import (
  CrossShardOptimizer,
  callbacks,
  local_strategy,
  schedules,
)
from tf_cross_shard import groups as groups_lib

_REPLICAS = flags.DEFINE_integer(
  "replicas", 8, "Number of devices to train on.", lower_bound=1
)
_GROUP_SIZE = flags.DEFINE_integer(
  "group_size",
  2,
  "Replicas in each group of the second run. The program uses fewer if that"
  " many would give only one group, or do not divide --replicas.",
  1,
)
_EPOCHS = flags.DEFINE_integer("epochs", 15, "Epochs of each run.", 1)
_BATCH_SIZE = flags.DEFINE_integer(
  "batch_size", 64, "Images in each step, for all replicas together.", 1, 1024
)
_RATES = flags.DEFINE_list(
  "learning_rates",
  ["0.0005", "0.002", "0.008", "0.032"],
  "Adam's learning rates, one for each group. The list repeats if there"
  " are more groups. The ungrouped run uses the second learning rate.",
)
_SHARD_UPDATE = flags.DEFINE_bool(
  "shard_update", False, "Divide Adam's state among the replicas of a group."
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


def train(
  strategy: tf.distribute.Strategy,
  groups: groups_lib.Groups,
  rates: Sequence[float],
  train_data: tf.data.Dataset,
  test_data: tf.data.Dataset,
) -> group_history.GroupHistory:
  """Trains from the same initial weights in each call; returns the history."""
  # After the data, since preparing the data consumes random numbers.
  tf.keras.utils.set_random_seed(_SEED.value)
  steps = len(train_data)
  with strategy.scope():
    model = digits_dataset.make_model()
    decays = [
      tf.keras.optimizers.schedules.CosineDecay(rate, _EPOCHS.value * steps)
      for rate in rates
    ]
    model.compile(
      optimizer=CrossShardOptimizer(
        tf.keras.optimizers.Adam(schedules.PerGroup(decays)),
        group_assignment=groups,
        shard_update=_SHARD_UPDATE.value,
      ),
      loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=["accuracy"],
    )
  history = group_history.GroupHistory(groups, [f"{rate:g}" for rate in rates])
  watching = [callbacks.GroupMetrics(test_data), history]
  if _LOGS.value and groups.num_groups > 1:
    watching.append(callbacks.GroupTensorBoard(_LOGS.value))
  model.fit(
    train_data.repeat(),  # One iterator for all epochs.
    epochs=_EPOCHS.value,
    steps_per_epoch=steps,
    shuffle=False,  # The dataset is shuffled already.
    verbose=2,  # One line per epoch, with the metrics of each group.
    callbacks=watching,
  )
  return history


def train_separately(
  rates: Sequence[float],
  train_data: tf.data.Dataset,
  test_data: tf.data.Dataset,
) -> None:
  """Trains the model of each group with plain Keras, one after the other."""
  for group, rate in enumerate(rates):

    def share(x: tf.Tensor, group: int = group) -> tf.Tensor:
      return tf.split(x, len(rates))[group]

    steps = len(train_data)
    tf.keras.utils.set_random_seed(_SEED.value)
    model = digits_dataset.make_model()
    decay = tf.keras.optimizers.schedules.CosineDecay(
      rate, _EPOCHS.value * steps
    )
    model.compile(
      optimizer=tf.keras.optimizers.Adam(decay),
      loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=["accuracy"],
    )
    model.fit(
      train_data.map(lambda x, y, share=share: (share(x), share(y))).repeat(),
      epochs=_EPOCHS.value,
      steps_per_epoch=steps,
      validation_data=test_data,
      shuffle=False,
      verbose=0,
    )


def conclusion(
  ungrouped: group_history.GroupHistory, grouped: group_history.GroupHistory
) -> str:
  """Returns a summary of the two runs."""
  last = grouped.accuracy[-1]
  best = int(np.argmax(last))
  return (
    f"One job tried {len(last)} learning rates, each on 1/{len(last)} of the"
    f" images: {grouped.names[best]} was best, with an accuracy of"
    f" {last[best]:.1%}. The groups' mean prediction has"
    f" {grouped.ensemble[-1]:.1%}. One model, trained on all images with the"
    f" learning rate {ungrouped.names[0]}, has"
    f" {ungrouped.accuracy[-1][0]:.1%}."
  )


def main(argv: Sequence[str]) -> None:
  """Trains without and with groups, prints a table and draws a plot."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}")
  rates = [float(rate) for rate in _RATES.value]
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow log a lot.
  num_replicas = _REPLICAS.value
  strategy = local_strategy(num_replicas)
  runs = {"ungrouped": groups_lib.contiguous(num_replicas, num_replicas)}
  groups = replicas.choose_groups(num_replicas, _GROUP_SIZE.value)
  if groups is None:
    print("One replica cannot be divided into groups: there is only one run.")
  else:
    runs["grouped"] = groups

  batch_size = replicas.divisible(_BATCH_SIZE.value, num_replicas)
  # Each run has its own dataset, so both see the images in the same order.
  data = {
    name: digits_dataset.load(batch_size, _DATA_DIR.value, _SEED.value)
    for name in runs
  }

  histories, costs = {}, {}
  for name, grouping in runs.items():
    print(f"\n{name}\n{grouping.draw()}\n")
    chosen = [rates[i % len(rates)] for i in range(grouping.num_groups)]
    if grouping.num_groups == 1:
      chosen = [rates[1 % len(rates)]]
    start = time.process_time()
    histories[name] = train(strategy, grouping, chosen, *data[name])
    costs[name] = time.process_time() - start
  print(f"\n{group_history.table(histories)}\n")
  if groups is not None:
    print(conclusion(histories["ungrouped"], histories["grouped"]))
    start = time.process_time()
    train_separately(chosen, *data["grouped"])
    print(
      f"The one fit took {costs['grouped']:.0f} s of CPU time;"
      f" {len(chosen)} separate fits of plain Keras took"
      f" {time.process_time() - start:.0f} s."
    )
  group_history.draw(histories, _PICTURE.value)
  print(f"The learning curves are in {_PICTURE.value}.")


if __name__ == "__main__":
  command_line.run(main)
