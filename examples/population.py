"""Runs population-based training on handwritten digits in one `fit`.

    python examples/population.py --epochs=12 --every=3

Each of four replicas is a group with its own learning rate. Every few epochs,
the worst group copies the weights of the best group, and takes the learning
rate of the best group times a factor.
"""

from collections.abc import Sequence

import command_line
import digits_dataset
import tensorflow as tf
from absl import flags, logging

from tf_cross_shard import (
  CrossShardOptimizer,
  callbacks,
  groups,
  local_strategy,
  schedules,
)

RATES = [0.03, 0.01, 0.003, 0.0001]
_EPOCHS = flags.DEFINE_integer("epochs", 12, "Number of epochs.", 1)
_EVERY = flags.DEFINE_integer(
  "every", 3, "Number of epochs between two copies.", 1
)
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder for the prepared data."
)


def main(argv: Sequence[str]) -> None:
  """Trains; prints which group copied which, and all accuracies."""
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow log a lot.
  strategy = local_strategy(len(RATES))
  train, test = digits_dataset.load(128, _DATA_DIR.value)
  tf.keras.utils.set_random_seed(0)
  with strategy.scope():
    model = digits_dataset.make_model()
    adam = tf.keras.optimizers.Adam(schedules.PerGroup(RATES))
    optimizer = CrossShardOptimizer(adam, group_assignment=groups.singletons(4))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
  metrics = callbacks.GroupMetrics(test, ensemble=False)
  population = callbacks.Population("val_accuracy", every=_EVERY.value)
  options = {"callbacks": [metrics, population], "shuffle": False, "verbose": 0}
  logs = model.fit(train, epochs=_EPOCHS.value, **options).history
  for copy in population.copied:
    epoch, source, target, rate = copy.values()
    print(f"Epoch {epoch + 1}: group {target} copies group {source}.")
  for i, rate in enumerate(population.learning_rates):
    print(
      f"learning rate {rate:.4f}: {logs[f'val_accuracy/group_{i}'][-1]:.2%}"
    )


if __name__ == "__main__":
  command_line.run(main)
