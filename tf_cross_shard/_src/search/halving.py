"""Successive halving: train all trials briefly, and the best ones for longer.

A *rung* trains a number of trials up to the same epoch. If the rung has more
trials than there are groups, it trains them in several *waves*:

    8 trials, 4 groups, factor 2, 4 epochs
    rung 0   epochs 1-2    0 1 2 3 | 4 5 6 7     two waves of four trials
    rung 1   epochs 3-4    1 2 4 7               the best half continues

A wave begins by restoring a file into each group, and ends by writing the state
of each group to the file of its trial:

    initial ─▶ wave 0 ─▶ trial_0 ... trial_3 ─┐
            ─▶ wave 1 ─▶ trial_4 ... trial_7 ─┴─▶ the best of them ─▶ rung 1
"""

import dataclasses
import difflib
import json
import math
from typing import Any, Final

import numpy as np
from absl import logging
from etils import epath

from tf_cross_shard._src.core import per_group as per_group_lib
from tf_cross_shard._src.core import settings
from tf_cross_shard._src.core.inner import inner as inner_lib
from tf_cross_shard._src.core.inner import names as names_lib
from tf_cross_shard._src.fit import (
  group_callback,
  group_metrics,
  group_rates,
  summaries,
)
from tf_cross_shard._src.replica_state import (
  archive,
  checkpoint,
  group_models,
  group_state,
  tracked,
)
from tf_cross_shard._src.replica_state import paths as paths_lib
from tf_cross_shard._src.search import rungs as rungs_lib
from tf_cross_shard._src.search import table as table_lib
from tf_cross_shard._src.search import trial_files

_RATE: Final = "learning_rate"


@dataclasses.dataclass
class _Progress:
  """The point that the search has reached.

  Attributes:
    rung: The number of the rung.
    waiting: The trials that the rung has not trained yet.
    running: The trial of each group. If there are fewer trials than groups, the
      remaining groups repeat the first trial and are ignored.
    epochs_left: The number of epochs until the wave ends.
  """

  rung: int = 0
  waiting: list[int] = dataclasses.field(default_factory=list)
  running: list[int] = dataclasses.field(default_factory=list)
  epochs_left: int = 0


