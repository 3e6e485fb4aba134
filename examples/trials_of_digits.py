"""Searches 16 settings on handwritten digits in four groups, by halving.

    python examples/trials_of_digits.py --folder=trials

All trials see the same batches. They are trained for three epochs, the best
half for six epochs, and the best four for twelve epochs. Afterwards, the folder
contains the table, the best model, and the learning curves for TensorBoard (in
`board`). If you stop the program, start it again with the same command: it
continues where it was.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import command_line
import digits_dataset
import tensorflow as tf
from absl import flags, logging

from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  callbacks,
  groups,
  trials,
)

SETTINGS = [
  {"learning_rate": rate, "weight_decay": decay, "smoothing": smoothing}
  for rate, decay, smoothing in itertools.product(
    [0.1, 0.01, 0.003, 0.0003], [0.004, 0.1], [0.0, 0.1]
  )
]
_FOLDER = flags.DEFINE_string("folder", "trials", "Folder for the results.")
_EPOCHS = flags.DEFINE_integer("epochs", 12, "Epochs of the best trials.", 4)
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder for the prepared data."
)


def main(argv: Sequence[str]) -> None:
  """Trains all trials, prints the table, and saves the best model."""
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow log a lot.
  four, folder = groups.singletons(4), _FOLDER.value
  strategy = VectorizedStrategy(4)
  train, test = digits_dataset.load(64, _DATA_DIR.value)
  tf.keras.utils.set_random_seed(0)
  with strategy.scope():
    table = trials.Table(SETTINGS, four)
    model = digits_dataset.make_model()
    adam = tf.keras.optimizers.AdamW(0.001, weight_decay=0.004)

    def loss(labels: Any, logits: Any) -> Any:
      smoothing = table.value("smoothing")
      targets = tf.one_hot(tf.cast(labels, tf.int32), 10) * (1 - smoothing)
      return tf.keras.losses.categorical_crossentropy(
        targets + smoothing / 10, logits, from_logits=True
      )

    model.compile(
      CrossShardOptimizer(adam, group_assignment=four),
      loss,
      metrics=["accuracy"],
    )
  halving = callbacks.Halving(
    *(table, folder, "val_accuracy"),
    epochs=_EPOCHS.value,
    factor=2,
    log_dir=f"{folder}/board",
  )
  monitors = [callbacks.GroupMetrics(test, ensemble=False), halving]
  model.fit(
    train,
    epochs=halving.total_epochs,
    shuffle=False,  # The dataset is shuffled already.
    verbose=0,
    callbacks=[*monitors, callbacks.BackupAndRestore(f"{folder}/backup")],
  )
  print(table)
  table.to_csv(f"{folder}/table.csv")
  halving.best_model().save(f"{folder}/winner.keras")


if __name__ == "__main__":
  command_line.run(main)
