"""Compares the update by Adam, fused and sharded, with plain Keras.

    python benchmarks/update.py --json=update.json

Every result is a ratio to plain Keras in the same run. All parts take about
five minutes on two cores, most of them for tracing plain Keras.

    device       apply() with given gradients on one device. XLA is plain Keras
                 under jit_compile=True.
    mirrored     reduction and update under MirroredStrategy on logical CPUs
    reduction    only the reduction, under the same strategy
    sizes        one device; for variables of several sizes: Adam's kernel, the
                 kernels of its parts, and Keras' operations. Add --threads=16
                 to divide operations among so many threads.

The parts device and mirrored also show "first", the time of the first call
(tracing, graph optimization and one step), and "state", the bytes that one
replica keeps for the optimizer.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import functools
import gc
import time
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import timing
from absl import app, flags

from tf_cross_shard import CrossShardOptimizer, groups
from tf_cross_shard._src.core import reduce
from tf_cross_shard._src.core.reduce import gradient_reducer
from tf_cross_shard._src.core.wrapped import adam_parts

_PARTS = timing.define_choices(
  "parts", ["device", "mirrored", "reduction", "sizes"]
)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Timings of each case.", 1)
_REPLICAS = flags.DEFINE_integer("replicas", 4, "Logical CPUs, even.", 2)
_THREADS = flags.DEFINE_integer("threads", None, "Threads of an operation.", 1)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")

KERAS, XLA, OURS, SHARDED = "plain Keras", "XLA", "ours", "ours, sharded"
Shapes = list[list[int]]
MODELS: dict[str, Shapes] = {
  "50 variables, 12 M": [[1000, 240]] * 50,
  "300 variables, 7 M": [[200, 117]] * 300,
}
_SIZES = [8 << i for i in range(0, 18, 2)]  # Elements of a variable.
# So small that weights stay finite, however often a step is repeated.
_RATE = 1e-7

Step = Callable[[], Any]
Reducer = Callable[[list[tf.Tensor]], Any]


def make_optimizer(case: str) -> Any:
  """Returns the optimizer of a case."""
  adam = tf.keras.optimizers.Adam(_RATE)
  if case in (KERAS, XLA):
    return adam
  return CrossShardOptimizer(adam, "sum", shard_update=case == SHARDED)


def make_variables(shapes: Shapes) -> list[Any]:
  """Returns variables of ones."""
  return [
    tf.keras.Variable(np.ones(shape, "f"), name=f"v{i}")
    for i, shape in enumerate(shapes)
  ]


def state_bytes(optimizer: Any) -> int:
  """Returns the bytes that one replica keeps for an optimizer."""
  inner = getattr(optimizer, "inner_optimizer", optimizer)
  return sum(
    int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size
    for variable in inner.variables
  )


def measure(
  part: str, steps: dict[str, Step], optimizers: dict[str, Any]
) -> list[dict[str, Any]]:
  """Times the first call of each step, and then the steps in turns."""
  first = {}
  for case, step in steps.items():
    start = time.perf_counter()
    step()
    first[case] = time.perf_counter() - start
  found = compare(part, steps)
  for row, (case, optimizer) in zip(found, optimizers.items(), strict=True):
    row["first_seconds"] = first[case]
    row["state_bytes"] = state_bytes(optimizer)
    print(
      f"    {case:<30} first {first[case]:6.2f} s"
      f" ({first[case] / first[KERAS]:.2f})"
      f"  state {row['state_bytes'] / 1e6:8.2f} MB"
    )
  return found


def compare(part: str, steps: dict[str, Step]) -> list[dict[str, Any]]:
  """Times the steps in turns."""
  taken = timing.interleave(steps, _ROUNDS.value)
  rows = timing.compare(part, taken, [KERAS])
  timing.show(rows)
  # Functions and variables of a part refer to each other: free them now, before
  # the next part measures.
  gc.collect()
  return [dict(vars(row)) for row in rows]


def measure_device(name: str, shapes: Shapes) -> list[dict[str, Any]]:
  """Measures the update by given gradients on one device."""
  grads = [
    tf.constant(np.random.default_rng(i).normal(size=shape).astype("f"))
    for i, shape in enumerate(shapes)
  ]
  steps, optimizers = {}, {}
  for case in (KERAS, XLA, OURS):
    weights, optimizer = make_variables(shapes), make_optimizer(case)
    optimizer.build(weights)
    optimizers[case] = optimizer
    steps[case] = tf.function(
      functools.partial(optimizer.apply, grads, weights),
      autograph=False,
      jit_compile=case == XLA,
    )
  return measure(f"one device, {name}", steps, optimizers)


def measure_mirrored(
  strategy: tf.distribute.Strategy, name: str, shapes: Shapes
) -> list[dict[str, Any]]:
  """Measures reduction and update; gradients depend on the replica."""
  steps, optimizers = {}, {}
  for case in (KERAS, OURS, SHARDED):
    with strategy.scope():
      weights, optimizer = make_variables(shapes), make_optimizer(case)
      optimizer.build(weights)

    def replica_step(
      weights: Any = weights, optimizer: Any = optimizer
    ) -> None:
      replica = tf.distribute.get_replica_context().replica_id_in_sync_group
      slope = 1.0 + tf.cast(replica, tf.float32)
      grads = [weight.value * 1e-3 + slope for weight in weights]
      optimizer.apply_gradients(list(zip(grads, weights, strict=True)))

    optimizers[case] = optimizer
    steps[case] = tf.function(
      functools.partial(strategy.run, replica_step), autograph=False
    )
  return measure(f"mirrored, {name}", steps, optimizers)


def measure_reduction(
  strategy: tf.distribute.Strategy, name: str, shapes: Shapes
) -> list[dict[str, Any]]:
  """Measures only the sums of gradients over replicas, and over two groups."""
  with strategy.scope():
    # Reading a variable costs nothing, and is no constant that can be folded.
    grads = [tf.Variable(tf.random.normal(shape)) for shape in shapes]
  replicas = strategy.num_replicas_in_sync

  def ours(group_size: int) -> Reducer:
    grouping = groups.contiguous(replicas, group_size)
    engine = reduce.for_strategy(strategy, grouping)
    return gradient_reducer.GradientReducer(engine).reduce

  def make_step(reducer: Reducer) -> Step:
    def replica_step() -> tf.Tensor:
      sums = reducer([grad.read_value() for grad in grads])
      # An element of each sum, so that TensorFlow prunes none of them.
      return tf.stack([tf.reshape(total, [-1])[-1] for total in sums])

    return tf.function(lambda: strategy.run(replica_step), autograph=False)

  reducers = {
    KERAS: timing.keras_reducer,
    OURS: ours(replicas),
    "ours, two groups": ours(replicas // 2),
  }
  steps = {case: make_step(reducer) for case, reducer in reducers.items()}
  return compare(f"reduction, {name}", steps)


def measure_sizes() -> list[dict[str, Any]]:
  """Measures how Adam's update of a variable depends on its size."""
  found: list[dict[str, Any]] = []
  for size in _SIZES:
    count = min(max(400_000 // size, 1), 100)
    ways = KERAS, "kernel", "parts"
    steps = {how: make_adam(how, size, count) for how in ways}
    found += compare(f"{count} x {size}", steps)
  return found


def make_adam(how: str, size: int, count: int) -> Step:
  """Returns a traced step of Adam for `count` variables of `size` elements.

  `how` is plain Keras, "kernel" or "parts".
  """
  weights, optimizer = make_variables([[size]] * count), make_optimizer(how)
  optimizer.build(weights)
  grads = [tf.random.normal([size]) for _ in weights]
  step = tf.function(
    functools.partial(optimizer.apply, grads, weights), autograph=False
  )
  sizes = range(size + 1) if how == "parts" else range(0)
  with unittest.mock.patch.object(adam_parts, "SIZES", sizes):
    step()
  return step


def main(argv: Sequence[str]) -> None:
  """Measures all parts, prints tables, and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  if _THREADS.value:
    tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
  strategy = timing.mirrored(_REPLICAS.value)
  print(timing.machine())
  rows: list[dict[str, Any]] = []
  for name, shapes in MODELS.items():
    if "device" in _PARTS.value:
      rows += measure_device(name, shapes)
    if "mirrored" in _PARTS.value:
      rows += measure_mirrored(strategy, name, shapes)
    if "reduction" in _PARTS.value:
      rows += measure_reduction(strategy, name, shapes)
  if "sizes" in _PARTS.value:
    rows += measure_sizes()
  if _JSON.value:
    timing.write_json(_JSON.value, {"rows": rows})


if __name__ == "__main__":
  app.run(main)
