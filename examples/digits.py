"""Trains on handwritten digits on several replicas, as one and in groups.

    python examples/digits.py --replicas=8 --group_size=2

First all replicas sum their gradients together. Then they do so in groups of
neighbours, in one `fit`: each group trains a model of its own on its own share
of the data, with a learning rate of its own. Needs no download and no GPU.
"""
# bazel: deps=:command_line,:digits_dataset,:group_history,:replicas

import os

# TensorFlow reads these when it is imported. oneDNN rounds differently from
# machine to machine, and says so at every start.
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

from tf_cross_shard import CrossShardOptimizer, callbacks, schedules
from tf_cross_shard import groups as groups_lib

_REPLICAS = flags.DEFINE_integer(
  "replicas", 8, "Devices to train on.", lower_bound=1
)
_GROUP_SIZE = flags.DEFINE_integer(
  "group_size",
  2,
  "Replicas that sum together, in the second run; fewer where that many would"
  " leave one group or not divide --replicas.",
  1,
)
_EPOCHS = flags.DEFINE_integer("epochs", 15, "Epochs of each run.", 1)
_BATCH_SIZE = flags.DEFINE_integer(
  "batch_size", 64, "Images per step, over all replicas.", 1, 1024
)
_RATES = flags.DEFINE_list(
  "learning_rates",
  ["0.0005", "0.002", "0.008", "0.032"],
  "Of Adam: one for each group, from the start again where groups are more. The"
  " ungrouped run takes the second.",
)
_SHARD_UPDATE = flags.DEFINE_bool(
  "shard_update", False, "Keep one part of Adam's state on each replica."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the weights and the data's order.")
_PICTURE = command_line.define_picture("digits.png", "File to draw into.")
_LOGS = flags.DEFINE_string(
  "logs", None, "Folder to write the curves to, for TensorBoard."
)
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder to prepare the data in; the user's cache if unset."
)


def train(
  strategy: tf.distribute.Strategy,
  groups: groups_lib.Groups,
  rates: Sequence[float],
  train_data: tf.data.Dataset,
  test_data: tf.data.Dataset,
) -> group_history.GroupHistory:
  """Trains one model, from the same start each time; returns its history."""
  # After the data: to prepare them takes random numbers, to read them none.
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
    shuffle=False,  # The pipeline does it.
    verbose=2,  # A line per epoch: each group's metrics are in it.
    callbacks=watching,
  )
  return history


def conclusion(
  ungrouped: group_history.GroupHistory, grouped: group_history.GroupHistory
) -> str:
  """Says what was seen, in a sentence."""
  last = grouped.accuracy[-1]
  best = int(np.argmax(last))
  return (
    f"One job tried {len(last)} learning rates, each on 1/{len(last)} of the"
    f" images: {grouped.names[best]} was best, {last[best]:.1%}; the groups'"
    f" mean prediction has {grouped.ensemble[-1]:.1%}, and one model on all"
    f" images, rate {ungrouped.names[0]}, {ungrouped.accuracy[-1][0]:.1%}."
  )


def main(argv: Sequence[str]) -> None:
  """Trains ungrouped and in groups, then prints a table and draws."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}")
  rates = [float(rate) for rate in _RATES.value]
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow tell much.
  num_replicas = _REPLICAS.value
  strategy = replicas.make_strategy(num_replicas)
  runs = {"ungrouped": groups_lib.contiguous(num_replicas, num_replicas)}
  groups = replicas.choose_groups(num_replicas, _GROUP_SIZE.value)
  if groups is None:
    print("One replica cannot be divided into groups: one run only.")
  else:
    runs["grouped"] = groups

  batch_size = replicas.divisible(_BATCH_SIZE.value, num_replicas)
  # Each run shuffles a dataset of its own, and so sees the same order.
  data = {
    name: digits_dataset.load(batch_size, _DATA_DIR.value, _SEED.value)
    for name in runs
  }
  # Without it TensorFlow may idle for minutes whenever the iterator of a
  # distributed dataset is deleted: docs/limits.md#tensorflow says why. It comes
  # after the datasets, whose functions it would make slow.
  tf.data.experimental.enable_debug_mode()

  histories = {}
  for name, grouping in runs.items():
    print(f"\n{name}\n{grouping.draw()}\n")
    chosen = [rates[i % len(rates)] for i in range(grouping.num_groups)]
    if grouping.num_groups == 1:
      chosen = [rates[1 % len(rates)]]
    histories[name] = train(strategy, grouping, chosen, *data[name])
  print(f"\n{group_history.table(histories)}\n")
  if groups is not None:
    print(conclusion(histories["ungrouped"], histories["grouped"]))
  group_history.draw(histories, _PICTURE.value)
  print(f"The learning curves are in {_PICTURE.value}.")


if __name__ == "__main__":
  command_line.run(main)
