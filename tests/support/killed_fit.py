"""Runs a `fit` in another process, which is killed at a given place."""

import os
import pathlib
import signal
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support import fit_outcome, forking, logical_devices, testbed
from tf_cross_shard import CrossShardOptimizer, callbacks, schedules
from tf_cross_shard_cli import launch

EPOCHS, STEPS = 5, 4
GROUPS = [[0], [1]]
RATES = [0.5, 0.03125]
# Where in an epoch the process is killed: between two batches; after the best
# weights are saved, but before the backup; and after the backup.
PLACES = ("batch", "checkpoint", "backup")
Place = tuple[int, str | int] | None  # epoch, place or batch


class _Kill(tf.keras.callbacks.Callback):  # type: ignore[misc]
  """Sends a signal to its own process at a given place in the training."""

  def __init__(self, kind: str, at: Place, number: int) -> None:
    super().__init__()
    self._kind, self._at, self._number = kind, at, number
    self._epoch = 0

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    self._epoch = epoch

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    places = {(self._epoch, batch)} if self._kind == "checkpoint" else set()
    if batch == STEPS // 2:
      places.add((self._epoch, "batch"))
    if self._at in places:
      os.kill(os.getpid(), self._number)

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    if self._at == (epoch, self._kind):
      os.kill(os.getpid(), self._number)


def _train(
  folder: pathlib.Path,
  at: Place,
  patience: int,
  min_delta: float,
  number: int,
  every: int | str,
) -> None:
  """Trains, and writes the values of all variables to a file at the end."""
  logical_devices.split_cpu(2)
  tf.keras.utils.set_random_seed(1)
  strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  layers = tf.keras.layers
  with strategy.scope():
    model = tf.keras.Sequential(
      [
        *(tf.keras.Input((3,)), layers.Dense(4), layers.Dropout(0.25)),
        *(layers.BatchNormalization(), layers.Dense(1)),
      ]
    )
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(schedules.PerGroup(RATES)),
      group_assignment=GROUPS,
    )
    model.compile(optimizer, "mse")
  rng = np.random.default_rng(0)
  x = rng.normal(size=(8 * STEPS, 3)).astype("float32")
  y = rng.normal(size=(8 * STEPS, 1)).astype("float32")
  stop = callbacks.GroupEarlyStopping(patience=patience, min_delta=min_delta)
  lower = callbacks.GroupReduceLROnPlateau(
    factor=0.5, patience=1, cooldown=1, mode="max"
  )
  other = callbacks.GroupEarlyStopping(
    mode="max", patience=4, restore_best_weights=False, start_from_epoch=1
  )
  keep = callbacks.GroupCheckpoint(folder / "best.npz")
  model.fit(
    *(x, y),
    batch_size=8,
    epochs=EPOCHS,
    shuffle=False,
    verbose=0,
    callbacks=[
      callbacks.GroupMetrics((x[:8], -y[:8])),
      *(lower, stop, other, keep, fit_outcome.history(folder / "history")),
      _Kill("checkpoint", at, number),
      callbacks.BackupAndRestore(
        folder / "backup", every=every, on_preemption=True
      ),
      _Kill("backup", at, number),
    ],
  )
  values = [
    copy
    for variable in [*model.variables, *optimizer.variables]
    for copy in testbed.copies(variable)
  ]
  numbers = [keep.best]
  for callback in (stop, other):
    numbers += [callback.best, callback.best_epoch, callback.stopped_epoch]
  np.savez(
    folder / "end.npz",
    *values,
    numbers=np.array(numbers),
    rates=np.array([lower.best, lower.state()["wait"]]),
  )


def run(
  folder: pathlib.Path,
  at: Place,
  patience: int,
  min_delta: float,
  number: int = signal.SIGKILL,
  every: int | str = "epoch",
) -> int:
  """Trains in another process, and returns the exit code of the process."""
  process = forking.Process(
    *(_train, folder, at, patience, min_delta, number, every)
  )
  with launch.killed_at_end([process]):
    assert launch.wait({0: process}, 900), "The fit did not end in 900 s."
  code = process.poll()
  assert code is not None
  return code
