"""Compares several models in one `fit` with separate fits of plain Keras.

    python -m benchmarks.vectorized
    python -m benchmarks.vectorized --cases="16 tiny" --rounds=5

Each model of a `VectorizedStrategy` has its own learning rate. The figure of a
case is the CPU time of a step of `fit`, divided by that of the same number of
separate fits: 0.2 means that a step of all networks takes a fifth of the CPU
time. Both run in turns, and the smallest time of each counts, since other
processes only add to it.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Before TensorFlow.

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags

from benchmarks import timing
from tf_cross_shard import CrossShardOptimizer, VectorizedStrategy, schedules

_CASES = flags.DEFINE_list("cases", [], "Cases to measure; all by default.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each case.", 1)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")
_STEPS, _EPOCHS = 40, 5  # Of each `fit`.
_layers = tf.keras.layers


def _dense(*sizes: int) -> Callable[[], Any]:
  first, *hidden, last = sizes
  return lambda: tf.keras.Sequential(
    [
      tf.keras.Input((first,)),
      *(_layers.Dense(size, "relu") for size in hidden),
      _layers.Dense(last),
    ]
  )


def _lstm() -> Any:
  return tf.keras.Sequential(
    [tf.keras.Input((10, 8)), _layers.LSTM(32), _layers.Dense(3)]
  )


def _transformer() -> Any:
  x = y = tf.keras.Input((16, 32))
  for _ in range(2):
    y = _layers.LayerNormalization()(
      y + _layers.MultiHeadAttention(2, 16)(y, y)
    )
    feed = _layers.Dense(32)(_layers.Dense(64, "relu")(y))
    y = _layers.LayerNormalization()(y + feed)
  return tf.keras.Model(
    x, _layers.Dense(3)(_layers.GlobalAveragePooling1D()(y))
  )


def _convolutions() -> Any:
  return tf.keras.Sequential(
    [
      tf.keras.Input((16, 16, 1)),
      _layers.Conv2D(8, 3, activation="relu"),
      _layers.MaxPooling2D(),
      _layers.Conv2D(16, 3, activation="relu"),
      _layers.Flatten(),
      _layers.Dense(3),
    ]
  )


@dataclasses.dataclass(frozen=True)
class Case:
  """How many networks train, on examples of `shape`, and whether by XLA."""

  models: int
  shape: tuple[int, ...]
  batch: int
  make: Callable[[], Any]  # The network has three outputs, or more.
  jit: bool


def _network(models: int, jit: bool, *sizes: int) -> Case:
  return Case(models, sizes[:1], 64, _dense(*sizes), jit)


_TINY = 20, 64, 64, 64, 3
_WIDE = 100, 256, 256, 256, 10
_WIDEST = 784, 1024, 1024, 3
CASES = {
  "16 tiny": _network(16, False, *_TINY),
  "16 tiny, XLA": _network(16, True, *_TINY),
  "4 tiny": _network(4, False, *_TINY),
  "4 tiny, XLA": _network(4, True, *_TINY),
  "16 of 256": _network(16, False, *_WIDE),
  "16 of 256, XLA": _network(16, True, *_WIDE),
  "4 of 1024": _network(4, False, *_WIDEST),
  "4 of 1024, XLA": _network(4, True, *_WIDEST),
  "16 LSTMs": Case(16, (10, 8), 32, _lstm, False),
  "16 transformers": Case(16, (16, 32), 32, _transformer, False),
  "16 transformers, XLA": Case(16, (16, 32), 32, _transformer, True),
  "8 CNNs": Case(8, (16, 16, 1), 32, _convolutions, False),
}


def _data(case: Case) -> tf.data.Dataset:
  rng = np.random.default_rng(0)
  x = rng.normal(size=(_STEPS * case.batch, *case.shape)).astype("float32")
  y = rng.integers(0, 3, size=len(x))
  return tf.data.Dataset.from_tensor_slices((x, y)).batch(case.batch).cache()


def _compiled(case: Case, optimizer: Any, jit: bool) -> Any:
  tf.keras.utils.set_random_seed(0)
  model = case.make()
  loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(optimizer, loss, jit_compile=jit)
  return model


def _vectorized(case: Case) -> Any:
  rates = np.geomspace(1e-3, 1e-2, case.models).tolist()
  with VectorizedStrategy(case.models).scope():
    adam = tf.keras.optimizers.Adam(schedules.PerModel(rates))
    return _compiled(case, CrossShardOptimizer(adam), case.jit)


def _milliseconds(model: Any, data: tf.data.Dataset) -> float:
  """Returns the CPU time of a step of `fit`."""
  start = time.process_time()
  model.fit(data, epochs=_EPOCHS, verbose=0)
  return 1e3 * (time.process_time() - start) / (_STEPS * _EPOCHS)


def measure(name: str) -> dict[str, Any]:
  """Measures a case, and prints its row."""
  case = CASES[name]
  plain = _compiled(case, tf.keras.optimizers.Adam(1e-3), False)
  ours = _vectorized(case)
  data = _data(case)
  start = time.perf_counter()
  ours.fit(data.take(1), epochs=1, verbose=0)
  first = time.perf_counter() - start
  taken: list[list[float]] = [[], []]
  for i in range(_ROUNDS.value + 1):
    for model, times in zip((plain, ours), taken, strict=True):
      used = _milliseconds(model, data)
      if i:  # The first round traces, and fills caches.
        times.append(used)
  one, all_models = map(min, taken)
  row = {
    "case": name,
    "ratio": all_models / one / case.models,
    "milliseconds": all_models,
    "first_step_seconds": first,
  }
  print(
    f"{name:22} {row['ratio']:.2f} of separate fits; {all_models:.2f} ms; first"
    f" step {first:.1f} s",
    flush=True,
  )
  return row


def main(argv: Sequence[str]) -> None:
  """Measures the cases, and prints a table."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  print(timing.machine())
  rows = [measure(name) for name in _CASES.value or CASES]
  if _JSON.value:
    timing.write_json(_JSON.value, {"rows": rows})


if __name__ == "__main__":
  app.run(main)
