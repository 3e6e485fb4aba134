"""Compares a training step in towers with MirroredStrategy and one device.

    python benchmarks/towers.py --json=towers.json

It takes two to three minutes on two cores. The processes run one after the
other. All three cases train the same network from the same initial weights with
the same global batch. Towers and MirroredStrategy divide the batch among four
logical CPUs; one device takes the whole batch. MirroredStrategy and one device
use the plain Keras optimizer.

    training       forward pass, backward pass, reduction and update, in turns
                   in one process. A ratio compares two cases in one round; the
                   table has the median and the quartiles. The losses of all
                   cases must be equal, which is checked.
    memory         each case in its own process. "variables" are the bytes
                   of all copies of weights and slots; "peak" is the largest
                   increase of the resident size.
    in parallel    how far towers overlap, from a profile of their steps with
                   one thread for each operation: of the time in which any tower
                   multiplies matrices, the share in which at least two towers
                   do so, on different threads. With one thread for all
                   operations the share must be 0. Other work on the machine
                   slows operations down, but does not make them overlap.

The four logical CPUs share two cores. None of the cases has more hardware than
the others, so what differs is the overhead. MirroredStrategy updates four
copies of the variables, which four real devices would do at the same time.
Towers and MirroredStrategy compute the gradients of all weights four times,
each from a quarter of the batch.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import collections
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import timing
from absl import app, flags
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tf_cross_shard

_LAYERS = flags.DEFINE_integer("layers", 12, "Dense layers of the network.", 1)
_WIDTH = flags.DEFINE_integer("width", 1000, "Units of each layer.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Rows for all towers.", 1)
_TOWERS = flags.DEFINE_integer("towers", 4, "Towers, and logical CPUs.", 2)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Timings of each case.", 1)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")
_CHILD = flags.DEFINE_list("child", None, "Used internally.")

TOWERS, MIRRORED, ONE = "towers", "MirroredStrategy", "one device"
_CHECKED_STEPS = 5
_MEMORY_STEPS = 10
_PROFILED_STEPS = 3
# The name of a matrix product in a tower, of the forward or backward pass.
_TOWER = re.compile(r"tower_(\d+)/.*MatMul$")
_SHOWN = 3000  # Characters that are shown of the output of a failed process.
_SECONDS = 300  # Seconds until a process is killed as hung.
_SAME = 1e-4  # Relative tolerance for float32 sums in a different order.

Step = Callable[[], Any]


def make_model() -> Any:
  """Returns dense layers with the same initial weights in every call.

  They are initialized so that activations keep their size.
  """
  tf.keras.utils.set_random_seed(0)
  layers = [
    tf.keras.layers.Dense(_WIDTH.value, "relu", kernel_initializer="he_normal")
    for _ in range(_LAYERS.value)
  ]
  return tf.keras.Sequential([tf.keras.Input([_WIDTH.value]), *layers])


def make_data(size: int) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns a batch of inputs and targets."""
  shape = [size, _WIDTH.value]
  x, y = (tf.random.stateless_normal(shape, [0, seed]) for seed in (1, 2))
  return x, y


def make_optimizer() -> Any:
  """Returns the plain optimizer of a case; all cases use the same settings."""
  return tf.keras.optimizers.Adam(1e-5)


