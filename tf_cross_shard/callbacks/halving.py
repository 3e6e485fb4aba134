"""Successive halving: many trials for a short time, the best ones for longer.

    8 trials, 4 groups, factor 2, 4 epochs
    rung 0   epochs 1      0 1 2 3 | 4 5 6 7     two waves of four groups
    rung 1   epochs 2-4    1 2 4 7               the best half goes on

A wave begins with files of the groups' states, and ends with others:

    initial ─▶ wave 0 ─▶ trial_0 ... trial_3 ─┐
            ─▶ wave 1 ─▶ trial_4 ... trial_7 ─┴─▶ the best of them ─▶ rung 1
"""

import dataclasses
import math
import pathlib
import shutil
from typing import Any, NamedTuple

from absl import logging

from tf_cross_shard import group_schedule, trials
from tf_cross_shard.callbacks import (
  base,
  group_metrics,
  group_rates,
  summaries,
  trial_monitor,
)
from tf_cross_shard.replica_state import (
  archive,
  checkpoint,
  group_files,
  group_models,
)


class Rung(NamedTuple):
  """How many trials are trained, and up to which of their epochs."""

  trials: int
  epochs: int


def rungs(
  num_trials: int, num_groups: int, factor: int, epochs: int
) -> list[Rung]:
  """Returns the rungs, of which the last has no more trials than groups.

  No rung has fewer than groups: they cost nothing.

  >>> [tuple(rung) for rung in rungs(16, 4, 2, 9)]
  [(16, 2), (8, 4), (4, 9)]

  Raises:
    ValueError: If the first would have no epoch.
  """
  counts = [num_trials]
  while counts[-1] > num_groups:
    counts.append(max(num_groups, math.ceil(counts[-1] / factor)))
  last = len(counts) - 1
  if epochs < factor**last:
    raise ValueError(
      f"`epochs` must be at least {factor**last}: {num_trials} trials in"
      f" {num_groups} groups are divided by {factor} {last} times; got"
      f" {epochs}."
    )
  return [
    Rung(count, epochs // factor ** (last - i))
    for i, count in enumerate(counts)
  ]


@dataclasses.dataclass
class _Place:
  """The place in the plan.

  Attributes:
    rung: The number of the rung.
    waiting: Trials that the rung has not trained yet.
    running: The trial of each group; groups beyond repeat the first.
    left: The epochs that are left of the wave.
  """

  rung: int = 0
  waiting: list[int] = dataclasses.field(default_factory=list)
  running: list[int] = dataclasses.field(default_factory=list)
  left: int = 0


class Halving(trial_monitor.TrialMonitor):
  """Goes through a table of trials in one `fit`, and trains on with the best.

  All trials are trained for a few epochs, as many at a time as there are
  groups; one in `factor` of them, the best so far, goes on for `factor` times
  as many; and so on, until no more are left than groups. These are trained for
  all `epochs`. Each trial begins with the weights and slots that group 0 has
  when `fit` begins, and goes on with its own.

  >>> import tempfile
  >>> import numpy as np, tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, callbacks, groups, trials
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> pairs = groups.singletons(2)
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   rates = [{"learning_rate": rate} for rate in [0.001, 0.01, 0.1, 2.0]]
  ...   table = trials.Table(rates, pairs)
  ...   sgd = tf.keras.optimizers.SGD(0.1)
  ...   model.compile(CrossShardOptimizer(sgd, group_assignment=pairs), "mse")
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
    Massively Parallel Hyperparameter Tuning, 2020 (arXiv 1810.05934), whose
    synchronous form this is.
  """

  def __init__(
    self,
    table: trials.Table,
    folder: Any,
    monitor: str = "val_loss",
    *,
    epochs: int,
    factor: int = 3,
    mode: str = "auto",
    log_dir: Any = None,
  ) -> None:
    """Makes the plan.

    Args:
      table: The trials. Each notes its metrics, and its best epoch.
      folder: A folder for the trials' states, weights and slots; it is made.
        What is left in it are the weights of each trial's best epoch,
        `trial_3.npz`. On several machines all workers see it.
      monitor: A metric that `GroupMetrics` puts into the logs, without the
        `/group_0` behind it. Trials are judged by their best epoch so far.
      epochs: How long the last trials are trained, altogether.
      factor: One in so many trials goes on.
      mode: `"min"`, `"max"`, or `"auto"` for what Keras knows of the metric.
      log_dir: A folder for TensorBoard: a run for each trial, over its own
        epochs, and a row of the HParams page with its settings.

    Raises:
      ValueError: If `epochs` are too few, and as for other callbacks.
    """
    super().__init__(monitor, mode)
    if not isinstance(table, trials.Table):
      raise TypeError(
        f"`table` must be a trials.Table; got {type(table).__name__}. Use"
        ' trials.Table([{"learning_rate": 0.1}, ...], groups).'
      )
    base.check_count("epochs", epochs, 1, "epochs of the last trials")
    base.check_count("factor", factor, 2, "trials of which one goes on")
    self.table: trials.Table = table
    self.names = table.names
    self.epochs = epochs
    self.factor = factor
    self._folder = archive.as_path(folder, "folder")
    self._num_groups = table.groups.num_groups
    self._rungs = rungs(len(table), self._num_groups, factor, epochs)
    self._place = _Place()
    self._rates: list[float] = []  # that the groups were given
    self._runs = None if log_dir is None else summaries.Runs(log_dir)

  @property
  def total_epochs(self) -> int:
    """The epochs of the whole `fit`, for its argument `epochs`."""
    starts = [0, *(rung.epochs for rung in self._rungs)]
    return sum(
      math.ceil(rung.trials / self._num_groups) * (rung.epochs - start)
      for rung, start in zip(self._rungs, starts, strict=False)
    )

  def best_model(self, into: Any = None) -> Any:
    """Returns the best trial, with the weights of its best epoch.

    Call it when `fit` is over.

    Args:
      into: As for `replica_state.load_group`.

    Returns:
      A plain Keras model. If its layers ask for settings, they have those of
      this trial: `table.value` returns them from now on, for all groups.

    Raises:
      ValueError: If no trial has a value of the metric.
    """
    best = self.table.best
    if best.file is None:
      raise ValueError(
        f"No trial has a best epoch: `monitor`, {self.monitor!r}, was a finite"
        f" number in none of them. See the history of {self.table!r}."
      )
    path = archive.as_path(best.file)
    values = checkpoint.values_of_group(path, 0, self.copies())
    optimizer = self.model.optimizer
    with group_schedule.as_group(0):  # Keras calls the clone's layers.
      plain = group_models.load_group(0, optimizer, self.model, into=into)
    group_models.assign(plain, values)
    self.table.assign([best.settings] * self._num_groups)
    return plain

  def on_train_begin(self, logs: Any = None) -> None:
    """Raises an error for what does not go with trials.

    Raises:
      ValueError: If to another callback each group is one training, if groups
        differ in what the table has not, or some epochs have no metrics.
    """
    super().on_train_begin(logs)
    self._place = _Place()
    optimizer = self.model.optimizer
    differing = dict(self.step.settings.group_settings or {})
    if (rates := group_schedule.rates_of(optimizer)) is not None:
      differing["learning_rate"] = rates.rates
    for name in set(differing) - set(self.names):
      raise ValueError(
        f"`table` has no {name!r}, in which the groups differ:"
        f" {differing[name]}. A trial is trained in several groups: put it into"
        " the table, or give `opt` one for all."
      )
    for other in self.same_fit():
      if other.follows_groups and other is not self:
        raise ValueError(
          f"{type(other).__name__} takes a group as one training, and Halving"
          " gives it other trials. Leave it out; the table has each trial's"
          " history, `log_dir` its curves, and `best_model` its best weights."
        )
      if isinstance(other, group_metrics.GroupMetrics) and other.every != 1:
        raise ValueError(
          "Halving needs metrics after every epoch; GroupMetrics has"
          f" every={other.every}. Leave that out."
        )
    (self._folder / "states").mkdir(parents=True, exist_ok=True)
    with self.model.distribute_strategy.scope():
      self.model.optimizer.build(self.model.trainable_variables)

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Begins with the first trials, unless a backup was restored.

    Raises:
      ValueError: If `fit` is to end too early.
    """
    if self._place.running:
      return
    least = epoch + self.total_epochs
    epochs = (self.params or {}).get("epochs", least)
    if epochs < least:
      raise ValueError(
        f"`epochs` of fit must be at least {least}, for {len(self.table)}"
        f" trials in {self._num_groups} groups; got {epochs}. Use"
        " fit(epochs=halving.total_epochs), without initial_epoch."
      )
    copies = self.copies(is_whole=True)
    group_files.save({0: self._path("states/initial")}, copies)
    self._climb(0)

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Notes metrics; gives the groups other trials if it is time.

    Raises:
      ValueError: If something else has set a learning rate.
    """
    if self._place.left == 0 or not self.begin(logs):
      return
    if (rates := self._read_rates()) != self._rates:
      raise ValueError(
        f"The learning rates of the groups were {self._rates} and are {rates}"
        f" after epoch {epoch}: a callback like LearningRateScheduler or"
        " ReduceLROnPlateau sets one for all trials, by the epochs of fit."
        " Leave it out; a schedule in `opt` begins anew with each trial."
      )
    best = {}
    for group in self.note(self._place.running, logs):
      trial = self.table[self._place.running[group]]
      path = best[group] = self._path(f"trial_{trial.number}")
      trial.file = str(path)
    if best:
      group_files.save(best, self.copies())
    if self._runs is not None and self.copies().copies.is_first:
      self._draw(self._runs)
    self._place.left -= 1
    if self._place.left == 0:
      self._end_wave()

  def on_train_end(self, logs: Any = None) -> None:
    """Deletes all files but those of the trials' best epochs."""
    if self._runs is not None:
      self._runs.close()
    self.copies().agree("the end of trials")
    if self._place.left:
      logging.warning(
        "fit ended before the trials did: something else has set stop_training."
        " The table has what they came to so far."
      )
    else:
      shutil.rmtree(self._folder / "states", ignore_errors=True)

  def state(self) -> dict[str, Any]:
    """Returns the plan, the place in it, and the table."""
    place = dataclasses.asdict(self._place)
    own = [self._plan(), place, self.table.to_list()]
    return {**super().state(), "trials": base.to_array(own)}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on with the trials that the groups have."""
    super().set_state(state)
    plan, place, rows = base.from_array(state["trials"])
    if plan != self._plan():
      raise archive.CheckpointError(
        f"The backup is of other trials: it has the plan {plan}, and Halving"
        f" {self._plan()}. Give `monitor`, `epochs` and `factor` as before, or"
        " delete the backup."
      )
    self._place = _Place(**place)
    self.table.from_list(rows)
    self._give()
    self.model.stop_training = self._place.left == 0

  def _plan(self) -> list[Any]:
    """Returns what the place means, as JSON knows it."""
    return [self.monitor, *map(list, self._rungs)]

  def _draw(self, runs: summaries.Runs) -> None:
    """Adds the last epoch to each trial's curves."""
    for trial in (self.table[number] for number in self._place.running):
      name = f"trial_{trial.number}"
      last = {metric: row[-1] for metric, row in trial.history.items()}
      hparams = {"trial": name, **trial.settings}
      runs.write(name, trial.epochs - 1, last, hparams)

  def _end_wave(self) -> None:
    """Keeps the state of its trials, and begins the next wave, if any."""
    place = self._place
    is_last = place.rung + 1 == len(self._rungs)
    if not is_last:
      group_files.save(
        {
          group: self._state_path(number, place.rung)
          for group, number in enumerate(place.running)
        },
        self.copies(is_whole=True),
      )
    if place.waiting:
      self._start_wave(place.rung, place.waiting)
    elif is_last:
      self.model.stop_training = True
    else:
      self._climb(place.rung + 1)

  def _climb(self, rung: int) -> None:
    """Chooses who is trained in a rung, and begins with the first of them."""
    best = self.table.ranking[: self._rungs[rung].trials]
    self._start_wave(rung, sorted(trial.number for trial in best))

  def _start_wave(self, rung: int, waiting: list[int]) -> None:
    """Gives groups the next trials: their states, and their settings."""
    count = self._num_groups
    before = self._rungs[rung - 1].epochs if rung else 0
    self._place = _Place(
      rung=rung,
      waiting=waiting[count:],
      running=waiting[:count],
      left=self._rungs[rung].epochs - before,
    )
    paths = [self._state_path(n, rung - 1) for n in self._numbers_here()]
    group_files.restore(paths, self.copies(is_whole=True))
    self._give()

  def _give(self) -> None:
    """Gives each group the settings of its trial."""
    self.give([self.table[number].settings for number in self._numbers_here()])
    self._rates = self._read_rates()

  def _read_rates(self) -> list[float]:
    """Returns each group's learning rate; none unless it is one number."""
    is_one = group_rates.is_one_number(self.model)
    return group_rates.read(self.model) if is_one else []

  def _numbers_here(self) -> list[int]:
    """Returns which trial's settings each group has."""
    running = self._place.running
    return running + running[:1] * (self._num_groups - len(running))

  def _state_path(self, number: int, rung: int) -> pathlib.Path:
    """Returns the file of a trial's state at the end of a rung.

    It is not written again: a `fit` that goes on after a crash may read it.
    """
    if rung < 0:
      return self._path("states/initial")
    return self._path(f"states/trial_{number}_rung_{rung}")

  def _path(self, name: str) -> pathlib.Path:
    """Returns a file in the folder."""
    return self._folder / f"{name}.npz"
