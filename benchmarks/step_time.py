"""Compares the time of a step with CrossShardOptimizer and with plain Keras.

    python benchmarks/step_time.py --json=step_time.json
    python benchmarks/step_time.py --sweep     # compares bucket sizes

The first command takes about five minutes on two cores, most of them for
tracing. The second one compares bucket sizes for the reduction; the sizes in
use are in gradients/packing.py and reduce/mirrored.py.

Both optimizers run in turns under one MirroredStrategy on logical CPUs. About
12 million float32 parameters are divided into 50 and into 500 variables,
matrices and their biases.

    reduction      only the sum of gradients over the replicas
    optimizer      apply_gradients(): reduction and update
    training       forward pass, backward pass, reduction and update of a dense
                   network
    memory         growth of the process in resident size and threads over many
                   steps
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import gc
from collections.abc import Sequence
from typing import Any

import contestants
import tensorflow as tf
import timing
from absl import app, flags

from tf_cross_shard import groups as groups_lib
from tf_cross_shard._src.core import reduce
from tf_cross_shard._src.core.reduce import gradient_reducer, mirrored

_OPTIMIZER = flags.DEFINE_enum(
  "optimizer", "adam", ["adam", "sgd"], "The optimizer that is compared."
)
_REPLICAS = flags.DEFINE_integer(
  "replicas", 4, "Logical CPUs, an even number.", 2
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Rows per replica.", 1)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Timings of each case.", 1)
_VARIABLES = flags.DEFINE_list(
  "variables", ["50", "500"], "Numbers of variables of the models."
)
_TRAINED = flags.DEFINE_list(
  "trained",
  ["50"],
  "The numbers in --variables for which the training step is measured. Tracing"
  " a training step of 500 variables takes a minute for each contestant.",
)
_MEMORY_STEPS = flags.DEFINE_integer(
  "memory_steps", 2000, "Steps of the part memory; 0 leaves the part out.", 0
)
_SWEEP = flags.DEFINE_bool("sweep", False, "Compare bucket sizes only.")
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")

_BUCKET_BYTES = (1, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 26)


def measure_reduction(
  strategy: tf.distribute.Strategy, num_variables: int
) -> list[timing.Row]:
  """Measures only the reduction of gradients."""
  grads = contestants.make_copies(
    strategy, contestants.shapes_of(num_variables)
  )
  replicas = strategy.num_replicas_in_sync

  def ours(group_size: int) -> contestants.Reducer:
    groups = groups_lib.contiguous(replicas, group_size)
    engine = reduce.for_strategy(strategy, groups)
    reducer = gradient_reducer.GradientReducer(engine)
    return lambda values: reducer.reduce(values)[0]

  reducers = {
    contestants.KERAS: contestants.keras_reducer,
    contestants.OURS: ours(replicas),
    contestants.GROUPED: ours(replicas // 2),
    "nothing reduced": lambda values: values,
  }
  return _measure(
    f"reduction, {num_variables} variables",
    {
      name: contestants.reduction_step(strategy, grads, reducer)
      for name, reducer in reducers.items()
    },
  )


def measure_steps(
  strategy: tf.distribute.Strategy, num_variables: int
) -> list[timing.Row]:
  """Measures the optimizer step and, if asked to, the training step."""
  optimizer_steps, train_steps = contestants.training_steps(
    strategy,
    _OPTIMIZER.value,
    width=contestants.layer_width(num_variables),
    num_variables=num_variables,
    batch_size=_BATCH_SIZE.value,
  )
  rows = _measure(f"optimizer, {num_variables} variables", optimizer_steps)
  if str(num_variables) in _TRAINED.value:
    rows += _measure(f"training, {num_variables} variables", train_steps)
  return rows


def measure_memory(
  strategy: tf.distribute.Strategy, num_steps: int
) -> list[dict[str, Any]]:
  """Measures the growth of the process over many steps of a small model."""
  _, steps = contestants.training_steps(
    strategy, _OPTIMIZER.value, width=64, num_variables=20, batch_size=8
  )
  print(f"\nmemory, {num_steps} steps".ljust(35), "MB".rjust(15), "threads")
  rows = []
  for name, step in steps.items():
    # Let memory and thread pools grow to their final size first.
    for _ in range(max(num_steps // 4, 1)):
      step()
    megabytes, threads = timing.process_size()
    for _ in range(num_steps):
      step()
    after = timing.process_size()
    rows.append(
      {
        "case": name,
        "mb": [megabytes, after[0]],
        "threads": [threads, after[1]],
      }
    )
    print(
      f"  {name:<32}{megabytes:>7.1f} → {after[0]:<7.1f}"
      f"{threads:>4} → {after[1]}"
    )
  return rows


def measure_sweep(
  strategy: tf.distribute.Strategy, part: str, shapes: list[list[int]]
) -> list[timing.Row]:
  """Measures the reduction with buckets of several sizes.

  Both ways to reduce are measured: by a merge call and by collective ops.
  """
  grads = contestants.make_copies(strategy, shapes)
  replicas = strategy.num_replicas_in_sync
  groups = groups_lib.contiguous(replicas, replicas)
  merge = mirrored.Mirrored(strategy, groups, prefer_merge=True)
  collective = mirrored.Mirrored(strategy, groups, prefer_merge=False)
  reducers = {
    contestants.KERAS: contestants.keras_reducer,
    "nothing reduced": lambda grads: grads,
  } | {
    f"{way}, {size:,} bytes": contestants.packed_reducer(engine, size)
    for way, engine, sizes in (
      ("merge call", merge, _BUCKET_BYTES),
      ("CollectiveReduceV2", collective, _BUCKET_BYTES[2::2]),
    )
    for size in sizes
  }
  return _measure(
    part,
    {
      name: contestants.reduction_step(strategy, grads, reducer)
      for name, reducer in reducers.items()
    },
  )


def _measure(part: str, steps: dict[str, contestants.Step]) -> list[timing.Row]:
  """Times the steps in turns and prints a table."""
  taken = timing.interleave(steps, _ROUNDS.value)
  rows = timing.compare(
    part, taken, baselines=[contestants.KERAS, contestants.OURS]
  )
  timing.show(rows)
  # Functions and variables of a part refer to each other: free them now, before
  # the next part measures.
  gc.collect()
  return rows


def main(argv: Sequence[str]) -> None:
  """Measures all parts, prints tables and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  strategy = timing.mirrored(_REPLICAS.value)
  print(timing.machine())
  rows: list[timing.Row] = []
  memory: list[dict[str, Any]] = []
  if _MEMORY_STEPS.value and not _SWEEP.value:
    memory = measure_memory(strategy, _MEMORY_STEPS.value)
  for count in map(int, _VARIABLES.value):
    if _SWEEP.value:
      rows += measure_sweep(
        strategy, f"{count} variables", contestants.shapes_of(count)
      )
    else:
      rows += measure_reduction(strategy, count)
      rows += measure_steps(strategy, count)
  if _SWEEP.value:
    mix = (
      contestants.shapes_of(50)[:30]
      + [[16]] * 200
      + contestants.shapes_of(500)[:60]
    )
    rows += measure_sweep(strategy, "mix of sizes, most tiny", mix)
  if _JSON.value:
    timing.write_json(
      _JSON.value,
      {
        "flags": {
          flag.name: flag.value
          for flag in flags.FLAGS.get_key_flags_for_module(argv[0])
        },
        "rows": [vars(row) for row in rows],
        "memory": memory,
      },
    )


if __name__ == "__main__":
  app.run(main)
