"""Measures PyTorch and Horovod on the gradients of multi_worker.py.

    python benchmarks/multi_worker.py --workers=2 --json=ours.json
    TORCH/bin/python benchmarks/multi_worker_peers.py --ours=ours.json
    HOROVOD/bin/python benchmarks/multi_worker_peers.py --ours=ours.json

Run it with the Python of another virtual environment, which has NumPy and
either PyTorch or Horovod with TensorFlow. It needs nothing of this project.
Each of the two takes about two minutes with two workers. Both use gloo over
local sockets.
"""

import argparse
import faulthandler
import importlib.util
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import timing

# By part: the number of tensors, and the float32 elements of each tensor.
BUFFERS = {
  "50 MB in 100 tensors": (100, 125_000),
  "50 MB in 1,000 tensors": (1000, 12_500),
  "2 MB in 1,000 tensors": (1000, 500),
}
TRAINING = "MLP step, 12.7 MB of gradients"
LAYERS = (784, 1024, 1024, 1024, 256, 10)
BATCH_SIZE = 64
# So small that weights stay finite, however often a step is repeated.
LEARNING_RATE = 1e-7

# The baselines. DDP is PyTorch's DistributedDataParallel, which reduces
# gradients during the backward pass.
DDP, JOINED, HOROVOD = "DDP, backward", "joined", "Horovod"

Step = Callable[[], Any]


def in_turns(
  steps: Mapping[str, Step], rounds: int, repeats: int
) -> dict[str, Any]:
  """Runs the steps in turns, each several times in a row.

  Before each turn the step runs once without being counted. In that run workers
  wait for those that are still busy with the previous case.

  Args:
    steps: Steps by name, in the same order in all processes.
    rounds: The number of turns of each step.
    repeats: How often a step runs in a turn.

  Returns:
    The milliseconds of one step, by name: an array of shape `[rounds]`.
  """

  def repeatedly(step: Step) -> Step:
    def run() -> None:
      for _ in range(repeats):
        step()

    return run

  cases: dict[str, Step] = {}
  for name, step in steps.items():
    cases[f"before {name}"] = step
    cases[name] = repeatedly(step)
  taken = timing.interleave(cases, rounds)
  return {name: taken[name] / repeats for name in steps}


def torch_parts(count: int) -> dict[str, dict[str, Step]]:
  """Returns steps of PyTorch, by part and name, for `count` processes."""
  import torch
  from torch import distributed, nn

  class Many(nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    """A module with one parameter for each tensor of a part; it uses all."""

    def __init__(self, tensors: int, size: int) -> None:
      super().__init__()
      self.all = nn.ParameterList(torch.zeros(size) for _ in range(tensors))

    def forward(self, scale: Any) -> Any:
      return sum((each * 1.0).sum() for each in self.all) * scale

  def ddp(module: Any) -> Any:
    return nn.parallel.DistributedDataParallel(module)

  def ddp_bfloat16(module: Any) -> Any:
    parallel = ddp(module)
    # PyTorch's own bfloat16 hook refuses gloo, and PyTorch refuses other hooks
    # that have annotations.
    parallel.register_comm_hook(
      None,
      lambda _, bucket: (
        distributed.all_reduce(
          bucket.buffer().bfloat16().div_(count), async_op=True
        )
        .get_future()
        .then(lambda done: done.value()[0].float())
      ),
    )
    return parallel

  def one_by_one(tensors: list[Any]) -> Step:
    def step() -> None:
      for work in [distributed.all_reduce(x, async_op=True) for x in tensors]:
        work.wait()

    return step

  def joined(tensors: list[Any]) -> Step:
    def step() -> None:
      buffer = torch.cat(tensors)
      distributed.all_reduce(buffer)
      parts = buffer.split([len(x) for x in tensors])
      for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part)

    return step

  def backward(module: Any) -> Step:
    def step() -> None:
      module.zero_grad(set_to_none=False)
      module(torch.tensor(1.0)).backward()

    return step

  def training(wrap: Callable[[Any], Any]) -> Step:
    layers: list[Any] = []
    for i, o in itertools.pairwise(LAYERS):
      layers += [nn.Linear(i, o), nn.ReLU()]
    module = wrap(nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
    inputs = torch.randn(BATCH_SIZE, LAYERS[0])
    labels = torch.randint(0, LAYERS[-1], (BATCH_SIZE,))

    def step() -> None:
      optimizer.zero_grad()
      nn.functional.cross_entropy(module(inputs), labels).backward()
      optimizer.step()

    return step

  torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
  total = torch.ones(())
  distributed.all_reduce(total)
  assert total == count, total
  parts: dict[str, dict[str, Step]] = {}
  for part, (tensors, size) in BUFFERS.items():
    parts[part] = {
      DDP: backward(ddp(Many(tensors, size))),
      f"{DDP}, bfloat16": backward(ddp_bfloat16(Many(tensors, size))),
      "backward pass alone": backward(Many(tensors, size)),
      "one by one": one_by_one(
        [torch.full([size], 0.0) for _ in range(tensors)]
      ),
      JOINED: joined([torch.full([size], 0.0) for _ in range(tensors)]),
    }
  parts[TRAINING] = {
    DDP: training(ddp),
    f"{DDP}, bfloat16": training(ddp_bfloat16),
    "nothing reduced": training(lambda module: module),
  }
  return parts


def horovod_parts(count: int) -> dict[str, dict[str, Step]]:
  """Returns steps of Horovod, by part and name, for `count` processes."""
  import horovod.tensorflow as hvd
  import tensorflow as tf

  def reduction(part: str, grouped: bool, compression: Any) -> Step:
    tensors, size = BUFFERS[part]
    copies = [tf.Variable(tf.ones([size])) for _ in range(tensors)]
    how: dict[str, Any] = {"op": hvd.Sum, "compression": compression}

    def reduce(scale: Any) -> Any:
      grads = [copy * scale for copy in copies]
      if grouped:
        return hvd.grouped_allreduce(grads, **how)
      return [
        hvd.allreduce(grad, name=f"tensors_{tensors}_{size}_{i}", **how)
        for i, grad in enumerate(grads)
      ]

    step = tf.function(reduce, autograph=False)
    assert float(step(tf.constant(1.0))[-1][-1]) == count
    return lambda: step(tf.constant(1.0))

  def training(reduce: Callable[[Any], Any]) -> Step:
    hidden = [tf.keras.layers.Dense(n, "relu") for n in LAYERS[1:-1]]
    model = tf.keras.Sequential(
      [tf.keras.Input([LAYERS[0]]), *hidden, tf.keras.layers.Dense(LAYERS[-1])]
    )
    optimizer = tf.keras.optimizers.Adam(LEARNING_RATE)
    weights = model.trainable_variables
    optimizer.build(weights)
    inputs = tf.random.normal([BATCH_SIZE, LAYERS[0]])
    labels = tf.random.uniform([BATCH_SIZE], 0, LAYERS[-1], tf.int64)

    def step() -> None:
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(
          tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels, model(inputs, training=True)
          )
        )
      grads = reduce(tape.gradient(loss, weights))
      optimizer.apply_gradients(zip(grads, weights, strict=True))

    return tf.function(step, autograph=False)  # type: ignore[no-any-return]

  plain, half = hvd.Compression.none, hvd.Compression.fp16
  parts: dict[str, dict[str, Step]] = {
    part: {
      HOROVOD: reduction(part, False, plain),
      "Horovod, grouped": reduction(part, True, plain),
      "Horovod, float16": reduction(part, True, half),
    }
    for part in BUFFERS
  }
  parts[TRAINING] = {
    HOROVOD: training(
      lambda grads: hvd.grouped_allreduce(grads, op=hvd.Average)
    ),
    "nothing reduced": training(lambda grads: grads),
  }
  return parts


