"""Whole training steps of `fit`, ours against plain Keras.

    python benchmarks/whole_step.py
    python benchmarks/whole_step.py --parts=device --batch_size=1024

A step is everything that `fit` does for a batch: input, forward and backward
pass, reduction, Adam's update, metrics. The time is the CPU time of all threads
of this process, since other programs on the machine change it little; with
a GPU, it is the elapsed time. In each round both optimizers train one after the
other; a ratio is the median [quartiles] over the rounds. About forty minutes on
two busy cores.

    device     one device
    mirrored   MirroredStrategy on four logical CPUs, which share each batch
    models     four models: four groups of one `fit` on four logical CPUs,
               against four calls of `fit` of plain Keras, one after the other
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import timing
from absl import app, flags

from tf_cross_shard import CrossShardOptimizer, groups

DENSE = {  # The width of the input, then those of the layers.
  "3 dense layers of 64": (64,) * 4,
  "21 dense layers of 64": (64,) * 22,
  "12 dense layers of 150": (150,) * 13,
  "12 dense layers of 512": (512,) * 13,
  "dense 784-2048-2048-10": (784, 2048, 2048, 10),
}
NETWORKS = [*DENSE, "small CNN", "transformer"]
layers = tf.keras.layers

_PARTS = timing.define_choices("parts", ["device", "mirrored", "models"])
_NETWORKS = timing.define_choices("networks", NETWORKS)
_ROWS = flags.DEFINE_integer("batch_size", 64, "Examples in a step.", 1)
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Timings of each case.", 1)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps of each timing.", 1)


def make_network(name: str) -> Any:
  """Returns a new model."""
  if name in DENSE:
    x = start = tf.keras.Input(DENSE[name][:1])
    for width in DENSE[name][1:]:
      x = layers.Dense(width, "relu")(x)
  elif name == "small CNN":
    x = start = tf.keras.Input((28, 28, 1))
    x = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu")(x))
    x = layers.MaxPooling2D()(layers.Conv2D(64, 3, activation="relu")(x))
    x = layers.Dense(10)(layers.Dense(128, "relu")(layers.Flatten()(x)))
  else:  # A transformer: four encoder layers of width 128, for 64 vectors.
    x = start = tf.keras.Input((64, 128))
    for _ in range(4):
      attention = layers.MultiHeadAttention(4, 32)(x, x)
      x = layers.LayerNormalization()(x + attention)
      inner = layers.Dense(128)(layers.Dense(512, "relu")(x))
      x = layers.LayerNormalization()(x + inner)
  return tf.keras.Model(start, x)


def make_trainer(
  name: str,
  rows: int,
  wrap: Callable[[Any], Any],
  strategy: tf.distribute.Strategy | None = None,
) -> Callable[[], float]:
  """Returns a function that trains, and returns milliseconds per step."""
  with strategy.scope() if strategy else contextlib.nullcontext():
    model = make_network(name)
    model.compile(wrap(tf.keras.optimizers.Adam(1e-4)), "mse")
  shapes = model.input_shape[1:], model.output_shape[1:]
  x, y = (np.random.normal(size=(rows, *s)).astype("f") for s in shapes)
  data = tf.data.Dataset.from_tensors((x, y)).repeat(1 + _STEPS.value)
  has_gpu = bool(tf.config.list_physical_devices("GPU"))
  now = time.perf_counter if has_gpu else time.process_time
  ends = []  # When each step ended, in seconds.
  clock = tf.keras.callbacks.Callback()
  clock.on_train_batch_end = lambda *_, **__: ends.append(now())

  def train() -> float:
    ends.clear()
    model.fit(data, verbose=0, shuffle=False, callbacks=[clock])
    return 1e3 * (ends[-1] - ends[0]) / _STEPS.value

  return train


def main(_: Sequence[str]) -> None:
  """Measures the networks in the parts that were asked for."""
  rows, strategy, single = _ROWS.value, timing.mirrored(4), groups.singletons(4)
  grouped = functools.partial(CrossShardOptimizer, group_assignment=single)
  print(timing.machine())
  for part, name in itertools.product(_PARTS.value, _NETWORKS.value):
    if part == "models":
      plain = [make_trainer(name, rows, lambda adam: adam) for _ in range(4)]
      ours = make_trainer(name, 4 * rows, grouped, strategy)
    else:
      on = None if part == "device" else strategy
      plain = [make_trainer(name, rows, lambda adam: adam, on)]
      ours = make_trainer(name, rows, CrossShardOptimizer, on)
    rounds = range(1 + _ROUNDS.value)  # The first one traces.
    taken = [(sum(train() for train in plain), ours()) for _ in rounds]
    keras_times, our_times = np.transpose(taken[1:])
    times = {"plain Keras": keras_times, "ours": our_times}
    timing.show(timing.compare(f"{part}: {name}", times, ["plain Keras"]))


if __name__ == "__main__":
  app.run(main)
