"""Compares divided embedding tables with whole ones.

    python benchmarks/tables.py
    python benchmarks/tables.py --parts=growth --rows=100000,10000000

A whole step is measured: lookup, gradient and update. The ids of each replica
follow a power law, p(k) ~ 1 / k, and are spread over the table.

    step       milliseconds: plain Keras with a whole table on each replica,
               layers.Embedding with lazy_rows=True, ShardedEmbedding, and
               a partitioned variable of TensorFlow 1
    growth     ShardedEmbedding on tables of several sizes, as a ratio to the
               first size
    memory     bytes that the table, its slots and some steps add to a process
               with all replicas: at most and at the end, as ratios to the bytes
               of one whole table and its slots
    workers    two workers: bytes that each of them sends in a step
    files      two workers: megabytes that replica_state.save and restore add
               to a process at most, with a table of the largest size
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import timing
import workers
from absl import app, flags, logging

from tf_cross_shard import keras3, multi_worker, replica_state

_ALL = ["step", "growth", "memory", "workers", "files"]
_PARTS = flags.DEFINE_list("parts", _ALL, "Parts to measure.")
_OPTIMIZERS = flags.DEFINE_list(
  "optimizers", ["Adam", "Adagrad"], "Optimizers."
)
_ROWS = flags.DEFINE_list("rows", ["100000", "1000000"], "Sizes for `growth`.")
_STEP_ROWS = flags.DEFINE_integer("step_rows", 200_000, "Rows for `step`.", 1)
_IDS = flags.DEFINE_integer("ids", 2048, "Ids of each replica.", 1)
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Timings of each case.", 1)
_REPLICAS = flags.DEFINE_integer("replicas", 4, "Logical CPUs.", 2)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")
_RISE_OF = flags.DEFINE_list("rise_of", None, "Used internally.")

WIDTH = 64
KERAS, LAZY, OURS = "plain Keras", "lazy_rows", "ShardedEmbedding"
PARTITIONED = "TensorFlow 1"
# How many tables the weights and the slots of an optimizer are.
_TABLES = {"Adam": 3, "Adagrad": 2, "SGD": 1}
_FOLDER = "TABLES_FOLDER"  # Names the folder of files to the workers.
_TIMEOUT = 600.0  # Seconds until the workers are killed as hung.
Rows = list[Any]


def make_ids(rows: int, replicas: int) -> np.ndarray:
  """Returns the ids of a batch, `[replicas, ids]`.

  There are as many distinct ids in a large table as in a small one.
  """
  smallest = min([_STEP_ROWS.value, *map(int, _ROWS.value), rows])
  uniform = np.random.default_rng(0).random([replicas, _IDS.value])
  ranks = np.floor(smallest**uniform).astype(int)
  return (ranks - 1) * (rows // smallest)


def make_step(
  strategy: tf.distribute.Strategy, case: str, name: str, rows: int
) -> Callable[[], Any]:
  """Returns a step with lookup, gradient and update."""
  with strategy.scope():
    kinds = {
      KERAS: keras.layers.Embedding,
      LAZY: keras3.Embedding,
      OURS: keras3.ShardedEmbedding,
    }
    layer = kinds[case](rows, WIDTH)
    layer.build()
    optimizer = getattr(keras.optimizers, name)(0.001)
    if case != KERAS:
      optimizer = keras3.CrossShardOptimizer(
        optimizer, loss_averaged_over="global", lazy_rows=True
      )
    optimizer.build(layer.trainable_variables)
  ids = tf.constant(make_ids(rows, strategy.num_replicas_in_sync))

  def replica_step() -> None:
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(tf.square(layer(ids[replica]) - 1.0))
    [variable] = layer.trainable_variables
    grad = tape.gradient(loss, variable.value)
    # Keras' Adagrad cannot be traced with row-sparse gradients.
    if case == KERAS:
      grad = tf.convert_to_tensor(grad)
    optimizer.apply_gradients([(grad, variable)])

  run = functools.partial(strategy.run, replica_step)
  return tf.function(run, autograph=False)


def make_partitioned_step(name: str, rows: int) -> Callable[[], Any]:
  """Returns a step of a TensorFlow 1 program with a partitioned variable."""
  v1, towers = tf.compat.v1, _REPLICAS.value
  ids = make_ids(rows, towers)
  with tf.Graph().as_default() as graph:
    table = v1.get_variable(
      "table", [rows, WIDTH], partitioner=v1.fixed_size_partitioner(towers)
    )
    losses = []
    for tower in range(towers):
      with tf.device(f"CPU:{tower}"):
        found = v1.nn.embedding_lookup(table, ids[tower])
        losses.append(tf.reduce_sum(tf.square(found - 1.0)))
    optimizer = getattr(v1.train, f"{name}Optimizer")(0.001)
    train = optimizer.minimize(tf.add_n(losses))
    start = v1.global_variables_initializer()
  session = v1.Session(
    graph=graph, config=v1.ConfigProto(device_count={"CPU": towers})
  )
  session.run(start)
  return functools.partial(session.run, train)


def measure_step(strategy: tf.distribute.Strategy) -> Rows:
  """Compares steps on one size of table."""
  found: Rows = []
  for name in _OPTIMIZERS.value:
    cases = {
      case: make_step(strategy, case, name, _STEP_ROWS.value)
      for case in (KERAS, LAZY, OURS)
    }
    cases[PARTITIONED] = make_partitioned_step(name, _STEP_ROWS.value)
    taken = timing.interleave(cases, _ROUNDS.value)
    part = f"{name}, {_STEP_ROWS.value:,} rows"
    found += timing.compare(part, taken, [KERAS])
    timing.show(found[-len(cases) :])
  return found


def measure_growth(strategy: tf.distribute.Strategy) -> Rows:
  """Compares steps on divided tables of several sizes."""
  found: Rows = []
  sizes = [f"{int(rows):,} rows" for rows in _ROWS.value]
  for name in _OPTIMIZERS.value:
    cases = {
      size: make_step(strategy, OURS, name, int(rows))
      for size, rows in zip(sizes, _ROWS.value, strict=True)
    }
    taken = timing.interleave(cases, _ROUNDS.value)
    found += timing.compare(f"{name}, growth", taken, sizes[:1])
    timing.show(found[-len(sizes) :])
  return found


def measure_memory() -> Rows:
  """Measures the memory that the largest table adds to a new process."""
  found: Rows = []
  rows = max(map(int, _ROWS.value))
  print(f"\nmemory of {_REPLICAS.value} replicas, {rows:,} rows")
  for name in _OPTIMIZERS.value:
    for case in (LAZY, OURS):
      child = f"--rise_of={case},{name},{rows}"
      command = [sys.executable, *sys.argv, child]
      # oneDNN's allocator keeps memory that tensors have freed.
      environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
      output = subprocess.check_output(command, text=True, env=environment)
      added, at_end = map(float, output.split()[-2:])
      whole = 4 * rows * WIDTH * _TABLES[name]
      row = {"case": case, "optimizer": name}
      row |= {"peak": added / whole, "at_end": at_end / whole}
      print(f"  {name}, {case}: peak {row['peak']:.2f}, {row['at_end']:.2f}")
      found.append(row)
  return found


def rise(strategy: Any, case: str, name: str, rows: int) -> tuple[float, float]:
  """Returns the bytes that a case adds to this process: the peak, the end."""
  # A small table first, so that TensorFlow's own memory is not counted.
  for _ in range(3):
    make_step(strategy, case, name, 1000)()
  before, _ = timing.process_size()
  step = make_step(strategy, case, name, rows)
  for _ in range(5):
    step()
  after, _ = timing.process_size()
  peak = timing.peak_megabytes()
  return (peak - before) * 2**20, (after - before) * 2**20


def sent_here() -> int:
  """Returns the bytes that went through the loopback device, on Linux."""
  lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
  [fields] = (x.split() for x in lines if x.strip().startswith("lo:"))
  return int(fields[9])


def measure_bytes() -> Rows:
  """Measures the bytes of a step on this worker, one of two."""
  strategy = multi_worker.MultiWorkerStrategy()
  found: Rows = []
  for name in _OPTIMIZERS.value:
    step = make_step(strategy, OURS, name, _STEP_ROWS.value)
    for _ in range(3):
      step()
    before, count = sent_here(), 20
    for _ in range(count):
      step()
    # Both workers send through this device.
    sent = (sent_here() - before) / count / strategy.num_replicas_in_sync
    ids = make_ids(_STEP_ROWS.value, strategy.num_replicas_in_sync)
    unique = float(np.mean([len(np.unique(own)) for own in ids]))
    limit = 2 * unique * (WIDTH + 1) * 4
    found.append(
      {
        "optimizer": name,
        "bytes": sent,
        "unique": unique,
        "of_target": sent / limit,
      }
    )
  return found


def measure_workers() -> Rows:
  """Starts this program as two workers; returns the first worker's results."""
  found: Rows = workers.start(2, _TIMEOUT, ["--parts=workers"])["rows"]
  for row in found:
    print(
      f"  {row['optimizer']}: {row['bytes']:,.0f} bytes by each worker,"
      f" {row['unique']:.0f} distinct ids,"
      f" {row['of_target']:.2f} of 2 ids (width + 1) numbers"
    )
  return found


