"""`BackupAndRestore`: backups during `fit`, from which a later `fit` resumes.

`fit` can only begin at the start of an epoch. To resume in the middle of one,
`model.train_function` draws batches at first, and does not train on them.
"""

import itertools
import re
import sys
from typing import Any, Final, Literal

import numpy as np
from absl import logging
from etils import epath

from tf_cross_shard._src.backup import backup_files, preemption
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.fit import keras_fit, per_model_callback
from tf_cross_shard._src.models import archive, checkpoint

# Prefix of the arrays in a backup that hold the state of callbacks.
_CALLBACKS: Final = "callbacks/"
# The code with which TensorFlow's PreemptionCheckpointHandler exits, and which
# a shell reports for a process that SIGTERM ended. It is not 0, so a job
# scheduler starts the job again.
_EXIT_CODE: Final = 143


class BackupAndRestore(per_model_callback.PerModelCallback):
  """Backs up training during `fit`, and resumes it in the next `fit`.

  Use it instead of `tf.keras.callbacks.BackupAndRestore`, and put it last in
  the list of callbacks. It adds support for groups and for several workers:

  - The first worker writes one file with the values of all workers, and all
    workers resume from it. They all need to see the same folder.
  - Every group keeps its own weights and slots. Values that differ between the
    replicas of a group, such as batch statistics, are kept too.
  - The states of random number generators, for example of dropout, are saved.
    Keras' own callback leaves them out.
  - The state of this package's other callbacks is saved: best values, wait
    counts and stopped groups.
  - A new file replaces older ones only when it is complete.

  A backup is made after each epoch, or every few batches or seconds, when the
  machine is about to be taken away (SIGTERM) and, if backups are kept after
  `fit`, when `fit` ends. A backup in the middle of an
  epoch also holds the position in the data and the metrics so far, and `fit`
  resumes with the next batch. To do this, `fit` reads the epoch from the
  beginning and skips the batches that are done, so the data must come in the
  same order again: pass `shuffle=False` with arrays, or a dataset that does not
  shuffle or uses `shuffle(..., seed=0, reshuffle_each_iteration=False)`. `fit`
  shuffles arrays by default, and the position of its random numbers is not
  saved. You get a warning if the order of arrays matters. The order of
  a dataset cannot be seen from outside.

  >>> import tempfile
  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import callbacks
  >>> model = tf.keras.Sequential(
  ...   [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ... )
  >>> model.compile("sgd", "mse")
  >>> x = np.ones([4, 1])
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   backup = callbacks.BackupAndRestore(directory, delete_checkpoint=False)
  ...   _ = model.fit(x, x, epochs=2, verbose=0, callbacks=[backup])
  ...   history = model.fit(x, x, epochs=3, verbose=0, callbacks=[backup])
  >>> history.epoch
  [2]

  When `fit` begins, it raises one of these errors on all workers:

  - `models.CheckpointError` if the backup is damaged, if it was made
    with a different model or number of groups, or if the workers do not see the
    same folder.
  - `MissingWorkerError` if a worker does not connect.
  - `ValueError` if a callback whose state is saved comes after this one.

  While `fit` runs, a backup can raise the errors of `Models.save`.
  """

  def __init__(
    self,
    backup_dir: Any,
    delete_checkpoint: bool = True,
    *,
    every: int | Literal["epoch"] = "epoch",
    every_seconds: float | None = None,
    on_preemption: bool = False,
    exit_code: int = _EXIT_CODE,
    keep: int = 2,
  ) -> None:
    """Sets where and when to make backups.

    Args:
      backup_dir: A folder that all workers see, for example on a network file
        system or on `gs://`. It is created if necessary. The files in it have
        the format of `Models.save`.
      delete_checkpoint: Whether to delete the backups when `fit` ends, as Keras
        does. If your program is killed after `fit` and before it has saved the
        model, it has to train from the beginning. With False, `fit` finds that
        training is complete.
      every: `"epoch"`, or the number of batches from one backup to the next.
        The count continues across epochs.
      every_seconds: Also make a backup when the last one is this many seconds
        old, by the clock of the first worker. None for no such limit.
      on_preemption: Whether to act on SIGTERM. When any worker receives it, all
        workers make a backup after the same batch and exit with `exit_code`. A
        second signal ends a process immediately. With True, call `fit` in the
        main thread.
      exit_code: The exit code of processes that end on SIGTERM. The default is
        143, as for TensorFlow's PreemptionCheckpointHandler and in shells.
      keep: How many of the last backups to keep. At least 2, since on some file
        systems a crash may leave the newest one incomplete.

    Raises:
      ValueError: If `backup_dir` is empty or a URL that TensorFlow cannot open,
        or if `every` or `keep` is not an integer in its range.
      TypeError: If `backup_dir` is not a path, `every_seconds` not a number, or
        `on_preemption` not a boolean.
    """
    super().__init__()
    if every != "epoch":
      every = per_model_callback.check_count(
        "every", every, 1, 'batches, or is "epoch"'
      )
    keep = per_model_callback.check_count("keep", keep, 2, "backups")
    if not isinstance(on_preemption, bool):
      raise TypeError(
        f"`on_preemption` must be True or False; got {on_preemption!r}. True"
        " makes a backup and ends the process on SIGTERM."
      )
    if every_seconds is not None:
      per_model_callback.check_number("every_seconds", every_seconds)
    self._backup_dir = archive.as_path(backup_dir, "backup_dir")
    self.backups = str(self._backup_dir)
    self._delete = delete_checkpoint
    self._every = every
    self._exit_code = exit_code
    self._keep = keep
    self._watch = preemption.PreemptionMonitor(on_preemption, every_seconds)
    # The learning rates with which the program began, each of all replicas.
    self._rates: list[list[float]] = []
    # The position in the data, and the batches since the last backup.
    self._epoch = self._batches = self._since = 0
    if every != "epoch" or self._watch.is_needed:
      self.call_after_batches(self._end_batch)

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    strategy, optimizer = self.model.distribute_strategy, self.model.optimizer
    # `same_fit` returns the callbacks in their order.
    from_here = itertools.dropwhile(lambda c: c is not self, self.same_fit())
    later = [
      type(callback).__name__
      for callback in itertools.islice(from_here, 1, None)
      if type(callback).state is not per_model_callback.PerModelCallback.state
      or callback.acts_on_batches
    ]
    if later:
      raise ValueError(
        "BackupAndRestore saves the state of other callbacks, but"
        f" {', '.join(later)} runs after it, so its state would be out of date."
        " Put BackupAndRestore last in the list of callbacks."
      )
    nested_lib.check_optimizer(optimizer)
    checkpoint.build_optimizer(optimizer, self.model)
    self._files = backup_files.BackupFiles(self._backup_dir, strategy)
    path = self._files.newest()
    if not self.model.stop_training:  # A finished search has set it.
      keras_fit.begin_at(self.model, None)
    self._epoch = self._batches = self._since = 0
    rates = nested_lib.rate_variables(optimizer)
    copies = self.state_of_groups().copies
    replicas = range(copies.engine.num_replicas)
    # The rates of a PerModel are one variable.
    self._rates = [
      np.unique(
        np.concatenate(list(map(np.ravel, copies.read(rate, replicas))))
      )
      .astype(float)
      .tolist()
      for rate in rates
    ]
    if path is not None:
      of_program = [copies.here(rate) for rate in rates]
      restored = checkpoint.restore_file(path, optimizer, self.model)
      if not restored.is_exact and self._files.is_first:
        logging.warning(
          "The backup %s was made with groups of another size. Training resumes"
          " with its weights and slots. Gradient accumulation and the metrics"
          " of this epoch start again, and values that differed within a group"
          " are replaced by their mean.",
          path,
        )
      states = {
        name.removeprefix(_CALLBACKS): array
        for name, array in restored.arrays.items()
        if name.startswith(_CALLBACKS)
      }
      per_model_callback.restore_state(self.same_fit(), states)
      self._warn_of_absent(states, path)
      # If all groups had stopped when this backup was made, only the end of
      # `fit` is left: begin after the last epoch, so that nothing is trained.
      epochs = self.params["epochs"] if self.model.stop_training else 0
      first = max(restored.values["epoch"], epochs)
      keras_fit.begin_at(self.model, first)
      if first >= self.params["epochs"]:
        self._warn_of_end(path, first)
        # The program may begin with other learning rates than when it made
        # the backup, and nothing goes on with those.
        if restored.values.get("rates") != self._rates:
          for rate, values in zip(rates, of_program, strict=True):
            copies.write(rate, values)
      if restored.values["batch"]:
        self._skip(path, restored.values["batch"])
    self._warn_if_shuffled()
    self._watch.begin(strategy)

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Notes the position in the data."""
    self._epoch, self._batches = epoch, 0

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Makes a backup if one is due; ends the process after SIGTERM."""
    must_exit, is_backup_due = self._watch.compare(is_epoch_end=True)
    # Usually the training function that skips batches resets this flag. If a
    # callback makes Keras create a new training function, the flag is reset
    # here.
    for callback in self.same_fit():
      callback.is_skipping_batches = False
    is_end = self.model.stop_training or epoch + 1 == self.params["epochs"]
    is_kept = is_end and not self._delete
    if self._every == "epoch" or must_exit or is_backup_due or is_kept:
      self._save(epoch + 1, 0)
    self._end_if(must_exit)

  def on_train_end(self, logs: Any = None) -> None:
    """Deletes the backups, unless they are to be kept."""
    keras_fit.begin_at(self.model, None)
    if self._delete:
      self._files.delete()
    self._watch.end()

  def _warn_of_end(self, path: epath.Path, epochs: int) -> None:
    """Warns that `fit` finds its work finished, and trains nothing."""
    if self._files.is_first:
      logging.warning(
        "`fit` trains nothing: the backup %s says that the training for %d"
        " epochs is complete, and its weights were restored. To train again,"
        " delete the folder %s; to train longer, call `fit` with more epochs.",
        *(path, epochs, self._files.folder),
      )

  def _warn_of_absent(self, states: dict[str, Any], path: epath.Path) -> None:
    """Warns of state in a backup whose callback is not in this `fit`."""
    present = {type(callback).__name__ for callback in self.same_fit()}
    # The keys are "PerModelEarlyStopping/best", "PerModelEarlyStopping#2/best".
    saved = {re.split("[/#]", key)[0] for key in states}
    if saved - present and self._files.is_first:
      logging.warning(
        "The backup %s also holds the state of %s, which this fit does not"
        " use. That state is ignored.",
        *(path, ", ".join(sorted(saved - present))),
      )

  def _warn_if_shuffled(self) -> None:
    """Warns if a resumed `fit` would differ because it sees other batches."""
    # Backups at the end of an epoch are safe: the next one is shuffled anyway.
    in_epoch = self._every != "epoch" or self._watch.is_needed
    if not (in_epoch and self._files.is_first and keras_fit.shuffles_arrays()):
      return
    logging.warning(
      "BackupAndRestore does not save the order in which `fit` shuffles arrays:"
      " if this fit is killed and resumed, some examples of the epoch are used"
      " twice, and others not at all. Pass shuffle=False to fit, or a"
      " tf.data.Dataset with a fixed order."
    )

  def _end_batch(self, batch: int, logs: Any = None) -> None:
    """Makes a backup if one is due, after a call of the training function."""
    must_exit, is_backup_due = self._watch.compare()
    if not self.is_skipping_batches:
      count = keras_fit.batches_per_call(self.model)
      self._batches += count
      self._since += count
      is_due = self._every != "epoch" and self._since >= int(self._every)
      if is_due or must_exit or is_backup_due:
        self._save(self._epoch, self._batches)
    self._end_if(must_exit)

  def _end_if(self, must_exit: bool) -> None:
    if must_exit:
      logging.warning(
        "SIGTERM: the backup is in %s. Start the same program again to resume"
        " from it. Exiting with code %d.",
        *(self._files.folder, self._exit_code),
      )
      sys.exit(self._exit_code)

  def _save(self, epoch: int, batch: int) -> None:
    """Writes a backup, and deletes the oldest ones."""
    state = self.state_of_groups(with_optimizer=True)
    topic = "a backup"
    arrays = state.arrays(topic)
    for key, value in per_model_callback.collect_state(self.same_fit()).items():
      arrays[_CALLBACKS + key] = np.asarray(value)
    if batch:
      replicas = range(state.copies.engine.num_replicas)
      for key, variable in _metric_variables(self.model).items():
        arrays[key] = np.stack(state.copies.read(variable, replicas))
    path = self._files.path(epoch, batch)
    values = {"epoch": epoch, "batch": batch, "rates": self._rates}
    state.write(path, topic, arrays, values)
    self._files.prune(self._keep)
    self._since = 0
    self._watch.restart_clock()

  def _skip(self, path: epath.Path, batches: int) -> None:
    """Makes `fit` draw the first batches of an epoch, not train on them."""
    model = self.model
    # A `fit` that failed may have left our function: create Keras' own.
    model.make_train_function(force=True)
    train = model.train_function
    same_fit = self.same_fit()
    logs: Any = None
    done = 0

    def end() -> None:
      model.train_function = train
      for callback in same_fit:
        callback.is_skipping_batches = False

    def skip_batch(iterator: Any) -> Any:
      nonlocal logs, done
      if done == batches:
        end()
        return train(iterator)
      count = keras_fit.batches_per_call(model)
      try:
        if done + count > batches:
          raise ValueError(
            f"The backup {path} was made after {batches} batches of an"
            " epoch, but no call of the training function ends there with"
            f" `steps_per_execution={count}`. Compile the model with the same"
            " `steps_per_execution` as before."
          )
        if not done:
          # Keras creates its metrics in a step. The backup undoes the step.
          train(iterator)
          self._restore_metrics(path)
          logs = model.get_metrics_result()
        elif not list(itertools.islice(iterator, count)):
          raise StopIteration
      except BaseException:
        end()
        raise
      done = self._batches = done + count
      return logs

    for callback in same_fit:
      callback.is_skipping_batches = True
    model.train_function = skip_batch

  def _restore_metrics(self, path: epath.Path) -> None:
    """Restores a backup again, together with the metrics of its epoch."""
    optimizer = self.model.optimizer
    restored = checkpoint.restore_file(path, optimizer, self.model)
    copies = self.state_of_groups(with_optimizer=True).copies
    for key, variable in _metric_variables(self.model).items():
      here = copies.here(variable)
      # If the size of the groups has changed, the metrics start again.
      values = [np.zeros_like(copy) for copy in here]
      if restored.is_exact and key in restored.arrays:
        values = [restored.arrays[key][r] for r in copies.engine.local_replicas]
      copies.write(variable, values)


def _metric_variables(model: Any) -> dict[str, Any]:
  """Returns the variables of the metrics, which `fit` resets in each epoch."""
  variables = [v for metric in model.metrics for v in metric.variables]
  return {f"metrics/{i}": variable for i, variable in enumerate(variables)}