def loss_of(model: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
  """Returns the mean square error."""
  return tf.reduce_mean((model(x, training=True) - y) ** 2)


def in_towers(size: int, devices: Sequence[str]) -> tuple[Step, Sequence[Any]]:
  """Returns a step in towers, and its variables."""
  model = make_model()
  optimizer = tf_cross_shard.TowerOptimizer(make_optimizer())
  optimizer.build(model.trainable_variables)

  def model_fn(
    features: tf.Tensor, labels: tf.Tensor, mode: str
  ) -> tf_cross_shard.TowerSpec:
    def loss() -> tf.Tensor:
      return loss_of(model, features, labels)

    # Compute the value and the gradients in the same pass.
    with tf.GradientTape() as tape:
      value = loss()
    weights = model.trainable_variables
    pairs = optimizer.compute_gradients(value, weights, tape=tape)
    train_op = optimizer.apply_gradients(pairs)
    return tf_cross_shard.TowerSpec(mode, value, train_op)

  replicated = tf_cross_shard.replicate_model_fn(model_fn, "mean", devices)
  step = lambda x, y: replicated(x, y).loss  # noqa: E731
  variables = [*model.variables, *optimizer.variables]
  return _bound(step, size), variables


def mirrored(size: int, devices: Sequence[str]) -> tuple[Step, Sequence[Any]]:
  """Returns a step of plain Keras under MirroredStrategy, and its variables."""
  strategy = tf.distribute.MirroredStrategy(list(devices))
  with strategy.scope():
    model = make_model()
    optimizer = make_optimizer()
    optimizer.build(model.trainable_variables)
  weights = model.trainable_variables

  def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
      loss = loss_of(model, x, y) / len(devices)
    grads = tape.gradient(loss, weights)
    optimizer.apply_gradients(zip(grads, weights, strict=True))
    return loss

  def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    parts = list(
      zip(tf.split(x, len(devices)), tf.split(y, len(devices)), strict=True)
    )
    shares = [
      strategy.experimental_distribute_values_from_function(
        lambda context, at=at: parts[context.replica_id_in_sync_group][at]
      )
      for at in (0, 1)
    ]
    losses = strategy.run(replica_step, args=tuple(shares))
    return strategy.reduce("SUM", losses, axis=None)

  return _bound(step, size), [*model.variables, *optimizer.variables]


def on_one_device(
  size: int, devices: Sequence[str]
) -> tuple[Step, Sequence[Any]]:
  """Returns a step of plain Keras on the first device, and its variables."""
  with tf.device(devices[0]):
    model = make_model()
    optimizer = make_optimizer()
    optimizer.build(model.trainable_variables)
  weights = model.trainable_variables

  def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.device(devices[0]):
      with tf.GradientTape() as tape:
        loss = loss_of(model, x, y)
      grads = tape.gradient(loss, weights)
      optimizer.apply_gradients(zip(grads, weights, strict=True))
      return loss

  return _bound(step, size), [*model.variables, *optimizer.variables]


_CONTESTANTS = {TOWERS: in_towers, MIRRORED: mirrored, ONE: on_one_device}


def measure_training(devices: Sequence[str]) -> list[timing.Row]:
  """Checks that all cases have the same losses, and times them in turns."""
  steps: dict[str, Step] = {
    name: make(_BATCH_SIZE.value, devices)[0]
    for name, make in _CONTESTANTS.items()
  }
  losses = {
    name: [float(step()) for _ in range(_CHECKED_STEPS)]
    for name, step in steps.items()
  }
  for name, values in losses.items():
    np.testing.assert_allclose(values, losses[ONE], rtol=_SAME, err_msg=name)
  taken = timing.interleave(
    {name: _finished(step) for name, step in steps.items()},
    _ROUNDS.value,
  )
  rows = timing.compare("training", taken, [MIRRORED, ONE])
  timing.show(rows)
  return rows


def measure_memory(name: str, devices: Sequence[str]) -> dict[str, Any]:
  """Returns the memory that one case adds to this process."""
  tf.zeros([]).numpy()
  before, _ = timing.process_size()
  step, variables = _CONTESTANTS[name](_BATCH_SIZE.value, devices)
  for _ in range(_MEMORY_STEPS):
    step()
  return {
    "case": name,
    "variables_mb": sum(map(_bytes, variables)) / 2**20,
    "before_mb": before,
    "peak_mb": _peak(),
  }


def measure_parallel(threads: int, devices: Sequence[str]) -> dict[str, Any]:
  """Returns how far towers overlap when `threads` threads run operations."""
  step, _ = in_towers(_BATCH_SIZE.value, devices)
  for _ in range(_CHECKED_STEPS):
    step()
  options = tf.profiler.experimental.ProfilerOptions(
    host_tracer_level=2, python_tracer_level=0
  )
  with tempfile.TemporaryDirectory() as folder:
    with tf.profiler.experimental.Profile(folder, options):
      for _ in range(_PROFILED_STEPS):
        step().numpy()
    (path,) = Path(folder).rglob("*.xplane.pb")
    times = _tower_times(path.read_bytes())
  any_tower, several = _overlap(times)
  return {
    "threads": threads,
    "operations": len(times),
    "towers": sorted({tower for _, _, tower in times}),
    "milliseconds": any_tower * 1e3 / _PROFILED_STEPS,
    "overlap": several / any_tower,
  }


def _tower_times(profile: bytes) -> list[tuple[float, float, int]]:
  """Returns all matrix products: start and end in seconds, and the tower."""
  space = xplane_pb2.XSpace()
  space.ParseFromString(profile)
  times = []
  for plane in space.planes:
    names = {key: each.name for key, each in plane.event_metadata.items()}
    for line in plane.lines:  # Each line is a thread.
      for event in line.events:
        found = _TOWER.search(names[event.metadata_id])
        if found:
          start = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
          end = start + event.duration_ps * 1e-12
          times.append((start, end, int(found[1])))
  return times


def _overlap(times: Sequence[tuple[float, float, int]]) -> tuple[float, float]:
  """Returns the seconds in which any tower and at least two towers work."""
  changes = [(start, 1, tower) for start, _, tower in times]
  changes += [(end, -1, tower) for _, end, tower in times]
  running: collections.Counter[int] = collections.Counter()
  one = several = last = 0.0
  for now, change, tower in sorted(changes):
    busy = sum(count > 0 for count in running.values())
    one += (now - last) * (busy > 0)
    several += (now - last) * (busy > 1)
    running[tower] += change
    last = now
  return one, several


def _bound(step: Callable[..., Any], size: int) -> Step:
  """Returns the step on its batch, as a tf.function without arguments."""
  x, y = make_data(size)
  function = tf.function(step, autograph=False)
  return lambda: function(x, y)


def _finished(step: Step) -> Step:
  """Returns a step that waits for its loss."""
  return lambda: step().numpy()


def _bytes(variable: Any) -> int:
  """Returns the bytes of all copies of a variable."""
  native = getattr(variable, "value", variable)
  copies = getattr(native, "values", [native])
  return sum(
    int(np.prod(copy.shape)) * tf.as_dtype(copy.dtype).size for copy in copies
  )


def _peak() -> float:
  """Returns the peak resident size of this process in megabytes."""
  with open("/proc/self/status", encoding="ascii") as file:
    fields = dict(line.split(":", 1) for line in file)
  return int(fields["VmHWM"].split()[0]) / 1024


def _in_child(*part: str) -> dict[str, Any]:
  """Measures a part in its own process."""
  done = subprocess.run(
    [sys.executable, *sys.argv, f"--child={','.join(part)}"],
    capture_output=True,
    text=True,
    check=False,
    timeout=_SECONDS,
    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
  )
  if done.returncode:
    raise RuntimeError(
      f"The part {' '.join(part)} failed with exit status {done.returncode}:"
      f" {done.stderr[-_SHOWN:]}"
    )
  found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
  return found


def _run_child(part: Sequence[str]) -> dict[str, Any]:
  """Measures the part that `--child` names."""
  if part[0] == "training":
    rows = measure_training(_split_cpu(_TOWERS.value))
    return {"rows": [vars(row) for row in rows]}
  if part[0] == "memory":
    return measure_memory(part[1], _split_cpu(_TOWERS.value))
  threads = int(part[1])
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(threads)
  return measure_parallel(threads, _split_cpu(_TOWERS.value))


def _split_cpu(count: int) -> list[str]:
  """Creates logical CPUs and returns their names."""
  tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * count,
  )
  return [f"CPU:{i}" for i in range(count)]


