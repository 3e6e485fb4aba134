"""The trials of one process in an Optuna study.

    ask ─▶ running ─ report ─▶ pruned, failed or complete ─ tell

A killed process leaves trials in the study that its backup does not have: see
`Trials.resume`.
"""

import contextlib
import dataclasses
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tf_cross_shard._src.core import validation
from tf_cross_shard._src.models import archive

# The attribute of a trial that says which `fit` trains it.
_FIT: Final = "tf_cross_shard_fit"
# The attribute of a trial that says where the program keeps its backups: the
# same for a program that was killed and started again.
_BACKUPS: Final = "tf_cross_shard_backups"
# The attribute of a failed trial that does not count, because its settings were
# asked for again, or because something else ended `fit`.
_AGAIN: Final = "tf_cross_shard_again"
# How often `suggest` may prune before its names are known.
_MOST_PRUNED: Final = 1000


def import_optuna() -> Any:
  """Returns the module; raises an `ImportError` that names the extra."""
  try:
    import optuna
  except ImportError as error:
    raise ImportError(
      "OptunaSearch needs Optuna. Run: pip install 'tf-cross-shard[optuna]'"
    ) from error
  return optuna


@dataclasses.dataclass
class Running:
  """A trial that a group trains.

  `reported` is the last epoch that a killed process reported after its backup.
  `is_over`: it finished the trial then, which trains again for its weights.
  """

  number: int
  settings: dict[str, float]
  values: list[float] = dataclasses.field(default_factory=list)
  reported: int = -1
  is_over: bool = False
  best_epoch: int = -1

  @property
  def best(self) -> float:
    return self.values[self.best_epoch]


