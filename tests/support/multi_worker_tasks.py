"""The programs of workers: each process runs one of `TASKS`."""

import os
import pathlib
import pickle
import runpy
import sys
import time
import traceback
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

from tests.support import (
  forking,
  logical_devices,
  mixed_precision,
  multi_worker_cases,
  multi_worker_faults,
  random_programs,
  replica_state_workers,
)
from tf_cross_shard import multi_worker


def strategy_of(kind: str, **options: Any) -> tf.distribute.Strategy:
  if kind == "tensorflow":
    return tf.distribute.MultiWorkerMirroredStrategy(**options)
  return multi_worker.MultiWorkerStrategy(**options)


def numbers(launch: str) -> dict[Any, Any]:
  """Runs all cases of a launch.

  Returns the values that the tests compare with plain Keras and NumPy.
  """
  kind, _ = launch.split("-")
  strategy = strategy_of(kind)
  assert strategy.num_replicas_in_sync > 1
  found: dict[Any, Any] = {}
  for key, case in multi_worker_cases.cases_of(launch).items():
    found[key] = _timed(" ".join(key), case, strategy)
  if kind == "tensorflow":
    # Creating a second MultiWorkerMirroredStrategy in one process would cause a
    # race.
    cell = mixed_precision.OF_TENSORFLOW
    found[cell] = mixed_precision.train_worker(strategy, cell)
  return found


def _timed(name: str, function: Callable[..., Any], *args: Any) -> Any:
  """Calls a function, and prints the time that the call took."""
  begin = time.monotonic()
  result = function(*args)
  print(f"{time.monotonic() - begin:.2f} s: {name}", flush=True)
  return result


def faults(what: str, odd: bool) -> dict[str, Any]:
  """Returns what each worker reports if one worker does something different."""
  strategy = multi_worker.MultiWorkerStrategy()
  if what == "disagree":
    return multi_worker_faults.disagree(odd, strategy)
  return multi_worker_faults.make_others(what, odd, strategy)


def lose(kind: str, killed: int) -> dict[str, Any]:
  return multi_worker_faults.lose(kind, killed, strategy_of(kind))


def lose_waiting() -> dict[str, Any]:
  return multi_worker_faults.lose_waiting(strategy_of("own"))


def stall(odd: bool) -> dict[str, Any]:
  return multi_worker_faults.stall(odd, strategy_of("own"))


def resume(
  folder: pathlib.Path, dies: bool, signalled: int | None = None
) -> dict[str, Any]:
  """Resumes a training that was killed; also runs one without interruption."""
  strategy = multi_worker.MultiWorkerStrategy()
  found = multi_worker_faults.resume(
    folder / "backup", dies, strategy, signalled
  )
  if not dies:
    found["undisturbed"] = multi_worker_faults.resume(
      folder / "whole", dies, strategy
    )
  return found


def fit(folder: pathlib.Path, killed_after: int | None) -> dict[str, Any]:
  return multi_worker_faults.fit(folder, killed_after, strategy_of("own"))


def two_replicas_each() -> tf.distribute.Strategy:
  """Returns a strategy with two replicas in each process, as with GPUs.

  On CPUs, TensorFlow normally uses one replica for each process.
  """
  logical_devices.split_cpu(2)
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
  """Returns the values of two replicas in each of several processes."""
  strategy = two_replicas_each()
  found: dict[Any, Any] = {
    case: multi_worker_cases.powers_of_two(*case, steps, strategy)
    for case in multi_worker_cases.POWERS
  }
  found["replica_state"] = replica_state_workers.run(strategy, folder)
  return found


def one_after_the_other(delay: float) -> list[Any]:
  """Sums gradients under two strategies, one after the other.

  The first variables of the strategies have different dtypes, so a worker that
  mixes up the strategies fails.
  """
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
  """Runs the cases of two workers.

  These are `one_after_the_other`, the cells of mixed precision and loss scaling
  with Keras 3 and tf_keras, and `evaluate_and_predict`.
  """
  found: dict[Any, Any] = {"one after the other": one_after_the_other(delay)}
  strategy = multi_worker.MultiWorkerStrategy()
  for cell in mixed_precision.WORKER_CELLS:
    found[cell] = _timed(
      str(cell), mixed_precision.train_worker, strategy, cell
    )
  found["evaluated"] = mixed_precision.evaluate_and_predict(strategy)
  found["even"] = multi_worker_cases.even(strategy)
  return found


def random(
  seeds: Sequence[int], folder: pathlib.Path
) -> dict[int, random_programs.State]:
  """Returns what this worker holds after each of the random programs."""
  strategy = multi_worker.MultiWorkerStrategy()
  found: dict[int, random_programs.State] = {}
  for seed in seeds:
    print(f"seed {seed}", flush=True)
    drawn = random_programs.draw(seed, strategy.num_replicas_in_sync)
    [found[seed]] = random_programs.train(drawn, strategy, folder)
    tf.keras.backend.clear_session()
  return found


def program(path: pathlib.Path) -> None:
  """Runs a program in its folder."""
  os.chdir(path.parent)
  runpy.run_path(str(path), run_name="__main__")


TASKS: dict[str, Callable[..., Any]] = {
  task.__name__: task
  for task in (
    numbers,
    multi_worker_faults.start,
    faults,
    lose,
    lose_waiting,
    stall,
    resume,
    fit,
    local_replicas,
    two,
    random,
    program,
  )
}


def run(
  task: str,
  place: str,
  environment: Mapping[str, str],
  arguments: Mapping[str, Any],
) -> None:
  """Runs a task: its output goes to PLACE.log, its result to PLACE.out."""
  given = pathlib.Path(place)
  forking.prepare(given.with_suffix(".log"), environment)
  tf.get_logger().setLevel("ERROR")
  try:
    result = TASKS[task](**arguments)
  except Exception:
    # End at once: TensorFlow would wait for workers that wait for this one.
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
  part = given.with_suffix(".part")
  part.write_bytes(pickle.dumps(result))
  os.replace(part, given.with_suffix(".out"))