class Halving(group_callback.GroupMonitor):
  """Finds the best trial of a table in one `fit`, by successive halving.

  First, all trials are trained for a few epochs, as many trials at a time as
  there are groups. The best trials, one in `factor`, are then trained for
  `factor` times as many epochs, and so on, until there are no more trials than
  groups. These are trained for all `epochs`.

  Each trial starts with the weights and slots that group 0 has when `fit`
  begins. When a trial continues, it continues with its own weights and slots.

  >>> import tempfile
  >>> import numpy as np, tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, callbacks, groups, trials
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> singles = groups.singletons(2)
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   rates = [{"learning_rate": rate} for rate in [0.001, 0.01, 0.1, 2.0]]
  ...   table = trials.Table(rates, singles)
  ...   sgd = tf.keras.optimizers.SGD(0.1)
  ...   model.compile(CrossShardOptimizer(sgd, group_assignment=singles), "mse")
  >>> x = np.ones([4, 1], "float32")
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   halving = callbacks.Halving(table, folder, epochs=4, factor=2)
  ...   _ = model.fit(
  ...     *(x, 5 * x),
  ...     epochs=halving.total_epochs,
  ...     verbose=0,
  ...     callbacks=[callbacks.GroupMetrics((x, 5 * x)), halving],
  ...   )
  ...   winner = halving.best_model()  # plain Keras
  >>> halving.total_epochs, [trial.epochs for trial in table]
  (6, [2, 4, 4, 2])
  >>> table.best.settings, table.best.best_epoch
  ({'learning_rate': 0.1}, 3)
  >>> abs(float(winner(x)[0, 0]) - 5) < 1
  True

  References:
    Jamieson and Talwalkar, 2016 (arXiv 1502.07943); Li et al., A System for
    Massively Parallel Hyperparameter Tuning, 2020 (arXiv 1810.05934). This is
    the synchronous algorithm.

  Attributes:
    table: The trials.
    names: The names of the settings in the table.
  """

  compares_trials = True

  def __init__(
    self,
    table: table_lib.Table,
    folder: Any,
    monitor: str = "val_loss",
    *,
    epochs: int,
    factor: int = 3,
    mode: group_callback.Mode = "auto",
    log_dir: Any = None,
  ) -> None:
    """Plans the search.

    Args:
      table: The trials, which receive their metrics and their best epoch.
      folder: A folder for the files of the trials, which is created if
        necessary. When the search has ended, it holds the weights of each
        trial's best epoch, in files such as `trial_3.npz`. On several machines,
        all workers need access to this folder.
      monitor: The metric that decides, as `GroupMetrics` names it, without the
        suffix `/group_0`. Trials are ranked by their best epoch so far.
      epochs: The number of epochs of the last trials, in total.
      factor: Only one in `factor` trials continues to the next rung.
      mode: `"min"`, `"max"`, or `"auto"` to let Keras decide by the metric.
      log_dir: A folder for TensorBoard. It receives a run for each trial, over
        the trial's own epochs, with its settings as a table.

    Raises:
      TypeError: If `table` is not a `trials.Table`.
      ValueError: If `epochs` is too small, or another argument is not valid.
    """
    super().__init__(monitor, mode)
    if not isinstance(table, table_lib.Table):
      raise TypeError(
        f"`table` must be a trials.Table; got {type(table).__name__}. Use"
        ' trials.Table([{"learning_rate": 0.1}, ...], groups).'
      )
    epochs = group_callback.check_count(
      "epochs", epochs, 1, "epochs of the last trials"
    )
    factor = group_callback.check_count(
      "factor", factor, 2, "trials, of which one continues"
    )
    self.table: table_lib.Table = table
    self.names = table.names
    self.epochs = epochs
    self.factor = factor
    self._folder = paths_lib.as_path(folder, "folder")
    self._num_groups = table.groups.num_groups
    self._rungs = rungs_lib.rungs(len(table), self._num_groups, factor, epochs)
    self._progress = _Progress()
    self._rates: list[float] = []  # the learning rates that were applied
    self._runs = None if log_dir is None else summaries.Runs(log_dir)

  @property
  def total_epochs(self) -> int:
    """The number of epochs of the whole search, to pass to `fit`."""
    starts = [0, *(rung.epochs for rung in self._rungs)]
    return sum(
      math.ceil(rung.trials / self._num_groups) * (rung.epochs - start)
      for rung, start in zip(self._rungs, starts, strict=False)
    )

  def best_model(self, into: Any = None) -> Any:
    """Returns the best trial as a model with the weights of its best epoch.

    Call this when `fit` has ended.

    Args:
      into: A plain model that receives the weights, as for
        `replica_state.load_group`. None lets Keras clone the model.

    Returns:
      A plain Keras model. From now on, `table.value` returns the settings of
      the best trial in all groups, so layers which read settings compute
      as they did in this trial.

    Raises:
      ValueError: If no trial has a value of the metric.
    """
    best = self.table.best
    missing = self._missing()
    if best.file is None:
      raise ValueError(
        f"No trial has a finite {self.monitor!r}"
        + (
          f": {missing}. Call fit(epochs=halving.total_epochs), without"
          " callbacks that stop it."
          if missing
          else f". Look at the history of the trials in {self.table!r}."
        )
      )
    if missing:
      logging.warning(
        "best_model returns the best trial of a search that has not ended: %s.",
        missing,
      )
    optimizer = self.model.optimizer
    state = group_state.GroupState(optimizer, self.model, with_optimizer=False)
    path = paths_lib.as_path(best.file)
    values = checkpoint.values_of_group(path, 0, state)
    # Layers of the clone, such as dropout, get the present settings of group 0.
    rows = [best.settings] * self._num_groups
    table_lib.results_of(self.table).assign(rows)
    # Keras calls the clone's layers, which may ask for the settings of a group.
    with per_group_lib.as_group(0):
      plain = group_models.load_group(self.model, 0, optimizer, into=into)
    group_models.assign(state, values, plain)
    return plain

  def names_of_trials(self) -> list[str]:
    running = self._progress.running
    names = [f"trial {number}" for number in running]
    return names + [""] * (self._num_groups - len(names)) if names else []

  def _missing(self) -> str:
    """Returns what the search lacks, in words; empty if it has ended."""
    is_last = self._progress.rung + 1 == len(self._rungs)
    if self._progress.running and is_last and not self._progress.epochs_left:
      return ""
    untrained = sum(not trial.epochs for trial in self.table)
    return (
      f"{untrained} of {len(self.table)} trials were not trained, and no trial"
      f" was trained for all {self.epochs} epochs"
    )

  @property
  def _step(self) -> Any:
    """The step of the CrossShardOptimizer, which has `group_settings`."""
    [step] = names_lib.steps_of(self.model.optimizer)
    return step

  @property
  def _optimizer_settings(self) -> set[str]:
    innermost = inner_lib.innermost(self.model.optimizer)
    return {*settings.LIMITS, *vars(innermost)} - {_RATE}

  def set_model(self, model: Any) -> None:
    super().set_model(model)
    if _RATE in self.names:
      group_rates.prepare(model, type(self).__name__)

  def on_train_begin(self, logs: Any = None) -> None:
    """Resets the table, checks what it will set, and creates the folder.

    Raises:
      ValueError: If the optimizer has other groups than the table or cannot
        take its settings, if the groups differ in a setting that is not in the
        table, if another callback assumes that a group trains a single trial,
        or if some epochs have no metrics.
    """
    super().on_train_begin(logs)
    groups = names_lib.groups_of(self.model.optimizer)
    if self.table.groups != groups:
      raise ValueError(
        f"`table` is for the groups {self.table.groups.to_lists()}, but the"
        f" optimizer has {groups.to_lists()}. Pass the groups of the table as"
        " `group_assignment` to the CrossShardOptimizer."
      )
    table_lib.results_of(self.table).forget()
    self._progress = _Progress()
    self._check_settings()
    self._check_callbacks()
    paths_lib.make_folder(self._folder / "states")
    with self.model.distribute_strategy.scope():
      self.model.optimizer.build(self.model.trainable_variables)
    tracked.check_built(self.model.optimizer, self.model, "Halving")

  def _check_settings(self) -> None:
    """Raises an error if the optimizer cannot take the settings of a trial."""
    # Try the settings of each trial on all groups, and then restore the
    # settings.
    before = self._step.settings.group_settings
    names = self._optimizer_settings.intersection(self.names)
    try:
      for trial in self.table:
        rows = {n: [trial.settings[n]] * self._num_groups for n in names}
        self._step.replace(group_settings=rows)
    except (NotImplementedError, ValueError) as error:
      # The user passed a table, and no `group_settings`.
      raise type(error)(
        str(error).replace("`group_settings`", "`table`")
      ) from error
    finally:
      self._step.replace(group_settings=before)
    differing = dict(before or {})
    if (rates := per_group_lib.rates_of(self.model.optimizer)) is not None:
      differing[_RATE] = rates.rates
    for name in set(differing) - set(self.names):
      raise ValueError(
        f"The groups have different values of {name!r}, {differing[name]}, but"
        " `table` does not contain it. Add it to the table, because a trial may"
        " move from group to group, or give `opt` one value for all groups."
      )

  def _check_callbacks(self) -> None:
    """Raises an error if another callback cannot be used with trials."""
    for other in self.same_fit():
      if other.follows_groups and other is not self:
        raise ValueError(
          f"{type(other).__name__} assumes that a group trains one model from"
          " start to finish, but Halving trains several trials per group."
          f" Remove {type(other).__name__}; use the history in the table, the"
          " curves in `log_dir`, and `best_model`."
        )
      if isinstance(other, group_metrics.GroupMetrics) and other.every != 1:
        raise ValueError(
          "Halving needs metrics after every epoch, but GroupMetrics has"
          f" every={other.every}. Use every=1, which is the default."
        )

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Starts the first rung, unless a backup was restored.

    Raises:
      ValueError: If `fit` would end before the search is complete.
    """
    if self._progress.running:
      return
    least = epoch + self.total_epochs
    epochs = (self.params or {}).get("epochs", least)
    if epochs < least:
      raise ValueError(
        f"`epochs` of fit must be at least {least}, for {len(self.table)}"
        f" trials in {self._num_groups} groups; got {epochs}. Use"
        " fit(epochs=halving.total_epochs), without initial_epoch."
      )
    state = self.state_of_groups(with_optimizer=True)
    trial_files.save({0: self._path("states/initial")}, state)
    self._start_rung(0)

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Records the metrics, and ends the wave if it is complete.

    Raises:
      ValueError: If another callback has set a learning rate, or nothing reads
        a setting of the table.
    """
    if self._progress.epochs_left == 0 or not self.begin(logs):
      return
    if (rates := self._read_rates()) != self._rates:
      raise ValueError(
        f"The learning rates of the groups changed from {self._rates} to"
        f" {rates} in epoch {epoch}: a callback such as LearningRateScheduler"
        " or ReduceLROnPlateau sets one learning rate for all trials. Remove"
        " this callback. A schedule in `opt` starts again with each trial."
      )
    self._check_names()
    results = table_lib.results_of(self.table)
    results.monitor, results.sign = self.monitor, self._sign
    best = {}
    keys = self.keys
    for group, number in enumerate(self._progress.running):
      end = f"/{keys[group]}"
      metrics = {
        name.removesuffix(end): float(logs[name])
        for name in logs
        if name.endswith(end)
      }
      if results.note(number, metrics):
        best[group] = self._path(f"trial_{number}")
        self.table[number].file = str(best[group])
    if best:
      trial_files.save(best, self.state_of_groups())
    if self._runs is not None and self.state_of_groups().copies.is_first:
      self._draw(self._runs)
    self._progress.epochs_left -= 1
    if self._progress.epochs_left == 0:
      self._end_wave()

  def _check_names(self) -> None:
    """Raises `ValueError` if nothing reads a setting of the table."""
    known = {_RATE, *self._optimizer_settings}
    asked = table_lib.results_of(self.table).asked
    for name in self.names:
      if name not in known | asked:
        close = difflib.get_close_matches(name, sorted(known), 1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        innermost = inner_lib.innermost(self.model.optimizer)
        raise ValueError(
          f"Nothing uses the setting {name!r} of `table`:"
          f" {type(innermost).__name__} has no such setting, and the model does"
          f" not read it. Correct the name{meant}, or call"
          f" table.value({name!r}) in the model."
        )

  def on_train_end(self, logs: Any = None) -> None:
    """Deletes all files except those with the trials' best weights."""
    if self._runs is not None:
      self._runs.close()
    self.state_of_groups().compare_workers("the end of trials")
    if self._progress.epochs_left:
      logging.warning(
        "fit ended before the search: %s. If a callback such as Keras'"
        " EarlyStopping set stop_training, remove it, because Halving itself"
        " stops poor trials; after SIGTERM, start the program again.",
        self._missing(),
      )
    else:
      paths_lib.delete_tree(self._folder / "states")

  def state(self) -> dict[str, Any]:
    progress = dataclasses.asdict(self._progress)
    own = [self._plan(), progress, table_lib.results_of(self.table).to_list()]
    # JSON, which does not round floats, in the form of an array for a file.
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    return {**super().state(), "trials": text}

  def set_state(self, state: dict[str, Any]) -> None:
    """Resumes the search from the plan, the progress and the table of a backup.

    Raises:
      CheckpointError: If the backup belongs to a different search.
    """
    super().set_state(state)
    text = np.asarray(state["trials"], np.uint8).tobytes()
    plan, progress, rows = json.loads(text)
    if plan != self._plan():
      raise archive.CheckpointError(
        f"The backup belongs to a different search: its plan is {plan}, but"
        f" Halving's plan is {self._plan()}. Use the same `monitor`, `epochs`"
        " and `factor` as before, or delete the backup."
      )
    self._progress = _Progress(**progress)
    table_lib.results_of(self.table).from_list(rows)
    self._apply_settings()
    self.model.stop_training = self._progress.epochs_left == 0

  def _plan(self) -> list[Any]:
    """Returns the plan as JSON values, to recognize the search in a backup."""
    return [self.monitor, *map(list, self._rungs)]

  def _draw(self, runs: summaries.Runs) -> None:
    for trial in (self.table[number] for number in self._progress.running):
      name = f"trial_{trial.number}"
      last = {metric: row[-1] for metric, row in trial.history.items()}
      about = {"trial": name, **trial.settings}
      runs.write(name, trial.epochs - 1, last, about)

  def _end_wave(self) -> None:
    """Saves the trials of the wave, and starts the next wave or rung."""
    progress = self._progress
    is_last = progress.rung + 1 == len(self._rungs)
    if not is_last:
      trial_files.save(
        {
          group: self._state_path(number, progress.rung)
          for group, number in enumerate(progress.running)
        },
        self.state_of_groups(with_optimizer=True),
      )
    if progress.waiting:
      self._start_wave(progress.rung, progress.waiting)
    elif is_last:
      self.model.stop_training = True
    else:
      self._start_rung(progress.rung + 1)

  def _start_rung(self, rung: int) -> None:
    """Chooses the best trials, and starts the first wave of a rung."""
    best = self.table.ranking
    if rung:  # A trial that diverged is the worst, whatever it was before.
      best = sorted(best, key=lambda trial: trial.has_diverged(self.monitor))
    best = best[: self._rungs[rung].trials]
    self._start_wave(rung, sorted(trial.number for trial in best))

  def _start_wave(self, rung: int, waiting: list[int]) -> None:
    """Gives each group its next waiting trial: the state and the settings."""
    count = self._num_groups
    before = self._rungs[rung - 1].epochs if rung else 0
    self._progress = _Progress(
      rung=rung,
      waiting=waiting[count:],
      running=waiting[:count],
      epochs_left=self._rungs[rung].epochs - before,
    )
    paths = [self._state_path(n, rung - 1) for n in self._trial_of_each_group()]
    trial_files.restore(paths, self.state_of_groups(with_optimizer=True))
    self._apply_settings()

  def _apply_settings(self) -> None:
    """Gives each group the settings of its trial.

    The training step is traced again only if a setting that the optimizer holds
    as a constant has changed. The learning rate and the settings of the model
    are read from variables.
    """
    rows = [self.table[n].settings for n in self._trial_of_each_group()]
    if _RATE in self.names:
      group_rates.write(self.model, [row[_RATE] for row in rows])
    before = self._step.settings.group_settings or {}
    names = self._optimizer_settings.intersection(self.names)
    after = before | {name: [row[name] for row in rows] for name in names}
    if after != before:
      self._step.replace(group_settings=after)
      self.model.make_train_function(force=True)
    table_lib.results_of(self.table).assign(rows)
    self._rates = self._read_rates()

  def _read_rates(self) -> list[float]:
    """Returns the groups' learning rates; empty if a schedule decides them."""
    is_one = group_rates.is_one_number(self.model)
    return group_rates.read(self.model) if is_one else []

  def _trial_of_each_group(self) -> list[int]:
    running = self._progress.running
    return running + running[:1] * (self._num_groups - len(running))

  def _state_path(self, number: int, rung: int) -> epath.Path:
    """Returns the file with the state of a trial at the end of a rung.

    Each rung has its own file, because a `fit` that resumes after a crash
    may need the file of the previous rung.
    """
    if rung < 0:
      return self._path("states/initial")
    return self._path(f"states/trial_{number}_rung_{rung}")

  def _path(self, name: str) -> epath.Path:
    return self._folder / f"{name}.npz"
