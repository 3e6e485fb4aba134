"""The weights of the best trial, in memory or in files."""

import dataclasses

from etils import epath

from tf_cross_shard._src.models import archive, group_state, plain_models
from tf_cross_shard._src.search import study as study_lib


class BestWeights:
  """Keeps the weights of the best complete trial of this process."""

  def __init__(self, sign: float, folder: epath.Path | None) -> None:
    self.best: study_lib.Running | None = None
    self.weights: dict[str, archive.Array] = {}
    self._sign = sign
    self._folder = folder

  def may_win(self, running: study_lib.Running) -> bool:
    """Returns whether a trial is better than the best complete one."""
    sign = self._sign
    return self.best is None or sign * running.best > sign * self.best.best

  def finish(
    self,
    running: study_lib.Running,
    state: group_state.GroupState,
    group: int,
    kept: group_state.Values,
  ) -> None:
    """Keeps the weights of a group's complete trial if it is the best one."""
    if not self.may_win(running):
      return
    members = state.groups.assignment[group]
    self.best = running
    self.weights = {
      entry.key: plain_models.merged(
        entry, [kept[entry.key][replica] for replica in members]
      )
      for entry in state.entries
    }
    if self._folder is not None:
      archive.make_folder(self._folder)
      about = {
        "format": group_state.FORMAT,
        "group_assignment": [[0]],
        "names": state.names,
        "rates": state.rates,
        "values": dataclasses.asdict(running),
      }
      key_in_file = group_state.key_in_file
      arrays = {key_in_file(k, 0): v for k, v in self.weights.items()}
      archive.write(self._path(self._folder, running.number), arrays, about)

  def load(self, number: int) -> dict[str, archive.Array]:
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
      return {key: file[group_state.key_in_file(key, 0)] for key in names}

  @staticmethod
  def _path(folder: epath.Path, number: int) -> epath.Path:
    return folder / f"trial_{number}.npz"
