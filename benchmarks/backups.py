"""Measures what backups take from training: beside it in a thread, and not.

    python benchmarks/backups.py --megabytes=100

Two groups of one replica each train layers with Adam. The time of all batches
from one backup to the next, less that of as many batches without, is what a
backup takes. Kinds of runs take turns.
"""
# bazel: deps=:timing

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

_MEGABYTES = flags.DEFINE_integer("megabytes", 100, "Of a backup.", 1)
_EVERY = flags.DEFINE_integer("every", 20, "Batches from backup to backup.", 1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each kind.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Of both groups.", 2)
_FOLDER = flags.DEFINE_string("folder", None, "Where to write, if not in /tmp.")
_WIDTH, _BACKUPS = 512, 3  # units of a layer; in a run


class _Times(tf.keras.callbacks.Callback):  # type: ignore[misc]
  """Notes when batches end, once all other callbacks are through."""

  def __init__(self) -> None:
    super().__init__()
    self.ends: list[float] = []

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    self.ends.append(time.perf_counter())


def main(argv: Sequence[str]) -> None:
  """Prints a table."""
  del argv
  with timing.mirrored(2).scope():
    # Weights and two slots, in both groups.
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
  kinds: dict[str, dict[str, Any] | None] = {
    "no backups": None,
    "blocking": {},
    "in the background": {"in_background": True},
  }
  taken: dict[str, list[np.ndarray]] = {name: [] for name in kinds}
  sizes = [0.0]
  for _ in range(1 + _ROUNDS.value):
    for name, options in kinds.items():
      times = _Times()
      listed: list[Any] = [times]
      with tempfile.TemporaryDirectory(dir=_FOLDER.value) as folder:
        if options is not None:
          backup = callbacks.BackupAndRestore(
            *(folder, False), every=_EVERY.value, **options
          )
          listed = [backup, times]
        model.fit(data, verbose=0, callbacks=listed)
        files = pathlib.Path(folder).rglob("*.npz")
        sizes += [path.stat().st_size / 1e6 for path in files]
      # Each row is a backup, and the batches to the next one.
      rows = 1e3 * np.diff(times.ends)[_EVERY.value - 2 : -1]
      taken[name].append(rows.reshape([-1, _EVERY.value]))
  print(f"{max(sizes):.0f} MB a file, on {timing.machine()}")
  # The first round traces. Neighbours of one round are compared.
  plain = np.array(taken["no backups"][1:])
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
