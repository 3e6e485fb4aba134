"""The training programs that `preemptions.py` kills.

`train` is one worker of a program, and resumes from its backup if there is one.
It appends events with their times to the file `log_<worker>` in a folder, as
JSON lines `[time, kind, ...]`. It writes the metrics of each epoch to
`history_<worker>`, and the final state to `end.npz`.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import failing_storage

from tests.support import fit_outcome, forking

# `preemptions.py` imports this file for the names of the programs. So only the
# functions that train import TensorFlow.

EPOCHS, STEPS = 4, 40  # Of each `fit`.
ROWS = 50  # Of the embedding table.


@dataclasses.dataclass(frozen=True)
class Program:
  """One program.

  Attributes:
    options: The arguments of CrossShardOptimizer.
    backup: The arguments of BackupAndRestore.
    is_search: Whether `Halving` trains trials, in place of other callbacks.
    patience: The `patience` of GroupEarlyStopping. With 0, each group stops
      in another epoch.
    has_table: Whether the model has an embedding table.
    has_limits: Whether each group has its own `clipnorm`.
    on_workers: Whether it also runs on several workers.
  """

  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  backup: dict[str, Any] = dataclasses.field(default_factory=dict)
  is_search: bool = False
  patience: int = 9
  has_table: bool = False
  has_limits: bool = False
  on_workers: bool = True


PROGRAMS = {
  "windows": Program({"accumulate_steps": 3}, {"every": 7}),
  "shards": Program({"shard_update": True}, {"every": 5, "keep": 2}),
  "by_variable": Program({"shard_update": "by_variable"}),
  "rows": Program({"lazy_rows": True}, {"every_seconds": 0.5}, has_table=True),
  "settings": Program(
    {"wire_dtype": "bfloat16", "skip_nonfinite": True},
    {"every": 11},
    has_limits=True,
  ),
  "windows_of_shards": Program(
    {"accumulate_steps": 2, "shard_update": True},
    {"every": 6, "every_seconds": 0.2},
  ),
  "early_stopping": Program({}, {"every": 13}, patience=0),
  "halving": Program({}, {"every": 9}, is_search=True, on_workers=False),
}


def train(
  folder: pathlib.Path,
  name: str,
  worker: int,
  storage: str,
  output: pathlib.Path,
  environment: Mapping[str, str],
) -> None:
  """Trains one worker, in a process that was forked for it.

  Args:
    folder: The folder of the logs and of the final state.
    name: The name of the program.
    worker: The number of this worker.
    storage: The folder or URL of backups, best weights and trials.
    output: The file for stdout and stderr.
    environment: Environment variables to set. TF_CONFIG names the workers.
  """
  forking.prepare(output, environment)
  failing_storage.act_as_server(storage)
  program = PROGRAMS[name]
  import numpy as np
  import tensorflow as tf

  from tf_cross_shard import (
    callbacks,
    local_strategy,
    multi_worker,
    replica_state,
  )

  log = (folder / f"log_{worker}").open("a", buffering=1)

  def note(*what: Any) -> None:
    print(json.dumps([time.time(), *what]), file=log)

  if not environment:
    strategy, groups = local_strategy(4), [[0, 2], [1, 3]]
  else:
    strategy = multi_worker.MultiWorkerStrategy()
    workers = strategy.num_replicas_in_sync
    # Only members of one group divide weights. So pairs train together.
    size = 2 if program.options.get("shard_update") else 1
    groups = np.arange(workers).reshape(-1, size).tolist()
  note("started")
  tf.keras.utils.set_random_seed(1)
  x, y = make_data(program)
  with strategy.scope():
    model = make_model(program, groups)
  backup = callbacks.BackupAndRestore(
    f"{storage}/backup",
    # The process may be killed after `fit` and before the final state is saved.
    delete_checkpoint=False,
    on_preemption=True,
    **program.backup,
  )
  epochs, extra = make_callbacks(program, storage, model.optimizer.groups)
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
      *extra.values(),
      make_log(note, backup),
      fit_outcome.history(folder / f"history_{worker}"),
      backup,
      # Comes after the backup callback, which restores the backup.
      tf.keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: note("restored")
      ),
    ],
  )
  # The file holds all groups; the log holds the best values of callbacks.
  replica_state.save(folder / "end.npz", model.optimizer, model)
  if program.is_search:
    note("end", repr(extra["search"].table))
  else:
    stop, best = extra["stop"], extra["best"]
    note("end", stop.best, stop.best_epoch, best.best)


def make_data(program: Program) -> tuple[Any, Any]:
  """Returns the examples of one epoch: inputs and targets."""
  import numpy as np

  rng = np.random.default_rng(0)
  if program.has_table:
    x = rng.integers(0, ROWS, (8 * STEPS, 6)).astype("int32")
  else:
    x = rng.normal(size=(8 * STEPS, 6)).astype("float32")
  return x, rng.normal(size=(8 * STEPS, 1)).astype("float32")


def make_model(program: Program, groups: list[list[int]]) -> Any:
  """Returns a compiled model; call it in the scope of a strategy."""
  import tensorflow as tf

  from tf_cross_shard import CrossShardOptimizer, layers, schedules

  keras = tf.keras.layers
  inputs = [tf.keras.Input((6,))]
  if program.has_table:
    inputs = [tf.keras.Input((6,), dtype="int32")]
    inputs += [layers.Embedding(ROWS, 4), keras.Flatten()]
  model = tf.keras.Sequential(
    [
      *(*inputs, keras.Dense(16), keras.Dropout(0.25)),
      *(keras.BatchNormalization(), keras.Dense(1)),
    ]
  )
  options = dict(program.options)
  if program.has_limits:
    limits = [1.0 + i % 2 for i in range(len(groups))]
    options["group_settings"] = {"clipnorm": limits}
  # A search sets the learning rates itself.
  rates = [0.03 / (1 + i) for i in range(len(groups))]
  rate = 0.01 if program.is_search else schedules.PerGroup(rates)
  optimizer = CrossShardOptimizer(
    tf.keras.optimizers.Adam(rate), group_assignment=groups, **options
  )
  model.compile(optimizer, "mse")
  return model


def make_callbacks(
  program: Program, storage: str, groups: Any
) -> tuple[int, dict[str, Any]]:
  """Returns the number of epochs, and the program's callbacks by name."""
  from tf_cross_shard import callbacks, trials

  if program.is_search:
    table = trials.Table(
      [{"learning_rate": 0.1 / 2**i} for i in range(4)], groups
    )
    search = callbacks.Halving(table, f"{storage}/trials", epochs=2, factor=2)
    return search.total_epochs, {"search": search}
  return EPOCHS, {
    "reduce": callbacks.GroupReduceLROnPlateau(factor=0.5, patience=1),
    "stop": callbacks.GroupEarlyStopping(patience=program.patience),
    "best": callbacks.GroupCheckpoint(f"{storage}/best.npz"),
  }


def make_log(note: Any, backup: Any) -> Any:
  """Returns a callback that logs each batch, trained or skipped."""
  import tensorflow as tf

  class Log(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Logs each batch."""

    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
      self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
      kind = "passed over" if backup.is_skipping_batches else "trained"
      note(kind, self.epoch * STEPS + batch)

  return Log()
