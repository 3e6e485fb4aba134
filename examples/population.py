"""Trains a population on handwritten digits: four learning rates, one `fit`.

    python examples/population.py --epochs=12 --every=3

Each replica is a group with a learning rate of its own. Every few epochs the
worst group goes on from the best one's weights, with its rate times a factor.
"""
# bazel: deps=:command_line,:digits_dataset,:replicas

from collections.abc import Sequence

import command_line
import digits_dataset
import replicas
import tensorflow as tf
from absl import flags, logging

from tf_cross_shard import CrossShardOptimizer, callbacks, groups, schedules

RATES = [0.03, 0.01, 0.003, 0.0001]
_EPOCHS = flags.DEFINE_integer("epochs", 12, "Times to see all images.", 1)
_EVERY = flags.DEFINE_integer("every", 3, "Epochs from copy to copy.", 1)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder for the data.")


def main(argv: Sequence[str]) -> None:
  """Trains, and prints who copied whom."""
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow tell much.
  strategy = replicas.make_strategy(len(RATES))
  train, test = digits_dataset.load(128, _DATA_DIR.value)
  tf.data.experimental.enable_debug_mode()  # Else it may idle: docs/limits.md.
  tf.keras.utils.set_random_seed(0)
  with strategy.scope():
    model = digits_dataset.make_model()
    adam = tf.keras.optimizers.Adam(schedules.PerGroup(RATES))
    optimizer = CrossShardOptimizer(adam, group_assignment=groups.singletons(4))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
  judge = callbacks.GroupMetrics(test, ensemble=False)
  population = callbacks.Population("val_accuracy", every=_EVERY.value)
  options = {"callbacks": [judge, population], "shuffle": False, "verbose": 0}
  logs = model.fit(train, epochs=_EPOCHS.value, **options).history
  for copy in population.copied:
    epoch, source, target, rate = copy.values()
    print(f"Epoch {epoch + 1}: group {target} goes on from group {source}.")
  for i, rate in enumerate(population.learning_rates):
    print(f"rate {rate:.4f}: {logs[f'val_accuracy/group_{i}'][-1]:.2%}")


if __name__ == "__main__":
  command_line.run(main)