def main(argv: Sequence[str]) -> None:
  """Measures all parts, prints tables and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  if _CHILD.value:
    print(json.dumps(_run_child(_CHILD.value)))
    return
  print(timing.machine(), flush=True)
  rows = _in_child("training")["rows"]
  timing.show([timing.Row(**row) for row in rows])

  print(f"\n{'memory':<34}{'variables, MB':>14}{'peak, MB':>10}")
  memory = [_in_child("memory", name) for name in _CONTESTANTS]
  for case in memory:
    risen = case["peak_mb"] - case["before_mb"]
    print(f"  {case['case']:<32}{case['variables_mb']:>14.1f}{risen:>10.1f}")

  print(f"\n{'in parallel':<34}{'ms a step':>14}{'overlap':>10}")
  parallel = [_in_child("parallel", threads) for threads in ("2", "1")]
  for case in parallel:
    name = f"threads: {case['threads']}"
    took, overlap = case["milliseconds"], case["overlap"]
    print(f"  {name:<32}{took:>14.1f}{overlap:>10.0%}")
  if _JSON.value:
    timing.write_json(
      _JSON.value, {"rows": rows, "memory": memory, "parallel": parallel}
    )
  print(f"\nload at the end: {os.getloadavg()}")


if __name__ == "__main__":
  app.run(main)
