"""Trains a recommender of two towers, and updates its tables by rows.

    python examples/recommender.py
    python examples/recommender.py --replicas=4 --groups=2 --nolazy_rows

A query and an item are vectors, rows of two tables; a click says that theirs
have a large product. The other items of a batch are what was not clicked. The
data are MovieLens where TensorFlow Datasets has prepared it, else clicks made
here: items follow a power law, and a query clicks on those of its own kind.
"""
# bazel: deps=:command_line,:replicas

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Before the imports.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import time
from collections.abc import Sequence
from typing import Any

import command_line
import matplotlib as mpl
import numpy as np
import replicas
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import app, flags, logging

from tf_cross_shard import CrossShardOptimizer, groups, layers, replica_state

mpl.use("Agg")  # Draws into files: no screen is needed.
from matplotlib import pyplot as plt

_REPLICAS = flags.DEFINE_integer("replicas", 1, "Devices to train on.", 1)
_GROUPS = flags.DEFINE_integer("groups", 1, "Models; divides replicas.", 1)
_LAZY = flags.DEFINE_bool("lazy_rows", True, "Adam by rows; else of all rows.")
_ITEMS = flags.DEFINE_integer("items", 100_000, "Of the clicks made here.", 10)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "Times to see all clicks.", 2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 512, "Clicks per step.", 1)
_PICTURE = command_line.define_picture("recommender.png", "File to draw into.")
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "TensorFlow Datasets' folder."
)

WIDTH, K, KINDS = 64, 10, 50


