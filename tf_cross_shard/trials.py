"""Trials of settings: as many as you like, trained in the groups of one `fit`.

    table     0  1  2  3  4  5  6  7     each a dictionary of settings
    groups    0  1  2  3                 some of them at a time

`callbacks.Halving` goes through a table, and trains on what is best in it;
`callbacks.Population` changes the settings of those that are worst.
"""

import csv
import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import group_schedule, settings, validation
from tf_cross_shard import groups as groups_lib
from tf_cross_shard.replica_state import archive

__all__ = ["Table", "Trial"]


def __dir__() -> list[str]:
  """Returns the public names."""
  return sorted(__all__)


@dataclasses.dataclass
class Trial:
  """One trial, and what it has come to.

  Attributes:
    number: Its place in the table.
    settings: Its settings, by name.
    history: What `GroupMetrics` put into the logs of its group, by the name of
      the metric: a number for each epoch that it was trained.
    best: Its best value of the metric that is monitored; None before the first.
    best_epoch: Of its own epochs, counted from 0, that of `best`.
    file: What `replica_state.read_group(file, 0, model)` reads its weights of
      that epoch from; None if there is none.
  """

  number: int
  settings: dict[str, float]
  history: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  best: float | None = None
  best_epoch: int | None = None
  file: str | None = None

  @property
  def epochs(self) -> int:
    """How many epochs it was trained."""
    return max(map(len, self.history.values()), default=0)


