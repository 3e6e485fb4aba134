"""Where the time of a training step goes, and what compiled gradients gain.

    python benchmarks/step_parts.py --json=step_parts.json

Each case is a step that does more than the one before it, as a share of the
whole step. Adam under MirroredStrategy on logical CPUs; two minutes.

    forward     the loss
    backward    and its gradients
    update      and an update of each replica by itself, in groups of one
    reduction   the whole step
    compiled    the whole step, forward and backward pass compiled by XLA, as in
                docs/fit.md
"""
# bazel: deps=:timing

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import timing
from absl import app, flags

from tf_cross_shard import CrossShardOptimizer

_ROUNDS = flags.DEFINE_integer("rounds", 15, "Timings of each case.", 1)
_REPLICAS = flags.DEFINE_integer("replicas", 4, "Logical CPUs.", 2)
_JSON = flags.DEFINE_string("json", None, "File to write the figures to.")

_CASES = "forward", "backward", "update", "reduction", "compiled"
_BATCH = 16  # Of each replica.


def _dense(layers: int, width: int) -> tuple[Any, tf.Tensor]:
  """Dense layers, and a batch."""
  dense = [tf.keras.layers.Dense(width, "relu") for _ in range(layers)]
  model = tf.keras.Sequential([tf.keras.Input([width]), *dense])
  return model, tf.random.normal([_BATCH, width])


def _recommender() -> tuple[Any, tf.Tensor]:
  """The mean of eight rows of a table, and a dense layer."""
  layers = tf.keras.layers
  model = tf.keras.Sequential(
    [
      tf.keras.Input([8], dtype="int32"),
      layers.Embedding(200_000, 32),
      layers.GlobalAveragePooling1D(),
      layers.Dense(64, "relu"),
      layers.Dense(1),
    ]
  )
  return model, tf.random.uniform([_BATCH, 8], 0, 200_000, tf.int32)


def _convolutions() -> tuple[Any, tf.Tensor]:
  """A small network for images."""
  layers = tf.keras.layers
  model = tf.keras.Sequential(
    [
      tf.keras.Input([28, 28, 1]),
      layers.Conv2D(16, 3, activation="relu"),
      layers.Conv2D(32, 3, 2, activation="relu"),
      layers.Flatten(),
      layers.Dense(10),
    ]
  )
  return model, tf.random.normal([_BATCH, 28, 28, 1])


MODELS: dict[str, Callable[[], tuple[Any, tf.Tensor]]] = {
  "MLP, 3 layers of 64": lambda: _dense(3, 64),
  "50 variables, 12 M": lambda: _dense(25, 693),
  "recommender, a table of 6.4 M": _recommender,
  "MLP, 32 layers of 64": lambda: _dense(32, 64),
  "small CNN": _convolutions,
}


def make_steps(
  strategy: tf.distribute.Strategy, make: Callable[[], tuple[Any, tf.Tensor]]
) -> dict[str, Callable[[], Any]]:
  """Steps of one model, by case."""
  replicas = strategy.num_replicas_in_sync
  alone = [[replica] for replica in range(replicas)]
  with strategy.scope():
    model, data = make()
    optimizers = {
      case: CrossShardOptimizer(
        # So small that weights stay finite however often a step is repeated.
        tf.keras.optimizers.Adam(1e-7),
        "sum",
        group_assignment=alone if case == "update" else None,
        lazy_rows=data.dtype == tf.int32,
      )
      for case in _CASES[2:]
    }
    for optimizer in optimizers.values():
      optimizer.build(model.trainable_variables)
  weights = model.trainable_variables

  def forward() -> tf.Tensor:
    return tf.reduce_mean(model(data, training=True) ** 2)

  def backward() -> Any:
    with tf.GradientTape() as tape:
      loss = forward()
    return tape.gradient(loss, weights)

  def whole(case: str) -> None:
    differentiate = backward
    if case == "compiled":
      differentiate = tf.function(backward, autograph=False, jit_compile=True)
    grads = differentiate()
    optimizers[case].apply_gradients(list(zip(grads, weights, strict=True)))

  replica_steps: dict[str, Callable[[], Any]] = {
    "forward": forward,
    "backward": backward,
    **{case: functools.partial(whole, case) for case in _CASES[2:]},
  }
  return {
    case: tf.function(functools.partial(strategy.run, step), autograph=False)
    for case, step in replica_steps.items()
  }


def main(argv: Sequence[str]) -> None:
  """Measures, prints and writes."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  strategy = timing.mirrored(_REPLICAS.value)
  print(timing.machine())
  found = []
  for name, make in MODELS.items():
    steps = make_steps(strategy, make)
    first = {}
    for case, step in steps.items():
      start = time.perf_counter()
      step()
      first[case] = time.perf_counter() - start
    taken = timing.interleave(steps, _ROUNDS.value)
    rows = timing.compare(name, taken, ["reduction"])
    timing.show(rows)
    print("  first", {case: round(value, 1) for case, value in first.items()})
    found += [
      {
        "model": name,
        "case": row.case,
        "milliseconds": row.milliseconds,
        "ratio": row.ratios["reduction"],
        "first_seconds": first[row.case],
      }
      for row in rows
    ]
  if _JSON.value:
    timing.write_json(_JSON.value, {"rows": found})


if __name__ == "__main__":
  app.run(main)
