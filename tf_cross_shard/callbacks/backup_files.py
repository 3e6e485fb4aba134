"""The backups of all workers, and from which of them all go on.

    worker_0   epoch_1   epoch_2   epoch_3      of two workers
    worker_1   epoch_1   epoch_2                killed before it wrote the third

Both go on from epoch 2; so does a single worker that sees both folders. Where
it sees the first one only, it goes on from epoch 3, if there is one group.
"""

import contextlib
import json
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, Final, TypeVar

import tensorflow as tf

from tf_cross_shard.coordination import agreement, errors
from tf_cross_shard.replica_state import archive

_NAME: Final = re.compile(r"epoch_(\d+)(?:_batch_(\d+))?\.npz")
_FOLDER: Final = re.compile(r"worker_(\d+)")
_thread: Final = futures.ThreadPoolExecutor(1, "backup")  # begins when used
_in_flight: Final[list[futures.Future[None]]] = []
_Checkpoint = TypeVar("_Checkpoint", int, str)


def newest_common(
  strategy: tf.distribute.Strategy, numbers: Iterable[int]
) -> int | None:
  """Returns the newest checkpoint that all workers have.

  `BackupAndRestore` goes on from it; so may a loop of your own. All workers
  call it, each with its own checkpoints:

  >>> newest_common(tf.distribute.get_strategy(), [100, 200])
  200

  Args:
    strategy: The strategy that the workers train under.
    numbers: Of the checkpoints of this worker, say the steps they were made at.

  Returns:
    The greatest number that every worker has; None where no worker has any.

  Raises:
    DisagreementError: If there are checkpoints, and none is common to all.
    MissingWorkerError: If a worker does not come.
  """
  own = sorted({int(number) for number in numbers})
  return max(_common(strategy, own), default=None)


def _common(
  strategy: tf.distribute.Strategy, own: Sequence[_Checkpoint]
) -> set[_Checkpoint]:
  """Returns the checkpoints that all workers have, as `newest_common` says."""
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
    f"There is no checkpoint that all workers have: {held}. Copy those that"
    " are missing to their workers, or delete all to start anew."
  )


def _of_all(
  strategy: tf.distribute.Strategy, own: Sequence[_Checkpoint]
) -> list[Sequence[_Checkpoint]]:
  """Returns the checkpoints of each worker."""
  workers = agreement.of_strategy(strategy)
  if workers is None:
    return [own]
  topic = "the choice of a checkpoint"
  texts = agreement.exchange(workers, topic, json.dumps(own))
  return list(map(json.loads, texts))


class BackupFiles:
  """The backups of this worker, and those of others that it sees.

  Attributes:
    folder: That of this worker.
    is_first: Whether it is the first worker, or the only one.
  """

  def __init__(
    self, backup_dir: pathlib.Path, strategy: tf.distribute.Strategy
  ) -> None:
    """Makes the folder, or fails now; clears it of what a crash has left."""
    self._all, self._strategy = backup_dir, strategy
    workers = self._workers = agreement.of_strategy(strategy)
    self._index = workers.index if workers else 0
    self._count = len(workers.names) if workers else 1
    self.is_first = self._index == 0
    self.folder = backup_dir / f"worker_{self._index}"
    self.folder.mkdir(parents=True, exist_ok=True)
    futures.wait(_in_flight)  # of a `fit` that failed
    _in_flight.clear()
    for path in self.folder.glob(".*.partial"):
      path.unlink()

  def newest(self) -> list[pathlib.Path]:
    """Returns the files of the newest backup of all workers; the own one first.

    Own files that are later are deleted: they are of a run that has not been.
    """
    seen = self._seen()
    whole = [key for key in seen if self._is_whole(key, seen[key])]
    # The files of some of other workers have one group, if not all.
    held = {*whole, *(key for key in seen if " of " in key)}
    common = _common(self._strategy, sorted(held))
    if not common:
      return []
    whole_for_all = set.intersection(*map(set, _of_all(self._strategy, whole)))
    newest = max(common & whole_for_all or common, key=_place)
    for path in self._own():
      if _place(path.name) > _place(newest):
        path.unlink()
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
    """Writes a backup."""
    archive.write(self.folder / f"{name}.npz", arrays, about)

  def write_beside(self, *arguments: Any) -> None:
    """Does so in a thread, which the end of the process waits for."""
    _in_flight.append(_thread.submit(self.write, *arguments))

  def finish(self) -> None:
    """Waits for the thread; raises its error."""
    while _in_flight:
      _in_flight.pop().result()

  def prune(self, keep: int) -> None:
    """Deletes this worker's backups but the last, once all have these."""
    for path in self._own()[:-keep]:
      path.unlink()

  def delete(self) -> None:
    """Deletes this worker's backups, and those of workers that are no more."""
    if self._workers is not None:
      # A worker lost before that needs the files of the others.
      agreement.agree(self._workers, "the end of fit", [])
    shutil.rmtree(self.folder, ignore_errors=True)
    for index, folder in self._folders().items():
      if self.is_first and index >= self._count:
        shutil.rmtree(folder, ignore_errors=True)

  def _own(self) -> list[pathlib.Path]:
    """Returns this worker's backups, the newest one last."""
    paths = filter(lambda p: _NAME.fullmatch(p.name), self.folder.iterdir())
    return sorted(paths, key=lambda path: _place(path.name))

  def _folders(self) -> dict[int, pathlib.Path]:
    """Returns the folders that this worker sees, by their workers."""
    matches = [(_FOLDER.fullmatch(p.name), p) for p in self._all.iterdir()]
    return {int(match[1]): path for match, path in matches if match}

  def _seen(self) -> dict[str, dict[int, pathlib.Path]]:
    """Returns the files of each backup by worker; other numbers of workers."""
    seen: dict[str, dict[int, pathlib.Path]] = {}
    for index, folder in self._folders().items():
      # Another worker may be deleting what `fit` before this one has left.
      with contextlib.suppress(FileNotFoundError):
        for path in filter(lambda p: _NAME.fullmatch(p.name), folder.iterdir()):
          count = archive.about(path).get("workers", self._count)
          key = path.name
          if count != self._count:
            key += f" of {count} workers"
          seen.setdefault(key, {})[index] = path
    return seen

  def _is_whole(self, key: str, files: dict[int, pathlib.Path]) -> bool:
    """Returns whether this worker has all of a backup that it may need."""
    count = re.search(r" of (\d+)", key)
    if count is None:
      return self._index in files
    return set(range(int(count[1]))) <= set(files)


def _place(name: str) -> tuple[int, int]:
  """Returns the epochs, and batches of the next, behind a backup."""
  match = _NAME.match(name)
  assert match is not None
  return int(match[1]), int(match[2] or 0)