class Table(Sequence[Trial]):
  """Trials of settings, in the order in which they were given.

  Settings are those that `group_settings` of an optimizer takes, and
  `"learning_rate"`; every other is for the model, whose code asks for it by
  `value`. Printed, it has the best trial first.

  >>> from tf_cross_shard import groups, schedules, trials
  >>> table = trials.Table(
  ...   [{"learning_rate": rate, "dropout": 0.1} for rate in [0.1, 0.01, 1.0]],
  ...   groups.singletons(2),
  ... )
  >>> len(table), table[2].settings
  (3, {'learning_rate': 1.0, 'dropout': 0.1})
  >>> with schedules.as_group(1):  # Outside of replicas
  ...   print(f"{table.value('learning_rate'):.2f}")
  0.01

  Attributes:
    groups: The groups that trials are trained in.
    monitor: The metric that decides what is best, once a `fit` has begun.
  """

  def __init__(
    self, settings_of_trials: Sequence[Mapping[str, float]], groups: Any
  ) -> None:
    """Takes the trials. Call it inside `strategy.scope()` if `value` is used.

    Args:
      settings_of_trials: A dictionary for each trial, all with the same names.
      groups: A `Groups` or a `group_assignment`: those of the optimizer.

    Raises:
      TypeError: If a setting is no number.
      ValueError: If there is no trial, or names differ.
    """
    rows = [dict(row) for row in settings_of_trials]
    if not rows:
      raise ValueError(
        "`settings_of_trials` must hold a dictionary for each trial; got"
        f' {settings_of_trials!r}. Use for example [{{"learning_rate": 0.1}}].'
      )
    for row in rows:
      if set(row) != set(rows[0]):
        raise ValueError(
          "`settings_of_trials` must have the same names in all trials; got"
          f" {sorted(row)} beside {sorted(rows[0])}."
        )
      for name, number in row.items():
        if not validation.is_number(number):
          raise TypeError(
            f"`settings_of_trials` must hold numbers; {name!r} is {number!r}."
            " Of a choice take the number of it."
          )
        row[name] = float(number)
    self.groups = settings.as_groups(groups) or groups_lib.Groups(groups)
    self.monitor: str | None = None
    self._trials = [Trial(i, row) for i, row in enumerate(rows)]
    self._sign = 1.0  # -1 where less of `monitor` is better
    self._asked: set[str] = set()
    self._variables = {
      name: tf.Variable(
        [rows[i % len(rows)][name] for i in range(self.groups.num_groups)],
        trainable=False,
        dtype=tf.float32,
        name=name,
      )
      for name in rows[0]
    }

  def __len__(self) -> int:
    """Returns the number of trials."""
    return len(self._trials)

  def __getitem__(self, index: Any) -> Any:
    """Returns a trial by its number, or several."""
    return self._trials[index]

  def __repr__(self) -> str:
    """Shows how many trials there are, and of what."""
    return f"<Table of {len(self)} trials of {self.names}>"

  def __str__(self) -> str:
    """Returns a row of text for each trial, the best first."""
    rows = [
      {k: v for k, v in row.items() if k != "file"} for row in self.rows()
    ]
    cells = [list(rows[0]), *([_shown(v) for v in r.values()] for r in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
      "  ".join(
        cell.rjust(width) for cell, width in zip(row, widths, strict=True)
      )
      for row in cells
    )

  @property
  def names(self) -> list[str]:
    """The names of the settings."""
    return list(self._trials[0].settings)

  @property
  def ranking(self) -> list[Trial]:
    """All trials, the best first, and those that had no number last."""
    return sorted(self._trials, key=self.badness)

  @property
  def best(self) -> Trial:
    """The trial with the best value of all."""
    return self.ranking[0]

  @tf.autograph.experimental.do_not_convert
  def value(self, name: str) -> tf.Tensor:
    """The setting of the trial that the calling replica is training.

    Call it where a replica computes: in the `call` of a layer, in a loss.
    Nothing is traced again when the group goes on with another trial.

    Args:
      name: The name of the setting.

    Returns:
      A float32 scalar; outside of replicas that of group 0, or of the group of
      `schedules.as_group`.

    Raises:
      KeyError: If trials have no such setting.
    """
    if name not in self._variables:
      raise KeyError(f"`name` must be one of {self.names}; got {name!r}.")
    self._asked.add(name)
    return group_schedule.per_group(self._variables[name], self.groups)

  def rows(self) -> list[dict[str, Any]]:
    """A dictionary for each trial, the best first.

    It has `trial`, the settings, `epochs`, the metric that is monitored at its
    best, `best_epoch` and `file`; `pandas.DataFrame(table.rows())` is a frame.
    """
    return [
      {
        "trial": trial.number,
        **trial.settings,
        "epochs": trial.epochs,
        self.monitor or "best": trial.best,
        "best_epoch": trial.best_epoch,
        "file": trial.file,
      }
      for trial in self.ranking
    ]

  def to_csv(self, path: Any) -> None:
    """Writes `rows` to a file, which spreadsheets read."""
    rows = self.rows()
    with open(os.fspath(path), "w", newline="", encoding="utf-8") as file:
      writer = csv.DictWriter(file, list(rows[0]))
      writer.writeheader()
      writer.writerows(rows)

  def badness(self, trial: Trial) -> tuple[bool, float, int]:
    """What trials are sorted by, the best first."""
    if trial.best is None:
      return True, 0.0, trial.number
    return False, -self._sign * trial.best, trial.number

  def forget(self) -> None:
    """Forgets what another `fit` found."""
    self._trials = [Trial(t.number, t.settings) for t in self._trials]

  def judge_by(self, monitor: str, sign: float) -> None:
    """Says what decides; more of it is better if `sign` is 1, less if -1."""
    self.monitor, self._sign = monitor, sign

  def assign(self, rows: Sequence[Mapping[str, float]]) -> None:
    """Gives each group the settings that `value` returns."""
    for name, variable in self._variables.items():
      variable.assign([row[name] for row in rows])

  def is_asked(self, name: str) -> bool:
    """Whether code of the model has asked for a setting."""
    return name in self._asked

  def note(self, number: int, metrics: Mapping[str, float]) -> bool:
    """Adds an epoch to a trial; returns whether it is its best."""
    trial = self._trials[number]
    for name, metric in metrics.items():
      trial.history.setdefault(name, []).append(metric)
    value = metrics[self.monitor or ""]
    best = -self._sign * math.inf if trial.best is None else trial.best
    is_best = self._sign * value > self._sign * best
    if is_best:
      trial.best, trial.best_epoch = value, trial.epochs - 1
    return is_best

  def to_list(self) -> list[Any]:
    """Returns what trials have come to, as JSON knows it."""
    return [self.monitor, self._sign, *map(dataclasses.asdict, self._trials)]

  def from_list(self, values: Sequence[Any]) -> None:
    """Goes on from what `to_list` returned.

    Raises:
      CheckpointError: If that was of other trials.
    """
    monitor, sign, *rows = values
    trials = [Trial(**row) for row in rows]
    for own, other in itertools.zip_longest(self._trials, trials):
      if own is None or other is None or own.settings != other.settings:
        raise archive.CheckpointError(
          f"The backup is of another table: it has {other and other.settings},"
          f" where this one has {own and own.settings}. Make the same, or"
          " delete the backup."
        )
    self.monitor, self._sign, self._trials = monitor, sign, trials


def _shown(value: Any) -> str:
  """Returns a cell of a printed table."""
  return f"{value:.6g}" if isinstance(value, float) else str(value)
