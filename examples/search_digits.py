"""Tunes a network on handwritten digits: 64 Optuna trials in one `fit`.

    python examples/search_digits.py --trials=64 --models=16

The study is in a file, so that you can start the program in several processes,
which share the study, and kill it and start it again. Finally, it saves the
best model as plain Keras, and draws Optuna's curves of all trials.
"""

import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import pathlib
from collections.abc import Sequence

import command_line
import digits_dataset
import matplotlib as mpl
import optuna
import tensorflow as tf
from absl import flags, logging
from optuna.storages import journal

from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  callbacks,
  layers,
)

mpl.use("Agg")  # Draws into files: no screen is needed.
from matplotlib import pyplot as plt

_TRIALS = flags.DEFINE_integer("trials", 64, "Trials of this process.", 1)
_MODELS = flags.DEFINE_integer("models", 16, "Models at a time.", 2)
_EPOCHS = flags.DEFINE_integer("epochs", 9, "Epochs of a trial.", 1)
_FOLDER = flags.DEFINE_string(
  "folder", "search", "Folder of the study, the best weights and the model."
)
_PICTURE = command_line.define_picture("search.png", "File for the plot.")
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder for the prepared data. Default: your cache folder."
)


def suggest(trial: optuna.Trial) -> dict[str, float]:
  """Returns the settings of a trial."""
  return {
    "learning_rate": trial.suggest_float("learning_rate", 1e-4, 0.3, log=True),
    "weight_decay": trial.suggest_float("weight_decay", 1e-4, 0.3, log=True),
    "dropout": trial.suggest_float("dropout", 0.0, 0.6),
  }


def open_study(folder: pathlib.Path) -> optuna.Study:
  """Returns the study in a folder, which other processes may use, too."""
  file = journal.JournalFileBackend(str(folder / "study.log"))
  return optuna.create_study(
    study_name="digits",
    storage=optuna.storages.JournalStorage(file),
    load_if_exists=True,
    direction="maximize",
    sampler=optuna.samplers.TPESampler(constant_liar=True),
    pruner=optuna.pruners.SuccessiveHalvingPruner(),
  )


def draw(study: optuna.Study) -> None:
  """Draws Optuna's curves of the trials, and their settings."""
  with warnings.catch_warnings():  # Optuna calls these plots experimental.
    warnings.simplefilter("ignore")
    plot = optuna.visualization.matplotlib
    axes = plot.plot_intermediate_values(study)
    axes.get_legend().remove()
    axes.set(xlabel="epoch", ylabel="accuracy on the test images")
    axes.set_title(f"{len(study.trials)} trials")
    axes.figure.set_size_inches(8, 4.5)
    axes.figure.savefig(_PICTURE.value, dpi=100, format="png")
  plt.close(axes.figure)


def main(argv: Sequence[str]) -> None:
  """Searches, prints the best trials, and saves the best model."""
  del argv
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow log a lot.
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  folder = pathlib.Path(_FOLDER.value)
  folder.mkdir(parents=True, exist_ok=True)
  train, test = digits_dataset.load(64, _DATA_DIR.value)
  tf.keras.utils.set_random_seed(0)
  study = open_study(folder)
  search = callbacks.OptunaSearch(
    study,
    suggest,
    trials=_TRIALS.value,
    epochs=_EPOCHS.value,
    monitor="val_accuracy",
    mode="max",
    folder=folder,
  )
  with VectorizedStrategy(_MODELS.value).scope():
    model = tf.keras.Sequential(
      [
        tf.keras.Input(digits_dataset.IMAGE_SHAPE),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, "relu"),
        layers.GroupDropout(search.value("dropout")),
        tf.keras.layers.Dense(64, "relu"),
        tf.keras.layers.Dense(digits_dataset.NUM_CLASSES),
      ]
    )
    model.compile(
      CrossShardOptimizer(tf.keras.optimizers.AdamW(weight_decay=0.004)),
      tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=["accuracy"],
    )
  model.fit(
    train,
    validation_data=test,
    epochs=search.most_epochs,
    shuffle=False,  # The dataset is shuffled already.
    verbose=0,
    callbacks=[callbacks.GroupMetrics(), search],
  )
  complete = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
  complete.sort(key=lambda trial: -trial.value)
  for trial in complete[:5]:
    settings = {name: f"{x:.3g}" for name, x in trial.params.items()}
    print(f"trial {trial.number:3}  {trial.value:.2%}  {settings}")
  search.best_model().save(folder / "best.keras")
  draw(study)
  print(
    f"The best of {len(study.trials)} trials has {study.best_value:.2%}. It is"
    f" in {folder / 'best.keras'}, and the curves are in {_PICTURE.value}."
  )


if __name__ == "__main__":
  command_line.run(main)
