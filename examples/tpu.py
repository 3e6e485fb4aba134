"""Trains on handwritten digits on a TPU, or on a virtual TPU on this CPU.

    python examples/tpu.py --virtual=8 --groups=2
    python examples/tpu.py --tpu=local --groups=2    # on the machine of a TPU

Both run the replicas as one XLA program. Before the training, the TPU compiler
reports what the replicas exchange in a step. This report needs no TPU.
"""

import os

# TensorFlow reads these variables when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from collections.abc import Sequence
from typing import Any

import command_line
import digits_dataset
import group_history
import replicas
import tensorflow as tf
from absl import app, flags, logging

import tf_cross_shard
from tf_cross_shard import callbacks, virtual_tpu
from tf_cross_shard import groups as groups_lib

_TPU = flags.DEFINE_string(
  "tpu", None, "Name or address of a TPU; 'local' on the machine of the TPU."
)
_VIRTUAL = flags.DEFINE_integer(
  "virtual", None, "Replicas of a virtual TPU. Default: 8, without --tpu.", 1
)
flags.mark_flags_as_mutual_exclusive([_TPU, _VIRTUAL])
_GROUPS = flags.DEFINE_integer("groups", 1, "Number of groups.", 1)
_TOPOLOGY = flags.DEFINE_string(
  "topology", None, "TPU slice of the report. Default: v5e:4x2, for 8 replicas."
)
_EPOCHS = flags.DEFINE_integer("epochs", 15, "Number of epochs.", 1)
_PICTURE = command_line.define_picture("tpu.png", "File for the plot.")
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder for the prepared data. Default: your cache folder."
)


def make_strategy() -> tf.distribute.Strategy:
  """Returns a strategy on the TPU of the flags, or on a virtual TPU."""
  if _TPU.value is None:
    return virtual_tpu.VirtualTPUStrategy(_VIRTUAL.value or 8)
  resolver = tf.distribute.cluster_resolver.TPUClusterResolver(_TPU.value)
  tf.config.experimental_connect_to_cluster(resolver)
  tf.tpu.experimental.initialize_tpu_system(resolver)
  return tf.distribute.TPUStrategy(resolver)


def make_model(
  strategy: tf.distribute.Strategy, groups: groups_lib.Groups, steps: int
) -> Any:
  """Returns a compiled model for a training of `steps` steps.

  The initial weights are the same in each call.
  """
  tf.keras.utils.set_random_seed(0)
  with strategy.scope():
    model = digits_dataset.make_model()
    rate = tf.keras.optimizers.schedules.CosineDecay(0.002, steps)
    model.compile(
      optimizer=tf_cross_shard.CrossShardOptimizer(
        tf.keras.optimizers.Adam(rate), group_assignment=groups
      ),
      loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=["accuracy"],
    )
  return model


def report(groups: groups_lib.Groups, batch: Any) -> Any:
  """Returns the TPU compiler's report on a step, or why there is no report."""
  topology = _TOPOLOGY.value
  if topology is None:
    if groups.num_replicas != 8:
      return (
        "No report: give --topology, a TPU slice with"
        f" {groups.num_replicas} devices."
      )
    topology = "v5e:4x2"
  # Compile the step of a separate model, on a virtual TPU.
  strategy = virtual_tpu.VirtualTPUStrategy(groups.num_replicas)
  step = make_model(strategy, groups, 1).train_step
  try:
    return virtual_tpu.compile_for(topology, step, [batch], strategy=strategy)
  except ImportError as error:  # The message says what to install.
    return f"No report: {error}"


def main(argv: Sequence[str]) -> None:
  """Prints the compiler's report, trains, prints a table and draws a plot."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}")
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow log a lot.
  strategy = make_strategy()
  num_replicas = strategy.num_replicas_in_sync
  group_size, rest = divmod(num_replicas, _GROUPS.value)
  if rest:
    raise app.UsageError(
      f"--groups must divide the number of replicas, {num_replicas}; got"
      f" {_GROUPS.value}."
    )
  groups = groups_lib.contiguous(num_replicas, group_size)
  print(f"{groups.draw()}\n")

  batch_size = replicas.divisible(64, num_replicas)
  train_data, test_data = digits_dataset.load(batch_size, _DATA_DIR.value)
  share = train_data.unbatch().batch(batch_size // num_replicas, True)
  print(f"{report(groups, share.element_spec)}\n")

  steps = len(train_data)
  model = make_model(strategy, groups, _EPOCHS.value * steps)
  history = group_history.GroupHistory(groups)
  model.fit(
    train_data.repeat(),
    epochs=_EPOCHS.value,
    steps_per_epoch=steps,
    shuffle=False,  # The dataset is shuffled already.
    verbose=2,  # One line per epoch.
    callbacks=[callbacks.GroupMetrics(test_data), history],
  )
  runs = {"TPU" if _TPU.value else "virtual TPU": history}
  print(f"\n{group_history.table(runs)}")
  group_history.draw(runs, _PICTURE.value)


if __name__ == "__main__":
  command_line.run(main)