def measure_files_here() -> Rows:
  """Measures the memory and the time of save and restore on one worker."""
  strategy = multi_worker.MultiWorkerStrategy()
  rows, found = max(map(int, _ROWS.value)), []
  for name in _OPTIMIZERS.value:
    with strategy.scope():
      layer = keras3.ShardedEmbedding(rows, WIDTH)
      layer.build()
      optimizer = keras3.CrossShardOptimizer(
        getattr(keras.optimizers, name)(0.001)
      )
      optimizer.build(layer.trainable_variables)
    state = optimizer, layer.trainable_variables
    row: dict[str, Any] = {"optimizer": name}
    row["megabytes"] = 4 * rows * WIDTH * _TABLES[name] / 2**20
    path = os.path.join(os.environ[_FOLDER], name)
    for function in (replica_state.save, replica_state.restore):
      before, _ = timing.process_size()
      pathlib.Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
      start = time.perf_counter()
      function(path, *state)
      row[function.__name__] = timing.peak_megabytes() - before
      row[f"{function.__name__} seconds"] = time.perf_counter() - start
    found.append(row)
  return found


def measure_files() -> Rows:
  """Starts this program as two workers; returns the first worker's results."""
  with tempfile.TemporaryDirectory() as folder:
    os.environ[_FOLDER] = folder
    found: Rows = workers.start(2, _TIMEOUT, ["--parts=files"])["rows"]
  for row in found:
    print(
      f"  {row['optimizer']}: table and slots {row['megabytes']:.0f} MiB; save"
      f" adds {row['save']:.0f} MiB in {row['save seconds']:.1f} s, restore"
      f" {row['restore']:.0f} MiB in {row['restore seconds']:.1f} s"
    )
  return found


def main(argv: Sequence[str]) -> None:
  """Measures all parts, prints tables and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  logging.set_verbosity(logging.ERROR)
  tf.get_logger().setLevel("ERROR")
  if "TF_CONFIG" in os.environ:
    is_files = _PARTS.value == ["files"]
    rows = measure_files_here() if is_files else measure_bytes()
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
      timing.write_json(_JSON.value, {"rows": rows})
    return
  strategy = timing.mirrored(_REPLICAS.value)
  if _RISE_OF.value:
    case, name, tall = _RISE_OF.value
    print(*rise(strategy, case, name, int(tall)))
    return
  print(timing.machine())
  parts: dict[str, Callable[[], Rows]] = {
    "step": lambda: measure_step(strategy),
    "growth": lambda: measure_growth(strategy),
    "memory": measure_memory,
    "workers": measure_workers,
    "files": measure_files,
  }
  found = {part: parts[part]() for part in _PARTS.value}
  if _JSON.value:
    rows = {
      part: [getattr(row, "__dict__", row) for row in of_part]
      for part, of_part in found.items()
    }
    timing.write_json(_JSON.value, rows)


if __name__ == "__main__":
  app.run(main)
