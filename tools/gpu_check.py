"""Compares training with plain Keras, by value and by time, on this machine.

Run by tools/gpu_check.sh. Each row trains a model with and without this
package. Without a GPU, it runs on logical CPUs, with smaller models.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from tf_cross_shard import (
  CrossShardOptimizer,
  Models,
  VectorizedStrategy,
  groups,
  layers,
)

GPUS = tf.config.list_physical_devices("GPU")
WIDTH, STEPS, BATCH = (512, 50, 256) if GPUS else (32, 10, 16)
VOCABULARY = 1_000_000 if GPUS else 10_000
MODELS = (16, 64) if GPUS else (4, 8)
SAME = 1e-4  # The largest difference of a weight; float32 sums differ in order.
SAME_FLOAT16 = 2e-2

failures = 0


def dense() -> Any:
  """Returns a model of dense layers."""
  hidden = [tf.keras.layers.Dense(WIDTH, "tanh") for _ in range(3)]
  end = tf.keras.layers.Dense(1, dtype="float32")
  return tf.keras.Sequential([tf.keras.Input((WIDTH,)), *hidden, end])


def embedding(layer: Any) -> Any:
  """Returns a model with a large embedding table."""
  ids = tf.keras.Input((8,), dtype="int64")
  table = layer(VOCABULARY, 32)(ids)
  end = tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(table))
  return tf.keras.Model(ids, end)


def adam() -> Any:
  """Returns Adam whose steps do not enlarge rounding errors."""
  return tf.keras.optimizers.Adam(1e-3, epsilon=1e-2)


def fit(
  model: Callable[[], Any],
  optimizer: Callable[[], Any],
  x: Any,
  batch: int = BATCH,
  jit: bool = False,
  strategy: Any = None,
) -> tuple[Any, float]:
  """Returns a trained model, and the time of a step in the last epoch."""
  tf.keras.utils.set_random_seed(0)
  with (strategy or tf.distribute.get_strategy()).scope():
    trained = model()
    trained.compile(optimizer(), "mse", jit_compile=jit)
  times = []
  clock = tf.keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: times.append(time.perf_counter())
  )
  y = np.mean(x, axis=1, keepdims=True, dtype="f") / len(x[0])
  trained.fit(
    *(x, y, batch),
    **{"epochs": 3, "shuffle": False, "verbose": 0, "callbacks": [clock]},
  )
  return trained, (times[-1] - times[-2]) * 1e3 / (len(x) / batch)


def inputs(batch: int = BATCH) -> np.ndarray:
  """Returns inputs of `dense` for `STEPS` steps."""
  shape = STEPS * batch, WIDTH
  return np.random.default_rng(0).normal(size=shape).astype("f")


def check(
  name: str,
  plain: tuple[Any, float],
  ours: Callable[[], tuple[Any, float]],
  *,
  same: float = SAME,
  fits: int = 1,
) -> None:
  """Prints a row: the largest difference, and times. `fits` models trained."""
  global failures
  try:
    model, milliseconds = ours()
    pairs = zip(plain[0].get_weights(), model.get_weights(), strict=True)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    result = f"{difference:.1e}" + (" FAILED" if difference > same else "")
  except Exception as error:
    result, milliseconds = f"FAILED: {error!s:.200}", float("nan")
  failures += "FAILED" in result
  ratio = milliseconds / plain[1] / fits
  result = result.replace("\n", " ").replace("|", "/")
  print(f"| {name} | {result} | {milliseconds:.2f} | {ratio:.2f} |", flush=True)


def check_one_device() -> None:
  """Kernels, Keras' operations and XLA; float16; rows of a table."""
  x = inputs()
  for jit in (False, True):
    plain = fit(dense, adam, x, jit=jit)
    for fused in (None, False):

      def ours(jit: bool = jit, fused: Any = fused) -> Any:
        wrapped = lambda: CrossShardOptimizer(adam(), fused_update=fused)  # noqa: E731
        return fit(dense, wrapped, x, jit=jit)

      check(f"one device, fused_update={fused}, jit_compile={jit}", plain, ours)
  tf.keras.mixed_precision.set_global_policy("mixed_float16")
  check(
    "one device, mixed_float16",
    fit(dense, adam, x),
    lambda: fit(dense, lambda: CrossShardOptimizer(adam()), x),
    same=SAME_FLOAT16,
  )
  tf.keras.mixed_precision.set_global_policy("float32")
  # Adagrad changes only rows that occur, so that plain Keras agrees. No id
  # occurs twice in a batch: of these, Keras squares each gradient.
  rng = np.random.default_rng(0)
  batches = [rng.choice(VOCABULARY, BATCH * 8, False) for _ in range(STEPS)]
  ids = np.reshape(batches, (-1, 8))
  adagrad = lambda: tf.keras.optimizers.Adagrad(0.01)  # noqa: E731
  check(
    f"one device, lazy_rows, table of {VOCABULARY:,} x 32",
    fit(lambda: embedding(tf.keras.layers.Embedding), adagrad, ids),
    lambda: fit(
      lambda: embedding(layers.Embedding),
      lambda: CrossShardOptimizer(adagrad(), lazy_rows=True),
      ids,
    ),
  )


def check_models(count: int, jit: bool) -> None:
  """The last of `count` models in one program, against a separate fit."""
  x = inputs()

  def ours() -> Any:
    model, took = fit(dense, adam, x, BATCH, jit, VectorizedStrategy(count))
    return Models(model)[count - 1], took

  plain = fit(dense, adam, x, jit=jit)
  check(f"{count} models, jit_compile={jit}", plain, ours, fits=count)


def check_groups(strategy: Any, size: int) -> None:
  """The last group of `size` replicas, against a separate fit of its data."""
  count = strategy.num_replicas_in_sync
  table = groups.contiguous(count, size)
  x = inputs(BATCH * count)
  parts = x.reshape(STEPS, table.num_groups, -1, WIDTH)
  of_last = parts[:, -1].reshape(-1, WIDTH)

  def ours() -> Any:
    wrapped = lambda: CrossShardOptimizer(adam(), group_assignment=table)  # noqa: E731
    model, took = fit(dense, wrapped, x, BATCH * count, strategy=strategy)
    last = table.num_groups - 1
    return Models(model)[last], took

  plain = fit(dense, adam, of_last, BATCH * size)
  name = f"{table.num_groups} groups of {size} devices"
  check(name, plain, ours, fits=table.num_groups)


def main() -> int:
  """Prints the table; returns 1 if a row failed."""
  tf.config.experimental.enable_tensor_float_32_execution(False)
  if not GPUS:
    tf.config.set_logical_device_configuration(
      tf.config.list_physical_devices("CPU")[0],
      [tf.config.LogicalDeviceConfiguration()] * 4,
    )
  kind = "GPU" if GPUS else "CPU"
  devices = [d.name for d in tf.config.list_logical_devices(kind)]
  print(f"{len(GPUS)} GPUs, TensorFlow {tf.__version__},", end=" ")
  print(f"Keras {tf.keras.__version__}; the last column is relative to as many")
  print("fits of plain Keras.\n\n| what | largest difference | ms | ratio |")
  print("|---|---|---|---|")
  check_one_device()
  for count in MODELS:
    for jit in (False, True):
      check_models(count, jit)
  if len(devices) > 1:
    even = len(devices) // 2 * 2
    strategy = tf.distribute.MirroredStrategy(devices[:even])
    for size in sorted({1, even // 2, even}):
      check_groups(strategy, size)
  else:
    print("| groups of several GPUs | skipped: there is one | | |")
  return int(failures > 0)


if __name__ == "__main__":
  sys.exit(main())
