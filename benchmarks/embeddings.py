"""Compares our updates of embedding tables with Keras 3, tf_keras and TF 1.

    python benchmarks/embeddings.py --json=embeddings.json
    python benchmarks/embeddings.py --parts=device --optimizers=Adam --ids=2048

Ours updates only the rows that occur in a batch. Every result is a ratio to
plain Keras 3 in the same run, unless a part says otherwise. All parts take some
minutes on two cores, most of them for plain Keras on tables of a million rows.

    device     apply_gradients() with given rows on one device
    mirrored   the same under MirroredStrategy, where each replica has other
               rows
    workers    the same on two workers
    lookup     a whole step: lookup, gradient and update. Ours is measured with
               keras.layers.Embedding, which reads whole tables, and with
               layers.embedding_lookup.

The ids of a batch are divided among the replicas. They follow a power law,
p(k) ~ 1 / k, and are spread over the table, so that as many rows occur in a
large table as in a small one. SGD and Adagrad do the same update in all cases.
Our Adam and Momentum have lazy_rows=True. Of the others, only TensorFlow 1's
Momentum updates single rows; the others update the whole table.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import functools
import gc
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras
import timing
import workers
from absl import app, flags, logging

from tf_cross_shard import keras3, layers, multi_worker

_PARTS = timing.define_choices(
  "parts", ["device", "mirrored", "workers", "lookup"]
)
_OPTIMIZERS = flags.DEFINE_list(
  "optimizers", ["Adam", "Adagrad", "SGD", "Momentum"], "Optimizers to measure."
)
_ROWS = flags.DEFINE_list(
  "rows", ["10000", "100000", "1000000"], "Rows of the tables."
)
_REPLICATED_ROWS = flags.DEFINE_list(
  "replicated_rows",
  ["10000", "100000"],
  "Rows of the tables that have a copy on each replica. The tables of all cases"
  " are in memory at the same time.",
)
_IDS = flags.DEFINE_list("ids", ["2048", "16384"], "Ids of a batch.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Timings of each case.", 1)
_REPLICAS = flags.DEFINE_integer("replicas", 4, "Logical CPUs.", 2)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")

WIDTH = 64
KERAS, TF_KERAS, TF1 = "plain Keras", "tf_keras", "TensorFlow 1"
OURS, OURS_WHOLE = "ours, by rows", "ours, Embedding"
# So small that weights stay finite, however often a step is repeated.
_RATE = 1e-7
_TIMEOUT = 1200  # Seconds until the workers are killed as hung.

Rows = list[dict[str, Any]]


def make_optimizer(case: str, name: str) -> Any:
  """Returns the optimizer of a case."""
  if case == TF1:
    train = tf.compat.v1.train
    if name == "Momentum":
      return train.MomentumOptimizer(_RATE, 0.9)
    kind = "GradientDescent" if name == "SGD" else name
    return getattr(train, f"{kind}Optimizer")(_RATE)
  options = {"momentum": 0.9} if name == "Momentum" else {}
  library = tf_keras if case == TF_KERAS else keras
  kind = getattr(library.optimizers, "SGD" if options else name)
  optimizer = kind(_RATE, **options)
  if case in (KERAS, TF_KERAS):
    return optimizer
  is_lazy = name in ("Adam", "Momentum")
  return keras3.CrossShardOptimizer(optimizer, "sum", lazy_rows=is_lazy)


def make_table(rows: int) -> Any:
  """Returns a table of ones, as a Keras variable."""
  return keras.Variable("ones", shape=[rows, WIDTH], name="table")


def make_ids(rows: int, count: int, num_replicas: int) -> tf.Tensor:
  """Returns the ids of a batch, of shape `[replicas, ids / replicas]`.

  They follow a power law, and are spread over the rows of the table.
  """
  smallest = min(map(int, [*_ROWS.value, *_REPLICATED_ROWS.value]))
  uniform = np.random.default_rng(count).random([num_replicas, count])
  ranks = np.floor(smallest ** uniform[:, : count // num_replicas]).astype(int)
  return tf.constant((ranks - 1) * (rows // smallest))


def replica_id() -> Any:
  """Returns the number of the replica that is being traced."""
  return tf.distribute.get_replica_context().replica_id_in_sync_group


def make_step(
  strategy: tf.distribute.Strategy, case: str, name: str, rows: int, count: int
) -> Callable[[], Any]:
  """Returns a step that applies given rows, which depend on the replica."""
  with strategy.scope():
    optimizer = make_optimizer(case, name)
    table = make_table(rows)
    if case in (TF_KERAS, TF1):
      table = table.value
    if case != TF1:
      optimizer.build([table])
  ids = make_ids(rows, count, strategy.num_replicas_in_sync)
  values = tf.random.stateless_normal([ids.shape[1], WIDTH], [0, 0])

  def replica_step() -> None:
    # A tensor, since Keras' Adagrad fails with a list.
    shape = tf.constant([rows, WIDTH], tf.int64)
    grad = tf.IndexedSlices(values, ids[replica_id()], shape)
    optimizer.apply_gradients([(grad, table)])

  run = functools.partial(strategy.run, replica_step)
  return tf.function(run, autograph=False)


def make_training(
  strategy: tf.distribute.Strategy, case: str, rows: int, count: int
) -> Callable[[], Any]:
  """Returns a whole step of Adam: lookup, gradient and update."""
  with strategy.scope():
    layer = keras.layers.Embedding(rows, WIDTH)
    layer.build()
    table = layer.embeddings
    optimizer = make_optimizer(case, "Adam")
    optimizer.build([table])
  ids = make_ids(rows, count, strategy.num_replicas_in_sync)

  look_up = layer
  if case == OURS:
    look_up = functools.partial(layers.embedding_lookup, table)

  def replica_step() -> None:
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(look_up(ids[replica_id()]) ** 2)
    grad = tape.gradient(loss, table.value)
    optimizer.apply_gradients([(grad, table)])

  run = functools.partial(strategy.run, replica_step)
  return tf.function(run, autograph=False)


def measure(part: str, steps: Mapping[str, Callable[[], Any]]) -> Rows:
  """Times the steps in turns; the first worker prints a table."""
  taken = timing.interleave(steps, _ROUNDS.value)
  rows = timing.compare(part, taken, [KERAS])
  cluster = json.loads(os.environ.get("TF_CONFIG", "{}"))
  if cluster.get("task", {"index": 0})["index"] == 0:
    timing.show(rows)
  # Functions and variables of a part refer to each other: free them now, before
  # the next part measures.
  gc.collect()
  return [
    {
      "part": part,
      "case": row.case,
      "milliseconds": row.milliseconds,
      "ratio": row.ratios[KERAS],
    }
    for row in rows
  ]


def measure_updates(
  strategy: tf.distribute.Strategy, title: str, tables: Sequence[str]
) -> Rows:
  """Measures updates under a strategy: all optimizers, tables and batches."""
  found: Rows = []
  for name, rows, count in itertools.product(
    _OPTIMIZERS.value, map(int, tables), map(int, _IDS.value)
  ):
    found += measure(
      f"{title}, {name}, {rows:,}, {count:,} ids",
      {
        case: make_step(strategy, case, name, rows, count)
        for case in (KERAS, TF_KERAS, TF1, OURS)
      },
    )
  return found


def measure_lookups(
  strategy: tf.distribute.Strategy, title: str, tables: Sequence[str]
) -> Rows:
  """Measures whole steps, including the lookup, under a strategy."""
  found: Rows = []
  for rows, count in itertools.product(map(int, tables), map(int, _IDS.value)):
    found += measure(
      f"{title}, Adam, {rows:,}, {count:,} ids",
      {
        case: make_training(strategy, case, rows, count)
        for case in (KERAS, OURS_WHOLE, OURS)
      },
    )
  return found


def measure_workers() -> Rows:
  """Starts this program as two workers; returns the first worker's results."""
  found: Rows = workers.start(2, _TIMEOUT)["rows"]
  return found


