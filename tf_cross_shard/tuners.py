"""KerasTuner, whose trials are trained side by side in the groups of one `fit`.

    oracle ── asks ─▶ as many trials as groups ─▶ one `fit` ── tells ─▶ oracle

It needs `pip install keras-tuner`.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras_tuner
import tensorflow as tf
from keras_tuner.engine import base_tuner

from tf_cross_shard import callbacks as callbacks_lib
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import trials


class GroupTuner(base_tuner.BaseTuner):
  """Trains the trials of any oracle of KerasTuner, one in each group.

  Hyperparameters are numbers, and known to the oracle before.
  `get_best_hyperparameters`, `results_summary` and going on with a search that
  was stopped are KerasTuner's. The weights of each trial's best epoch are in a
  file of its project; `files` has them.

  >>> import tempfile
  >>> import keras_tuner, numpy as np
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
  >>> best.values, len(tuner.oracle.trials)
  ({'learning_rate': 0.1}, 3)

  Attributes:
    files: What `replica_state.read_group(file, 0, model)` reads the weights
      from, by the oracle's name of the trial.
  """

  def __init__(
    self,
    oracle: keras_tuner.Oracle,
    build: Callable[[trials.Table], Any],
    strategy: tf.distribute.Strategy,
    groups: Any,
    **options: Any,
  ) -> None:
    """Takes what trains trials.

    Args:
      oracle: Asks for trials, and is told what they came to. Not Hyperband's,
        whose trials begin with others' weights: `callbacks.Halving` does that.
      build: Makes a compiled model, inside `strategy.scope()`, of a
        `trials.Table`, whose `value` layers may ask for settings, and whose
        `groups` the optimizer has.
      strategy: The strategy that has the replicas.
      groups: A `Groups` or a `group_assignment`: one trial for each.
      **options: Of KerasTuner's tuners: `directory`, `project_name`, ...
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
    """Trains trials until the oracle wants no more.

    Args:
      *data: As for `fit`.
      validation_data: As for `callbacks.GroupMetrics`.
      epochs: How long each trial is trained.
      callbacks: More of them, after GroupMetrics.
      **options: More arguments of `fit`.
    """
    self.oracle.verbose = options.get("verbose", "auto")
    self.on_search_begin()
    while asked := self._ask():
      settings = [trial.hyperparameters.values for trial in asked]
      with self._strategy.scope():
        table = trials.Table(settings, self._groups)
        model = self._build(table)
      folder = pathlib.Path(self.get_trial_dir(asked[0].trial_id)) / "groups"
      objective = self.oracle.objective
      own = [
        callbacks_lib.GroupMetrics(validation_data, ensemble=False),
        callbacks_lib.Halving(
          *(table, folder, objective.name),
          epochs=epochs,
          mode=objective.direction,
        ),
      ]
      model.fit(*data, epochs=epochs, callbacks=[*own, *callbacks], **options)
      for trial, result in zip(asked, table, strict=True):
        self._tell(trial, result)
    self.on_search_end()

  def get_state(self) -> dict[str, Any]:
    """Returns what KerasTuner saves, and a search that is begun again has."""
    return {**super().get_state(), "files": self.files}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from what `get_state` returned."""
    super().set_state(state)
    self.files = state["files"]

  def _ask(self) -> list[Any]:
    """Returns the next trials, at most one for each group."""
    asked = []
    for i in range(self._groups.num_groups):
      trial = self.oracle.create_trial(f"{self.tuner_id}_group_{i}")
      if trial.status == "RUNNING":
        self.on_trial_begin(trial)
        asked.append(trial)
    return asked

  def _tell(self, trial: Any, result: trials.Trial) -> None:
    """Tells the oracle what a trial came to in each epoch."""
    name = self.oracle.objective.name
    for epoch, value in enumerate(result.history[name]):
      self.oracle.update_trial(trial.trial_id, {name: value}, step=epoch)
    self.files[trial.trial_id] = result.file
    trial.status = "COMPLETED"
    self.on_trial_end(trial)
