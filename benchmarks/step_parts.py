"""Where the time of a training step goes, read from TensorFlow's profiler.

    python benchmarks/step_parts.py              # one minute
    python benchmarks/step_parts.py --compiled   # two minutes

Adam under MirroredStrategy on logical CPUs. TensorFlow's executor has as many
threads as the machine has cores. All that they do in some steps is divided by
the name scopes of operations:

    input       the batch
    forward     the loss
    backward    its gradients: `gradient_tape/`
    reduction   their sums, and what packs and carries these
    update      Adam and its slots
    starting    an executor thread between two operations
    idle        a thread without any that is ready

Beside it stands what the machine can do: the memory's rate in `a += b` over
variables of these sizes, and that of multiplying large matrices. `--compiled`
times steps whose forward and backward pass XLA compiles, as in docs/fit.md.
"""
# bazel: deps=:timing

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import collections
import dataclasses
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
import timing
from absl import app, flags
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tf_cross_shard import CrossShardOptimizer

_ROUNDS = flags.DEFINE_integer("rounds", 15, "Steps of each model.", 1)
_REPLICAS = flags.DEFINE_integer("replicas", 4, "Logical CPUs.", 2)
_COMPILED = flags.DEFINE_bool("compiled", False, "What XLA gains instead.")
_JSON = flags.DEFINE_string("json", None, "File to write the figures to.")

_PARTS = "input", "forward", "backward", "reduction", "update", "starting"
_BATCH = 16  # Of each replica.
_SMALL = 0.02  # Shares below this are not printed.
_WARM_UP = 5  # Steps before those that are measured.
_STEP = "measured step"
_EXECUTOR = "ExecutorState::Process"
# What an operation's event is called: its name, and its kind.
_OPERATION = re.compile(r"(?P<name>[^:]+):(?P<kind>_?[A-Z]\w+)")


def _dense(layers: int, width: int) -> tuple[Any, tf.Tensor]:
  """Dense layers, and a batch of all replicas."""
  dense = [tf.keras.layers.Dense(width, "relu") for _ in range(layers)]
  model = tf.keras.Sequential([tf.keras.Input([width]), *dense])
  return model, tf.random.normal([_BATCH * _REPLICAS.value, width])


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
  shape = [_BATCH * _REPLICAS.value, 8]
  return model, tf.random.uniform(shape, 0, 200_000, tf.int32)


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
  return model, tf.random.normal([_BATCH * _REPLICAS.value, 28, 28, 1])


MODELS: dict[str, Callable[[], tuple[Any, tf.Tensor]]] = {
  "MLP, 3 layers of 64": lambda: _dense(3, 64),
  "50 variables, 12 M": lambda: _dense(25, 693),
  "recommender, a table of 6.4 M": _recommender,
}
_COMPILED_MODELS = {
  **MODELS,
  "MLP, 32 layers of 64": lambda: _dense(32, 64),
  "small CNN": _convolutions,
}


