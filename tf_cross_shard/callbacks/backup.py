"""Going on after a crash: from a checkpoint that all workers have.

A worker that is killed may not have written what the others have written. So
each keeps its last two files, in a folder of its own, and all go on from the
newest that is common to them.
"""

import json
import pathlib
import re
import shutil
import types
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard.callbacks import base
from tf_cross_shard.coordination import agreement, errors
from tf_cross_shard.replica_state import checkpoint, group_models, group_state

_KEPT: Final = 2  # backups of each worker
_CALLBACKS: Final = "callbacks/"  # before the names of their state in a file
_NAME: Final = re.compile(r"epoch_(\d+)\.npz")


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
  workers = agreement.of_strategy(strategy)
  if workers is None:
    return own[-1] if own else None
  texts = agreement.exchange(
    workers, "the choice of a checkpoint", json.dumps(own)
  )
  common = set.intersection(*(set(json.loads(text)) for text in texts))
  if common or not any(map(json.loads, texts)):
    return max(common, default=None)
  held = "; ".join(
    f"{name} has {text}"
    for name, text in zip(workers.names, texts, strict=True)
  )
  raise errors.DisagreementError(
    f"There is no checkpoint that all workers have: {held}. Copy those that"
    " are missing to their workers, or delete all to start anew."
  )


class BackupAndRestore(base.GroupCallback):
  """Saves after each epoch, and makes the next `fit` go on from there.

  In the place of `tf.keras.callbacks.BackupAndRestore`, for several workers and
  for groups: each worker has files of its own, which no other overwrites, and
  all go on from the newest that all have. Groups keep their own weights and
  slots, and replicas what else they differ in, on one machine too. The states
  of random numbers, of dropout say, are saved too; Keras' own leaves them out.
  So is what this package's other callbacks know, best values, wait counts and
  stopped groups; they stand before this one in the list. A file replaces none
  before it is whole, and the last two are kept.

  >>> import tempfile
  >>> import numpy as np
  >>> model = tf.keras.Sequential(
  ...   [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ... )
  >>> model.compile("sgd", "mse")
  >>> x = np.ones([4, 1])
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   backup = BackupAndRestore(directory, delete_checkpoint=False)
  ...   _ = model.fit(x, x, epochs=2, verbose=0, callbacks=[backup])
  ...   history = model.fit(x, x, epochs=3, verbose=0, callbacks=[backup])
  >>> history.epoch
  [2]

  `fit` raises, on all workers alike, a `replica_state.CheckpointError` when it
  begins, if the backup is damaged, or of another model or other groups (one
  group may have another size), a `DisagreementError` if none is common to all,
  a `MissingWorkerError` if a worker does not come, and errors as of
  `replica_state.save`.
  """

  def __init__(self, backup_dir: Any, delete_checkpoint: bool = True) -> None:
    """Names the place.

    Args:
      backup_dir: A directory, which workers may or may not share. Each writes
        to `worker_<number>` in it: files as of `replica_state.save`, with its
        own groups only.
      delete_checkpoint: Delete this worker's files when `fit` ends.

    Raises:
      ValueError: If `backup_dir` is empty, or a URL.
    """
    super().__init__()
    if not str(backup_dir) or "://" in str(backup_dir):
      raise ValueError(
        "`backup_dir` must name a directory of a file system; got"
        f" {str(backup_dir)!r}. Mount the storage, or use a local one."
      )
    self._backup_dir = pathlib.Path(backup_dir)
    self._delete = delete_checkpoint

  def on_train_begin(self, logs: Any = None) -> None:
    """Restores the newest backup that all workers have."""
    super().on_train_begin(logs)
    strategy, optimizer = self.model.distribute_strategy, self.model.optimizer
    later = [
      type(callback).__name__
      for callback in self.same_fit()
      if callback._place_in_list > self._place_in_list
      and type(callback).state is not base.GroupCallback.state
    ]
    if later:
      raise ValueError(
        f"BackupAndRestore saves what callbacks know; {', '.join(later)} comes"
        " after it, and would be an epoch behind. Put BackupAndRestore last."
      )
    if not hasattr(optimizer, "build"):
      raise ValueError(
        "BackupAndRestore needs an optimizer with a method build(); got"
        f" {type(optimizer).__name__}. Encapsulate it in a CrossShardOptimizer."
      )
    with strategy.scope():
      optimizer.build(self.model.trainable_variables)
    self._workers = agreement.of_strategy(strategy)
    index = self._workers.index if self._workers else 0
    self._folder = self._backup_dir / f"worker_{index}"
    self._folder.mkdir(parents=True, exist_ok=True)  # or fails now
    for path in self._folder.glob(".*.partial"):  # of a crash
      path.unlink()
    backups = self._backups()
    newest = newest_common(strategy, backups)
    _begin_at(self.model, None)
    if newest is not None:
      values, arrays = checkpoint.restore_file(
        backups[newest], optimizer, self.model
      )
      base.restore_state(
        self.same_fit(),
        {name.removeprefix(_CALLBACKS): arrays[name] for name in arrays},
      )
      # All groups may have stopped, and only the end of `fit` be left.
      epochs = self.params["epochs"] if self.model.stop_training else 0
      _begin_at(self.model, max(values["epoch"], epochs))
      for number, path in backups.items():
        if number > newest:  # of a run that has not been
          path.unlink()

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Saves, and deletes this worker's backups but the last two."""
    state = group_state.GroupCopies(self.model.optimizer, self.model)
    path = self._folder / f"epoch_{epoch + 1}.npz"
    state.agree("a backup")
    arrays = state.arrays(state.apart("a backup"), own=True)
    for name, value in base.collect_state(self.same_fit()).items():
      arrays[_CALLBACKS + name] = np.asarray(value)
    state.write(path, "a backup", arrays, {"epoch": epoch + 1})
    backups = self._backups()
    for number in sorted(backups)[:-_KEPT]:
      backups[number].unlink()

  def on_train_end(self, logs: Any = None) -> None:
    """Deletes this worker's files, if they are not to be kept."""
    _begin_at(self.model, None)
    if self._delete:
      if self._workers is not None:
        # A worker lost before that needs the files of the others.
        agreement.agree(self._workers, "the end of fit", [])
      shutil.rmtree(self._folder, ignore_errors=True)

  def _backups(self) -> dict[int, pathlib.Path]:
    """Returns this worker's files, by how many epochs are behind them."""
    return {
      int(match[1]): path
      for path in self._folder.iterdir()
      if (match := _NAME.fullmatch(path.name))
    }


def _begin_at(model: Any, epoch: int | None) -> None:
  """Makes `fit` begin at an epoch, once its callbacks have been called.

  Neither Keras has a public way. None leaves it to `initial_epoch`.
  """
  if group_models.keras_of(model).__name__ == "keras":
    model._initial_epoch = epoch
  elif epoch is None:
    model._training_state = None
  else:
    model._training_state = types.SimpleNamespace(
      maybe_load_initial_counters_from_ckpt=lambda *_, **__: (epoch, 0)
    )