def load() -> tuple[np.ndarray, int, int]:
  """Returns clicks [n, 2], query and item, and how many there are of both."""
  try:
    builder = tfds.builder("movielens/100k-ratings", data_dir=_DATA_DIR.value)
    [ratings] = tfds.as_numpy(builder.as_dataset("train").batch(1_000_000))
  except (AssertionError, OSError):  # Not prepared: nothing is downloaded.
    print("MovieLens is not there: clicks are made, with a fixed seed.")
    rng = np.random.default_rng(0)
    queries = rng.integers(0, _ITEMS.value // 10, 60_000)
    ranks = (_ITEMS.value // KINDS) ** rng.random(len(queries))
    items = (ranks.astype(int) - 1) * KINDS + queries % KINDS
    return np.stack([queries, items], 1), _ITEMS.value // 10, _ITEMS.value
  names = ("user_id", "movie_id")
  ids = [np.unique(ratings[name], return_inverse=True)[1] for name in names]
  return np.stack(ids, 1), ids[0].max() + 1, ids[1].max() + 1


class Embedding(tf.keras.layers.Embedding):
  """Keras' layer, but that it reads only rows that occur."""

  def call(self, ids: Any) -> Any:
    """Returns the rows of the ids."""
    # Keras tries models with numbers of any dtype before it fits them.
    return layers.embedding_lookup(self.embeddings, tf.cast(ids, tf.int32))


class TwoTowers(tf.keras.Model):
  """Products of each query of a batch with each item of it, as logits."""

  def __init__(self, queries: int, items: int, layer: type[Any]) -> None:
    super().__init__()
    self.queries, self.items = layer(queries, WIDTH), layer(items, WIDTH)
    self.dense = tf.keras.layers.Dense(WIDTH)

  def call(self, clicks: tf.Tensor) -> tf.Tensor:
    """Returns logits, [batch, batch]."""
    query = self.dense(self.queries(clicks[:, 0]))
    return tf.matmul(query, self.items(clicks[:, 1]), transpose_b=True)


def in_batch_softmax(_: Any, logits: tf.Tensor) -> tf.Tensor:
  """Returns a loss for each query, whose own item is in its own column."""
  return tf.nn.sparse_softmax_cross_entropy_with_logits(
    tf.range(tf.shape(logits)[0]), logits
  )


def train(
  strategy: tf.distribute.Strategy, sizes: Sequence[int], data: Any, ours: bool
) -> tuple[TwoTowers, list[float], float]:
  """Returns the model, its loss by epoch, and milliseconds per step."""
  tf.keras.utils.set_random_seed(0)
  count = strategy.num_replicas_in_sync
  with strategy.scope():
    model = TwoTowers(*sizes, Embedding if ours else tf.keras.layers.Embedding)
    optimizer = tf.keras.optimizers.Adam(0.01)
    if ours:
      optimizer = CrossShardOptimizer(
        optimizer,
        group_assignment=groups.contiguous(count, count // _GROUPS.value),
        lazy_rows=_LAZY.value,
      )
    model.compile(optimizer, in_batch_softmax)
  ends: list[float] = []
  timer = tf.keras.callbacks.LambdaCallback(
    on_epoch_end=lambda *_: ends.append(time.perf_counter())
  )
  history = model.fit(
    data.repeat(),
    epochs=_EPOCHS.value,
    steps_per_epoch=len(data),
    shuffle=False,  # The pipeline does it.
    callbacks=[timer],
    verbose=0,
  )
  seconds = float(np.median(np.diff(ends)))  # The first epoch traces.
  return model, history.history["loss"], 1e3 * seconds / len(data)


def recall(model: TwoTowers, clicks: np.ndarray) -> list[float]:
  """Returns each replica's share of clicks on one of its first K items."""
  tables = model.queries.embeddings, model.items.embeddings
  copies = map(replica_state.values, [*tables, *model.dense.weights])
  shares = []
  for queries, items, kernel, bias in zip(*copies, strict=True):
    logits = (queries[clicks[:, 0]] @ kernel + bias) @ items.T
    first = np.argpartition(-logits, K, axis=1)[:, :K]
    shares.append(float((first == clicks[:, 1:]).any(axis=1).mean()))
  return shares


def main(argv: Sequence[str]) -> None:
  """Trains plain Keras and ours, prints and draws."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}")
  logging.set_verbosity(logging.WARNING)  # tfds and TensorFlow tell much.
  strategy = replicas.make_strategy(_REPLICAS.value)
  clicks, *sizes = load()
  clicks = np.random.default_rng(1).permutation(clicks)
  test, clicks = clicks[:500], clicks[500:]
  size = replicas.divisible(_BATCH_SIZE.value, _REPLICAS.value)
  data = tf.data.Dataset.from_tensor_slices((clicks, np.zeros(len(clicks))))
  data = data.shuffle(len(clicks), seed=0).batch(size, drop_remainder=True)
  # After the datasets, whose functions it would make slow. Without it
  # TensorFlow may idle when it deletes iterators: docs/limits.md#tensorflow.
  tf.data.experimental.enable_debug_mode()
  print(f"{len(clicks):,} clicks of {sizes[0]:,} queries on {sizes[1]:,} items")
  step = _REPLICAS.value // _GROUPS.value
  figure, axes = plt.subplots(figsize=(6.4, 4), layout="tight")
  medians = []
  for name in ("plain Keras", "ours"):
    model, losses, milliseconds = train(strategy, sizes, data, name == "ours")
    shares = recall(model, test)[:: step if name == "ours" else len(clicks)]
    found = ", ".join(f"{share:.1%}" for share in shares)
    medians.append(milliseconds)
    print(
      f"{name}: recall@{K} {found}; {milliseconds:.1f} ms a step,"
      f" {milliseconds / medians[0]:.2f} of plain Keras"
    )
    label = f"{name}, {milliseconds:.1f} ms a step"
    axes.plot(range(1, len(losses) + 1), losses, "o-", label=label)
  axes.set(xlabel="epoch", ylabel="loss", title=f"{sizes[1]:,} items")
  axes.legend()
  figure.savefig(_PICTURE.value, dpi=110, format="png")


if __name__ == "__main__":
  command_line.run(main)