def main(argv: Sequence[str]) -> None:
  """Measures all parts, prints tables and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  # Hide TensorFlow's messages. It would warn of many new functions, but each
  # case has its own tf.function on purpose.
  logging.set_verbosity(logging.ERROR)
  tf.get_logger().setLevel("ERROR")
  if "TF_CONFIG" in os.environ:
    strategy = multi_worker.MultiWorkerStrategy()
    rows = measure_updates(strategy, "workers", _REPLICATED_ROWS.value)
    if strategy.cluster_resolver.task_id == 0:
      timing.write_json(_JSON.value, {"rows": rows})
    return
  tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * _REPLICAS.value,
  )
  print(timing.machine())
  one = tf.distribute.get_strategy()
  mirrored = tf.distribute.MirroredStrategy(
    [f"CPU:{i}" for i in range(_REPLICAS.value)]
  )
  tables, replicated = _ROWS.value, _REPLICATED_ROWS.value
  parts: dict[str, Callable[[], Rows]] = {
    "device": lambda: measure_updates(one, "device", tables),
    "mirrored": lambda: measure_updates(mirrored, "mirrored", replicated),
    "workers": measure_workers,
    "lookup": lambda: (
      measure_lookups(one, "lookup", tables)
      + measure_lookups(mirrored, "lookup, mirrored", replicated)
    ),
  }
  found = {part: parts[part]() for part in _PARTS.value}
  if _JSON.value:
    timing.write_json(_JSON.value, found)


if __name__ == "__main__":
  app.run(main)
