"""Two processes that search at the same time share one Optuna study."""

import pathlib

import optuna
import pytest
import tensorflow as tf

from tests.support import programs
from tf_cross_shard import Models

PROGRAM = """
import optuna, tensorflow as tf
from tf_cross_shard import VectorizedStrategy, callbacks
file = optuna.storages.journal.JournalFileBackend("study.log")
study = optuna.create_study(
  study_name="both", storage=optuna.storages.JournalStorage(file),
  load_if_exists=True)
def suggest(trial):
  return {"learning_rate": trial.suggest_float("rate", 0.001, 0.1, log=True)}
search = callbacks.OptunaSearch(
  study, suggest, trials=6, epochs=2, folder="weights")
x = tf.random.stateless_normal([64, 4], [0, 1])
with VectorizedStrategy(3).scope():
  model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
  model.compile("sgd", "mse")
model.fit(x, x[:, :1], validation_data=(x, x[:, :1]), verbose=0,
          epochs=search.most_epochs,
          callbacks=[callbacks.PerModelMetrics(), search])
"""


def test_two_processes_share_a_study(tmp_path: pathlib.Path) -> None:
  with programs.started(["-c", PROGRAM], tmp_path) as finish:
    programs.run(["-c", PROGRAM], tmp_path)
    finish()
  file = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
  study = optuna.load_study(
    study_name="both", storage=optuna.storages.JournalStorage(file)
  )
  values = [trial.value for trial in study.trials]
  assert len(values) == 12
  assert None not in values
  # Whichever process trained the best trial, its weights are in the folder.
  best = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
  best_file = tmp_path / f"weights/trial_{study.best_trial.number}.npz"
  Models.read(best_file, 0, best)
  best.compile(loss="mse")
  x = tf.random.stateless_normal([64, 4], [0, 1])
  loss = best.evaluate(x, x[:, :1], verbose=0)
  assert loss == pytest.approx(study.best_value, 1e-5)
