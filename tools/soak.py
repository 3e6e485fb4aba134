"""Checks that long training does not use ever more memory, threads or files.

    python tools/soak.py                             # 22 minutes of CPU time
    python tools/soak.py --steps=2000 --epochs=50    # tries the script

Two small programs train one after the other under MirroredStrategy with four
replicas: plain Keras, and CrossShardOptimizer with groups, GroupMetrics and
backups. Each program trains twice: `--steps` steps in epochs of 1,000 steps,
and `--epochs` epochs of 5 steps. The script prints two rows for each training,
after a tenth of it and at its end: resident memory, threads, open files, how
often TensorFlow has traced the training step, and the CPU time of a step since
the first epoch or the first row. Plain Keras is there for comparison: its
memory and its threads grow a little. The script exits with 1 if
CrossShardOptimizer has more threads, open files or traces at the end than in
its first row, or more than 1.05 of the memory. It needs Linux.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

LONG, SHORT = 1000, 5  # Steps of an epoch.
# How many times its first row's value each number may have at the end.
LIMITS = {"threads": 1.0, "files": 1.0, "traces": 1.0, "MB": 1.05}


def train(is_ours: bool, epochs: int, steps: int) -> None:
  """Trains one program in this process, and prints its two rows as JSON."""
  import numpy as np
  import tensorflow as tf

  from tf_cross_shard import CrossShardOptimizer, callbacks, local_strategy

  strategy = local_strategy(4)
  traces: list[int] = []

  class Model(tf.keras.Sequential):  # type: ignore[misc]
    """A model that counts how often its training step is traced."""

    def train_step(self, *args: Any) -> Any:
      traces.append(1)
      return super().train_step(*args)

  rng = np.random.default_rng(0)
  x = rng.normal(size=(64, 8)).astype("float32")
  y = rng.normal(size=(64, 1)).astype("float32")
  data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(16)
  layers = tf.keras.layers
  with strategy.scope():
    model = Model([tf.keras.Input((8,)), layers.Dense(16), layers.Dense(1)])
    optimizer: Any = tf.keras.optimizers.Adam(1e-4)
    if is_ours:
      optimizer = CrossShardOptimizer(
        optimizer, group_assignment=[[0, 1], [2, 3]]
      )
    model.compile(optimizer, "mse")

  class Meter(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that prints a row after a tenth of the epochs and at the end."""

    cpu, epoch = 0.0, 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
      if epoch == 0:
        self.cpu = time.process_time()
      elif epoch + 1 in (max(2, epochs // 10), epochs):
        cpu, count = time.process_time(), (epoch - self.epoch) * steps
        status = pathlib.Path("/proc/self/status").read_text()
        row = {
          "steps": (epoch + 1) * steps,
          "epochs": epoch + 1,
          "MB": int(status.split("VmRSS:")[1].split()[0]) / 1024,
          "threads": int(status.split("Threads:")[1].split()[0]),
          "files": len(os.listdir("/proc/self/fd")),
          "traces": len(traces),
          "CPU ms": (cpu - self.cpu) / count * 1000,
        }
        print(json.dumps(row), flush=True)
        self.cpu, self.epoch = cpu, epoch

  with tempfile.TemporaryDirectory() as folder:
    extra = []
    if is_ours:
      extra = [
        callbacks.GroupMetrics((x[:16], y[:16])),
        callbacks.BackupAndRestore(folder, every=1000),
      ]
    model.fit(
      data,
      steps_per_epoch=steps,
      epochs=epochs,
      verbose=0,
      callbacks=[Meter(), *extra],
    )


def main() -> int:
  """Starts a process for each training; returns 1 if ours needs ever more."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=100_000)
  parser.add_argument("--epochs", type=int, default=2000)
  parser.add_argument("--train", nargs=3, type=int, help=argparse.SUPPRESS)
  given = parser.parse_args()
  if given.train:
    train(bool(given.train[0]), *given.train[1:])
    return 0
  grew = []
  for epochs, steps in ((given.steps // LONG, LONG), (given.epochs, SHORT)):
    for is_ours, name in ((0, "plain Keras"), (1, "CrossShardOptimizer")):
      command = [sys.executable, __file__, "--train"]
      result = subprocess.run(
        [*command, *map(str, (is_ours, epochs, steps))],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
      )
      lines = result.stdout.splitlines()
      rows = [json.loads(line) for line in lines if line.startswith("{")]
      for row in rows:
        numbers = (f"{key} {value:.5g}" for key, value in row.items())
        print(f"{name:20s}", *numbers, sep="  ", flush=True)
      first, last = rows[0], rows[-1]
      if is_ours:
        grew += [k for k, limit in LIMITS.items() if last[k] > limit * first[k]]
  if grew:
    print(f"FAILED: CrossShardOptimizer has more {', '.join(grew)} at the end")
  return int(bool(grew))


if __name__ == "__main__":
  sys.exit(main())
