"""Compares steps of several workers with those of plain Keras.

    python benchmarks/multi_worker.py --workers=2,4 --json=multi_worker.json
    python benchmarks/multi_worker.py --workers=2 --quick   # does all run?

Starts the workers on this machine. They train under one MultiWorkerStrategy,
and the first worker prints the results. If TF_CONFIG is set, the process is one
worker instead, so you can measure a real cluster.

On two cores, --quick took three minutes with two workers. Four workers took
longer, most of it for the case "one by one" with its 1,000 collectives;
--parts=training leaves that case out.

    tensors     reduction of 50 MB of gradients, in 100 and in 1,000 tensors
    small       reduction of 2 MB of gradients in 1,000 tensors
    training    forward pass, backward pass, reduction and update of a dense
                network
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import functools
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import timing
import workers
from absl import app, flags, logging

import tf_cross_shard
from tf_cross_shard import multi_worker
from tf_cross_shard._src.core import reduce
from tf_cross_shard._src.core.reduce import gradient_reducer

_WORKERS = flags.DEFINE_list(
  "workers", ["2", "4"], "Numbers of workers to measure, each at most 8."
)
_PARTS = timing.define_choices("parts", ["tensors", "small", "training"])
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Turns of each case.", 1)
_STEPS = flags.DEFINE_integer("steps", 3, "Steps in each turn.", 1)
_QUICK = flags.DEFINE_bool("quick", False, "Measure one round of few steps.")
_TIMEOUT = flags.DEFINE_integer(
  "timeout", 3600, "Seconds until the workers are killed.", 1
)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")

KERAS, OURS = "plain Keras", "ours"
BFLOAT16, FLOAT16 = f"{OURS}, bfloat16", f"{OURS}, float16"
SHARDED = f"{OURS}, sharded"
SINGLE, NOTHING = "one by one", "nothing reduced"
FOUR, ACCUMULATED = f"{OURS}, four batches", f"{OURS}, four in a window"
_WINDOW = 4
_SMALL = "2 MB in 1,000 tensors"
# By part: the number of tensors, and the float32 elements of each tensor.
_BUFFERS = {
  "50 MB in 100 tensors": (100, 125_000),
  "50 MB in 1,000 tensors": (1000, 12_500),
  _SMALL: (1000, 500),
}
_TRAINING = "MLP step, 12.7 MB of gradients"
_LAYERS = (784, 1024, 1024, 1024, 256, 10)
_BATCH_SIZE = 64
# So small that weights stay finite, however often a step is repeated.
_LEARNING_RATE = 1e-7

Step = Callable[[], Any]
Reducer = Callable[[list[tf.Tensor]], Any]


def measure_reduction(
  strategy: tf.distribute.Strategy, part: str
) -> list[timing.Row]:
  """Measures only the reduction, with the tensors of one part."""
  count, size = _BUFFERS[part]
  tensors = [tf.Variable(tf.random.normal([size])) for _ in range(count)]

  def ours(wire_dtype: tf.DType | None = None) -> Reducer:
    engine = reduce.for_strategy(strategy)
    return gradient_reducer.GradientReducer(engine, wire_dtype).reduce

  def make_step(reducer: Reducer) -> Step:
    def replica_step(scale: tf.Tensor) -> Any:
      # Computed, as a backward pass does, since a collective copies a tensor
      # that something else also refers to.
      return reducer([tensor * scale for tensor in tensors])

    step = tf.function(
      lambda scale: strategy.run(replica_step, args=(scale,)), autograph=False
    )
    return functools.partial(step, tf.constant(1.0))

  reducers: dict[str, Reducer] = {
    KERAS: timing.keras_reducer,
    SINGLE: lambda grads: [timing.keras_reducer(grad) for grad in grads],
    OURS: ours(),
    BFLOAT16: ours(tf.bfloat16),
    FLOAT16: ours(tf.float16),
    NOTHING: list,
  }
  steps = {case: make_step(reducer) for case, reducer in reducers.items()}
  return _measure(strategy, part, steps, baselines=[KERAS, SINGLE])


def training_steps(
  strategy: tf.distribute.Strategy,
) -> dict[str, Step]:
  """Returns training steps of one network with Adam, by case."""
  count = strategy.num_replicas_in_sync

  def ours(wire_dtype: str | None, **options: Any) -> Any:
    return tf_cross_shard.CrossShardOptimizer(
      tf.keras.optimizers.Adam(_LEARNING_RATE),
      reduction="sum",
      wire_dtype=wire_dtype,
      **options,
    )

  with strategy.scope():
    hidden = [tf.keras.layers.Dense(n, "relu") for n in _LAYERS[1:-1]]
    model = tf.keras.Sequential(
      [
        tf.keras.Input([_LAYERS[0]]),
        *hidden,
        tf.keras.layers.Dense(_LAYERS[-1]),
      ]
    )
    optimizers = {
      KERAS: tf.keras.optimizers.Adam(_LEARNING_RATE),
      OURS: ours(None),
      BFLOAT16: ours("bfloat16"),
      SHARDED: ours(None, shard_update=True),
      ACCUMULATED: ours(None, accumulate_steps=_WINDOW),
      NOTHING: tf.keras.optimizers.Adam(_LEARNING_RATE),
    }
    for optimizer in optimizers.values():
      optimizer.build(model.trainable_variables)
  # Keras' own hook, made to reduce nothing.
  optimizers[NOTHING]._all_reduce_sum_gradients = lambda pairs: pairs
  weights = model.trainable_variables
  rng = np.random.default_rng(_replica(strategy))
  inputs = tf.constant(
    rng.standard_normal([_BATCH_SIZE, _LAYERS[0]]), tf.float32
  )
  labels = tf.constant(rng.integers(0, _LAYERS[-1], _BATCH_SIZE))

  def training_step(optimizer: Any) -> tf.Tensor:
    with tf.GradientTape() as tape:
      losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels, model(inputs, training=True)
      )
      loss = tf.reduce_mean(losses) / count
    grads = tape.gradient(loss, weights)
    optimizer.apply_gradients(zip(grads, weights, strict=True))
    return loss

  def on_replicas(optimizer: Any) -> Step:
    step: Step = tf.function(
      lambda: strategy.run(training_step, args=(optimizer,)), autograph=False
    )
    return step

  def four_times(step: Step) -> Step:
    return lambda: [step() for _ in range(_WINDOW)]

  steps = {case: on_replicas(each) for case, each in optimizers.items()}
  steps[FOUR] = four_times(steps[OURS])
  steps[ACCUMULATED] = four_times(steps[ACCUMULATED])
  return steps


def work() -> dict[str, Any]:
  """Runs one worker and returns what it measured.

  Only the results of the first worker are used.
  """
  strategy = multi_worker.MultiWorkerStrategy()
  if _replica(strategy) == 0:
    print(f"\n{strategy.num_replicas_in_sync} workers")
    print(timing.machine(), flush=True)
  rows: list[timing.Row] = []
  for part in _BUFFERS:
    if ("small" if part == _SMALL else "tensors") in _PARTS.value:
      rows += measure_reduction(strategy, part)
  if "training" in _PARTS.value:
    steps = training_steps(strategy)
    rows += _measure(strategy, _TRAINING, steps, baselines=[KERAS, FOUR])
  return {"rows": [vars(row) for row in rows]}


def _measure(
  strategy: tf.distribute.Strategy,
  part: str,
  steps: Mapping[str, Step],
  baselines: Sequence[str],
) -> list[timing.Row]:
  """Times the steps in turns; the first worker prints a table."""
  rounds, repeats = (1, 1) if _QUICK.value else (_ROUNDS.value, _STEPS.value)
  cases: dict[str, Step] = {}
  for name, step in steps.items():
    # This run is not counted: in it, workers wait for those that are still busy
    # with the previous case.
    cases[f"before {name}"] = step
    cases[name] = lambda step=step: [step() for _ in range(repeats)]
  times = timing.interleave(cases, rounds)
  taken = {name: times[name] / repeats for name in steps}
  rows = timing.compare(part, taken, baselines)
  if _replica(strategy) == 0:
    timing.show(rows)
  # Functions and variables of a part refer to each other: free them now, before
  # the next part measures.
  gc.collect()
  return rows


def _replica(strategy: tf.distribute.Strategy) -> int:
  """Returns the number of this worker, which has one replica, its CPU."""
  return int(strategy.cluster_resolver.task_id)


def main(argv: Sequence[str]) -> None:
  """Runs one worker, or starts all of them."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  # Hide TensorFlow's messages. It would warn of many new functions, but each
  # case has its own tf.function on purpose.
  logging.set_verbosity(logging.WARNING)
  tf.get_logger().setLevel("ERROR")
  if "TF_CONFIG" in os.environ:
    results = work()
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"]:
      return
  else:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    results = {
      "clusters": {
        count: workers.start(int(count), _TIMEOUT.value)
        for count in _WORKERS.value
      }
    }
  if _JSON.value:
    timing.write_json(_JSON.value, results)


if __name__ == "__main__":
  app.run(main)
