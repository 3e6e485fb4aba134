"""The common base class of callbacks that train trials in groups."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tf_cross_shard._src.core import per_group as per_group_lib
from tf_cross_shard._src.core import settings
from tf_cross_shard._src.core.inner import inner as inner_lib
from tf_cross_shard._src.core.inner import names as names_lib
from tf_cross_shard._src.fit import group_callback, group_rates
from tf_cross_shard._src.replica_state import (
  checkpoint,
  group_models,
  group_state,
)
from tf_cross_shard._src.replica_state import paths as paths_lib
from tf_cross_shard._src.search import table as table_lib

_RATE: Final = "learning_rate"


class TrialMonitor(group_callback.GroupMonitor):
  """Applies the settings of trials to groups, and records the trials' results.

  Attributes:
    table: The trials.
    names: The names of the settings that may change.
  """

  compares_trials = True
  moves_optimizer = True
  _argument = "table"  # the argument that has the settings
  table: table_lib.Table
  names: Sequence[str]

  @property
  def step(self) -> Any:
    """The step of the CrossShardOptimizer, which has `group_settings`."""
    [step] = names_lib.steps_of(self.model.optimizer)
    return step

  @property
  def _innermost(self) -> Any:
    """The optimizer of Keras that the CrossShardOptimizer wraps."""
    return inner_lib.innermost(self.model.optimizer)

  def set_model(self, model: Any) -> None:
    super().set_model(model)
    if _RATE in self.names:
      group_rates.prepare(model, type(self).__name__)

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    groups = names_lib.groups_of(self.model.optimizer, None)
    if self.table.groups != groups:
      raise ValueError(
        f"`table` is for the groups {self.table.groups.to_lists()}, but the"
        f" optimizer has {groups.to_lists()}. Pass the groups of the table as"
        " `group_assignment` to the CrossShardOptimizer."
      )
    table_lib.results_of(self.table).forget()
    self._check([trial.settings for trial in self.table])

  def begin(self, logs: Any) -> bool:
    has_metrics = super().begin(logs)
    if has_metrics:
      results = table_lib.results_of(self.table)
      results.monitor, results.sign = self.monitor, self._sign
    return has_metrics

  def read(self) -> list[dict[str, float]]:
    """Returns the settings of each group that belong to the optimizer."""
    own: dict[str, Any] = {}
    count = names_lib.groups_of(self.model.optimizer, None).num_groups
    if _RATE in self.names:
      own[_RATE] = group_rates.read(self.model)
    for name in filter(self._is_own, self.names):
      number = self.step.context.settings.limits.get(name)
      if name not in settings.LIMITS:
        number = vars(self._innermost)[name]
      by_group = self.step.context.settings.group_settings or {}
      own[name] = by_group.get(name, [number] * count)
    return [{name: own[name][i] for name in own} for i in range(count)]

  def apply_settings(self, rows: Sequence[Mapping[str, float]]) -> None:
    """Gives each group its settings, in the optimizer and in the table.

    The training step is traced again only if a setting that the optimizer holds
    as a constant has changed. The learning rate and the settings of the model
    are read from variables.
    """
    if _RATE in self.names:
      group_rates.write(self.model, [row[_RATE] for row in rows])
    before = self.step.context.settings.group_settings or {}
    names = filter(self._is_own, self.names)
    after = before | {name: [row[name] for row in rows] for name in names}
    if after != before:
      self.step.replace(group_settings=after)
      self.model.make_train_function(force=True)
    table_lib.results_of(self.table).assign(rows)

  def note(
    self,
    running: Sequence[int],
    logs: Any,
    rows: Sequence[Mapping[str, float]] | None = None,
  ) -> list[int]:
    """Adds an epoch to the trial of each group.

    Args:
      running: The number of the trial of each group.
      logs: The logs of the epoch, with the metrics of the groups.
      rows: The settings of each group in this epoch, if they change.

    Returns:
      The groups whose trial has its best value so far in this epoch.

    Raises:
      ValueError: If nothing reads a setting of the table.
    """
    results = table_lib.results_of(self.table)
    for name in self.table.names:
      if not (name == _RATE or self._is_own(name) or name in results.asked):
        known = [_RATE, *settings.LIMITS, *vars(self._innermost)]
        close = difflib.get_close_matches(name, known, 1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
          f"Nothing uses the setting {name!r} of `table`:"
          f" {type(self._innermost).__name__} has no such setting, and the"
          f" model does not read it. Correct the name{meant}, or call"
          f" table.value({name!r}) in the model."
        )
    improved = []
    for group, number in enumerate(running):
      end = f"/group_{group}"
      own = rows[group] if rows else {}
      metrics = {
        name.removesuffix(end): float(logs[name])
        for name in logs
        if name.endswith(end)
      }
      if results.note(number, {**metrics, **own}):
        improved.append(group)
    return improved

  def _is_own(self, name: str) -> bool:
    """Returns whether a setting is one of the optimizer's `group_settings`."""
    return name != _RATE and name in {*settings.LIMITS, *vars(self._innermost)}

  def _check(self, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises an error if the optimizer cannot take the settings of a row."""
    # Try the settings of each trial on all groups, and then restore the
    # settings.
    before = self.step.context.settings.group_settings
    count = names_lib.groups_of(self.model.optimizer, None).num_groups
    try:
      for row in rows:
        own = {name: [row[name]] * count for name in filter(self._is_own, row)}
        self.step.replace(group_settings=own)
    except (NotImplementedError, ValueError) as error:
      # The user passed a table or `explore`, and no `group_settings`.
      argument = f"`{self._argument}`"
      raise type(error)(
        str(error).replace("`group_settings`", argument)
      ) from error
    finally:
      self.step.replace(group_settings=before)


def plain_model(
  path: str,
  row: Mapping[str, float],
  table: table_lib.Table,
  model: Any,
  into: Any = None,
) -> Any:
  """Returns a plain model with the weights and the settings of a trial.

  Args:
    path: The file with the weights of the trial.
    row: The settings of the trial, which `table.value` returns from now on.
    table: The table.
    model: The compiled model that was trained.
    into: As for `replica_state.load_group`.
  """
  optimizer = model.optimizer
  state = group_state.GroupState(optimizer, model, with_optimizer=False)
  values = checkpoint.values_of_group(paths_lib.as_path(path), 0, state)
  # Layers of the clone, such as dropout, get the present settings of group 0.
  table_lib.results_of(table).assign([row] * table.groups.num_groups)
  # Keras calls the clone's layers, which may ask for the settings of a group.
  with per_group_lib.as_group(0):
    plain = group_models.load_group(model, 0, optimizer, into=into)
  group_models.assign(state, values, plain)
  return plain
