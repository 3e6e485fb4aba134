"""Tables of trials: the hyperparameters to try, and the results.

    table     0  1  2  3  4  5  6  7     one dictionary of settings per trial
    groups    0  1  2  3                 the groups train some trials at a time

`callbacks.Halving` trains all trials of a table for a short time and the best
ones for longer.
"""

import csv
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import tensorflow as tf

from tf_cross_shard._src.core import per_group as per_group_lib
from tf_cross_shard._src.core import settings, validation
from tf_cross_shard._src.replica_state import archive
from tf_cross_shard._src.replica_state import paths as paths_lib

__all__ = ["Table", "Trial"]


@dataclasses.dataclass
class Trial:
  """One trial: its settings and its results.

  Attributes:
    number: The position of the trial in the table.
    settings: The settings, by name.
    history: The metrics that `GroupMetrics` wrote for the trial's group, by
      name: one number for each epoch that the trial was trained.
    best: The best value of the monitored metric; None before the first epoch.
    best_epoch: The epoch of `best`, counted from 0 in the epochs of this trial.
    file: The file with the weights of that epoch, for
      `replica_state.read_group(file, 0, model)`; None if there is no file.
  """

  number: int
  settings: dict[str, float]
  history: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  best: float | None = None
  best_epoch: int | None = None
  file: str | None = None

  @property
  def epochs(self) -> int:
    """The number of epochs that the trial was trained."""
    return max(map(len, self.history.values()), default=0)

  def has_diverged(self, monitor: str) -> bool:
    return not math.isfinite(self.history[monitor][-1])


@dataclasses.dataclass
class Results:
  """The state of a table, which callbacks change while `fit` runs.

  Attributes:
    trials: The trials and their results.
    variables: The settings of the trials that the groups train: for each name,
      one variable of shape `[num_groups]`.
    monitor: The metric that decides which trial is best; None before `fit`.
    sign: 1 if a larger `monitor` is better, else -1.
    asked: The names that the model's code has asked for.
  """

  trials: list[Trial]
  variables: dict[str, tf.Variable]
  monitor: str | None = None
  sign: float = 1.0
  asked: set[str] = dataclasses.field(default_factory=set)

  def forget(self) -> None:
    self.trials = [Trial(t.number, t.settings) for t in self.trials]

  def assign(self, rows: Sequence[Mapping[str, float]]) -> None:
    """Sets the settings that `value` returns, one dictionary per group."""
    for name, variable in self.variables.items():
      variable.assign([row[name] for row in rows])

  def note(self, number: int, metrics: Mapping[str, float]) -> bool:
    """Adds the metrics of an epoch; returns whether it is the best epoch."""
    trial = self.trials[number]
    for name, metric in metrics.items():
      trial.history.setdefault(name, []).append(metric)
    value = metrics[self.monitor or ""]
    best = -self.sign * math.inf if trial.best is None else trial.best
    is_best = math.isfinite(value) and self.sign * value > self.sign * best
    if is_best:
      trial.best, trial.best_epoch = value, trial.epochs - 1
    return is_best

  def to_list(self) -> list[Any]:
    return [self.monitor, self.sign, *map(dataclasses.asdict, self.trials)]

  def from_list(self, values: Sequence[Any]) -> None:
    """Sets the trials and results that `to_list` returned.

    Raises:
      CheckpointError: If the trials have other settings than this table.
    """
    monitor, sign, *rows = values
    trials = [Trial(**row) for row in rows]
    for own, other in itertools.zip_longest(self.trials, trials):
      if own is None or other is None or own.settings != other.settings:
        raise archive.CheckpointError(
          "The backup belongs to a different table: it contains"
          f" {other and other.settings}, but this table contains"
          f" {own and own.settings}. Create the same table as before, or delete"
          " the backup."
        )
    self.monitor, self.sign, self.trials = monitor, sign, trials


