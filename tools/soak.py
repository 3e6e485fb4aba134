"""Checks that long training does not use ever more memory, threads or files.

    python tools/soak.py                             # 22 minutes of CPU time
    python tools/soak.py --steps=2000 --epochs=50    # tries the script

Trains plain Keras, for comparison, and CrossShardOptimizer with groups,
PerModelMetrics and backups on four replicas, each in its own process: `--steps`
steps in epochs of 1,000, and `--epochs` epochs of 5 steps. Prints a row after a
tenth of each training and at its end. Exits with 1 if CrossShardOptimizer has
more threads, open files or traces at the end than in its first row, or more
than 1.05 of the memory. Needs Linux.
"""

import argparse
import multiprocessing
import os
import pathlib
import tempfile
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

LONG, SHORT = 1000, 5  # Steps of an epoch.
# How many times its first row's value each number may have at the end.
LIMITS = {"MB": 1.05, "threads": 1.0, "files": 1.0, "traces": 1.0}


def train(is_ours: bool, epochs: int, steps: int) -> list[dict[str, float]]:
  """Trains one program in this process, and returns its two rows."""
  import numpy as np
  import tensorflow as tf

  from tf_cross_shard import CrossShardOptimizer, callbacks, local_strategy

  strategy, layers = local_strategy(4), tf.keras.layers
  traces: list[int] = []
  rows: list[dict[str, float]] = []

  class Model(tf.keras.Sequential):  # type: ignore[misc]
    """A model that counts how often its training step is traced."""

    def train_step(self, *args: Any) -> Any:
      traces.append(1)
      return super().train_step(*args)

  def measure(epoch: int, logs: Any) -> None:
    if epoch + 1 in (max(2, epochs // 10), epochs):
      status = pathlib.Path("/proc/self/status").read_text()
      row = {
        "MB": int(status.split("VmRSS:")[1].split()[0]) / 1024,
        "threads": int(status.split("Threads:")[1].split()[0]),
        "files": len(os.listdir("/proc/self/fd")),
        "traces": len(traces),
      }
      print(f"{is_ours=} step {(epoch + 1) * steps:6}", row, flush=True)
      rows.append(row)

  x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
  data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat().batch(16)
  with strategy.scope(), tempfile.TemporaryDirectory() as folder:
    model = Model([tf.keras.Input((8,)), layers.Dense(16), layers.Dense(1)])
    optimizer: Any = tf.keras.optimizers.Adam(1e-4)
    extra = [tf.keras.callbacks.LambdaCallback(on_epoch_end=measure)]
    if is_ours:
      optimizer = CrossShardOptimizer(
        optimizer, group_assignment=[[0, 1], [2, 3]]
      )
      extra += [
        callbacks.PerModelMetrics((x[:16], x[:16, :1])),
        callbacks.BackupAndRestore(folder, every=1000),
      ]
    model.compile(optimizer, "mse")
    options = {"steps_per_epoch": steps, "epochs": epochs, "verbose": 0}
    model.fit(data, callbacks=extra, **options)
  return rows


def main() -> int:
  """Starts a process for each training; returns 1 if ours needs ever more."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=100_000)
  parser.add_argument("--epochs", type=int, default=2000)
  given = parser.parse_args()
  grew = []
  for epochs, steps in ((given.steps // LONG, LONG), (given.epochs, SHORT)):
    for is_ours in (False, True):
      with multiprocessing.get_context("spawn").Pool(1) as pool:
        first, last = pool.apply(train, (is_ours, epochs, steps))
      if is_ours:
        grew += [k for k, limit in LIMITS.items() if last[k] > limit * first[k]]
  if grew:
    print(f"FAILED: CrossShardOptimizer has more {', '.join(grew)} at the end")
  return int(bool(grew))


if __name__ == "__main__":
  raise SystemExit(main())
