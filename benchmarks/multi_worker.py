"""Compares our reduction over several workers with that of plain Keras.

    python benchmarks/multi_worker.py --workers=2,4 --json=multi_worker.json
    python benchmarks/multi_worker.py --workers=2 --quick   # does all run?
    python benchmarks/multi_worker.py --workers=2 --sweep   # bucket sizes

Starts the workers on this machine. They train under one MultiWorkerStrategy,
and the first worker prints the results. If TF_CONFIG is set, the process is one
worker instead, so you can measure a real cluster.

On two cores, --quick took three minutes with two workers. Four workers took
longer, most of it for the case "one by one" with its 1,000 collectives;
--parts=training,soak leaves that case out.

    tensors     reduction of 50 MB of gradients, in 100 and in 1,000 tensors
    small       reduction of 2 MB of gradients in 1,000 tensors
    training    forward pass, backward pass, reduction and update of a dense
                network
    soak        threads and resident memory over many training steps

--sweep compares bucket sizes and numbers of chains; those in use are in
core/reduce/multi_worker.py.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import gc
import json
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import contestants
import numpy as np
import tensorflow as tf
import timing
import workers
from absl import app, flags, logging

import tf_cross_shard
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import multi_worker
from tf_cross_shard._src.core import reduce
from tf_cross_shard._src.core.reduce import gradient_reducer
from tf_cross_shard._src.core.reduce import multi_worker as engines

_WORKERS = flags.DEFINE_list(
  "workers", ["2", "4"], "Numbers of workers to measure, each at most 8."
)
_DEFAULT = ["tensors", "small", "training", "soak"]
_PARTS = timing.define_choices("parts", _DEFAULT)
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Turns of each case.", 1)
_STEPS = flags.DEFINE_integer("steps", 3, "Steps in each turn.", 1)
_SOAK = flags.DEFINE_integer(
  "soak", 2000, "Steps of the part soak; 0 for none.", 0
)
_QUICK = flags.DEFINE_bool("quick", False, "Measure one round of few steps.")
_SWEEP = flags.DEFINE_bool("sweep", False, "Compare bucket sizes only.")
_TIMEOUT = flags.DEFINE_integer(
  "timeout", 3600, "Seconds until the workers are killed.", 1
)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")

KERAS, OURS = contestants.KERAS, contestants.OURS
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
# By case: the baseline, and the largest ratio to it that meets the goal.
_GOALS = {OURS: (KERAS, 1.0), BFLOAT16: (KERAS, 0.65)}
_GOALS_OF_SMALL = {OURS: (SINGLE, 0.2)}
_BUCKET_MEGABYTES = (1, 2, 4, 8, 16, 64)
_CHAINS = (1, 2, 4, 8)
# Groupings of four workers; the least favorable one is last.
_GROUPINGS = (((0, 1), (2, 3)), ((0, 3), (1, 2)))
_SETTLED = 200  # Steps after which memory and thread pools no longer grow.

_Case = tuple[contestants.Reducer, groups_lib.Groups]


class Gradients:
  """Gradients of this worker, for which every sum is known.

  The elements are -1, 0 and 1, times 2 to the power of the replica's number.
  Every set of replicas thus has a different sum, and half precision represents
  all sums exactly.
  """

  def __init__(self, tensors: int, size: int, replica: int) -> None:
    """Creates `tensors` tensors of `size` elements for `replica`."""
    rng = np.random.default_rng(0)  # The same numbers on all workers.
    self._replica = replica
    self._mine = [
      tf.Variable(2.0**replica * rng.integers(-1, 2, size), dtype=tf.float32)
      for _ in range(tensors)
    ]

  def step(
    self,
    strategy: tf.distribute.Strategy,
    reducer: contestants.Reducer,
    groups: groups_lib.Groups,
  ) -> contestants.Step:
    """Traces a reduction and checks its sums.

    Args:
      strategy: The strategy of the workers.
      reducer: Returns the sums of gradients.
      groups: The groups of replicas over which it sums.

    Returns:
      A function that runs the reduction. It computes the gradients each time,
      as a backward pass does, since a collective copies a tensor that something
      else also refers to.

    Raises:
      AssertionError: If a sum is wrong.
    """

    def reduce(scale: tf.Tensor) -> Any:
      return reducer([grad * scale for grad in self._mine])

    on_replicas = tf.function(
      lambda scale: strategy.run(reduce, args=(scale,)), autograph=False
    )
    one = tf.constant(1.0)
    members = groups.members_of(self._replica)
    factor = sum(2.0**member for member in members) / 2.0**self._replica
    for total, grad in zip(on_replicas(one), self._mine, strict=True):
      if not np.array_equal(total.numpy(), factor * grad.numpy()):
        raise AssertionError(f"Replica {self._replica} has a wrong sum.")
    return lambda: on_replicas(one)


def measure_reduction(
  strategy: tf.distribute.Strategy, part: str
) -> list[timing.Row]:
  """Measures only the reduction, with the tensors of one part."""
  count = strategy.num_replicas_in_sync
  whole = groups_lib.contiguous(count, count)

  def ours(
    groups: groups_lib.Groups, wire_dtype: tf.DType | None = None
  ) -> _Case:
    engine = reduce.for_strategy(strategy, groups)
    reducer = gradient_reducer.GradientReducer(engine, wire_dtype)
    return lambda grads: reducer.reduce(grads)[0], groups

  reducers: dict[str, _Case] = {
    KERAS: (contestants.keras_reducer, whole),
    SINGLE: (_single_reducer, whole),
    OURS: ours(whole),
    BFLOAT16: ours(whole, tf.bfloat16),
    FLOAT16: ours(whole, tf.float16),
    NOTHING: (list, groups_lib.singletons(count)),
  }
  if count == 4 and part != _SMALL:
    for rows in _GROUPINGS:
      groups = groups_lib.Groups(rows)
      reducers[f"{OURS}, {groups.to_lists()}"] = ours(groups)
  tensors, size = _BUFFERS[part]
  grads = Gradients(tensors, size, _replica(strategy))
  steps = {
    case: grads.step(strategy, reducer, groups)
    for case, (reducer, groups) in reducers.items()
  }
  return _measure(strategy, part, steps, baselines=[KERAS, SINGLE])


def measure_sweep(strategy: tf.distribute.Strategy) -> list[timing.Row]:
  """Measures the reduction with several bucket sizes and numbers of chains."""
  part = next(iter(_BUFFERS))
  tensors, size = _BUFFERS[part]
  engine = reduce.for_strategy(strategy)
  assert isinstance(engine, engines.MultiWorker)
  groups = engine.groups
  grads = Gradients(tensors, size, _replica(strategy))
  steps = {KERAS: grads.step(strategy, contestants.keras_reducer, groups)}
  for megabytes in _BUCKET_MEGABYTES:
    buckets = -(-4 * tensors * size // (megabytes << 20))
    for chains in _CHAINS:
      if chains >= 2 * buckets:
        continue  # Fewer chains already give each bucket its own chain.
      # All steps of a strategy share one object for collectives, which reads
      # the number of chains when a step is traced.
      with mock.patch.object(engine._collectives, "_chains", chains):
        steps[f"{megabytes} MiB, {chains} chains"] = grads.step(
          strategy,
          contestants.packed_reducer(engine, megabytes << 20),
          groups,
        )
  return _measure(strategy, part, steps, baselines=[KERAS])


def training_steps(
  strategy: tf.distribute.Strategy,
) -> dict[str, contestants.Step]:
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

  def on_replicas(optimizer: Any) -> contestants.Step:
    step: contestants.Step = tf.function(
      lambda: strategy.run(training_step, args=(optimizer,)), autograph=False
    )
    return step

  def four_times(step: contestants.Step) -> contestants.Step:
    return lambda: [step() for _ in range(_WINDOW)]

  steps = {case: on_replicas(each) for case, each in optimizers.items()}
  steps[FOUR] = four_times(steps[OURS])
  steps[ACCUMULATED] = four_times(steps[ACCUMULATED])
  return steps


def measure_soak(
  strategy: tf.distribute.Strategy, num_steps: int
) -> list[dict[str, Any]]:
  """Measures the growth of this process over many training steps."""
  steps = training_steps(strategy)
  settled = min(_SETTLED, num_steps // 2)
  title = f"from step {settled:,} to step {num_steps:,}"
  _say(strategy, f"\n{title:<34}{'MB':>17}{'threads':>14}")
  rows = []
  for case in (KERAS, OURS, BFLOAT16):
    sizes = []
    for count in (settled, num_steps - settled):
      for _ in range(count):
        steps[case]()
      sizes.append(timing.process_size())
    (megabytes, threads), after = sizes
    rows.append(
      {
        "case": case,
        "mb": [megabytes, after[0]],
        "threads": [threads, after[1]],
      }
    )
    _say(
      strategy,
      f"  {case:<32}{megabytes:>8.1f} → {after[0]:<8.1f}"
      f"{threads:>4} → {after[1]}",
    )
  return rows


def missed_goals(rows: Sequence[timing.Row]) -> list[str]:
  """Returns a line for each goal that was missed."""
  found = []
  for row in rows:
    goals = _GOALS_OF_SMALL if row.part == _SMALL else _GOALS
    baseline, most = goals.get(row.case, ("", 0.0))
    ratio = row.ratios.get(baseline, [0.0])[0]
    if ratio > most:
      found.append(
        f"{row.part}: {row.case} took {ratio:.2f} of the time of {baseline};"
        f" the goal is {most:.2f}"
      )
  return found


def work() -> dict[str, Any]:
  """Runs one worker and returns what it measured.

  Only the results of the first worker are used.
  """
  strategy = multi_worker.MultiWorkerStrategy()
  _say(strategy, f"\n{strategy.num_replicas_in_sync} workers")
  _say(strategy, str(timing.machine()))
  rows: list[timing.Row] = []
  soak: list[dict[str, Any]] = []
  if _SWEEP.value:
    return {"rows": [vars(row) for row in measure_sweep(strategy)]}
  # The part soak comes first, while this process has little memory.
  if "soak" in _PARTS.value and _SOAK.value:
    soak = measure_soak(strategy, 20 if _QUICK.value else _SOAK.value)
  for part in _BUFFERS:
    if ("small" if part == _SMALL else "tensors") in _PARTS.value:
      rows += measure_reduction(strategy, part)
  if "training" in _PARTS.value:
    rows += _measure(
      strategy,
      _TRAINING,
      training_steps(strategy),
      baselines=[KERAS, FOUR],
    )
  missed = missed_goals(rows)
  if rows:
    _say(strategy, "\n" + ("\n".join(missed) or "All goals are met."))
  return {"rows": [vars(row) for row in rows], "missed": missed, "soak": soak}


def _measure(
  strategy: tf.distribute.Strategy,
  part: str,
  steps: Mapping[str, contestants.Step],
  baselines: Sequence[str],
) -> list[timing.Row]:
  """Times the steps in turns; the first worker prints a table."""
  rounds, repeats = (1, 1) if _QUICK.value else (_ROUNDS.value, _STEPS.value)
  cases: dict[str, contestants.Step] = {}
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


def _single_reducer(grads: list[tf.Tensor]) -> list[tf.Tensor]:
  """Sums each gradient with its own collective."""
  context = tf.distribute.get_replica_context()
  return [context.all_reduce(tf.distribute.ReduceOp.SUM, x) for x in grads]


def _replica(strategy: tf.distribute.Strategy) -> int:
  """Returns the number of this worker, which has one replica, its CPU."""
  return int(strategy.cluster_resolver.task_id)


def _say(strategy: tf.distribute.Strategy, text: str) -> None:
  """Prints on the first worker."""
  if _replica(strategy) == 0:
    print(text, flush=True)


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
