"""Tasks of workers that train, save and export a divided table."""

import errno
import os
import pathlib
import signal
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.support import multi_worker_cases, multi_worker_faults, tables
from tf_cross_shard import CrossShardOptimizer, callbacks, layers, replica_state
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.layers import row_exchange
from tf_cross_shard._src.replica_state import archive, group_state

CASES = [
  ("keras", "SGD", None),
  ("keras", "Adam", None),
  ("tf_keras", "Adagrad", None),
  ("keras", "Adagrad", "strided"),
]


def groups_of(grouping: str | None) -> Any:
  """Returns the groups of four replicas by name."""
  return None if grouping is None else [[0, 2], [1, 3]]


def run(strategy: Any, folder: pathlib.Path) -> dict[Any, Any]:
  """Returns tables after training, and writes files of one of them."""
  found: dict[Any, Any] = {}
  for case in CASES:
    which, kind, grouping = case
    groups = groups_of(grouping)
    if groups and strategy.num_replicas_in_sync != 4:
      continue
    _, layer, optimizer = tables.make(which, strategy, kind, groups)
    tables.take_steps(strategy, layer, optimizer)
    number = 1 if groups is None else 2
    found[case] = [tables.whole(layer, i) for i in range(number)]
  # A plain `lookup` outside a step, on all workers.
  with mock.patch.object(
    row_exchange, "in_replica", wraps=row_exchange.in_replica
  ) as traced:
    for ids in ([3], [3, 7], [[1], [5]], [1, 2, 4], np.arange(tables.ROWS)):
      found["lookup"] = layer.lookup(ids).numpy()
  found["traces"] = traced.call_count
  _, layer, optimizer = tables.make("keras", strategy, "Adam")
  tables.take_steps(strategy, layer, optimizer, tables.IDS[:1])
  state = optimizer, layer.trainable_variables
  layer.export(folder / "served")
  full = tf.errors.ResourceExhaustedError(None, None, "disk is full")
  with mock.patch.object(tf.saved_model, "save", side_effect=full):
    found["full disk for export"] = multi_worker_faults.attempt(
      lambda: layer.export(folder / "served")
    )
  # Blocks of 2 rows.
  with mock.patch.object(replicas_lib, "_MOST_WORDS", 4):
    replica_state.save(folder / "state", *state)
    found["full disk"] = _save_on_a_full_disk(folder / "state", state)
  # What `BackupAndRestore` writes: each worker the rows of its own members.
  own = group_state.GroupState(*state)
  differing = own.names_that_differ("a backup")
  path = folder / f"worker_{multi_worker_cases.place_of(strategy)}"
  archive.write(path, own.arrays(differing, own=True), own.about({}))
  found["rows in the file"] = [
    array.shape[0]
    for name, array in own.arrays(differing, own=True).items()
    if "embeddings" in name
  ]
  store: dict[str, Any] = {}
  layer.save_own_variables(store)
  found["store"] = store["0"]
  found["part"] = tuple(layer.embeddings.shape)
  return found


def _save_on_a_full_disk(path: pathlib.Path, state: Any) -> Any:
  """Returns the error if the first worker cannot write the second table."""
  before, real = path.read_bytes(), np.lib.format.write_array_header_1_0
  failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  effects = [mock.DEFAULT, failure]
  header = mock.Mock(wraps=real, side_effect=effects)
  with mock.patch.object(np.lib.format, "write_array_header_1_0", header):
    outcome = multi_worker_faults.attempt(
      lambda: replica_state.save(path, *state)
    )
  return {**outcome, "is unchanged": path.read_bytes() == before}


def fit(
  strategy: Any, folder: pathlib.Path, killed_after: int | None
) -> dict[str, Any]:
  """Trains a model with a divided table; may kill worker 0 after some steps."""
  keras = tf.keras
  with strategy.scope():
    table = layers.ShardedEmbedding(100, tables.WIDTH)
    model = keras.Sequential(
      [
        keras.Input((4,), dtype="int32"),
        table,
        keras.layers.Flatten(),
        keras.layers.Dense(1, kernel_initializer="ones"),
      ]
    )
    optimizer = CrossShardOptimizer(keras.optimizers.Adagrad(0.05))
    model.compile(optimizer, "mse")
  is_first = multi_worker_cases.place_of(strategy) == 0

  def kill(batch: int, logs: Any) -> None:
    del batch, logs
    if is_first and optimizer.iterations.numpy() == killed_after:
      os.kill(os.getpid(), signal.SIGKILL)

  rng = np.random.default_rng(0)
  x, y = rng.integers(0, 100, [256, 4]), rng.random([256, 1])
  history = model.fit(
    tf.data.Dataset.from_tensor_slices((x, y)).batch(32),
    epochs=3,
    verbose=0,
    callbacks=[
      callbacks.BackupAndRestore(folder, every=3),
      keras.callbacks.LambdaCallback(on_train_batch_end=kill),
    ],
  )
  plain = replica_state.load_group(0, optimizer, model)
  return {
    "epochs": history.epoch,
    "table": table.get_weights()[0],
    "outputs": model.predict(x, verbose=0, batch_size=32),
    "plain": plain.predict(x, verbose=0),
  }
