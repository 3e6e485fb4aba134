"""Compares the fused and the sharded update with plain Keras.

    python benchmarks/update.py --json=update.json --picture=update.png

The optimizer is Adam unless a part says otherwise. Every result is a ratio to
plain Keras in the same run. All parts take about ten minutes on two cores, most
of them for tracing plain Keras.

    device       apply() with given gradients on one device. XLA is plain Keras
                 under jit_compile=True. The case `a += b` adds to variables of
                 the same sizes; its memory bandwidth gives a lower bound for
                 the time of the update.
    mirrored     reduction and update under MirroredStrategy on logical CPUs
    matrices     the part mirrored with Muon, whose update needs whole matrices
    compiled     the parts device and mirrored for optimizers that have no
                 TensorFlow kernel, so that XLA compiles them
    sizes        one device; for variables of several sizes: Adam's kernel, the
                 kernels of its parts, and Keras' operations. Add --threads=16
                 to divide operations among so many threads.
    training     whole training steps of small dense networks
    memory       peak resident memory of a process that does mirrored steps

Each row also shows "first", the time of the first call (tracing, graph
optimization and one step), and "state", the bytes that one replica keeps for
the optimizer.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import functools
import gc
import statistics
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import timing
from absl import app, flags

from tf_cross_shard import CrossShardOptimizer
from tf_cross_shard._src.core.wrapped import adam_parts

_PARTS = timing.define_choices(
  "parts",
  ["device", "mirrored", "matrices", "compiled", "sizes", "training", "memory"],
)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Timings of each case.", 1)
_REPLICAS = flags.DEFINE_integer("replicas", 4, "Logical CPUs.", 2)
_THREADS = flags.DEFINE_integer("threads", None, "Threads of an operation.", 1)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")
_PEAK_OF = flags.DEFINE_string("peak_of", None, "Used internally.")
_PICTURE = flags.DEFINE_string("picture", None, "File to draw to.")

KERAS, XLA, OURS, SHARDED = "plain Keras", "XLA", "ours", "ours, sharded"
STREAM = "a += b"
# Numbers that an update reads and writes for each weight. The weight and every
# slot are read and written, the gradient is only read: Adam has 2 slots, so it
# moves 2 + 2 * 2 + 1 = 7 numbers. `a += b` moves 3.
_MOVED = {
  **{"Adam": 7, "Nadam": 7, "amsgrad": 9},
  **{"Adagrad": 5, "Lion": 5, "RMSprop": 5},
}
MATRICES = [[256, 256]] * 24
MODELS = {
  "50 variables, 12 M": [[1000, 240]] * 50,
  "300 variables, 7 M": [[200, 117]] * 300,
}
_SIZES = [8 << i for i in range(0, 18, 2)]  # Elements of a variable.
_NETWORKS = (3, 64), (7, 64), (21, 64), (7, 256), (21, 256)  # layers, width
# So small that weights stay finite, however often a step is repeated.
_RATE = 1e-7


def make_optimizer(case: str, kind: str = "Adam") -> Any:
  """Returns the optimizer of a case.

  `kind` is the name of a Keras class, or "amsgrad" for Adam with that setting.
  """
  settings = {"amsgrad": True} if kind == "amsgrad" else {}
  name = "Adam" if settings else kind
  plain = getattr(tf.keras.optimizers, name)(_RATE, **settings)
  if case in (KERAS, XLA):
    return plain
  return CrossShardOptimizer(plain, "sum", shard_update=case == SHARDED)


def make_variables(shapes: Sequence[Sequence[int]]) -> list[Any]:
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
  part: str, steps: dict[str, Callable[[], Any]], state: dict[str, int]
) -> list[dict[str, Any]]:
  """Times the first call of each step, and then the steps in turns."""
  first = {}
  for case, step in steps.items():
    start = time.perf_counter()
    step()
    first[case] = time.perf_counter() - start
  taken = timing.interleave(steps, _ROUNDS.value)
  rows = timing.compare(part, taken, [KERAS])
  timing.show(rows)
  found = []
  for row in rows:
    ratio = first[row.case] / first[KERAS]
    print(
      f"    {row.case:<30} first {first[row.case]:6.2f} s ({ratio:.2f})"
      f"  state {state.get(row.case, 0) / 1e6:8.2f} MB"
    )
    found.append(
      {
        "part": part,
        "case": row.case,
        "milliseconds": row.milliseconds,
        "ratio": row.ratios[KERAS],
        "first_seconds": first[row.case],
        "first_ratio": ratio,
        "state_bytes": state.get(row.case, 0),
      }
    )
  # Functions and variables of a part refer to each other: free them now, before
  # the next part measures.
  gc.collect()
  return found


def measure_device(
  name: str, shapes: list[list[int]], kind: str = "Adam"
) -> list[dict[str, Any]]:
  """Measures the update by given gradients on one device."""
  grads = [
    tf.constant(np.random.default_rng(i).normal(size=shape).astype("f"))
    for i, shape in enumerate(shapes)
  ]
  steps, state = {}, {}
  for case in (KERAS, XLA, OURS):
    weights, optimizer = make_variables(shapes), make_optimizer(case, kind)
    optimizer.build(weights)
    steps[case] = tf.function(
      functools.partial(optimizer.apply, grads, weights),
      autograph=False,
      jit_compile=case == XLA,
    )
    state[case] = state_bytes(optimizer)
  steps[STREAM] = make_stream(grads)
  found = measure(f"one device, {name}", steps, state)
  # The update cannot be faster than memory: `a += b` moves 3 numbers.
  bound = found[-1]["ratio"][0] * _MOVED[kind] / 3
  found[-1]["bound"] = bound
  print(
    f"  {kind} moves {_MOVED[kind]} numbers for each weight, so its ratio is"
    f" {bound:.2f} at least"
  )
  return found


def make_stream(terms: Sequence[tf.Tensor]) -> Callable[[], Any]:
  """Returns a step that adds tensors to variables of the same sizes.

  It uses TensorFlow's kernel for gradient descent.
  """
  sums = [tf.Variable(tf.zeros_like(term)) for term in terms]

  def stream() -> None:
    for total, term in zip(sums, terms, strict=True):
      tf.raw_ops.ResourceApplyGradientDescent(
        var=total.handle, alpha=1.0, delta=term
      )

  return tf.function(stream, autograph=False)


def make_adam(how: str, size: int, count: int) -> Callable[[], Any]:
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


def measure_sizes() -> None:
  """Measures how Adam's update of a variable depends on its size."""
  for size in _SIZES:
    count = min(max(400_000 // size, 1), 100)
    ways = KERAS, "kernel", "parts"
    steps = {how: make_adam(how, size, count) for how in ways}
    taken = timing.interleave(steps, _ROUNDS.value)
    timing.show(timing.compare(f"{count} x {size}", taken, [KERAS]))


def make_mirrored(
  strategy: tf.distribute.Strategy,
  case: str,
  shapes: list[list[int]],
  kind: str = "Adam",
) -> tuple[Callable[[], Any], Any]:
  """Returns a step under a strategy, and its optimizer.

  The gradients depend on the weights and on the replica.
  """
  with strategy.scope():
    weights, optimizer = make_variables(shapes), make_optimizer(case, kind)
    optimizer.build(weights)

  def replica_step() -> None:
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    slope = 1.0 + tf.cast(replica, tf.float32)
    grads = [weight.value * 1e-3 + slope for weight in weights]
    optimizer.apply_gradients(list(zip(grads, weights, strict=True)))

  step = tf.function(
    functools.partial(strategy.run, replica_step), autograph=False
  )
  return step, optimizer


def measure_mirrored(
  strategy: tf.distribute.Strategy,
  name: str,
  shapes: list[list[int]],
  kind: str = "Adam",
) -> list[dict[str, Any]]:
  """Measures reduction and update under a strategy."""
  steps, state = {}, {}
  for case in (KERAS, OURS, SHARDED):
    steps[case], optimizer = make_mirrored(strategy, case, shapes, kind)
    state[case] = state_bytes(optimizer)
  return measure(f"mirrored, {name}", steps, state)


def peak_megabytes(strategy: tf.distribute.Strategy, case: str) -> float:
  """Returns the peak memory of this process after a few steps."""
  step, _ = make_mirrored(strategy, case, next(iter(MODELS.values())))
  for _ in range(5):
    step()
  return timing.peak_megabytes()


def measure_memory() -> list[dict[str, Any]]:
  """Measures peak memory: the median of three processes for each case."""
  found: list[dict[str, Any]] = []
  print(f"\nmemory, {next(iter(MODELS))}")
  for case in (KERAS, OURS, SHARDED):
    options = [f"--peak_of={case}", f"--replicas={_REPLICAS.value}"]
    command = [sys.executable, __file__, *options]
    peaks = [
      float(subprocess.check_output(command, text=True).split()[-1])
      for _ in range(3)
    ]
    peak = statistics.median(peaks)
    ratio = peak / (found[0]["peak_megabytes"] if found else peak)
    print(f"  {case:<30} {peak:6.0f} MB ({ratio:.2f})", peaks, flush=True)
    found.append({"case": case, "peak_megabytes": peak, "ratio": ratio})
  return found


def measure_training(
  strategy: tf.distribute.Strategy, layers: int, width: int
) -> list[dict[str, Any]]:
  """Measures whole training steps of a small dense network."""
  steps, state = {}, {}
  data = tf.random.normal([16, width])
  for case in (KERAS, OURS, SHARDED):
    with strategy.scope():
      model = tf.keras.Sequential(
        [
          tf.keras.Input([width]),
          *(tf.keras.layers.Dense(width, "relu") for _ in range(layers)),
        ]
      )
      optimizer = make_optimizer(case)
      optimizer.build(model.trainable_variables)

    def replica_step(model: Any = model, optimizer: Any = optimizer) -> None:
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(data, training=True) ** 2)
      grads = tape.gradient(loss, model.trainable_variables)
      pairs = zip(grads, model.trainable_variables, strict=True)
      optimizer.apply_gradients(list(pairs))

    steps[case] = tf.function(
      functools.partial(strategy.run, replica_step), autograph=False
    )
    state[case] = state_bytes(optimizer)
  return measure(f"training, {layers} layers of {width}", steps, state)


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
  """Draws step time, first step and state as shares of plain Keras."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  parts = [
    part
    for part in dict.fromkeys(row["part"] for row in rows)
    if part.split(", ", 1)[1] in MODELS
  ]
  contestants = KERAS, XLA, OURS, SHARDED
  colors = dict(zip(contestants, plt.cm.tab10.colors, strict=False))
  figure, axes = plt.subplots(
    1, len(parts), figsize=(3.2 * len(parts), 3.2), sharey=True
  )
  for axis, part in zip(np.atleast_1d(axes), parts, strict=True):
    mine = [r for r in rows if r["part"] == part and r["case"] != STREAM]
    plain = next(row for row in mine if row["case"] == KERAS)
    for i, row in enumerate(mine):
      shares = [
        row["ratio"][0],
        row["first_ratio"],
        row["state_bytes"] / plain["state_bytes"],
      ]
      places = np.arange(3) + (i - (len(mine) - 1) / 2) * 0.25
      axis.bar(places, shares, 0.23, color=colors[row["case"]])
    axis.set_xticks(range(3), ["step", "first step", "state"])
    axis.set_title(part.replace(", ", "\n", 1), fontsize=9)
    axis.axhline(1, color="grey", linewidth=0.5)
  np.atleast_1d(axes)[0].set_ylabel("share of plain Keras\n(lower is better)")
  bars = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
  figure.tight_layout(rect=(0, 0.08, 1, 1))
  names = [
    "plain Keras, compiled by XLA" if case == XLA else case for case in colors
  ]
  figure.legend(bars, names, loc="lower center", ncols=4, fontsize=8)
  figure.savefig(path, dpi=110)


def main(argv: Sequence[str]) -> None:
  """Measures all parts, prints tables, and writes and draws the results."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  if _THREADS.value:
    tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
  strategy = timing.mirrored(_REPLICAS.value)
  if _PEAK_OF.value:
    print(peak_megabytes(strategy, _PEAK_OF.value))
    return
  print(timing.machine())
  rows: list[dict[str, Any]] = []
  for name, shapes in MODELS.items():
    if "device" in _PARTS.value:
      rows += measure_device(name, shapes)
    if "mirrored" in _PARTS.value:
      rows += measure_mirrored(strategy, name, shapes)
  if "matrices" in _PARTS.value:
    name = "24 matrices of 256, Muon"
    rows += measure_mirrored(strategy, name, MATRICES, "Muon")
  if "compiled" in _PARTS.value:
    name, shapes = next(iter(MODELS.items()))
    for kind in ("Nadam", "Adagrad", "Lion", "RMSprop", "amsgrad"):
      rows += measure_device(f"{kind}, {name}", shapes, kind)
      rows += measure_mirrored(strategy, f"{kind}, {name}", shapes, kind)
  if "sizes" in _PARTS.value:
    measure_sizes()
  if "training" in _PARTS.value:
    for network in _NETWORKS:
      rows += measure_training(strategy, *network)
  memory = measure_memory() if "memory" in _PARTS.value else []
  if _JSON.value:
    timing.write_json(_JSON.value, {"rows": rows, "memory": memory})
  if _PICTURE.value:
    draw(rows, _PICTURE.value)


if __name__ == "__main__":
  app.run(main)