class Table(Sequence[Trial]):
  """The trials of a hyperparameter search, in the order in which you list them.

  `"learning_rate"` and the names that the optimizer's `group_settings` accepts
  are settings of the optimizer. Any other name is a setting of your model,
  which reads it with `value`. `print(table)` shows the best trial first.

  >>> from tf_cross_shard import groups, schedules, trials
  >>> table = trials.Table(
  ...   [{"learning_rate": rate, "dropout": 0.1} for rate in [0.1, 0.01, 1.0]],
  ...   groups.singletons(2),
  ... )
  >>> len(table), table[2].settings
  (3, {'learning_rate': 1.0, 'dropout': 0.1})
  >>> with schedules.as_group(1):  # Outside replicas
  ...   print(f"{table.value('learning_rate'):.2f}")
  0.01

  Attributes:
    groups: The groups that train the trials.
  """

  def __init__(
    self, settings_of_trials: Sequence[Mapping[str, float]], groups: Any
  ) -> None:
    """Creates the trials.

    Call this inside `strategy.scope()` if you use `value`.

    Args:
      settings_of_trials: One dictionary for each trial, all with the same
        names. The values are numbers.
      groups: The groups of the optimizer: a `Groups` or a `group_assignment`.

    Raises:
      TypeError: If a trial is not a dictionary, or a setting is not a number.
      ValueError: If there is no trial, if the names differ between trials, or
        if a setting is NaN.
    """
    if isinstance(settings_of_trials, str | Mapping) or not isinstance(
      settings_of_trials, Iterable
    ):
      raise TypeError(
        "`settings_of_trials` must be a list of dictionaries; got"
        f' {settings_of_trials!r}. Use for example [{{"learning_rate": 0.1}},'
        ' {"learning_rate": 0.01}].'
      )
    for row in settings_of_trials:
      if not isinstance(row, Mapping):
        raise TypeError(
          f"`settings_of_trials` must hold dictionaries; got {row!r}. Use for"
          ' example [{"learning_rate": 0.1}].'
        )
    rows = [dict(row) for row in settings_of_trials]
    if not rows:
      raise ValueError(
        "`settings_of_trials` must contain a dictionary for each trial; got"
        f' {settings_of_trials!r}. Use for example [{{"learning_rate": 0.1}}].'
      )
    for row in rows:
      if set(row) != set(rows[0]):
        raise ValueError(
          "`settings_of_trials` must have the same names in all trials; got"
          f" {sorted(row)} and {sorted(rows[0])}."
        )
      for name, number in row.items():
        if not isinstance(name, str):
          raise TypeError(
            f"`settings_of_trials` must name settings by strings; got {name!r}"
            f' in {row}. Use for example {{"learning_rate": 0.1}}.'
          )
        if not validation.is_number(number):
          raise TypeError(
            "`settings_of_trials` must contain numbers;"
            f" {name!r} is {number!r}. For a categorical choice, pass its"
            " index."
          )
        if math.isnan(number):
          raise ValueError(
            f"`settings_of_trials` must contain numbers; {name!r} is nan in"
            f" {row}. Correct or remove that trial."
          )
        row[name] = float(number)
    self.groups = settings.required_groups(groups)
    # Each variable has the settings of all groups.
    variables = {
      name: tf.Variable(
        [rows[i % len(rows)][name] for i in range(self.groups.num_groups)],
        trainable=False,
        dtype=tf.float32,
        name=name,
      )
      for name in rows[0]
    }
    trials = [Trial(i, row) for i, row in enumerate(rows)]
    self._results = Results(trials, variables)

  def __len__(self) -> int:
    return len(self._results.trials)

  @overload
  def __getitem__(self, index: int) -> Trial: ...

  @overload
  def __getitem__(self, index: slice) -> list[Trial]: ...

  def __getitem__(self, index: int | slice) -> Trial | list[Trial]:
    """Returns the trial with a number, or the trials of a slice."""
    return self._results.trials[index]

  def __repr__(self) -> str:
    return f"<Table of {len(self)} trials of {self.names}>"

  def __str__(self) -> str:
    """Returns one line of text for each trial, the best first."""
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
  def monitor(self) -> str | None:
    """The metric that decides which trial is best; None before `fit`."""
    return self._results.monitor

  @property
  def names(self) -> list[str]:
    """The names of the settings."""
    return list(self._results.trials[0].settings)

  @property
  def ranking(self) -> list[Trial]:
    """All trials, the best first; trials without a best value come last."""
    return sorted(self._results.trials, key=self._sort_key)

  @property
  def best(self) -> Trial:
    """The trial with the best value of the monitored metric."""
    return self.ranking[0]

  @tf.autograph.experimental.do_not_convert
  def value(self, name: str) -> tf.Tensor:
    """Returns a setting of the trial that the calling replica trains.

    Call this in code that replicas run: in the `call` of a layer or in a loss.
    The value is read from a variable, so a group can continue with another
    trial without a new trace.

    Args:
      name: The name of the setting.

    Returns:
      A float32 scalar. Outside replicas, it is the setting of group 0, or of
      the group in `schedules.as_group`.

    Raises:
      KeyError: If the trials have no such setting.
    """
    return per_group_lib.per_group(self.values(name), self.groups)

  def values(self, name: str) -> tf.Variable:
    """Returns a variable with a setting of the trials that the groups train.

    Pass it to `layers.GroupDropout`.

    Args:
      name: The name of the setting.

    Returns:
      float32 `[num_groups]`. `callbacks.Halving` assigns it.

    Raises:
      KeyError: If the trials have no such setting.
    """
    if name not in self._results.variables:
      raise KeyError(f"`name` must be one of {self.names}; got {name!r}.")
    self._results.asked.add(name)
    return self._results.variables[name]

  def rows(self) -> list[dict[str, Any]]:
    """Returns a dictionary for each trial, the best first.

    A dictionary has the entries `trial`, the settings, `epochs`, the best
    value under the name of the monitored metric, `best_epoch` and `file`. For a
    data frame, use `pandas.DataFrame(table.rows())`.
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
    """Writes `rows` to a CSV file.

    Args:
      path: The file.
    """
    rows = self.rows()
    target = paths_lib.as_path(path)
    with paths_lib.as_os_errors(target), target.open("w") as file:
      writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
      writer.writeheader()
      writer.writerows(rows)

  def _sort_key(self, trial: Trial) -> tuple[bool, float, int]:
    """Returns the sort key of a trial; the best has the smallest key."""
    if trial.best is None:
      return True, 0.0, trial.number
    return False, -self._results.sign * trial.best, trial.number


def results_of(table: Table) -> Results:
  """Returns the state of a table, for the callbacks that change it."""
  return table._results  # noqa: SLF001


def _shown(value: Any) -> str:
  return f"{value:.6g}" if isinstance(value, float) else str(value)