class Trials:
  """Asks a study for trials, and tells it what came of them.

  `fit` identifies the `fit` of the trials. `backups`, the folder of backups, is
  the program's name when it is started again.
  """

  def __init__(
    self, study: Any, suggest: Callable[[Any], Mapping[str, float]]
  ) -> None:
    self.study = study
    self.fit = uuid.uuid4().hex
    self._suggest = suggest
    self._names: set[str] = set()
    self._optuna = import_optuna()
    self._states = self._optuna.trial.TrialState
    self.begin("")

  def begin(self, backups: str) -> None:
    """Begins a `fit`, whose backup has what an earlier `fit` left running."""
    self.backups = backups
    self._trials: dict[int, Any] = {}  # The running ones, by number.

  @property
  def sign(self) -> float:
    """1.0 if the study maximizes, -1.0 if it minimizes."""
    return 1.0 if self.study.direction.name == "MAXIMIZE" else -1.0

  @property
  def asked(self) -> int:
    """How many trials this program has asked for, earlier fits included."""
    ended = [
      trial
      for trial in self._mine()
      if trial.state.is_finished() and _AGAIN not in trial.user_attrs
    ]
    return len(ended) + len(self._trials)

  def probe(self) -> dict[str, float]:
    """Returns the settings of a trial that is not one of the study."""
    level = self._optuna.logging.get_verbosity()
    self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
    scratch = self._optuna.create_study()
    self._optuna.logging.set_verbosity(level)
    for _ in range(_MOST_PRUNED):
      with contextlib.suppress(self._optuna.TrialPruned):
        return self._checked(self._suggest(scratch.ask()))
    raise ValueError(
      f"`suggest` raised TrialPruned for {_MOST_PRUNED} trials in a row. Let it"
      " raise the error for settings only that are not worth a trial."
    )

  def ask(self, most: int) -> Running | None:
    """Returns the next trial; None if the study was asked for `most` trials."""
    while self.asked < most:
      trial = self.study.ask()
      trial.set_user_attr(_FIT, self.fit)
      trial.set_user_attr(_BACKUPS, self.backups)
      self._trials[trial.number] = trial
      try:
        return Running(trial.number, self._checked(self._suggest(trial)))
      except self._optuna.TrialPruned as error:
        words = f"pruned by `suggest` ({error})"
        self._tell(trial.number, words, state=self._states.PRUNED)
    return None

  def report(self, running: Running, value: float, epochs: int) -> bool:
    """Reports the value of an epoch; returns whether the trial has ended."""
    step = len(running.values)
    running.values.append(value)
    if math.isfinite(value) and (
      running.best_epoch < 0 or self.sign * (value - running.best) > 0
    ):
      running.best_epoch = step
    if running.is_over:
      return step >= running.reported
    number = running.number
    trial = self._trials[number]
    if step > running.reported:
      trial.report(value, step)
    if not math.isfinite(value):
      self._tell(number, "failed", state=self._states.FAIL)
    elif step + 1 == epochs:
      self._tell(number, f"finished with value: {running.best}", running.best)
    elif step >= running.reported and trial.should_prune():
      state = self._states.PRUNED
      self._tell(number, f"pruned after {step + 1} epochs", state=state)
    else:
      return False
    return True

  def fail_all(self) -> int:
    """Marks the running trials as failed, and returns their number."""
    running = list(self._trials)
    for number in running:
      self._trials[number].set_user_attr(_AGAIN, True)
      self._tell(number, "failed", state=self._states.FAIL)
    return len(running)

  def end(self) -> None:
    """Fails what is left when the search is deleted or the program ends."""
    if not self.backups:
      self.fail_all()

  def _tell(self, number: int, words: str, *value: Any, **how: Any) -> None:
    trial = self._trials.pop(number)
    self.study.tell(trial, *value, **how)
    logger = self._optuna.logging.get_logger("optuna.tf_cross_shard")
    logger.info("Trial %d %s. %s", number, words, trial.params)

  def resume(self, fit: str, running: Sequence[Running | None]) -> None:
    """Continues after a kill, with the trials that were running in a backup."""
    self.fit = fit
    trials = {trial.number: trial for trial in self._mine()}
    for each in filter(None, running):
      if each.number not in trials:
        raise archive.CheckpointError(
          f"The backup has trial {each.number}, but `study` does not. Use a"
          " study in a file or a database, such as"
          " create_study(storage='sqlite:///study.db', load_if_exists=True)."
        )
      found = trials[each.number]
      each.is_over = found.state.is_finished()
      each.reported = max(found.intermediate_values, default=-1)
      if not each.is_over:
        self._trials[each.number] = self._trial(found)

  def ask_again(self) -> None:
    """Asks again for what a kill left running that no backup has."""
    for trial in self._mine():
      if not trial.state.is_finished() and trial.number not in self._trials:
        self._trial(trial).set_user_attr(_AGAIN, True)
        self.study.tell(trial.number, state=self._states.FAIL)
        self.study.enqueue_trial(trial.params)

  def _mine(self) -> list[Any]:
    return [
      trial
      for trial in self.study.get_trials(deepcopy=False)
      if trial.user_attrs.get(_FIT) == self.fit
      or (self.backups and trial.user_attrs.get(_BACKUPS) == self.backups)
    ]

  def _trial(self, frozen: Any) -> Any:
    return self._optuna.trial.Trial(self.study, frozen._trial_id)  # noqa: SLF001

  def _checked(self, settings: Any) -> dict[str, float]:
    """Returns the settings of a trial, or raises `ValueError`."""
    is_valid = isinstance(settings, Mapping) and all(
      isinstance(name, str)
      and validation.is_number(value)
      and math.isfinite(value)
      for name, value in settings.items()
    )
    if not is_valid or not settings:
      raise ValueError(
        "`suggest` must return a dictionary of finite numbers, such as"
        f" {{'learning_rate': 0.1}}; got {settings!r}. Of a categorical choice,"
        " return its index."
      )
    names = self._names = self._names or set(settings)
    if names != set(settings):
      raise ValueError(
        "`suggest` must return the same names for each trial; got"
        f" {sorted(settings)} after {sorted(names)}. Return a value for each"
        " name, such as 0.0."
      )
    return {name: float(value) for name, value in settings.items()}
