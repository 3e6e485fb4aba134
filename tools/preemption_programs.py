"""The training programs that `preemptions.py` kills.

`train` is one worker of a program, and resumes from its backup if there is one.
It appends JSON lines `[time, kind, ...]` to the file `log_<worker>`, and the
metrics of each epoch to `history_<worker>`. Finally, it writes `end.npz`.
"""

import json
import pathlib
import random
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.support import fit_outcome, forking

# `preemptions.py` imports this file for the names of the programs. So only the
# functions that train import TensorFlow.

EPOCHS, STEPS = 4, 40  # Of each `fit`.
ROWS = 50  # Of the embedding table.
SLOWEST, FAILING = 0.01, 0.2  # Seconds of an operation; share that fails.


class Program(NamedTuple):
  """One program: arguments of CrossShardOptimizer and of BackupAndRestore."""

  options: dict[str, Any]
  backup: dict[str, Any]
  patience: int = 9  # With 0, each group stops in another epoch.
  has_table: bool = False
  has_limits: bool = False  # Whether each group has its own `clipnorm`.
  is_virtual: bool = True  # On one worker: a virtual TPU, or logical devices.


PROGRAMS = {
  "windows": Program({"accumulate_steps": 3}, {"every": 7}),
  "shards": Program(
    {"shard_update": True}, {"every": 5, "keep": 2}, is_virtual=False
  ),
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

  Logs and the final state go to `folder`; backups and best weights to
  the path or URL `storage`; stdout and stderr to `output`.
  """
  forking.prepare(output, environment)
  program = PROGRAMS[name]
  import numpy as np
  import tensorflow as tf

  import tf_cross_shard as tcs
  from tf_cross_shard import callbacks, multi_worker

  if storage.startswith("gs://"):
    _make_bucket(folder)
  log = (folder / f"log_{worker}").open("a", buffering=1)

  def note(*what: Any) -> None:
    print(json.dumps([time.time(), *what]), file=log)

  if not environment:
    kind = tcs.virtual_tpu.VirtualTPUStrategy
    strategy = (kind if program.is_virtual else tcs.local_strategy)(4)
    groups = [[0, 2], [1, 3]]
  else:
    strategy = multi_worker.MultiWorkerStrategy()
    # Only members of one group divide weights. So pairs train together.
    size = 2 if program.options.get("shard_update") else 1
    workers = strategy.num_replicas_in_sync
    groups = np.arange(workers).reshape(-1, size).tolist()
  note("started")
  tf.keras.utils.set_random_seed(1)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(8 * STEPS, 6)).astype("float32")
  if program.has_table:
    x = rng.integers(0, ROWS, (8 * STEPS, 6)).astype("int32")
  y = rng.normal(size=(8 * STEPS, 1)).astype("float32")
  with strategy.scope():
    model = make_model(program, groups)
  stop = callbacks.PerModelEarlyStopping(patience=program.patience)
  best = callbacks.PerModelCheckpoint(f"{storage}/best.npz")
  reduce = callbacks.PerModelReduceLROnPlateau(factor=0.5, patience=1)
  used: list[Any] = [reduce, stop, best]
  backup = callbacks.BackupAndRestore(
    f"{storage}/backup",
    # The process may be killed after `fit` and before the final state is saved.
    delete_checkpoint=False,
    on_preemption=True,
    **program.backup,
  )

  class Log(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Logs each batch, trained or skipped."""

    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
      self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
      kind = "passed over" if backup.is_skipping_batches else "trained"
      note(kind, self.epoch * STEPS + batch)

  sharding = tf.data.Options()
  sharding.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.DATA
  )
  model.fit(
    tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(sharding),
    epochs=EPOCHS,
    verbose=0,
    callbacks=[
      *(callbacks.PerModelMetrics((x[:8], -y[:8])), *used, Log()),
      *(fit_outcome.history(folder / f"history_{worker}"), backup),
    ],
  )
  # The file holds all groups; the log holds the best values of callbacks.
  tcs.Models(model).save(folder / "end.npz")
  found = [stop.best, stop.best_epoch, best.best]
  note("end", *found)


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
    options["per_model"] = {"clipnorm": limits}
  rates = [0.03 / (1 + i) for i in range(len(groups))]
  adam = tf.keras.optimizers.Adam(schedules.PerModel(rates))
  model.compile(
    CrossShardOptimizer(adam, group_assignment=groups, **options), "mse"
  )
  return model


def flag(storage: pathlib.Path) -> pathlib.Path:
  """Returns the file that exists while a bucket does not answer."""
  return storage.with_name(f"{storage.name}_fails")


def _make_bucket(folder: pathlib.Path) -> None:
  """Keeps `gs://` in a folder; its operations are slow, and may fail.

  A new file is incomplete while another file is renamed to it.
  """
  import tensorflow as tf

  from tests.support import bucket

  # TensorFlow's seed must not decide: every start would fail at one place.
  rng = random.SystemRandom()
  functions = bucket.functions(folder)
  move = functions["rename"]
  is_failing = flag(folder / "storage").exists

  def serve(seconds: float = SLOWEST) -> None:
    time.sleep(rng.uniform(0, seconds))
    if is_failing() and rng.random() < FAILING:
      raise tf.errors.UnavailableError(None, None, "the bucket does not answer")

  def served(function: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
      serve()
      return function(*args, **options)

    return call

  class File(functions["GFile"]):  # type: ignore[misc]
    """A file of the bucket."""

    def write(self, data: Any) -> None:
      serve(0)
      super().write(data)

  def rename(old: str, new: str, overwrite: bool = False) -> None:
    source, target = (folder / p.removeprefix("gs://") for p in (old, new))
    if not target.exists():
      # A process that is killed here leaves half of the file.
      data = source.read_bytes()
      target.write_bytes(data[: len(data) // 2])
      serve()
    move(old, new, overwrite=overwrite)

  for name in ("listdir", "makedirs", "remove", "stat"):
    functions[name] = served(functions[name])
  functions |= {"GFile": File, "rename": served(rename)}
  for name, function in functions.items():
    setattr(tf.io.gfile, name, function)
