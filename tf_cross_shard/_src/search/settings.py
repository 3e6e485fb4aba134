"""Gives each model the settings of its trial."""

import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tf_cross_shard._src.core import optimizer_state, validation
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib
from tf_cross_shard._src.fit import per_model_rates
from tf_cross_shard._src.models import group_state
from tf_cross_shard._src.search import study as study_lib

_RATE: Final = "learning_rate"
RunningTrials = Sequence[study_lib.Running | None]  # That of each model.


class TrialSettings:
  """Learning rates, settings of the optimizer, and weights of the model."""

  def __init__(self) -> None:
    # The variables of each setting that is a weight.
    self._weights: dict[str, list[Any]] = {}
    self._sets_rate = False

  def prepare(
    self, model: Any, settings: Mapping[str, float], num_models: int
  ) -> None:
    """Finds what each name sets, before a step is traced."""
    self._sets_rate = _RATE in settings
    if self._sets_rate:
      per_model_rates.check(model, "OptunaSearch")
    before = _of_optimizer(model)
    wrapped = vars(wrapped_lib.base_optimizer(model.optimizer))
    known = {*wrapped, *settings_lib.LIMITS}
    new = (set(settings) & known) - {_RATE, *before}
    scalars = [
      entry
      for entry in group_state.GroupState(model.optimizer, model, False).entries
      if not entry.is_shared and not entry.shape.rank
    ]
    paths = [entry.name for entry in scalars]
    weights = [entry.variable for entry in scalars]
    names = set(settings) - {_RATE, *before, *new}
    # The numbers in the second list do not depend on earlier models.
    self._weights = max(
      (
        {name: _ending_with(name, listed, weights) for name in names}
        for listed in (paths, variables_lib.renumbered(paths))
      ),
      key=lambda found: sum(map(bool, found.values())),
    )
    for name, found in self._weights.items():
      if not found:
        numbers = [n for n, v in wrapped.items() if validation.is_number(v)]
        candidates = [_RATE, *before, *numbers, *settings_lib.LIMITS]
        candidates += paths
        candidates = [n for n in candidates if not n.startswith("_")]
        ends = [n.rsplit("/", 1)[-1] for n in candidates]
        close = difflib.get_close_matches(name, ends, 1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
          f"Nothing has the name {name!r} that `suggest` returns{meant}. Return"
          " a setting of the optimizer, or the end of the path of non-trainable"
          f" scalar weights of the model: {', '.join(candidates)}."
        )
    if not new:
      return
    if not optimizer_state.pipelines_of(model.optimizer):
      kind = type(model.optimizer).__name__
      raise ValueError(
        f"`suggest` returns {sorted(new)}, but {kind} has one number for all"
        f" models. Use CrossShardOptimizer({kind}(...))."
      )
    rows = {name: [settings[name]] * num_models for name in new}
    model.optimizer.per_model = {**before, **rows}
    if model.train_function is not None:
      # An earlier `fit` has traced a step that does not read them.
      model.make_train_function(force=True)

  def variables(self, optimizer: Any) -> list[Any]:
    """Returns the variables that are settings, not state of a trial."""
    settings = optimizer_state.rows_of_models(optimizer)
    if self._sets_rate:
      settings += nested_lib.rate_variables(optimizer)
    return [*settings, *itertools.chain(*self._weights.values())]

  def write(self, model: Any, running: RunningTrials) -> None:
    """Sets the settings of all models to those of their trials."""
    if self._sets_rate:
      rates = per_model_rates.read(model)
      per_model_rates.write(model, _merged(_RATE, rates, running))
    before = _of_optimizer(model)
    rows = {name: _merged(name, row, running) for name, row in before.items()}
    if rows != before:
      model.optimizer.per_model = rows
    for name, variables in self._weights.items():
      for variable in variables:
        row = per_model_rates.read_variable(model, variable)
        per_model_rates.write_variable(
          model, variable, _merged(name, row, running)
        )


def _ending_with(
  name: str, paths: Sequence[str], weights: Sequence[Any]
) -> list[Any]:
  """Returns the weights whose path ends with the name."""
  both = zip(paths, weights, strict=True)
  return [v for path, v in both if f"/{path}".endswith(f"/{name}")]


def _of_optimizer(model: Any) -> dict[str, list[float]]:
  return getattr(model.optimizer, "per_model", None) or {}


def _merged(
  name: str, row: Sequence[float], running: RunningTrials
) -> list[float]:
  """Returns a row with the numbers of the trials that models train."""
  return [
    old if trial is None else trial.settings.get(name, old)
    for old, trial in zip(row, running, strict=True)
  ]
