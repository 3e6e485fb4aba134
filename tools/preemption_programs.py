"""The training programs that `preemptions.py` kills.

    python tools/preemption_programs.py FOLDER PROGRAM WORKER WORKERS

Trains one worker of a program, which resumes from its backup if there is one.
It appends events with their times to the file `log_<worker>` in the folder, as
JSON lines `[time, kind, ...]`, and writes the final state to `end.npz`.
"""

import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

EPOCHS, STEPS = 4, 40  # Of each `fit`.
ROWS = 50  # Of the embedding table.
# Seconds to wait after each batch. Without the pause nearly all of the time
# would be spent in starting, and few signals would hit training.
PAUSE = 0.02


@dataclasses.dataclass(frozen=True)
class Program:
  """One program.

  Attributes:
    options: The arguments of CrossShardOptimizer.
    backup: The arguments of BackupAndRestore.
    search: "halving", "population", or "" for callbacks of groups.
    has_table: Whether the model has an embedding table.
    on_workers: Whether it also runs on several workers.
  """

  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  backup: dict[str, Any] = dataclasses.field(default_factory=dict)
  search: str = ""
  has_table: bool = False
  on_workers: bool = True


PROGRAMS = {
  "windows": Program({"accumulate_steps": 3}, {"every": 7}),
  "shards": Program({"shard_update": True}, {"every": 5, "keep": 2}),
  "by_variable": Program({"shard_update": "by_variable"}),
  "rows": Program({"lazy_rows": True}, {"every_seconds": 0.5}, has_table=True),
  "settings": Program(
    {
      "group_settings": {"clipnorm": [1.0, 2.0]},
      "wire_dtype": "bfloat16",
      "skip_nonfinite": True,
    },
    {"every": 11},
  ),
  "halving": Program({}, {"every": 9}, search="halving", on_workers=False),
  "population": Program(
    {}, {"every": 9}, search="population", on_workers=False
  ),
}


def main() -> None:
  """Trains one worker."""
  folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
  worker, workers = map(int, sys.argv[3:])
  program = PROGRAMS[name]
  import numpy as np
  import tensorflow as tf

  from tf_cross_shard import (
    CrossShardOptimizer,
    callbacks,
    layers,
    local_strategy,
    multi_worker,
    replica_state,
    schedules,
    trials,
  )

  log = (folder / f"log_{worker}").open("a", buffering=1)

  def note(*what: Any) -> None:
    print(json.dumps([time.time(), *what]), file=log)

  if workers > 1:
    strategy = multi_worker.MultiWorkerStrategy()
    # Pairs, so that shards have members; two workers are one group.
    groups = [[i, i + 1] for i in range(0, workers, 2)]
    if not program.options.get("shard_update"):
      groups = [[i] for i in range(workers)]
  else:
    strategy = local_strategy(4)
    groups = [[0, 2], [1, 3]]
  note("imported")
  tf.keras.utils.set_random_seed(1)
  rng = np.random.default_rng(0)
  keras_layers = tf.keras.layers
  if program.has_table:
    x = rng.integers(0, ROWS, (8 * STEPS, 6)).astype("int32")
    inputs = [
      tf.keras.Input((6,), dtype="int32"),
      layers.Embedding(ROWS, 4),
      keras_layers.Flatten(),
    ]
  else:
    x = rng.normal(size=(8 * STEPS, 6)).astype("float32")
    inputs = [tf.keras.Input((6,))]
  y = rng.normal(size=(8 * STEPS, 1)).astype("float32")
  rates = [0.03 / (1 + i) for i in range(len(groups))]
  options = dict(program.options)
  if "group_settings" in options:  # Values for as many groups as there are.
    limits = options["group_settings"]["clipnorm"]
    options["group_settings"] = {
      "clipnorm": [limits[i % len(limits)] for i in range(len(groups))]
    }
  with strategy.scope():
    model = tf.keras.Sequential(
      [
        *(*inputs, keras_layers.Dense(16), keras_layers.Dropout(0.25)),
        *(keras_layers.BatchNormalization(), keras_layers.Dense(1)),
      ]
    )
    rate = 0.01 if program.search else schedules.PerGroup(rates)
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(rate), group_assignment=groups, **options
    )
    model.compile(optimizer, "mse")
  backup = callbacks.BackupAndRestore(
    folder / "backup",
    # The process may be killed after `fit` and before the final state is saved.
    delete_checkpoint=False,
    on_preemption=True,
    **program.backup,
  )
  epochs = EPOCHS
  if program.search == "halving":
    table = trials.Table(
      [{"learning_rate": 0.1 / 2**i} for i in range(4)], optimizer.groups
    )
    search = callbacks.Halving(table, folder / "trials", epochs=2, factor=2)
    epochs, extra = search.total_epochs, [search]
  elif program.search == "population":
    explore = {"learning_rate": [0.8, 1.25]}
    search = callbacks.Population(explore=explore, every=1, seed=3)
    extra = [search]
  else:
    stop = callbacks.GroupEarlyStopping(patience=9)
    best = callbacks.GroupCheckpoint(folder / "best.npz")
    reduce = callbacks.GroupReduceLROnPlateau(factor=0.5, patience=1)
    extra = [reduce, stop, best]

  class Log(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Logs every batch, and every epoch with its metrics."""

    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
      self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
      kind = "passed over" if backup.is_skipping_batches else "trained"
      note(kind, self.epoch * STEPS + batch)
      time.sleep(0.0 if backup.is_skipping_batches else PAUSE)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
      note("epoch", epoch, {k: float(v).hex() for k, v in logs.items()})

  class Begun(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Logs that the backup is restored; comes after the backup callback."""

    def on_train_begin(self, logs: Any = None) -> None:
      note("restored")

  data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
  sharding = tf.data.Options()
  sharding.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.DATA
  )
  model.fit(
    data.with_options(sharding),
    epochs=epochs,
    verbose=0,
    callbacks=[
      callbacks.GroupMetrics((x[:8], -y[:8])),
      *(*extra, Log(), backup, Begun()),
    ],
  )
  # The file holds all groups; the log holds the best values of callbacks.
  replica_state.save(folder / "end.npz", optimizer, model)
  if program.search:
    note("end", repr(search.table))
  else:
    note("end", stop.best, stop.best_epoch, best.best)


if __name__ == "__main__":
  main()
