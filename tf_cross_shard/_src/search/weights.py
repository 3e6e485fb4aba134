"""The weights of the best trial, in memory or in files."""

import dataclasses
from collections.abc import Mapping, Sequence

from etils import epath

from tf_cross_shard._src.models import archive, group_state, plain_models
from tf_cross_shard._src.search import study as study_lib

Weights = dict[str, archive.Array]


class BestWeights:
  """Keeps the weights of the best epoch of each trial that may be the best.

  `kept` has those of each group's trial, or {} if the trial is worse than
  `best`, the best complete one of this process.
  """

  def __init__(self, sign: float, folder: epath.Path | None) -> None:
    """Takes 1.0 as `sign` if a larger value is better, else -1.0."""
    self.kept: list[Weights] = []
    self.best: study_lib.Running | None = None
    self.weights: Weights = {}
    self.rates: dict[str, int] = {}
    self._sign = sign
    self._folder = folder

  def may_win(self, running: study_lib.Running) -> bool:
    """Returns whether a trial is better than the best complete one."""
    sign = self._sign
    return self.best is None or sign * running.best > sign * self.best.best

  def keep(self, groups: Sequence[int], state: group_state.GroupState) -> None:
    """Keeps the present weights of groups."""
    for entry in state.entries:
      copies = state.copies.here(entry.variable)
      for group in groups:
        of_members = [copies[r] for r in state.groups.assignment[group]]
        merged = plain_models.merged(entry, of_members)
        self.kept[group][entry.name] = merged

  def finish(
    self, group: int, running: study_lib.Running, is_complete: bool
  ) -> None:
    """Keeps the weights of a trial that is the best complete one so far."""
    weights, self.kept[group] = self.kept[group], {}
    if not (is_complete and weights and self.may_win(running)):
      return
    self.best, self.weights = running, weights
    if self._folder is not None:
      archive.make_folder(self._folder)
      about = {
        "format": group_state.FORMAT,
        "group_assignment": [[0]],
        "names": list(weights),
        "rates": self.rates,
        "values": dataclasses.asdict(running),
      }
      arrays = {group_state.key(n, 0): array for n, array in weights.items()}
      archive.write(self._path(self._folder, running.number), arrays, about)

  def load(self, number: int) -> Weights:
    """Returns the weights of a complete trial."""
    if self.best is not None and self.best.number == number:
      return self.weights
    path = self._folder and self._path(self._folder, number)
    if path is None or not path.exists():
      raise ValueError(
        f"The best trial is {number}, whose weights this process does not have."
        " Pass `folder`, one folder for all processes that share the study."
      )
    with archive.reading(path) as file:
      names = file.about["names"]
      return {name: file[group_state.key(name, 0)] for name in names}

  @staticmethod
  def _path(folder: epath.Path, number: int) -> epath.Path:
    return folder / f"trial_{number}.npz"

  def state(self) -> dict[str, Weights]:
    groups = {f"kept_{i}": kept for i, kept in enumerate(self.kept)}
    return {"weights": self.weights, **groups}

  def set_state(
    self, best: study_lib.Running | None, state: Mapping[str, Weights]
  ) -> None:
    self.best, self.weights = best, state.get("weights", {})
    self.kept = [state.get(f"kept_{i}", {}) for i in range(len(self.kept))]
