"""Times a hyperparameter search: 64 trials, in one `fit` and as plain fits.

    python benchmarks/search.py --trials=64 --models=16

Two ways run the same search by TPE and successive halving, on the same data and
for the same number of epochs of a trial:

    stream      callbacks.OptunaSearch: all trials in one `fit`
    optuna      Optuna, with a plain Keras fit for each trial

More trials are pruned in the stream than by plain fits. So the cost is shown
for one epoch of one trial, tracing included, and as a ratio to that of plain
fits.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import optuna
import tensorflow as tf

from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  callbacks,
  layers,
)

FEATURES, ROWS, VALIDATION, BATCH = 16, 2560, 512, 64


class Cost(NamedTuple):
  """What a search took, in seconds, and its best validation loss."""

  trials: int
  epochs: int
  best: float
  cpu: float
  wall: float


class Task:
  """The data, the network and the space of settings."""

  def __init__(self, has_dropout: bool, trials: int, epochs: int) -> None:
    rng = np.random.default_rng(0)
    count = ROWS + VALIDATION
    x = rng.normal(size=(count, FEATURES)).astype("float32")
    noise = 0.1 * rng.normal(size=(count, 1))
    y = np.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + noise
    y = y.astype("float32")
    train = tf.data.Dataset.from_tensor_slices((x[:ROWS], y[:ROWS]))
    self.train = train.batch(BATCH, drop_remainder=True).cache()
    self.validation = x[ROWS:], y[ROWS:]
    self.has_dropout = has_dropout
    self.trials = trials
    self.epochs = epochs

  def network(self, dropout: Callable[[], Any]) -> Any:
    keras.utils.set_random_seed(0)
    stack = [keras.Input((FEATURES,))]
    for _ in range(2):
      stack.append(keras.layers.Dense(64, "relu"))
      if self.has_dropout:
        stack.append(dropout())
    return keras.Sequential([*stack, keras.layers.Dense(1)])

  def suggest(self, trial: Any) -> dict[str, float]:
    found = {"learning_rate": trial.suggest_float("rate", 1e-4, 0.3, log=True)}
    if self.has_dropout:
      found["dropout/rate"] = trial.suggest_float("dropout", 0.0, 0.5)
    return found

  def study(self) -> optuna.Study:
    return optuna.create_study(
      direction="minimize",
      sampler=optuna.samplers.TPESampler(
        seed=0, constant_liar=True, n_startup_trials=16
      ),
      pruner=optuna.pruners.SuccessiveHalvingPruner(
        min_resource=2, reduction_factor=3
      ),
    )


def _of_study(study: optuna.Study) -> tuple[int, int, float]:
  epochs = sum(len(trial.intermediate_values) for trial in study.trials)
  return len(study.trials), epochs, study.best_value


def stream(task: Task, models: int) -> tuple[int, int, float]:
  """Searches in one `fit`."""
  study = task.study()
  search = callbacks.OptunaSearch(
    study, task.suggest, trials=task.trials, epochs=task.epochs
  )
  with VectorizedStrategy(models).scope():
    model = task.network(lambda: layers.TunableDropout(0.5, name="dropout"))
    adam = keras.optimizers.Adam(0.01)
    model.compile(CrossShardOptimizer(adam), "mse")
  model.fit(
    task.train,
    validation_data=task.validation,
    epochs=search.most_epochs,
    verbose=0,
    callbacks=[search],
  )
  return _of_study(study)


def plain_fits(task: Task) -> tuple[int, int, float]:
  """Searches by Optuna, with a plain Keras fit for each trial."""
  study = task.study()

  class Report(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, trial: Any) -> None:
      super().__init__()
      self._trial = trial

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
      self._trial.report(logs["val_loss"], epoch)
      if self._trial.should_prune():
        raise optuna.TrialPruned

  def objective(trial: Any) -> float:
    settings = task.suggest(trial)
    model = task.network(lambda: keras.layers.Dropout(settings["dropout/rate"]))
    model.compile(keras.optimizers.Adam(settings["learning_rate"]), "mse")
    history = model.fit(
      task.train,
      validation_data=task.validation,
      epochs=task.epochs,
      verbose=0,
      callbacks=[Report(trial)],
    ).history
    return float(min(history["val_loss"]))

  study.optimize(objective, n_trials=task.trials)
  return _of_study(study)


def measure(search: Callable[[], tuple[int, int, float]]) -> Cost:
  """Runs a search, and returns its cost."""
  cpu, wall = time.process_time(), time.perf_counter()
  found = search()
  return Cost(*found, time.process_time() - cpu, time.perf_counter() - wall)


def main() -> None:
  """Prints a table of what searches cost, with OptunaSearch and plain fits."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--trials", type=int, default=64)
  parser.add_argument("--models", type=int, default=16)
  parser.add_argument("--epochs", type=int, default=16)
  given = parser.parse_args()
  optuna.logging.set_verbosity(optuna.logging.ERROR)
  print(
    f"{'':24}  {'trials':>6}  {'epochs':>6}  {'best':>7}  {'CPU':>7}"
    f"  {'time':>7}  {'CPU of an epoch':>15}"
  )
  for has_dropout in (False, True):
    task = Task(has_dropout, given.trials, given.epochs)
    costs = {
      "optuna": measure(functools.partial(plain_fits, task)),
      "stream": measure(functools.partial(stream, task, given.models)),
    }
    unit = costs["optuna"].cpu / costs["optuna"].epochs
    for name, cost in costs.items():
      ratio = cost.cpu / cost.epochs / unit
      title = f"{name}{', dropout' if has_dropout else ''}"
      print(
        f"{title:24}  {cost.trials:6}  {cost.epochs:6}  {cost.best:7.4f}"
        f"  {cost.cpu:5.1f} s  {cost.wall:5.1f} s  {ratio:15.3f}"
      )


if __name__ == "__main__":
  main()
