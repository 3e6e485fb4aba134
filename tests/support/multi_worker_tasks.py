"""The programs of workers: each process runs one of `TASKS`."""

import os
import pathlib
import pickle
import runpy
import sys
import time
import unittest.mock
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

from tests.support import (
  multi_worker_cases,
  multi_worker_faults,
  replica_state_workers,
)
from tf_cross_shard import multi_worker
from tf_cross_shard.coordination import agreement


def strategy_of(kind: str, **options: Any) -> tf.distribute.Strategy:
  """TensorFlow's strategy, or ours."""
  if kind == "tensorflow":
    return tf.distribute.MultiWorkerMirroredStrategy(**options)
  return multi_worker.MultiWorkerStrategy(**options)


def numbers(launch: str) -> dict[Any, Any]:
  """Everything that is compared with plain Keras and with NumPy."""
  kind, _ = launch.split("-")
  strategy = strategy_of(kind)
  assert strategy.num_replicas_in_sync > 1
  found: dict[Any, Any] = {}
  for key, case in multi_worker_cases.cases_of(launch).items():
    begin = time.monotonic()
    found[key] = case(strategy)
    print(f"{time.monotonic() - begin:.2f} s: {' '.join(key)}", flush=True)
  if kind == "tensorflow":
    # A second strategy of TensorFlow's in one process would be a race.
    found["interplay"] = _cells().train_with_tensorflows(strategy)
  return found


def start(older: bool = False, timeout: float | None = None) -> dict[str, Any]:
  """Starts a worker, and says what came of it."""
  if older:
    mine = agreement.library_versions()[1:]
    agreement.library_versions = lambda: ["tf_cross_shard: 0.0.1", *mine]
  return multi_worker_faults.attempt(
    lambda: multi_worker.MultiWorkerStrategy(timeout=timeout)
  )


def faults(what: str, odd: bool) -> dict[str, Any]:
  """What a worker reports where one of them does something else."""
  strategy = multi_worker.MultiWorkerStrategy()
  if what == "disagree":
    return multi_worker_faults.disagree(odd, strategy)
  return multi_worker_faults.make_others(what, odd, strategy)


def lose(kind: str, killed: int) -> dict[str, Any]:
  """What a worker reports when another one is killed."""
  return multi_worker_faults.lose(kind, killed, strategy_of(kind))


def lose_waiting() -> dict[str, Any]:
  """What a worker reports that waits for one that is killed."""
  return multi_worker_faults.lose_waiting(strategy_of("own"))


def resume(
  folder: pathlib.Path, dies: bool, signalled: int | None = None
) -> dict[str, Any]:
  """Training that goes on where it was killed, and an undisturbed one."""
  strategy = multi_worker.MultiWorkerStrategy()
  found = multi_worker_faults.resume(
    folder / "backup", dies, strategy, signalled
  )
  if not dies:
    found["undisturbed"] = multi_worker_faults.resume(
      folder / "whole", dies, strategy
    )
  return found


def two_replicas_each() -> tf.distribute.Strategy:
  """Two replicas in each process, as with GPUs; of CPUs it would be one."""
  cpu = tf.config.list_physical_devices("CPU")[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
  )
  with unittest.mock.patch.object(
    collective_all_reduce_strategy.CollectiveAllReduceExtended,
    "_initialize_local_devices",
    lambda extended, resolver, worker: (
      tuple(f"{worker}/device:CPU:{i}" for i in range(2)),
      "CPU",
    ),
  ):
    strategy = multi_worker.MultiWorkerStrategy()
  assert len(strategy.extended.worker_devices) == 2
  assert strategy.num_replicas_in_sync == 4
  return strategy


def local_replicas(steps: int, folder: pathlib.Path) -> dict[str, Any]:
  """What two replicas of each of several processes have."""
  strategy = two_replicas_each()
  found: dict[Any, Any] = {
    (grouping, wire_dtype): multi_worker_cases.powers_of_two(
      grouping, wire_dtype, steps, strategy
    )
    for grouping, wire_dtype in multi_worker_cases.POWERS
  }
  found["replica_state"] = replica_state_workers.run(strategy, folder)
  return found


def one_after_the_other(delay: float) -> list[Any]:
  """Sums under several strategies; what each broadcasts first differs."""
  found = []
  for dtype, grouping in (("float32", "ungrouped"), ("int64", "singletons")):
    time.sleep(delay)
    strategy = multi_worker.MultiWorkerStrategy()
    with strategy.scope():
      first = tf.Variable([strategy.num_replicas_in_sync], dtype=dtype)
    sums = multi_worker_cases.dense_sum("small", grouping, "function", strategy)
    found.append((grouping, first.numpy().tolist(), sums))
  return found


def two(delay: float) -> dict[Any, Any]:
  """Several strategies; then two Kerases, mixed precision and loss scaling."""
  return {"one after the other": one_after_the_other(delay), **_cells().train()}


def program(path: pathlib.Path) -> None:
  """Runs a program in its folder."""
  os.chdir(path.parent)
  runpy.run_path(str(path), run_name="__main__")


def _cells() -> Any:
  """Imported here, for no other task needs a second Keras: it takes seconds."""
  from tests.support import interplay_workers

  return interplay_workers


TASKS: dict[str, Callable[..., Any]] = {
  task.__name__: task
  for task in (
    numbers,
    start,
    faults,
    lose,
    lose_waiting,
    resume,
    local_replicas,
    two,
    program,
  )
}


def run(
  task: str,
  place: str,
  environment: Mapping[str, str],
  arguments: Mapping[str, Any],
) -> None:
  """Writes to PLACE.log, and leaves what a task returns in PLACE.out."""
  given = pathlib.Path(place)
  with given.with_suffix(".log").open("wb", buffering=0) as log:
    for stream in (sys.stdout, sys.stderr):
      stream.flush()
      os.dup2(log.fileno(), stream.fileno())
  # The server says nothing where it cannot import what it is told to.
  assert "tests.support.multi_worker_imports" in sys.modules
  os.environ.pop("TF_CONFIG", None)
  os.environ.update(environment)
  tf.get_logger().setLevel("ERROR")
  result = TASKS[task](**arguments)
  part = given.with_suffix(".part")
  part.write_bytes(pickle.dumps(result))
  os.replace(part, given.with_suffix(".out"))
