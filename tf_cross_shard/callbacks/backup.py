"""Going on after a crash: from a checkpoint that all workers have.

A worker that is killed may not have written what the others have written. So
each keeps its last files, see backup_files.py. `fit` begins anew the epoch in
which a backup was made, and the batches that are done are drawn, but not
trained on:

    fit ─▶ data ─▶ model.train_function ─▶ callbacks, BackupAndRestore last
                   ours, while it skips
"""

import itertools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from absl import logging

from tf_cross_shard.callbacks import backup_files, base, preemption
from tf_cross_shard.inner_optimizer import libraries
from tf_cross_shard.replica_state import archive, checkpoint, group_state

_CALLBACKS: Final = "callbacks/"  # before the names of their state in a file
# TensorFlow's PreemptionCheckpointHandler ends with it; and a shell reports it
# of SIGTERM. It is no success, so that the job is started again.
_EXIT_CODE: Final = 143


class BackupAndRestore(base.GroupCallback):
  """Saves as `fit` goes, and makes the next `fit` go on from there.

  In the place of `tf.keras.callbacks.BackupAndRestore`, for several workers and
  for groups: each worker has files of its own, which no other overwrites, and
  all go on from the newest that all have. Groups keep their own weights and
  slots, and replicas what else they differ in, on one machine too. The states
  of random numbers, of dropout say, are saved too; Keras' own leaves them out.
  So is what this package's other callbacks know, best values, wait counts and
  stopped groups; they stand before this one in the list. A file replaces none
  before it is whole.

  It saves after each epoch, or every k batches or seconds, and on SIGTERM,
  which machines get that are taken away. A backup of mid-epoch has the place in
  the data and the metrics so far. `fit` goes on with the next batch: it reads
  the epoch from its beginning, which has to give the same batches again, and
  passes over those that are done.

  >>> import tempfile
  >>> import numpy as np, tensorflow as tf
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
  begins, if the backup is damaged, or of another model or another number of
  groups, a `DisagreementError` if none is common to all,
  a `MissingWorkerError` if a worker does not come, and errors as of
  `replica_state.save`.
  """

  moves_optimizer = True

  def __init__(
    self,
    backup_dir: Any,
    delete_checkpoint: bool = True,
    *,
    every: int | str = "epoch",
    every_seconds: float | None = None,
    on_preemption: bool | Callable[[], bool] = False,
    exit_code: int = _EXIT_CODE,
    keep: int = 2,
    in_background: bool = False,
  ) -> None:
    """Names the place, and the times.

    Args:
      backup_dir: A directory, which workers may or may not share. Each writes
        to `worker_<number>` in it: files as of `replica_state.save`, with its
        own groups only.
      delete_checkpoint: Delete this worker's files when `fit` ends, as Keras
        does, and those of workers that are no more. A program that is killed
        after that, and before it has saved the model, begins anew: with False
        it finds the training done.
      every: Save when this many batches are done since the last backup, counted
        through epochs, or `"epoch"`.
      every_seconds: Save when the last backup is so old, too. The clock is that
        of the first worker.
      on_preemption: On SIGTERM, to any worker, all save after the same batch
        and end their processes with `exit_code`; a second signal ends a process
        at once. `fit` has to be called in the main thread. A function is asked
        too, about once a second between two batches, whether this machine is to
        go; an OSError of it is logged, and says no.
      exit_code: 143, which TensorFlow's PreemptionCheckpointHandler ends with,
        is what a shell reports of SIGTERM, and no success.
      keep: How many of the last backups to keep; at least 2, since a worker may
        be killed before it has written what the others have written.
      in_background: Write in a thread while training goes on. It takes a copy
        of this worker's values in memory. The next backup, the end of `fit` and
        SIGTERM wait for it, and raise its error. False is the way that loses
        least: a batch that has ended is in the file.

    Raises:
      ValueError: If `backup_dir` is empty, or a URL; if `every` or `keep` are
        no such integers.
    """
    super().__init__()
    if every != "epoch":
      base.check_count("every", every, 1, 'batches, or is "epoch"')
    base.check_count("keep", keep, 2, "backups")
    if every_seconds is not None:
      base.check_number("every_seconds", every_seconds)
    self._backup_dir = archive.as_path(backup_dir, "backup_dir")
    self._delete = delete_checkpoint
    self._every = every
    self._exit_code = exit_code
    self._keep = keep
    self._in_background = in_background
    self._watch = preemption.Watch(on_preemption, every_seconds)
    self._epoch = self._batches = self._since = 0
    if every != "epoch" or self._watch.is_needed:
      self.call_after_batches(self._end_batch)

  def on_train_begin(self, logs: Any = None) -> None:
    """Restores the newest backup that all workers have."""
    super().on_train_begin(logs)
    strategy, optimizer = self.model.distribute_strategy, self.model.optimizer
    later = [
      type(callback).__name__
      for callback in self.same_fit()
      if callback._place_in_list > self._place_in_list
      and (
        type(callback).state is not base.GroupCallback.state
        or callback.acts_on_batches
      )
    ]
    if later:
      raise ValueError(
        f"BackupAndRestore saves what callbacks know; {', '.join(later)} comes"
        " after it, and would be behind. Put BackupAndRestore last."
      )
    with strategy.scope():
      optimizer.build(self.model.trainable_variables)
    self._files = backup_files.BackupFiles(self._backup_dir, strategy)
    paths = self._files.newest()
    libraries.begin_at(self.model, None)
    self._epoch = self._batches = self._since = 0
    if paths:
      restored = checkpoint.restore_file(
        paths[0], optimizer, self.model, paths[1:]
      )
      if not restored.is_exact and self._files.is_first:
        logging.warning(
          "The backup %s is of other groups or workers. Weights and slots go"
          " on; windows of accumulate_steps and the metrics of this epoch begin"
          " anew, and what members of a group had of their own is their mean.",
          paths[0],
        )
      base.restore_state(
        self.same_fit(),
        {
          name.removeprefix(_CALLBACKS): array
          for name, array in restored.arrays.items()
          if name.startswith(_CALLBACKS)
        },
      )
      # All groups may have stopped, and only the end of `fit` be left.
      epochs = self.params["epochs"] if self.model.stop_training else 0
      libraries.begin_at(self.model, max(restored.values["epoch"], epochs))
      if restored.values["batch"]:
        self._skip(paths, restored.values["batch"])
    self._watch.begin(strategy)

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Notes the place."""
    self._epoch, self._batches = epoch, 0

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Saves, if it is time, and ends the process if it has to."""
    is_last, is_old = self._watch.compare(is_epoch_end=True)
    # Where a callback has steps traced again, nothing else would end it.
    for callback in self.same_fit():
      callback.passes_over = False
    if self._every == "epoch" or is_last or is_old:
      self._save(epoch + 1, 0)
    self._end_if(is_last)

  def on_train_end(self, logs: Any = None) -> None:
    """Deletes this worker's files, if they are not to be kept."""
    libraries.begin_at(self.model, None)
    self._finish()
    if self._delete:
      self._files.delete()
    self._watch.end()

  def _end_batch(self, batch: int, logs: Any = None) -> None:
    """As `on_epoch_end`, after the batches of one call of Keras' function."""
    is_last, is_old = self._watch.compare()
    if not self.passes_over:
      count = libraries.batches_per_call(self.model)
      self._batches += count
      self._since += count
      is_due = self._every != "epoch" and self._since >= int(self._every)
      if is_due or is_last or is_old:
        self._save(self._epoch, self._batches)
    self._end_if(is_last)

  def _end_if(self, is_last: bool) -> None:
    """Ends the process after SIGTERM."""
    if is_last:
      self._finish()
      logging.warning(
        "SIGTERM: the backup is in %s; the same program goes on from it."
        " Exiting with code %d.",
        *(self._files.folder, self._exit_code),
      )
      sys.exit(self._exit_code)

  def _save(self, epoch: int, batch: int) -> None:
    """Saves, and deletes this worker's backups but the last."""
    state = self.copies(is_whole=True)
    name = f"epoch_{epoch}_batch_{batch}" if batch else f"epoch_{epoch}"
    state.agree("a backup")
    self._finish(state)
    arrays = state.arrays(state.apart("a backup"), own=True)
    for key, value in base.collect_state(self.same_fit()).items():
      arrays[_CALLBACKS + key] = np.array(value)  # not what a callback changes
    if batch:
      for key, variable in _metric_variables(self.model).items():
        for i, copy in enumerate(state.copies.here(variable)):
          arrays[f"{key}/{i}"] = copy
    about = state.about({"epoch": epoch, "batch": batch})
    if self._in_background:
      self._files.write_beside(name, arrays, about)
    else:
      with state.together("a backup"):
        self._files.write(name, arrays, about)
      self._files.prune(self._keep)
    self._since = 0
    self._watch.restart_clock()

  def _finish(self, state: group_state.GroupCopies | None = None) -> None:
    """Waits for what is written beside; an error of one worker is all's."""
    if self._in_background:
      state = state or self.copies(is_whole=True)
      with state.together("the end of a backup"):
        self._files.finish()
      self._files.prune(self._keep)

  def _skip(self, paths: list[pathlib.Path], batches: int) -> None:
    """Makes `fit` pass over batches, and then restores the backup again.

    Data of every kind are drawn as for training. The first call trains, for
    Keras makes metrics only then, and is undone.
    """
    model = self.model
    model.make_train_function(force=True)  # not ours, of a `fit` that failed
    train = model.train_function
    same_fit = self.same_fit()
    logs: Any = None
    done = 0

    def end() -> None:
      model.train_function = train
      for callback in same_fit:
        callback.passes_over = False

    def pass_over(iterator: Any) -> Any:
      nonlocal logs, done
      if done == batches:
        end()
        return train(iterator)
      count = libraries.batches_per_call(model)
      try:
        if done + count > batches:
          raise ValueError(
            f"The backup {paths[0]} was made after {batches} batches of an"
            f" epoch, with which no call of `steps_per_execution={count}` ends."
            " Compile the model as it was."
          )
        if not done:
          train(iterator)
          self._restore_metrics(paths)
          logs = model.get_metrics_result()
        elif not list(itertools.islice(iterator, count)):
          raise StopIteration
      except BaseException:
        end()
        raise
      done = self._batches = done + count
      return logs

    for callback in same_fit:
      callback.passes_over = True
    model.train_function = pass_over

  def _restore_metrics(self, paths: list[pathlib.Path]) -> None:
    """Restores a backup again, with the metrics of its epoch."""
    optimizer = self.model.optimizer
    restored = checkpoint.restore_file(
      paths[0], optimizer, self.model, paths[1:]
    )
    copies = self.copies(is_whole=True).copies
    for key, variable in _metric_variables(self.model).items():
      here = copies.here(variable)
      values = [np.zeros_like(copy) for copy in here]
      if restored.is_exact and f"{key}/0" in restored.arrays:
        values = [restored.arrays[f"{key}/{i}"] for i in range(len(here))]
      copies.write(variable, values)


def _metric_variables(model: Any) -> dict[str, Any]:
  """Returns what `fit` sets to zero when an epoch begins, by name."""
  variables = [v for metric in model.metrics for v in metric.variables]
  return {f"metrics/{i}": variable for i, variable in enumerate(variables)}
