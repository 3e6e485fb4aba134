"""Measures OuterOptimizer with two workers over a link that is made slow.

    python benchmarks/islands.py --megabits=100 --json=islands.json
    python benchmarks/islands.py --cases=every,every+bfloat16 --rounds=2

The workers connect to ports of this process. It forwards their traffic through
a token bucket for each direction, which limits the bits per second and counts
the bytes:

    worker 0 ─▶ token bucket ─▶ worker 1
    worker 0 ◀─ token bucket ◀─ worker 1

The link adds no latency. The batch is small, and each step sleeps for the time
that an accelerator would take, so that other programs on this machine hardly
change the result.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import bisect
import contextlib
import json
import pathlib
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import timing
from absl import app, flags, logging

from tf_cross_shard import CrossShardOptimizer, callbacks, multi_worker
from tf_cross_shard_cli import launch

_MEGABITS = flags.DEFINE_float("megabits", 100.0, "A second, each way.", 0.1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Measured rounds of H steps.", 1)
_COMPUTES = flags.DEFINE_float("computes", 50.0, "Milliseconds of a step.", 0.0)
_EVERY = flags.DEFINE_integer("every", 20, "H.", 4)
_CASES = flags.DEFINE_list("cases", [], "Names of cases; all if empty.")
_TIMEOUT = flags.DEFINE_integer("timeout", 1200, "Seconds for all of it.", 1)
_JSON = flags.DEFINE_string("json", None, "File to write the figures to.")

LAYERS = (512, 512, 512, 512, 512, 10)  # 4.2 MB, most of it in four kernels
BATCH_SIZE = 8
_CHUNK = 1 << 14  # bytes that are forwarded together
# Arguments of OuterOptimizer by name. With `every` of 0 they are arguments of a
# CrossShardOptimizer with one group, which sums gradients in each step.
CASES: dict[str, dict[str, Any]] = {
  "nothing between workers": {"every": 1 << 30},
  "each step": {"every": 0},
  "each step+bfloat16": {"every": 0, "wire_dtype": "bfloat16"},
  "every": {},
  "every+bfloat16": {"wire_dtype": "bfloat16"},
}


class Bucket:
  """A token bucket for one direction of the link, which records its traffic.

  Attributes:
    times: When bytes went through, in seconds since the epoch.
    sums: For each time, how many bytes had gone through until then.
  """

  def __init__(self, bytes_per_second: float) -> None:
    self._rate = bytes_per_second
    self._free = time.monotonic()  # when all earlier bytes are through
    self._lock = threading.Lock()
    self.times, self.sums = [0.0], [0]

  def take(self, count: int) -> None:
    """Waits until `count` bytes may go through."""
    with self._lock:
      now = time.monotonic()
      self._free = max(self._free, now) + count / self._rate
      wait = self._free - now
      self.times.append(time.time())
      self.sums.append(self.sums[-1] + count)
    time.sleep(wait)

  def between(self, begin: float, end: float) -> int:
    """Returns how many bytes went through between two times."""
    first, last = (
      self.sums[bisect.bisect(self.times, at) - 1] for at in (begin, end)
    )
    return last - first


def forward(port: int, requests: Bucket, answers: Bucket) -> int:
  """Opens a port that forwards to another port, through token buckets."""
  listener = socket.create_server(("localhost", 0))

  def pump(source: socket.socket, target: socket.socket, to: Bucket) -> None:
    with contextlib.suppress(OSError):
      while data := source.recv(_CHUNK):
        to.take(len(data))
        target.sendall(data)
    for end in (source, target):
      with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)

  def accept() -> None:
    while True:
      near, _ = listener.accept()
      try:
        far = socket.create_connection(("localhost", port))
      except OSError:  # The worker is not listening yet. The peer retries.
        near.close()
        continue
      for a, b, bucket in ((near, far, requests), (far, near, answers)):
        b.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=pump, args=(a, b, bucket), daemon=True).start()

  threading.Thread(target=accept, daemon=True).start()
  return int(listener.getsockname()[1])


def environments(buckets: Sequence[Bucket]) -> dict[int, dict[str, str]]:
  """Returns TF_CONFIG for two workers; bucket i limits traffic to worker i."""
  ports = launch.free_ports(2)
  behind = [
    forward(ports[i], requests=buckets[i], answers=buckets[1 - i])
    for i in range(2)
  ]
  configs = {}
  for index in range(2):
    known = [behind[0], behind[1]]
    known[index] = ports[index]
    cluster = {"worker": [f"localhost:{port}" for port in known]}
    task = {"type": "worker", "index": index}
    configs[index] = {
      "TF_CONFIG": json.dumps({"cluster": cluster, "task": task})
    }
  return configs


def measure(
  strategy: tf.distribute.Strategy, options: dict[str, Any]
) -> dict[str, Any]:
  """Trains one case; returns begin, end and the duration of each step."""
  options = {"every": _EVERY.value, **options}
  groups, outer = None, None
  if options["every"]:
    groups, outer = [[0], [1]], callbacks.OuterOptimizer(**options)
  with strategy.scope():
    model = tf.keras.Sequential(
      [
        tf.keras.Input([LAYERS[0]]),
        *[tf.keras.layers.Dense(n, "relu") for n in LAYERS[1:-1]],
        tf.keras.layers.Dense(LAYERS[-1]),
      ]
    )
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(1e-5),
      group_assignment=groups,
      loss_averaged_over="replica",
      scale_gradients=True,
      wire_dtype=options.get("wire_dtype") if outer is None else None,
    )
    optimizer.build(model.trainable_variables)
  if outer is not None:
    outer.build(optimizer, model)
  rng = np.random.default_rng(strategy.cluster_resolver.task_id)
  inputs = tf.constant(rng.normal(size=[BATCH_SIZE, LAYERS[0]]), tf.float32)
  labels = tf.constant(rng.integers(0, LAYERS[-1], BATCH_SIZE))

  @tf.function(autograph=False)
  def step() -> None:
    def replica_step() -> None:
      with tf.GradientTape() as tape:
        logits = model(inputs, training=True)
        loss = tf.reduce_mean(
          tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        )
      weights = model.trainable_variables
      grads = tape.gradient(loss, weights)
      optimizer.apply_gradients(zip(grads, weights, strict=True))

    strategy.run(replica_step)

  times = [time.time()]
  # The first two rounds are not measured: they trace functions, and connect.
  for _ in range((2 + _ROUNDS.value) * _EVERY.value):
    step()
    time.sleep(_COMPUTES.value / 1e3)
    if outer is not None:
      outer.step()
    times.append(time.time())
  times = times[2 * _EVERY.value :]
  return {
    "begin": times[0],
    "end": times[-1],
    "milliseconds": (1e3 * np.diff(times)).tolist(),
  }


def chosen() -> list[str]:
  """Returns the names of the cases to measure."""
  return _CASES.value or list(CASES)


def work() -> None:
  """Runs one worker. The first worker writes the measurements."""
  strategy = multi_worker.MultiWorkerStrategy()
  found = {name: measure(strategy, CASES[name]) for name in chosen()}
  if strategy.cluster_resolver.task_id == 0:
    pathlib.Path(_JSON.value).write_text(json.dumps(found))


def main(argv: Sequence[str]) -> None:
  """Runs one worker, or starts both workers and prints the results."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  logging.set_verbosity(logging.WARNING)  # TensorFlow logs a lot.
  if "TF_CONFIG" in os.environ:
    work()
    return
  os.environ["CUDA_VISIBLE_DEVICES"] = ""
  buckets = [Bucket(_MEGABITS.value * 1e6 / 8) for _ in range(2)]
  with tempfile.TemporaryDirectory() as folder:
    result = pathlib.Path(folder, "measured.json")
    command = [sys.executable, *sys.argv, f"--json={result}"]
    launch.launch(command, environments(buckets), _TIMEOUT.value)
    measured = json.loads(result.read_text())
  print(timing.machine())
  print(
    f"\n{_MEGABITS.value:g} Mbit/s each way, H = {_EVERY.value}, steps of"
    f" {_COMPUTES.value:g} ms: milliseconds per step, and MB to a worker in H"
    " steps"
  )
  print(f"{'':<26}{'mean':>8}{'median':>8}{'longest':>9}{'MB':>8}")
  rows = []
  for name, case in measured.items():
    took = np.array(case["milliseconds"])
    sent = [b.between(case["begin"], case["end"]) for b in buckets]
    row = {
      "case": name,
      "mean": took.mean(),
      "median": np.median(took),
      "longest": took.max(),
      "megabytes": sum(sent) / 2 / _ROUNDS.value / 1e6,
    }
    rows.append(row)
    print(
      "{case:<26}{mean:>8.1f}{median:>8.1f}{longest:>9.1f}"
      "{megabytes:>8.2f}".format(**row)
    )
  if _JSON.value:
    timing.write_json(_JSON.value, {"rows": rows})


if __name__ == "__main__":
  app.run(main)
