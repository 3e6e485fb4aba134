"""Going on after a crash: from a checkpoint that all workers have.

A worker that is killed may not have written what the others have written. So
each keeps its last two, in a directory of its own, and they go on from the
newest that is common to all.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard import versions
from tf_cross_shard.coordination import agreement, errors
from tf_cross_shard.replica_state import overwritten

_MARKER: Final = "epoch.txt"
_COPIES: Final = "copies.npz"


def newest_common(
  strategy: tf.distribute.Strategy, numbers: Iterable[int]
) -> int | None:
  """The newest checkpoint that all workers have, for loops of one's own.

  All workers call it, each with its own checkpoints:

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
  mine = sorted({int(number) for number in numbers})
  workers = agreement.of_strategy(strategy)
  if workers is None:
    return mine[-1] if mine else None
  told = agreement.exchange(
    workers, "the choice of a checkpoint", json.dumps(mine)
  )
  common = set.intersection(*(set(json.loads(text)) for text in told))
  if common or not any(map(json.loads, told)):
    return max(common, default=None)
  found = "; ".join(
    f"{name} has {text}" for name, text in zip(workers.names, told, strict=True)
  )
  raise errors.DisagreementError(
    f"There is no checkpoint that all workers have: {found}. Copy those that"
    " are missing to their workers, or delete all to start anew."
  )


