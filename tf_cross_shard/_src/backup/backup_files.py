"""The backup files of all workers, and the choice of the one to resume from.

    worker_0   epoch_1   epoch_2   epoch_3      two workers
    worker_1   epoch_1   epoch_2                killed before it wrote epoch_3

Both workers resume from epoch 2. A single worker that sees both folders also
resumes from epoch 2. A single worker that sees the folder worker_0 only resumes
from epoch 3, if there is one group: then each file holds the whole state.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import tensorflow as tf
from absl import logging
from etils import epath

from tf_cross_shard._src.core.workers import agreement, errors
from tf_cross_shard._src.replica_state import archive
from tf_cross_shard._src.replica_state import paths as paths_lib

_NAME: Final = re.compile(r"epoch_(\d+)(?:_batch_(\d+))?\.npz")
_FOLDER: Final = re.compile(r"worker_(\d+)")
_Checkpoint = TypeVar("_Checkpoint", int, str)


def newest_common(
  strategy: tf.distribute.Strategy, numbers: Iterable[int]
) -> int | None:
  """Returns the newest checkpoint that all workers have.

  `BackupAndRestore` uses this rule. Call the function where you write
  checkpoints in a training loop of your own, to find the one to resume from.
  All workers call it, each with its own checkpoints:

  >>> import tensorflow as tf
  >>> from tf_cross_shard import multi_worker
  >>> multi_worker.newest_common(tf.distribute.get_strategy(), [100, 200])
  200

  Args:
    strategy: The strategy that the workers train under.
    numbers: The numbers of this worker's checkpoints, for example the steps at
      which they were written.

  Returns:
    The greatest number that every worker has, or None if no worker has any.

  Raises:
    DisagreementError: If there are checkpoints, but none that every worker has.
    MissingWorkerError: If a worker does not connect.
  """
  own = sorted({int(number) for number in numbers})
  return max(_common(strategy, own), default=None)


def _common(
  strategy: tf.distribute.Strategy, own: Sequence[_Checkpoint]
) -> set[_Checkpoint]:
  """Returns the checkpoints that all workers have.

  Raises `DisagreementError` if there are checkpoints, but none in common.
  """
  of_all = _of_all(strategy, own)
  common = set.intersection(*map(set, of_all))
  workers = agreement.of_strategy(strategy)
  if workers is None or common or not any(of_all):
    return common
  held = "; ".join(
    f"{name} has {json.dumps(others)}"
    for name, others in zip(workers.names, of_all, strict=True)
  )
  raise errors.DisagreementError(
    f"No checkpoint exists on all workers: {held}. Copy the missing checkpoints"
    " to their workers, or delete all of them to train from the beginning."
  )


def _of_all(
  strategy: tf.distribute.Strategy, own: Sequence[_Checkpoint]
) -> list[Sequence[_Checkpoint]]:
  workers = agreement.of_strategy(strategy)
  if workers is None:
    return [own]
  topic = "the choice of a checkpoint"
  texts = agreement.exchange(workers, topic, json.dumps(own))
  return list(map(json.loads, texts))


class BackupFiles:
  """The backups of this worker, and those of other workers that it can see.

  Attributes:
    folder: The folder of this worker.
    is_first: Whether this worker is the first one, or the only one.
  """

  def __init__(
    self, backup_dir: epath.Path, strategy: tf.distribute.Strategy
  ) -> None:
    """Creates the folder of this worker, and deletes incomplete files in it.

    An error of the file system is thus raised before training begins.
    """
    self._all, self._strategy = backup_dir, strategy
    workers = self._workers = agreement.of_strategy(strategy)
    self._index = workers.index if workers else 0
    self._count = len(workers.names) if workers else 1
    self.is_first = self._index == 0
    self.folder = backup_dir / f"worker_{self._index}"
    paths_lib.make_folder(self.folder)
    for path in paths_lib.list_folder(self.folder):
      if path.suffix == ".partial":
        paths_lib.delete(path)

  def newest(self) -> list[epath.Path]:
    """Returns the files of the newest backup; this worker's own file is first.

    This is the newest backup that all workers have. The list is empty if there
    is no such backup. Newer files of this worker are deleted: training resumes
    before them and will write them again.
    """
    seen = self._seen()
    whole = [key for key in seen if self._has_all_files(key, seen[key])]
    # Also accept backups of a different number of workers, even if this worker
    # does not see all of their files: with one group, any file is enough.
    held = {*whole, *(key for key in seen if " of " in key)}
    common = _common(self._strategy, sorted(held))
    if not common:
      return []
    whole_for_all = set.intersection(*map(set, _of_all(self._strategy, whole)))
    newest = max(common & whole_for_all or common, key=_place)
    for path in self._own():
      if _place(path.name) > _place(newest):
        paths_lib.delete(path)
    files = seen[newest]
    return [
      files[i] for i in sorted(files, key=lambda i: (i != self._index, i))
    ]

  def write(
    self,
    name: str,
    arrays: Mapping[str, archive.Array],
    about: Mapping[str, Any],
  ) -> None:
    """Writes a backup into the folder of this worker."""
    archive.write(self.folder / f"{name}.npz", arrays, about)

  def prune(self, keep: int) -> None:
    """Keeps only the last `keep` backups of this worker.

    Call it when every worker has written the last backup.
    """
    for path in self._own()[:-keep]:
      paths_lib.delete(path)

  def delete(self) -> None:
    """Deletes the backups of this worker, when `fit` ends.

    The first worker also deletes the backups of workers that no longer exist.
    """
    # Wait for all workers. If one of them is lost before this point, the
    # backups of the others are still needed to resume.
    agreement.compare_workers(self._workers, "the end of fit")
    paths_lib.delete_tree(self.folder)
    for index, folder in self._folders().items():
      if self.is_first and index >= self._count:
        paths_lib.delete_tree(folder)

  def _own(self) -> list[epath.Path]:
    """Returns the backups of this worker, the newest last."""
    return sorted(_backups_in(self.folder), key=lambda path: _place(path.name))

  def _folders(self) -> dict[int, epath.Path]:
    """Returns the workers' folders that this worker sees, by worker number."""
    folders = paths_lib.list_folder(self._all)
    matches = [(_FOLDER.fullmatch(path.name), path) for path in folders]
    return {int(match[1]): path for match, path in matches if match}

  def _seen(self) -> dict[str, dict[int, epath.Path]]:
    """Returns the visible files of each backup, by backup and worker number.

    The key of a backup is its file name. If it was made by another number of
    workers, that number is appended: "epoch_2.npz of 4 workers".
    """
    seen: dict[str, dict[int, epath.Path]] = {}
    for index, folder in self._folders().items():
      # Another worker may be deleting files that an earlier `fit` left.
      with contextlib.suppress(FileNotFoundError):
        for path in _backups_in(folder):
          # On file systems that copy a file to rename it, a crash may have
          # interrupted the copying.
          if not archive.is_complete(path):
            logging.warning("%s is incomplete, and is ignored.", path)
            continue
          count = archive.about(path).get("workers", self._count)
          key = path.name
          if count != self._count:
            key += f" of {count} workers"
          seen.setdefault(key, {})[index] = path
    return seen

  def _has_all_files(self, key: str, files: dict[int, epath.Path]) -> bool:
    """Returns whether this worker sees all files of a backup that it may need.

    It needs its own file only, unless another number of workers made the
    backup: then it needs the files of all of them.
    """
    count = re.search(r" of (\d+)", key)
    if count is None:
      return self._index in files
    return set(range(int(count[1]))) <= set(files)


def _backups_in(folder: epath.Path) -> list[epath.Path]:
  """Returns the backups in a folder."""
  paths = paths_lib.list_folder(folder)
  return [path for path in paths if _NAME.fullmatch(path.name)]


def _place(name: str) -> tuple[int, int]:
  """Returns the number of complete epochs, and of batches in the next one."""
  match = _NAME.match(name)
  assert match is not None
  return int(match[1]), int(match[2] or 0)