def make_step(
  strategy: tf.distribute.Strategy,
  model: Any,
  data: tf.Tensor,
  compiled: bool = False,
) -> Callable[[], Any]:
  """A step of one model, which takes its batch from a dataset."""
  with strategy.scope():
    optimizer = CrossShardOptimizer(
      # So small that weights stay finite however often a step is repeated.
      tf.keras.optimizers.Adam(1e-7),
      "sum",
      lazy_rows=data.dtype == tf.int32,
    )
    optimizer.build(model.trainable_variables)
  weights = model.trainable_variables
  batches = iter(tf.data.Dataset.from_tensors(data).repeat().prefetch(2))

  def differentiate(rows: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(model(rows, training=True) ** 2)
    return tape.gradient(loss, weights)

  if compiled:
    differentiate = tf.function(
      differentiate, autograph=False, jit_compile=True
    )

  def replica_step(batch: Sequence[tf.Tensor]) -> None:
    context = tf.distribute.get_replica_context()
    replica = tf.get_static_value(context.replica_id_in_sync_group)
    grads = differentiate(batch[int(replica)])
    optimizer.apply_gradients(list(zip(grads, weights, strict=True)))

  @tf.function(autograph=False)
  def step() -> None:
    with tf.name_scope("input"):
      batch = tf.split(next(batches), strategy.num_replicas_in_sync)
    strategy.run(replica_step, args=(batch,))

  return step


@dataclasses.dataclass
class Profile:
  """What the executor's threads did in some steps, in seconds.

  Attributes:
    wall: How long the steps took.
    threads: How many threads there were.
    parts: What they spent on each part.
    kinds: And on each kind of operation in it.
    counts: How many operations of each part and kind there were.
  """

  wall: float = 0.0
  threads: int = 0
  parts: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  kinds: collections.Counter[tuple[str, str]] = dataclasses.field(
    default_factory=collections.Counter
  )
  counts: collections.Counter[tuple[str, str]] = dataclasses.field(
    default_factory=collections.Counter
  )


def profile(step: Callable[[], Any], rounds: int) -> Profile:
  """Runs steps under the profiler, and reads what it wrote."""
  for _ in range(_WARM_UP):
    step()
  with tempfile.TemporaryDirectory() as folder:
    tf.profiler.experimental.start(folder)
    for number in range(rounds):
      with tf.profiler.experimental.Trace(_STEP, step_num=number):
        step()
    tf.profiler.experimental.stop()
    [path] = pathlib.Path(folder).rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
  found = Profile()
  for plane in space.planes:
    names = {key: data.name for key, data in plane.event_metadata.items()}
    for line in plane.lines:
      events = list(_own_times(line, names))
      found.wall += sum(e[2] for e in events if e[0] == _STEP)
      found.threads += any(name == _EXECUTOR for name, _, _ in events)
      for name, own, _ in events:
        _count(found, name, own)
  return found


def _own_times(line: Any, names: Any) -> Iterator[tuple[str, float, float]]:
  """Yields events of a thread: name, seconds without those within, and with."""
  stack: list[list[Any]] = []  # end, name, own, whole
  for event in sorted(line.events, key=lambda e: (e.offset_ps, -e.duration_ps)):
    while stack and stack[-1][0] <= event.offset_ps:
      yield tuple(stack.pop()[1:])  # type: ignore[misc]
    seconds = event.duration_ps / 1e12
    name = names[event.metadata_id]
    end = event.offset_ps + event.duration_ps
    # Nothing within an operation is another part's.
    if stack and not _OPERATION.fullmatch(stack[-1][1]):
      stack[-1][2] -= seconds
    elif stack:
      continue
    stack.append([end, name, seconds, seconds])
  while stack:
    yield tuple(stack.pop()[1:])  # type: ignore[misc]


def _count(found: Profile, name: str, seconds: float) -> None:
  """Adds an event to its part."""
  operation = _OPERATION.fullmatch(name)
  if operation:
    part = _part_of(operation["name"])
    found.kinds[part, operation["kind"]] += seconds
    found.counts[part, operation["kind"]] += 1
    found.parts[part] += seconds
  elif name.startswith("ExecutorState::"):
    found.parts["starting"] += seconds


def _part_of(operation: str) -> str:
  """Returns the part of a step that an operation is in, by its scopes."""
  scope = re.sub(r"replica_\d+/", "", operation)
  if scope.startswith("input"):
    return "input"
  if "gradient_tape/" in scope:
    return "backward"
  if scope.startswith("CrossShardOptimizer"):
    return "update" if re.search("/(adam|update)", scope) else "reduction"
  return "forward"


def measure_stream(
  strategy: tf.distribute.Strategy, weights: Sequence[Any], rounds: int
) -> float:
  """Returns bytes a second of `a += b` in all replicas' copies at once."""
  with strategy.scope():
    sums, terms = (
      [tf.Variable(tf.zeros(weight.shape)) for weight in weights]
      for _ in range(2)
    )

  def replica_step() -> None:
    for total, term in zip(sums, terms, strict=True):
      tf.raw_ops.ResourceApplyGradientDescent(
        var=total.handle, alpha=1.0, delta=term.read_value()
      )

  step = tf.function(lambda: strategy.run(replica_step), autograph=False)
  taken = timing.interleave({"stream": step}, rounds)["stream"]
  size = 12 * sum(float(tf.size(weight)) for weight in weights)
  return size * strategy.num_replicas_in_sync / (taken.min() / 1e3)


def measure_multiplying(rounds: int) -> float:
  """Returns floating-point operations a second, in all threads."""
  matrix = tf.random.normal([1024, 1024])
  multiply = tf.function(lambda: tf.matmul(matrix, matrix), autograph=False)
  taken = timing.interleave({"matmul": multiply}, rounds)["matmul"]
  return 2 * 1024**3 / (taken.min() / 1e3)


def show(name: str, found: Profile, rounds: int) -> dict[str, Any]:
  """Prints a model's row, and the dearest kinds of operation; returns all."""
  whole = found.wall * found.threads
  shares = {part: found.parts[part] / whole for part in _PARTS}
  shares["idle"] = 1.0 - sum(shares.values())
  cells = [f"{1e3 * found.wall / rounds:.1f} ms"]
  cells += [f"{share:.2f}" for share in shares.values()]
  print(f"| {name} | {' | '.join(cells)} |", flush=True)
  dearest = [
    {
      "part": part,
      "kind": kind,
      "share": seconds / whole,
      "in_a_step": found.counts[part, kind] / rounds,
      "microseconds": 1e6 * seconds / found.counts[part, kind],
    }
    for (part, kind), seconds in found.kinds.most_common(8)
  ]
  return {
    "model": name,
    "milliseconds": 1e3 * found.wall / rounds,
    "threads": found.threads,
    "shares": shares,
    "dearest": dearest,
  }


def measure_parts(strategy: tf.distribute.Strategy) -> list[dict[str, Any]]:
  """Profiles a step of each model."""
  rounds = _ROUNDS.value
  print(f"\n| | whole step | {' | '.join(_PARTS)} | idle |")
  print("|---" * (len(_PARTS) + 3) + "|")
  results = []
  for name, make in MODELS.items():
    with strategy.scope():
      model, data = make()
    found = profile(make_step(strategy, model, data), rounds)
    result = show(name, found, rounds)
    weights = model.trainable_variables
    copies = model.count_params() * strategy.num_replicas_in_sync
    is_dense = data.dtype == tf.float32  # Else Adam is for rows.
    result["adam_bytes"] = 28 * copies if is_dense else None
    result["stream"] = measure_stream(strategy, weights, rounds)
    results.append(result)
  print("\n| | part | operation | in a step | us each | share |")
  print("|---" * 6 + "|")
  for result in results:
    for row in result["dearest"]:
      if row["share"] >= _SMALL:
        print(
          f"| {result['model']} | {row['part']} | {row['kind']}"
          f" | {row['in_a_step']:.0f} | {row['microseconds']:.1f}"
          f" | {row['share']:.2f} |"
        )
  print(
    "\nGB/s of Adam's kernel, 28 bytes a weight, and of `a += b`, 12 bytes:"
  )
  for result in results:
    for row in result["dearest"]:
      if row["kind"] == "ResourceApplyAdam" and result["adam_bytes"]:
        seconds = row["in_a_step"] * row["microseconds"] / 1e6
        rate = result["adam_bytes"] / seconds * result["threads"]
        print(
          f"  {result['model']}: {rate / 1e9:.1f} of"
          f" {result['stream'] / 1e9:.1f}"
        )
  rate = measure_multiplying(rounds)
  print(f"GFLOP/s of multiplying matrices of 1,024 by 1,024: {rate / 1e9:.0f}")
  return results


def measure_compiled(strategy: tf.distribute.Strategy) -> list[dict[str, Any]]:
  """Times steps with and without compiled gradients."""
  results = []
  for name, make in _COMPILED_MODELS.items():
    with strategy.scope():
      model, data = make()
    steps = {
      case: make_step(strategy, model, data, case == "compiled")
      for case in ("plain", "compiled")
    }
    first = {}
    for case, step in steps.items():
      start = time.perf_counter()
      step()
      first[case] = time.perf_counter() - start
    rows = timing.compare(
      name, timing.interleave(steps, _ROUNDS.value), ["plain"]
    )
    timing.show(rows)
    print(f"  first step: {first['compiled'] / first['plain']:.1f}")
    results += [{**vars(row), "first_seconds": first[row.case]} for row in rows]
  return results


def main(argv: Sequence[str]) -> None:
  """Measures, prints and writes."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  strategy = timing.mirrored(_REPLICAS.value)
  print(timing.machine())
  measure = measure_compiled if _COMPILED.value else measure_parts
  rows = measure(strategy)
  if _JSON.value:
    timing.write_json(_JSON.value, {"rows": rows})


if __name__ == "__main__":
  app.run(main)
