"""Gives each group the settings of its trial."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tf_cross_shard._src.core import group_value, optimizer_state
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib
from tf_cross_shard._src.fit import per_model_rates
from tf_cross_shard._src.search import study as study_lib

_RATE: Final = "learning_rate"
RunningTrials = Sequence[study_lib.Running | None]  # That of each group.


class TrialSettings:
  """Learning rates, settings of the optimizer, and settings of the model.

  Attributes:
    values: What the model reads, by name.
  """

  def __init__(self) -> None:
    self.values: dict[str, group_value.GroupValue] = {}

  def prepare(
    self, model: Any, settings: Mapping[str, float], num_groups: int
  ) -> None:
    """Creates the variables of settings, before a step is traced."""
    if _RATE in settings:
      per_model_rates.check(model, "OptunaSearch")
    before = _of_optimizer(model)
    known = {
      *vars(wrapped_lib.base_optimizer(model.optimizer)),
      *settings_lib.LIMITS,
    }
    new = (set(settings) & known) - {_RATE, *before, *self.values}
    if not new:
      return
    if not optimizer_state.pipelines_of(model.optimizer):
      kind = type(model.optimizer).__name__
      raise ValueError(
        f"`suggest` returns {sorted(new)}, but {kind} has one number for all"
        f" groups. Use CrossShardOptimizer({kind}(...))."
      )
    rows = {name: [settings[name]] * num_groups for name in new}
    model.optimizer.per_model = {**before, **rows}
    if model.train_function is not None:
      # An earlier `fit` has traced a step that does not read them.
      model.make_train_function(force=True)

  def variables(self, optimizer: Any) -> list[Any]:
    """Returns the variables that are settings, not state of a trial."""
    settings = list(nested_lib.rate_variables(optimizer))
    for pipeline in optimizer_state.pipelines_of(optimizer):
      settings += pipeline.per_model.variables
    return settings

  def write(self, model: Any, running: RunningTrials) -> None:
    """Sets the settings of all groups to those of their trials."""
    if any(trial is not None and _RATE in trial.settings for trial in running):
      rates = {_RATE: per_model_rates.read(model)}
      per_model_rates.write(model, _merged(rates, running)[_RATE])
    before = _of_optimizer(model)
    if (rows := _merged(before, running)) != before:
      model.optimizer.per_model = rows
    self.write_values(model, running)

  def write_values(self, model: Any, running: RunningTrials) -> None:
    for name, value in self.values.items():
      value.create(len(running), model.distribute_strategy)
      assert value.numbers is not None
      row = _merged({name: value.numbers.read()}, running)[name]
      value.numbers.assign(row)

  def check(self, model: Any, settings: Mapping[str, float]) -> None:
    """Raises `ValueError` if nothing reads a setting, or none was returned."""
    known = {_RATE, *_of_optimizer(model), *self.values}
    for name in set(settings) - known:
      wrapped = vars(wrapped_lib.base_optimizer(model.optimizer))
      candidates = [*known, *(n for n in wrapped if not n.startswith("_"))]
      close = difflib.get_close_matches(name, candidates, 1)
      meant = f" (did you mean {close[0]!r}?)" if close else ""
      raise ValueError(
        f"Nothing reads the setting {name!r} that `suggest` returns. Correct"
        f" the name{meant}, or read search.value({name!r}) in the model."
      )
    for name in set(self.values) - set(settings):
      raise ValueError(
        f"The model reads search.value({name!r}), but `suggest` returns only"
        f" {sorted(settings)}. Add {name!r} to what it returns."
      )


def _of_optimizer(model: Any) -> dict[str, list[float]]:
  return getattr(model.optimizer, "per_model", None) or {}


def _merged(
  rows: Mapping[str, Sequence[float]], running: RunningTrials
) -> dict[str, list[float]]:
  """Returns rows with the numbers of the trials that groups train."""
  return {
    name: [
      old if trial is None else trial.settings.get(name, old)
      for old, trial in zip(row, running, strict=True)
    ]
    for name, row in rows.items()
  }