class BackupAndRestore(tf.keras.callbacks.Callback):
  """Saves after each epoch, and makes the next `fit` go on from there.

  Like `tf.keras.callbacks.BackupAndRestore`, which does the saving, but for
  several workers: each has its own files, which no other one overwrites, and
  all go on from the same epoch. Groups keep their own weights and slots, and
  replicas what else they differ in, on one machine too. The states of random
  numbers, of dropout say, are saved too; Keras' own leaves them out.

  >>> import tempfile
  >>> import numpy as np
  >>> model = tf.keras.Sequential(
  ...   [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ... )
  >>> model.compile("sgd", "mse")
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   backup = BackupAndRestore(directory, delete_checkpoint=False)
  ...   arguments = dict(verbose=0, callbacks=[backup])
  ...   _ = model.fit(np.ones([4, 1]), np.ones([4]), epochs=2, **arguments)
  ...   history = model.fit(
  ...     np.ones([4, 1]), np.ones([4]), epochs=3, **arguments
  ...   )
  >>> history.epoch
  [2]
  """

  def __init__(self, backup_dir: Any, delete_checkpoint: bool = True) -> None:
    """Names the place.

    Args:
      backup_dir: A directory, which workers may or may not share. Each writes
        to `worker_<number>` in it.
      delete_checkpoint: Delete this worker's files when `fit` ends.

    Raises:
      ValueError: If `backup_dir` is empty, or a URL.
      NotImplementedError: If `tf.keras` is tf_keras.
    """
    super().__init__()
    if versions.uses_tf_keras():
      raise NotImplementedError(
        "multi_worker.BackupAndRestore is for Keras 3, and `tf.keras` is"
        " tf_keras here, whose own tf_keras.callbacks.BackupAndRestore is made"
        " for several workers. Use that; with groups, use"
        " tf_cross_shard.replica_state.save() and restore()."
      )
    if not str(backup_dir) or "://" in str(backup_dir):
      raise ValueError(
        "`backup_dir` must name a directory of a file system; got"
        f" {str(backup_dir)!r}. Mount the storage, or use a local one."
      )
    self._backup_dir = Path(backup_dir)
    self._delete = delete_checkpoint

  def on_train_begin(self, logs: Any = None) -> None:
    """Restores the newest backup that all workers have.

    Args:
      logs: Not used.

    Raises:
      DisagreementError: If there are backups, and none is common to all.
      MissingWorkerError: If a worker does not come.
      ValueError: If the model is not built.
    """
    strategy = self.model.distribute_strategy
    workers = agreement.of_strategy(strategy)
    own = self._backup_dir / f"worker_{workers.index if workers else 0}"
    own.mkdir(parents=True, exist_ok=True)  # fails now, not after an epoch
    self._own, self._workers = own, workers
    # One is whole while the other is being written.
    self._slots = [_Slot(own / name, self.model) for name in ("even", "odd")]
    epochs = {slot.epoch(): slot for slot in self._slots}
    epochs.pop(None, None)
    newest = newest_common(strategy, [e for e in epochs if e is not None])
    if newest is not None:
      epochs[newest].restore()
      for epoch, slot in epochs.items():
        if epoch is not None and epoch > newest:
          slot.forget()  # of a run that has not been

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Saves.

    Args:
      epoch: The epoch that ended.
      logs: Of the epoch.
    """
    self._slots[epoch % 2].save(epoch, logs)

  def on_train_end(self, logs: Any = None) -> None:
    """Deletes this worker's files, if they are not to be kept.

    Args:
      logs: Not used.

    Raises:
      MissingWorkerError: If a worker did not come to the end.
    """
    if not self._delete:
      return
    if self._workers is not None:
      # Where one is lost before that, the others keep what it will need.
      agreement.agree(self._workers, "the end of fit", [])
    shutil.rmtree(self._own, ignore_errors=True)


class _Slot:
  """One backup, written by Keras; known to be whole by a file of its own."""

  def __init__(self, directory: Path, model: Any) -> None:
    self._marker = directory / _MARKER
    self._copies = directory / _COPIES
    self._model = model
    self._keras = tf.keras.callbacks.BackupAndRestore(
      str(directory), delete_checkpoint=False
    )
    self._keras.set_model(model)

  def epoch(self) -> int | None:
    """How many epochs the backup has behind it; None where none is whole."""
    text = self._marker.read_text() if self._marker.exists() else ""
    return int(text) if text.isdecimal() else None

  def save(self, epoch: int, logs: Any) -> None:
    """Writes the backup anew."""
    self.forget()
    with overwritten.all_kept():  # by all workers together
      self._keras.on_epoch_end(epoch, logs)
    kept: dict[str, Any] = {}
    for i, (variable, is_random) in enumerate(_variables(self._model)):
      arrays = [copy.numpy() for copy in self._copies_of(variable)]
      # Where all replicas have the same, what Keras saved is enough.
      if is_random or len({array.tobytes() for array in arrays}) > 1:
        kept[str(i)] = np.stack(arrays)
    np.savez(self._copies, **kept)
    beside = self._marker.with_suffix(".new")
    beside.write_text(str(epoch + 1))
    os.replace(beside, self._marker)

  def restore(self) -> None:
    """Loads weights and optimizer, and tells `fit` where to begin."""
    with np.load(self._copies) as saved:
      for i, (variable, _) in enumerate(_variables(self._model)):
        there = len(saved.get(str(i), ()))
        here = len(self._copies_of(variable))
        if there not in (0, here) and variable.trainable:
          raise ValueError(
            f"`backup_dir` holds weights of {there} replicas that differ, in"
            f" {self._copies}; this process has {here}. Go on with as many, or"
            " delete it to start anew."
          )
      self._keras.on_train_begin()
      for i, (variable, _) in enumerate(_variables(self._model)):
        arrays = saved.get(str(i), ())
        for copy, array in zip(
          self._copies_of(variable), itertools.cycle(arrays)
        ):
          # NumPy's files have no name for bfloat16.
          copy.assign(array.view(copy.dtype.as_numpy_dtype))

  def _copies_of(self, variable: Any) -> Sequence[Any]:
    """The copies that the replicas of this process have of a variable."""
    strategy = self._model.distribute_strategy
    copies: Sequence[Any] = strategy.experimental_local_results(
      variables_lib.native(variable)
    )
    return copies

  def forget(self) -> None:
    """Makes the backup one that is not there."""
    self._marker.unlink(missing_ok=True)


def _variables(model: Any) -> list[tuple[Any, bool]]:
  """All variables but metrics', and which are states of random numbers.

  Those Keras does not count among the weights.
  """
  metrics = set(map(id, model.metrics_variables))
  weights = set(map(id, (*model.weights, *model.optimizer.variables)))
  return [
    (variable, id(variable) not in weights)
    for variable in (*model.variables, *model.optimizer.variables)
    if id(variable) not in metrics
  ]
