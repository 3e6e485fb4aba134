"""Measures what backups take from training: beside it in a thread, and not.

    python benchmarks/backups.py --megabytes=100

Two groups of one replica each train layers with Adam. The time of all batches
from one backup to the next, less that of as many batches without, is what a
backup takes. Those from each kind of a run are neighbours.
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
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Backups of each kind.", 2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Of both groups.", 2)
_FOLDER = flags.DEFINE_string("folder", None, "Where to write, if not in /tmp.")
_WIDTH = 512


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
  steps = _EVERY.value * (_ROUNDS.value + 1)
  x = np.ones([_BATCH_SIZE.value, _WIDTH], "float32")
  data = tf.data.Dataset.from_tensors((x, x)).repeat(steps)
  kinds: dict[str, dict[str, Any] | None] = {
    "no backups": None,
    "blocking": {},
    "in the background": {"in_background": True},
  }
  batches: dict[str, np.ndarray] = {}
  sizes = [0.0]
  for _ in range(2):  # the first one traces
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
        sizes += [
          p.stat().st_size / 1e6 for p in pathlib.Path(folder).rglob("*.npz")
        ]
      taken = 1e3 * np.diff(times.ends)[_EVERY.value - 2 :]
      batches[name] = taken[: _EVERY.value * _ROUNDS.value].reshape(
        [_ROUNDS.value, _EVERY.value]
      )
  print(f"{max(sizes):.0f} MB a file, on {timing.machine()}")
  plain = np.median(batches["no backups"].sum(axis=1))
  for name, rows in batches.items():
    extra = np.median(rows.sum(axis=1)) - plain
    print(
      f"{name:<20} batch {np.median(rows):7.1f} ms, longest"
      f" {np.median(rows.max(axis=1)):7.1f} ms; a backup takes {extra:7.0f} ms"
    )


if __name__ == "__main__":
  app.run(main)
