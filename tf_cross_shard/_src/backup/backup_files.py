"""The backups in one folder: the first worker writes them, all workers read."""

import re
import secrets
from typing import Any, Final

import tensorflow as tf
from absl import logging
from etils import epath

from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard._src.models import archive, group_state

_NAME: Final = re.compile(r"epoch_(\d+)(?:_batch_(\d+))?\.npz")
_PARTIAL: Final = ".partial"  # The suffix of files that are not backups yet.


class BackupFiles:
  """The backups in a folder. All workers call the methods."""

  def __init__(
    self, folder: epath.Path, strategy: tf.distribute.Strategy
  ) -> None:
    """Creates the folder, and deletes incomplete files in it."""
    self.folder = folder
    self._workers = workers_lib.of_strategy(strategy)
    self.is_first = self._workers is None or self._workers.index == 0
    with group_state.raising_on_all(self._workers, "creating backup_dir"):
      if self.is_first:
        archive.make_folder(folder)
        for path in archive.list_folder(folder):
          if path.suffix == _PARTIAL:
            archive.delete(path)
    if self._workers is not None:
      self._check_shared(self._workers)

  def _check_shared(self, workers: workers_lib.Workers) -> None:
    """Raises an error on all workers unless all see a file of the first one."""
    topic = "checking backup_dir"
    with group_state.raising_on_all(workers, topic) as outcomes:
      name = outcomes[0]["name"] = f".{secrets.token_hex(4)}{_PARTIAL}"
      if self.is_first:
        archive.write_bytes(self.folder / name, b"")
    path = self.folder / outcomes[0]["name"]
    try:
      with (
        group_state.raising_on_all(workers, topic),
        archive.as_os_errors(path),
      ):
        if not path.exists():
          raise archive.CheckpointError(
            f"`backup_dir` is {self.folder}, in which {workers.own_name} does"
            f" not see what {workers.names[0]} writes. Name one folder that all"
            " workers see, on a network file system or a bucket such as gs://."
          )
    finally:
      if self.is_first:
        archive.delete(path)

  def newest(self) -> epath.Path | None:
    """Returns the newest backup, or None if there is no complete one."""
    topic = "the choice of a backup"
    with group_state.raising_on_all(self._workers, topic) as outcomes:
      if self.is_first:
        outcomes[0]["name"] = self._newest_name()
    name = outcomes[0]["name"]
    return None if name is None else self.folder / name

  def _newest_name(self) -> str | None:
    for path in reversed(self._backups()):
      # On file systems that copy a file to rename it, a crash may have
      # interrupted the copying.
      if archive.is_complete(path):
        return path.name
      logging.warning("%s is incomplete, and is ignored.", path)
    return None

  def path(self, epoch: int, batch: int) -> epath.Path:
    place = f"epoch_{epoch}_batch_{batch}" if batch else f"epoch_{epoch}"
    return self.folder / f"{place}.npz"

  def prune(self, keep: int) -> None:
    if self.is_first:
      for path in self._backups()[:-keep]:
        archive.delete(path)

  def delete(self) -> None:
    """Deletes all backups, when `fit` ends."""
    # Wait for all workers. If one of them is lost before this point, the
    # backups are still needed to resume.
    workers_lib.compare_workers(self._workers, "the end of fit")
    if self.is_first:
      for path in self._backups():
        archive.delete(path)

  def _backups(self) -> list[epath.Path]:
    paths = archive.list_folder(self.folder)
    return sorted(filter(_place, paths), key=_place)


def _place(path: epath.Path) -> Any:
  """Returns how many epochs are complete, and batches; None for other files."""
  match = _NAME.fullmatch(path.name)
  return match and (int(match[1]), int(match[2] or 0))
