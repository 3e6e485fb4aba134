"""A tuner for KerasTuner that trains several trials in one `fit`.

    oracle ── one trial per group ─▶ one `fit` ── metrics ─▶ oracle

This module needs `pip install keras-tuner`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras_tuner
import tensorflow as tf
from keras_tuner.engine import base_tuner

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.fit import group_metrics
from tf_cross_shard._src.replica_state import paths as paths_lib
from tf_cross_shard._src.search import halving, trial_monitor
from tf_cross_shard._src.search import table as table_lib


class GroupTuner(base_tuner.BaseTuner):
  """Trains the trials of an oracle of KerasTuner, one trial in each group.

  The hyperparameters are numbers, and you declare them to the oracle before the
  search. `get_best_hyperparameters`, `get_best_models`, `results_summary` and
  resuming a search that was interrupted work as in other tuners of KerasTuner.
  The weights of each trial's best epoch are stored in a file in the tuner's
  project folder; see `files`.

  >>> import tempfile
  >>> import keras_tuner, numpy as np, tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, groups, tuners
  >>> x = np.ones([4, 1], "float32")
  >>> space = keras_tuner.HyperParameters()
  >>> _ = space.Choice("learning_rate", [0.001, 0.01, 0.1])
  >>> def build(table):
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   sgd = tf.keras.optimizers.SGD(0.1)
  ...   optimizer = CrossShardOptimizer(sgd, group_assignment=table.groups)
  ...   model.compile(optimizer, "mse")
  ...   return model
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   tuner = tuners.GroupTuner(
  ...     keras_tuner.oracles.GridSearchOracle(
  ...       "val_loss", hyperparameters=space
  ...     ),
  ...     build,
  ...     tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
  ...     groups.singletons(2),
  ...     directory=folder,
  ...   )
  ...   tuner.search(x, 5 * x, validation_data=(x, 5 * x), epochs=2, verbose=0)
  ...   [best] = tuner.get_best_hyperparameters()
  ...   [model] = tuner.get_best_models()  # plain Keras
  >>> best.values, len(tuner.oracle.trials)
  ({'learning_rate': 0.1}, 3)
  >>> abs(float(model(x)[0, 0]) - 5) < 2
  True

  Attributes:
    files: The file with the weights of each trial, by the oracle's id of the
      trial, for `replica_state.read_group(file, 0, model)`.
  """

  def __init__(
    self,
    oracle: keras_tuner.Oracle,
    build: Callable[[table_lib.Table], Any],
    strategy: tf.distribute.Strategy,
    groups: Any,
    **options: Any,
  ) -> None:
    """Sets the oracle, the model and the groups.

    Args:
      oracle: An oracle of KerasTuner, which chooses the hyperparameters. The
        Hyperband oracle is not supported, because its trials start with the
        weights of other trials; use `callbacks.Halving` instead.
      build: A function that returns a compiled model. It is called inside
        `strategy.scope()` with a `trials.Table`. Give `table.groups` to the
        optimizer. Layers can call `table.value` to read their hyperparameters.
      strategy: The strategy to train under.
      groups: A `Groups` or a `group_assignment`. Each group trains one trial.
      **options: Other arguments of KerasTuner's tuners: `directory`,
        `project_name`, ...
    """
    self._build = build
    self._strategy = strategy
    self._groups = groups_lib.Groups(groups)
    self.files: dict[str, str | None] = {}
    super().__init__(oracle, **options)

  def search(
    self,
    *data: Any,
    validation_data: Any,
    epochs: int = 1,
    callbacks: Sequence[Any] = (),
    **options: Any,
  ) -> None:
    """Trains trials until the oracle has no more of them.

    Args:
      *data: The training data, as for `fit`.
      validation_data: The validation data, as for `callbacks.GroupMetrics`.
      epochs: The number of epochs of each trial.
      callbacks: Callbacks to add to the list, after those of the tuner.
      **options: Other arguments of `fit`.
    """
    self.oracle.verbose = options.get("verbose", "auto")
    self.on_search_begin()
    while asked := self._ask():
      settings = [trial.hyperparameters.values for trial in asked]
      with self._strategy.scope():
        table = table_lib.Table(settings, self._groups)
        model = self._build(table)
      folder = (
        paths_lib.as_path(self.get_trial_dir(asked[0].trial_id)) / "groups"
      )
      objective = self.oracle.objective
      own = [
        group_metrics.GroupMetrics(validation_data, ensemble=False),
        halving.Halving(
          *(table, folder / "groups", objective.name),
          epochs=epochs,
          mode=objective.direction,
        ),
      ]
      model.fit(*data, epochs=epochs, callbacks=[*own, *callbacks], **options)
      for trial, result in zip(asked, table, strict=True):
        self._tell(trial, result)
    self.on_search_end()

  def load_model(self, trial: Any) -> Any:
    """Returns a trial as a plain model with the weights of its best epoch.

    `get_best_models` calls this method. Keras has to be able to clone the model
    that `build` returns.

    Args:
      trial: A trial of the oracle.

    Raises:
      ValueError: If the trial has no weights, or Keras cannot clone the model.
    """
    path = self.files.get(trial.trial_id)
    if path is None:
      raise ValueError(
        f"Trial {trial.trial_id} has no finite {self.oracle.objective.name!r},"
        " so no weights were saved. Look at results_summary()."
      )
    row = trial.hyperparameters.values
    with self._strategy.scope():
      table = table_lib.Table([row], self._groups)
      model = self._build(table)
    return trial_monitor.plain_model(path, row, table, model)

  def get_state(self) -> dict[str, Any]:
    """Returns what KerasTuner saves to resume an interrupted search."""
    return {**super().get_state(), "files": self.files}

  def set_state(self, state: dict[str, Any]) -> None:
    """Resumes from the state that `get_state` returned."""
    super().set_state(state)
    self.files = state["files"]

  def _ask(self) -> list[Any]:
    """Returns the oracle's next trials, at most one for each group."""
    asked = []
    for i in range(self._groups.num_groups):
      trial = self.oracle.create_trial(f"{self.tuner_id}_group_{i}")
      # Other states mean that the search has ended or that the oracle waits.
      if trial.status == "RUNNING":
        self.on_trial_begin(trial)
        asked.append(trial)
    return asked

  def _tell(self, trial: Any, result: table_lib.Trial) -> None:
    """Reports the metric of each epoch of a trial to the oracle."""
    name = self.oracle.objective.name
    for epoch, value in enumerate(result.history[name]):
      self.oracle.update_trial(trial.trial_id, {name: value}, step=epoch)
    self.files[trial.trial_id] = result.file
    trial.status = "COMPLETED"
    self.on_trial_end(trial)
