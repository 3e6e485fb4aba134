"""Measures how much time backups add to training.

    python benchmarks/backups.py --megabytes=100

Two groups of one replica each train dense layers with Adam, in turns with and
without `BackupAndRestore`. The cost of a backup is the time from one backup to
the next, minus the median time of as many batches without backups in the same
round.
"""

import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import timing
from absl import app, flags

from tf_cross_shard import CrossShardOptimizer, callbacks

_MEGABYTES = flags.DEFINE_integer(
  "megabytes", 100, "Size of a backup file, about.", 1
)
_EVERY = flags.DEFINE_integer(
  "every", 20, "Batches from one backup to the next.", 1
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs with and without backups.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Rows of both groups.", 2)
_FOLDER = flags.DEFINE_string(
  "folder", None, "Where to write backups. The default is a temporary folder."
)
_WIDTH = 512  # Units of each layer.
_BACKUPS = 3  # Backups in each run.
_WITHOUT, _WITH = "no backups", "backups"


class _Times(tf.keras.callbacks.Callback):  # type: ignore[misc]
  """Notes when batches end. Put it last: it has to run after the backup."""

  def __init__(self) -> None:
    super().__init__()
    self.ends: list[float] = []

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    self.ends.append(time.perf_counter())


def main(argv: Sequence[str]) -> None:
  """Trains with and without backups, and prints a row for each."""
  del argv
  with timing.mirrored(2).scope():
    # A file holds the weights and Adam's two slots of both groups: 6 numbers of
    # 4 bytes for each weight.
    count = round(_MEGABYTES.value * 1e6 / (6 * 4 * _WIDTH**2))
    model = tf.keras.Sequential(
      [tf.keras.Input((_WIDTH,))]
      + [tf.keras.layers.Dense(_WIDTH, "relu") for _ in range(max(1, count))]
    )
    model.compile(
      CrossShardOptimizer(
        tf.keras.optimizers.Adam(1e-4), group_assignment=[[0], [1]]
      ),
      "mse",
    )
  steps = _EVERY.value * (_BACKUPS + 1)
  x = np.ones([_BATCH_SIZE.value, _WIDTH], "float32")
  data = tf.data.Dataset.from_tensors((x, x)).repeat(steps)
  taken: dict[str, list[np.ndarray]] = {_WITHOUT: [], _WITH: []}
  sizes = [0.0]
  for _ in range(1 + _ROUNDS.value):
    for name, found in taken.items():
      times = _Times()
      listed: list[Any] = [times]
      with tempfile.TemporaryDirectory(dir=_FOLDER.value) as folder:
        if name == _WITH:
          backup = callbacks.BackupAndRestore(
            folder, delete_checkpoint=False, every=_EVERY.value
          )
          listed = [backup, times]
        model.fit(data, verbose=0, callbacks=listed)
        files = pathlib.Path(folder).rglob("*.npz")
        sizes += [path.stat().st_size / 1e6 for path in files]
      # Each row is the time of a backup and of the batches up to the next one.
      rows = 1e3 * np.diff(times.ends)[_EVERY.value - 2 : -1]
      found.append(rows.reshape([-1, _EVERY.value]))
  print(f"{max(sizes):.0f} MB a file, on {timing.machine()}")
  # The first round is left out, since it traces. Runs are compared with runs
  # of the same round, when the machine had about the same load.
  plain = np.array(taken[_WITHOUT][1:])
  for name, rounds in taken.items():
    rows = np.array(rounds[1:])
    extra = rows.sum(axis=2) - np.median(plain.sum(axis=2), axis=1)[:, None]
    print(
      f"{name:<18} batch {np.median(rows):6.1f} ms, the longest"
      f" {np.median(rows.max(axis=2)):6.1f} ms; a backup takes"
      f" {np.median(extra):6.0f} ms"
    )


if __name__ == "__main__":
  app.run(main)
