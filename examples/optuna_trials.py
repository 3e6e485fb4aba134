"""Runs an Optuna hyperparameter search on digits, four trials at a time.

    python examples/optuna_trials.py --rounds=4

In each round, Optuna suggests the settings of four trials. Four groups train
them in one `fit`, on the same batches. Then Optuna gets the accuracy of each
trial.
"""

import tempfile
from collections.abc import Sequence

import command_line
import digits_dataset
import optuna
import tensorflow as tf
from absl import flags, logging

from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  callbacks,
  groups,
  trials,
)

_ROUNDS = flags.DEFINE_integer(
  "rounds", 4, "Number of rounds, with four trials each.", 1
)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "Epochs of each trial.", 1)
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder for the prepared data."
)


def ask(study: optuna.Study) -> tuple[optuna.Trial, dict[str, float]]:
  """Asks Optuna for a trial; returns the trial and its settings."""
  trial = study.ask()
  return trial, {
    "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1.0, log=True),
    "weight_decay": trial.suggest_float("weight_decay", 1e-4, 0.1, log=True),
  }


def main(argv: Sequence[str]) -> None:
  """Runs all rounds; prints the best trial after each round."""
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow log a lot.
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  strategy = VectorizedStrategy(4)
  four = groups.singletons(4)
  train, test = digits_dataset.load(64, _DATA_DIR.value)
  sampler = optuna.samplers.TPESampler(n_startup_trials=4, seed=0)
  study = optuna.create_study(direction="maximize", sampler=sampler)
  for number in range(_ROUNDS.value):
    asked = [ask(study) for _ in range(4)]
    tf.keras.utils.set_random_seed(0)
    with strategy.scope():
      table = trials.Table([settings for _, settings in asked], four)
      model = digits_dataset.make_model()
      adam = tf.keras.optimizers.AdamW(0.001, weight_decay=0.004)
      optimizer = CrossShardOptimizer(adam, group_assignment=four)
      loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
      model.compile(optimizer, loss, metrics=["accuracy"])
    with tempfile.TemporaryDirectory() as folder:
      epochs = _EPOCHS.value
      halving = callbacks.Halving(table, folder, "val_accuracy", epochs=epochs)
      monitors = [callbacks.GroupMetrics(test, ensemble=False), halving]
      options = {"shuffle": False, "verbose": 0}  # The dataset is shuffled.
      model.fit(train, epochs=epochs, callbacks=monitors, **options)
    for (trial, _), result in zip(asked, table, strict=True):
      study.tell(trial, result.best)
    best = {name: f"{value:.4g}" for name, value in study.best_params.items()}
    print(f"Round {number + 1}: {study.best_value:.2%} with {best}")


if __name__ == "__main__":
  command_line.run(main)
