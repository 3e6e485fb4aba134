"""Compares our TPU programs with those of plain Keras and TensorFlow 1.

    python -m benchmarks.tpu_program --json=tpu_program.json
    python -m benchmarks.tpu_program --rounds=1 --topologies=v5e:4x2

Prints what the TPU compiler makes of a step: collectives, bytes, memory and
compile time. It needs no TPU, since libtpu compiles ahead of time. The first
command takes half an hour on two cores.

All contestants train the same models with Adam, in float32, by the mean cross
entropy over the replica's examples. "original" is TensorFlow 1's
tf.compat.v1.tpu.CrossShardOptimizer with a global step, because Keras always
counts steps.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Before TensorFlow.

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent import futures
from importlib import metadata
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags, logging

from benchmarks import timing
from tests.support import original
from tf_cross_shard import CrossShardOptimizer, virtual_tpu

KERAS = "plain Keras"
CONTESTANTS = ("original", KERAS, "ours", "ours, sharded")
COLUMNS = ("collectives", "wire_bytes", "argument_bytes", "temp_bytes")
_BATCH_SIZE, _CLASSES = 8, 10
layers = tf.keras.layers

Row = dict[str, Any]


def make_mlp() -> Any:
  """Returns three dense layers of 512 units."""
  x = start = tf.keras.Input([512])
  for activation in ("relu", "relu", None):
    x = layers.Dense(512, activation)(x)
  return tf.keras.Model(start, x)


def make_resnet() -> Any:
  """Returns a residual network: a convolution, then four blocks of two."""

  def convolve(x: Any, filters: int, strides: int = 1, size: int = 3) -> Any:
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)

  start = tf.keras.Input([32, 32, 3])
  x = convolve(start, 16)
  for filters, strides in ((16, 1), (32, 2), (64, 2), (64, 1)):
    y = convolve(layers.ReLU()(convolve(x, filters, strides)), filters)
    if x.shape != y.shape:
      x = convolve(x, filters, strides, size=1)
    x = layers.ReLU()(x + y)
  x = layers.GlobalAveragePooling2D()(x)
  return tf.keras.Model(start, layers.Dense(_CLASSES)(x))


def make_transformer() -> Any:
  """Returns a transformer of two blocks that predicts the next word."""
  words, length, width, heads = 1000, 64, 128, 4
  start = tf.keras.Input([length], dtype=tf.int32)
  x = layers.Embedding(words, width)(start)
  x = x + layers.Embedding(length, width)(tf.range(length))
  for _ in range(2):
    y = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(heads, width // heads)
    x = x + attention(y, y, use_causal_mask=True)
    y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dense(width)(y)
  x = layers.LayerNormalization()(x)
  return tf.keras.Model(start, layers.Dense(words)(x))


MODELS: dict[str, Callable[[], Any]] = {
  "mlp": make_mlp,
  "resnet": make_resnet,
  "transformer": make_transformer,
}

_MODELS = timing.define_choices("models", list(MODELS))
_TOPOLOGIES = flags.DEFINE_list(
  "topologies", ["v5e:4x2", "v5e:16x16"], "TPU slices to compile for."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 7, "How often to compile each case.", 1
)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")


def make_step(
  name: str, strategy: virtual_tpu.VirtualTPUStrategy, model: Any
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
  """Returns a training step, written as users of that optimizer do."""
  variables = model.trainable_variables
  # Explicit, since the defaults of Keras and TensorFlow 1 differ.
  numbers = {"learning_rate": 0.001, "epsilon": 1e-7}
  adam = tf.keras.optimizers.Adam(**numbers)

  def loss_of(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    logits = model(inputs, training=True)
    return tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )

  if name == "original":
    of_v1 = tf.compat.v1.train.AdamOptimizer(**numbers)
    theirs = original.Original(strategy, of_v1, variables)

    def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
      loss = loss_of(inputs, labels)
      theirs.minimize(loss)
      return loss

  elif name == KERAS:
    adam.build(variables)

    def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
      with tf.GradientTape() as tape:
        loss = loss_of(inputs, labels)
        scaled = loss / strategy.num_replicas_in_sync
      grads = tape.gradient(scaled, variables)
      adam.apply_gradients(zip(grads, variables, strict=True))
      return loss

  else:
    ours = CrossShardOptimizer(
      adam, loss_averaged_over="replica", shard_update=name == "ours, sharded"
    )
    ours.build(variables)

    def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
      with tf.GradientTape() as tape:
        loss = loss_of(inputs, labels)
      pairs = ours.compute_gradients(loss, variables, tape=tape)
      ours.apply_gradients(pairs)
      return loss

  return step


def compile_steps(topology: str, name: str, rounds: int) -> list[Row]:
  """Compiles the contestants' steps of one model for one slice, in turns."""
  strategy = virtual_tpu.VirtualTPUStrategy(
    len(virtual_tpu.coordinates(topology))
  )
  steps = {}
  for case in CONTESTANTS:
    tf.keras.utils.set_random_seed(0)
    with strategy.scope():
      model = MODELS[name]()
      steps[case] = make_step(case, strategy, model)
  per_word = model.output_shape[1:-1]  # A label for each word, or example.
  specs = (
    tf.TensorSpec([_BATCH_SIZE, *model.input_shape[1:]], model.input.dtype),
    tf.TensorSpec([_BATCH_SIZE, *per_word], tf.int32),
  )
  reports: dict[str, virtual_tpu.Report] = {}
  seconds: dict[str, list[float]] = {case: [] for case in steps}
  # The first compilation of a process takes longer and is not counted.
  for case in [CONTESTANTS[0], *CONTESTANTS * rounds]:
    reports[case] = virtual_tpu.compile_for(
      topology, steps[case], specs, strategy=strategy
    )
    seconds[case].append(reports[case].compile_seconds)
  taken = {case: 1e3 * np.array(s[-rounds:]) for case, s in seconds.items()}
  return [
    {
      "part": f"{name}, {strategy.num_replicas_in_sync} replicas",
      "case": row.case,
      "collectives": len(reports[row.case].collectives),
      **{c: getattr(reports[row.case], c) for c in COLUMNS[1:]},
      "compile_seconds": row.milliseconds / 1e3,
      "ratio": row.ratios[KERAS],
    }
    for row in timing.compare(name, taken, [KERAS])
  ]


def main(argv: Sequence[str]) -> None:
  """Compiles the programs, prints tables, and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  logging.set_verbosity(logging.ERROR)
  versions = {name: metadata.version(name) for name in ("jaxlib", "libtpu")}
  print(timing.machine() | versions)
  # Each thread of the compiler leaves its own heap behind, 270 MB for every
  # residual network. So each model has its own process, with few heaps.
  os.environ["MALLOC_ARENA_MAX"] = "2"
  spawn = multiprocessing.get_context("spawn")
  found: list[Row] = []
  for topology in _TOPOLOGIES.value:
    for name in _MODELS.value:
      with futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        rows = pool.submit(
          compile_steps, topology, name, _ROUNDS.value
        ).result()
      line = "{:<26}" + "{:>16}" * len(COLUMNS) + "{:>24}"
      print("\n" + line.format(rows[0]["part"], *COLUMNS, "compile time"))
      for row in rows:
        cells = (f"{row[column]:,}" for column in COLUMNS)
        ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*row["ratio"])
        print(line.format(f"  {row['case']}", *cells, ratio), flush=True)
      found += rows
  if _JSON.value:
    timing.write_json(_JSON.value, {"versions": versions, "programs": found})


if __name__ == "__main__":
  app.run(main)