def measure(
  parts: Mapping[str, Mapping[str, Step]], rank: int, options: Any
) -> None:
  """Times all parts; the first process prints tables."""
  ours = _of_ours(options.ours, options.workers)
  for part, steps in parts.items():
    taken = in_turns(steps, options.rounds, options.steps)
    for case, milliseconds in ours.get(part, {}).items():
      taken[f"here: {case}"] = np.full(options.rounds, milliseconds)
    if rank == 0:
      timing.show(timing.compare(part, taken, [DDP, JOINED, HOROVOD]))
  sys.stdout.flush()


def _of_ours(path: str | None, count: int) -> dict[str, dict[str, float]]:
  """Returns milliseconds by part and case from a file of multi_worker.py."""
  if path is None:
    return {}
  with open(path, encoding="utf-8") as file:
    rows = json.load(file)["clusters"][str(count)]["rows"]
  found: dict[str, dict[str, float]] = {}
  for row in rows:
    found.setdefault(row["part"], {})[row["case"]] = row["milliseconds"]
  return found


def torch_worker(rank: int, port: int, options: Any) -> None:
  """Runs one process of PyTorch."""
  from torch import distributed

  faulthandler.dump_traceback_later(options.timeout, exit=True)
  os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
  distributed.init_process_group("gloo", rank=rank, world_size=options.workers)
  measure(torch_parts(options.workers), rank, options)
  distributed.barrier()


def horovod_worker(options: Any) -> None:
  """Runs one process of Horovod, which horovodrun has started."""
  import horovod.tensorflow as hvd

  faulthandler.dump_traceback_later(options.timeout, exit=True)
  hvd.init()
  measure(horovod_parts(hvd.size()), hvd.rank(), options)


def main() -> None:
  """Starts processes of PyTorch and Horovod, or runs one of them."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--workers", type=int, default=2, help="Processes that reduce together."
  )
  parser.add_argument(
    "--rounds", type=int, default=9, help="Turns of each case."
  )
  parser.add_argument("--steps", type=int, default=3, help="Steps in a turn.")
  parser.add_argument("--ours", help="File that multi_worker.py --json wrote.")
  parser.add_argument(
    "--timeout", type=int, default=1200, help="Seconds until processes end."
  )
  options = parser.parse_args()
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  found = [n for n in ("torch", "horovod") if importlib.util.find_spec(n)]
  if "HOROVOD_RANK" in os.environ:
    horovod_worker(options)
    return
  if not found:
    sys.exit(
      f"{sys.executable} has neither torch nor horovod. Run this file with the"
      " Python of an environment that has one of them."
    )
  if "torch" in found:
    from torch import multiprocessing

    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      port = free.getsockname()[1]
    multiprocessing.spawn(torch_worker, (port, options), nprocs=options.workers)
  if "horovod" in found:
    launcher = pathlib.Path(sys.executable).with_name("horovodrun")
    subprocess.run(
      [str(launcher), "--gloo", "-np", str(options.workers), sys.executable]
      + sys.argv,
      env={**os.environ, "HOROVOD_CACHE_CAPACITY": "4096"},
      timeout=options.timeout,
      check=True,
    )


if __name__ == "__main__":
  main()
