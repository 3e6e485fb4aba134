"""What callbacks that train trials in groups have in common."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tf_cross_shard import settings, trials
from tf_cross_shard.callbacks import base, group_rates
from tf_cross_shard.inner_optimizer import base as inner_optimizer
from tf_cross_shard.replica_state import group_state

_RATE: Final = "learning_rate"


class TrialMonitor(base.GroupMonitor):
  """Gives groups their settings, and notes what each trial comes to.

  Attributes:
    table: The trials.
    names: The settings that may change.
  """

  moves_optimizer = True
  table: trials.Table
  names: Sequence[str]

  @property
  def step(self) -> Any:
    """The step of the CrossShardOptimizer, which has the groups' settings."""
    [step] = group_state.steps_of(self.model.optimizer)
    return step

  @property
  def _innermost(self) -> Any:
    """The encapsulated optimizer."""
    return inner_optimizer.innermost(self.model.optimizer)

  def set_model(self, model: Any) -> None:
    """Makes rates ones that can be set, where they are to be."""
    super().set_model(model)
    if _RATE in self.names:
      group_rates.prepare(model, type(self).__name__)

  def on_train_begin(self, logs: Any = None) -> None:
    """Forgets what another `fit` left; raises if the table does not fit."""
    super().on_train_begin(logs)
    groups = group_state.groups_of(self.model.optimizer, None)
    if self.table.groups != groups:
      raise ValueError(
        f"`table` is for the groups {self.table.groups.to_lists()}; the"
        f" optimizer has {groups.to_lists()}. Give both the same."
      )
    self.table.forget()
    self._check([trial.settings for trial in self.table])

  def begin(self, logs: Any) -> bool:
    """Tells the table what is best, too."""
    has_metrics = super().begin(logs)
    if has_metrics:
      self.table.judge_by(self.monitor, self._sign)
    return has_metrics

  def read(self) -> list[dict[str, float]]:
    """Returns each group's settings that are the optimizer's."""
    own: dict[str, Any] = {}
    count = group_state.groups_of(self.model.optimizer, None).num_groups
    if _RATE in self.names:
      own[_RATE] = group_rates.read(self.model)
    for name in filter(self._is_own, self.names):
      number = self.step.settings.limits.get(name)
      if name not in settings.LIMITS:
        number = vars(self._innermost)[name]
      by_group = self.step.settings.group_settings or {}
      own[name] = by_group.get(name, [number] * count)
    return [{name: own[name][i] for name in own} for i in range(count)]

  def give(self, rows: Sequence[Mapping[str, float]]) -> None:
    """Gives each group its settings, wherever they are read.

    Steps are traced again where the optimizer has them as constants.
    """
    if _RATE in self.names:
      group_rates.write(self.model, [row[_RATE] for row in rows])
    before = self.step.settings.group_settings or {}
    names = filter(self._is_own, self.names)
    after = before | {name: [row[name] for row in rows] for name in names}
    if after != before:
      self.step.replace(group_settings=after)
      self.model.make_train_function(force=True)
    self.table.assign(rows)

  def note(self, running: Sequence[int], logs: Any) -> list[int]:
    """Adds an epoch to each group's trial; returns those at their best."""
    for name in self.table.names:
      if not (name == _RATE or self._is_own(name) or self.table.is_asked(name)):
        raise ValueError(
          f"`table` has {name!r}, which nothing reads:"
          f" {type(self._innermost).__name__} has no such number, and no code"
          f" of the model has called table.value({name!r}). Correct the name,"
          " or call it."
        )
    improved = []
    for group, number in enumerate(running):
      end = f"/group_{group}"
      metrics = {
        name.removesuffix(end): float(logs[name])
        for name in logs
        if name.endswith(end)
      }
      if self.table.note(number, metrics):
        improved.append(group)
    return improved

  def _is_own(self, name: str) -> bool:
    """Whether a setting is one of `group_settings`."""
    return name != _RATE and name in {*settings.LIMITS, *vars(self._innermost)}

  def _check(self, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises an error if the optimizer cannot have a group's settings."""
    before = self.step.settings.group_settings
    count = group_state.groups_of(self.model.optimizer, None).num_groups
    try:
      for row in rows:
        own = {name: [row[name]] * count for name in filter(self._is_own, row)}
        self.step.replace(group_settings=own)
    finally:
      self.step.replace(group_settings=before)
