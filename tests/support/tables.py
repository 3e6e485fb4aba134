"""Trains a divided table with given gradients; makes the oracle's batches."""

from typing import Any

import numpy as np
import tensorflow as tf

from tests.support import lazy_oracle, testbed, training
from tf_cross_shard import replica_state

ROWS, WIDTH, STEPS = 11, 2, 3
# By step and replica. Replicas repeat ids of their own and of each other.
IDS = np.random.default_rng(0).integers(0, ROWS, [STEPS, 4, 6])
TABLE = (
  np.random.default_rng(1).integers(-4, 4, [ROWS, WIDTH]).astype("float32")
)


def make(
  which: str,
  strategy: Any,
  kind: str = "SGD",
  groups: Any = None,
  **settings: Any,
) -> tuple[Any, Any, Any]:
  """Returns a strategy, a layer and an optimizer; the layer holds `TABLE`."""
  library, package = training.KERASES[which]
  with strategy.scope():
    layer = package.ShardedEmbedding(ROWS, WIDTH, group_assignment=groups)
    layer.build()
    options = lazy_oracle.KINDS.get(kind, (None, {}))[1]
    opt = getattr(library.optimizers, kind)(
      **{
        "learning_rate": lazy_oracle.RATE,
        **options,
        **settings.pop("opt", {}),
      }
    )
    optimizer = package.CrossShardOptimizer(
      opt, group_assignment=groups, loss_averaged_over="global", **settings
    )
  layer.load_own_variables({"0": TABLE})
  return strategy, layer, optimizer


def take_steps(
  strategy: Any,
  layer: Any,
  optimizer: Any,
  ids: Any = IDS,
  in_cond: bool = False,
  scale: float = 1.0,
) -> None:
  """Takes a step for each batch. The gradients are `weights_of(ids)`.

  Each replica also compares the rows with the table of its group.
  """

  def step(batch: Any, tables: Any) -> None:
    own = tf.gather(batch, testbed.replica_id())
    table = tf.gather(tables, testbed.replica_id())
    with tf.GradientTape() as tape:
      rows = layer(own)
      tf.debugging.assert_equal(rows, tf.gather(table, own))
      loss = tf.reduce_sum(rows * weights_of(own)) * scale
    variables = training.native(layer.trainable_variables)
    grads = tape.gradient(loss, variables)
    if in_cond:
      tf.cond(
        tf.constant(True),
        lambda: tf.identity(
          optimizer.apply_gradients(zip(grads, variables, strict=True))
        ),
        lambda: tf.constant(0, tf.int64),
      )
    else:
      optimizer.apply_gradients(zip(grads, variables, strict=True))

  count = strategy.num_replicas_in_sync
  groups = layer.group_assignment or [list(range(count))]

  @tf.function(autograph=False)
  def run(batch: Any, tables: Any) -> None:
    strategy.run(step, (batch, tables))

  for batch in ids:
    tables = np.zeros([count, ROWS, WIDTH], "float32")
    for group, members in enumerate(groups):
      tables[members] = whole(layer, group)
    run(tf.constant(batch), tf.constant(tables))


def weights_of(ids: Any) -> Any:
  """Returns the gradient of each looked-up row, small integers."""
  columns = [ids % 3 - 1, ids % 5 - 2]
  return tf.cast(tf.stack(columns, -1), tf.float32)


def whole(layer: Any, group: int = 0) -> np.ndarray:
  """Returns the table of a group, from the copies of its members."""
  copies = replica_state.values(layer.embeddings)
  table = np.zeros([ROWS, WIDTH], "float32")
  groups = layer.group_assignment or [range(len(copies))]
  for place, member in enumerate(sorted(groups[group])):
    own = table[place :: len(groups[group])]
    own[:] = copies[member][: len(own)]
  return table


def batches(replicas: Any) -> list[Any]:
  """Returns the oracle's batches: the rows of all replicas of a group."""
  found = []
  for batch in IDS:
    ids = batch[list(replicas)].reshape(-1)
    found.append((ids, np.array(weights_of(ids))))
  return found
