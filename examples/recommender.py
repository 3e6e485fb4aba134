"""Trains a two-tower recommender, and updates its embedding tables by rows.

    python examples/recommender.py
    python examples/recommender.py --replicas=4 --groups=2 --no-lazy_rows

Each query and each item has a vector, which is a row of an embedding table. The
model learns that the vectors of a clicked pair have a large product. The other
items of the batch count as not clicked.

The clicks are generated: the popularity of items follows a power law, and a
query clicks on items of its own kind.
"""

import time
from collections.abc import Callable
from typing import Any

import command_line  # First: it makes TensorFlow quiet.
import numpy as np
import replicas
import tensorflow as tf

from tf_cross_shard import (
  CrossShardOptimizer,
  Models,
  groups,
  layers,
  local_strategy,
)

FLAGS = command_line.parse(
  __doc__,
  replicas=(1, "Number of devices."),
  groups=(1, "Groups; divides --replicas."),
  lazy_rows=(True, "Let Adam update only the rows of a batch."),
  items=(100_000, "Number of generated items."),
  epochs=(4, "Number of epochs, at least two."),
  batch_size=(512, "Clicks per step."),
  seed=(0, "Seed of the initial weights."),
)

WIDTH, K, KINDS = 64, 10, 50


def generate() -> np.ndarray:
  """Returns clicks [n, 2]: the number of a query and the number of an item."""
  rng = np.random.default_rng(0)
  queries = rng.integers(0, FLAGS.items // 10, 60_000)
  ranks = (FLAGS.items // KINDS) ** rng.random(len(queries))
  items = (ranks.astype(int) - 1) * KINDS + queries % KINDS
  clicks = np.stack([queries, items], 1)
  return np.random.default_rng(1).permutation(clicks)


class TwoTowers(tf.keras.Model):
  """Multiplies each query of a batch with each item of the batch."""

  def __init__(
    self, queries: int, items: int, layer: Callable[[int, int], Any]
  ) -> None:
    super().__init__()
    self.queries, self.items = layer(queries, WIDTH), layer(items, WIDTH)
    self.dense = tf.keras.layers.Dense(WIDTH)

  def call(self, clicks: tf.Tensor) -> tf.Tensor:
    """Returns logits [batch, batch], one row for each query."""
    query = self.dense(self.queries(clicks[:, 0]))
    return tf.matmul(query, self.items(clicks[:, 1]), transpose_b=True)


def in_batch_softmax(_: Any, logits: tf.Tensor) -> tf.Tensor:
  """Returns the loss of each query. Item i is the label of query i."""
  return tf.nn.sparse_softmax_cross_entropy_with_logits(
    tf.range(tf.shape(logits)[0]), logits
  )


def train(
  strategy: tf.distribute.Strategy, data: tf.data.Dataset, ours: bool
) -> tuple[TwoTowers, float, float]:
  """Trains with this package, or with plain Keras.

  Returns the model, the last loss, and the milliseconds of a step.
  """
  tf.keras.utils.set_random_seed(FLAGS.seed)
  count = strategy.num_replicas_in_sync
  assignment = groups.contiguous(count, count // FLAGS.groups)
  with strategy.scope():
    embedding = layers.Embedding if ours else tf.keras.layers.Embedding
    model = TwoTowers(FLAGS.items // 10, FLAGS.items, embedding)
    optimizer = tf.keras.optimizers.Adam(0.01)
    if ours:
      optimizer = CrossShardOptimizer(
        optimizer,
        group_assignment=assignment,
        lazy_rows=FLAGS.lazy_rows,
      )
    model.compile(optimizer, in_batch_softmax)
  ends: list[float] = []
  timer = tf.keras.callbacks.LambdaCallback(
    on_epoch_end=lambda *_: ends.append(time.perf_counter())
  )
  history = model.fit(
    data.repeat(),
    epochs=FLAGS.epochs,
    steps_per_epoch=len(data),
    shuffle=False,  # The dataset is shuffled already.
    callbacks=[timer],
    verbose=0,
  )
  # `diff` leaves out the first epoch, in which TensorFlow traces the step.
  seconds = float(np.median(np.diff(ends)))
  return model, history.history["loss"][-1], 1e3 * seconds / len(data)


def recall(model: TwoTowers, clicks: np.ndarray) -> list[float]:
  """Returns recall@K of each model.

  This is the share of clicks whose item is among the first K for its query.
  """
  tables = model.queries.embeddings, model.items.embeddings
  models = Models(model)
  copies = [models.values(v) for v in (*tables, *model.dense.weights)]
  shares = []
  for queries, items, kernel, bias in zip(*copies, strict=True):
    logits = (queries[clicks[:, 0]] @ kernel + bias) @ items.T
    first = np.argpartition(-logits, K, axis=1)[:, :K]
    shares.append(float((first == clicks[:, 1:]).any(axis=1).mean()))
  return shares


def main() -> None:
  """Trains with plain Keras and with this package, and compares both."""
  strategy = local_strategy(FLAGS.replicas)
  test, trained = np.split(generate(), [500])
  size = replicas.divisible(FLAGS.batch_size, FLAGS.replicas)
  data = tf.data.Dataset.from_tensor_slices((trained, np.zeros(len(trained))))
  data = data.shuffle(len(trained), seed=0).batch(size, drop_remainder=True)
  queries, items = FLAGS.items // 10, FLAGS.items
  print(f"{len(trained):,} clicks of {queries:,} queries on {items:,} items")
  medians = []
  for name in ("plain Keras", "ours"):
    model, loss, milliseconds = train(strategy, data, name == "ours")
    shares = recall(model, test)
    found = ", ".join(f"{share:.1%}" for share in shares)
    medians.append(milliseconds)
    print(
      f"{name}: loss {loss:.3f}; recall@{K} {found};"
      f" {milliseconds:.1f} ms a step,"
      f" {milliseconds / medians[0]:.2f} times plain Keras"
    )


if __name__ == "__main__":
  main()
