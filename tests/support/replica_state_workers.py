"""The program of a worker that reads and saves values of all replicas.

Each case returns values, which the test's own process compares.
"""

import os
import pathlib
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.support import multi_worker_cases, multi_worker_faults, testbed
from tests.support import replica_state_cases as cases
from tf_cross_shard import CrossShardOptimizer, Models

# Of other dtypes TensorFlow makes no variables under this strategy.
DTYPES = ("float16", "float64", "int64", "bool")
GROUPS = [[0, 3], [1, 2]]
STEPS = 5
SIZES = (1, 511, (1 << 23) + 777)  # elements; the last travel in two messages


class Worker:
  """This worker, its replicas, and the folder that all workers see."""

  def __init__(
    self, strategy: tf.distribute.Strategy, folder: pathlib.Path
  ) -> None:
    self.strategy, self.folder = strategy, folder
    self.index = multi_worker_cases.place_of(strategy)
    here = len(strategy.extended.worker_devices)
    self.replicas = range(self.index * here, (self.index + 1) * here)
    self.count = strategy.num_replicas_in_sync
    assert self.count > here >= 1

  def spread(self, variable: Any, of_replica: Callable[[int], Any]) -> None:
    cases.spread(variable, [of_replica(replica) for replica in self.replicas])

  def simple(self, groups: Sequence[Sequence[int]]) -> Any:
    """Returns an optimizer and a weight, whose values differ between groups."""
    with self.strategy.scope():
      weight = tf.keras.Variable([0.0, 0.0], name="weight")
      optimizer = CrossShardOptimizer(
        tf.keras.optimizers.SGD(momentum=0.5), group_assignment=groups
      )
      optimizer.build([weight])
    for variable in [weight, *optimizer.variables]:
      self.spread(
        variable,
        lambda replica, like=variable: np.full(
          like.shape, optimizer.groups.index_of(replica) + 1
        ).astype(like.dtype),
      )
    return optimizer, weight

  def own(self, variables: Sequence[Any]) -> list[list[Any]]:
    return [
      [copy.tolist() for copy in cases.testbed.copies(variable)]
      for variable in variables
    ]


def replica_value(dtype: str, replica: int) -> Any:
  """Returns a value that depends on the replica."""
  numbers = np.array([replica, 5, 0, replica * replica % 3])
  return numbers.astype(dtype)


def values(worker: Worker) -> Any:
  """Reads several dtypes, a scalar, and a variable without replicas."""
  found: dict[str, Any] = {}
  for dtype in DTYPES:
    with worker.strategy.scope():
      variable = tf.Variable(replica_value(dtype, 0), trainable=False)
    worker.spread(variable, lambda r, dtype=dtype: replica_value(dtype, r))
    arrays = testbed.values(variable)
    found[dtype] = [(a.dtype.name, a.tolist()) for a in arrays]
  with worker.strategy.scope():
    scalar = tf.Variable(0.0)
    total = tf.Variable(
      0.0,
      synchronization=tf.VariableSynchronization.ON_READ,
      aggregation=tf.VariableAggregation.SUM,
    )
  for name, variable in (("scalar", scalar), ("total", total)):
    worker.spread(variable, lambda r: 2.0**r)
    found[name] = [float(a) for a in testbed.values(variable)]
  with worker.strategy.scope():
    rows = tf.Variable(tf.zeros([1, 2]), shape=[None, 2], trainable=False)
  worker.spread(rows, lambda r: np.full([1 + r % 3, 2], r, "f"))
  found["rows"] = [a.tolist() for a in testbed.values(rows)]
  alone = tf.Variable([float(worker.index)])
  found["alone"] = [a.tolist() for a in testbed.values(alone)]
  return found


def numbers(size: int, replica: int) -> np.ndarray:
  """Returns float16 numbers, which differ between replicas."""
  return (np.arange(size) % 1000 + replica).astype("float16")


def in_parts(worker: Worker) -> Any:
  """Reads values that are longer than one message."""
  found = []
  for size in SIZES:
    with worker.strategy.scope():
      long = tf.Variable(np.zeros(size, "float16"), trainable=False)
    worker.spread(long, lambda r, n=size: numbers(n, r))
    values = testbed.values(long)
    found.append([zlib.crc32(each.tobytes()) for each in values])
  return found


def resume(worker: Worker) -> Any:
  """Compares a training with another that is restored after half of the steps.

  The first training takes 5 steps, saves, and takes 5 more steps. The second
  one restores the file and takes the last 5 steps.
  """
  groups = GROUPS
  path = worker.folder / "resume"
  one = cases.Training(worker.strategy, groups, seed=1)
  one.steps(0, STEPS)
  saved = one.state()
  with mock.patch.object(np, "savez", wraps=np.savez) as write:
    one.save(path)
  one.steps(STEPS, 2 * STEPS)
  other = cases.Training(worker.strategy, groups, seed=2)
  other.steps(0, 1)
  before = len(cases.differing(saved, other.state()))
  other.restore(path)
  restored = cases.differing(saved, other.state())
  other.steps(STEPS, 2 * STEPS)
  kernel = one.model.trainable_variables[0]
  return {
    "wrote": write.call_count,
    "differed": before,
    "restored": restored,
    "continued": cases.differing(one.state(), other.state()),
    "trained": len(cases.differing(saved, one.state())),
    "groups": [
      value.tobytes()
      for value in Models(optimizer=one.optimizer).values(kernel)
    ],
    "values": [value.tobytes() for value in testbed.values(kernel)],
  }


def errors(worker: Worker) -> Any:
  """Makes errors on one worker only; all workers must raise them."""
  groups = GROUPS
  optimizer, weight = worker.simple(groups)
  variables = [weight, *optimizer.variables]
  good, mine = worker.folder / "good", worker.folder / f"own_{worker.index}"
  Models([weight], optimizer).save(good)
  before = good.read_bytes()
  found: dict[str, Any] = {}

  def restore(name: str, data: bytes) -> None:
    """Restores a file with `data`, and records the error of this worker."""
    mine.write_bytes(data)
    weight.assign([9.0, 9.0])
    found[name] = multi_worker_faults.attempt(
      lambda: Models([weight], optimizer).restore(mine)
    )
    found[f"{name}: unchanged"] = worker.own([weight])

  real = os.fsync
  failure = OSError(28, "No space left on device")
  with mock.patch.object(
    os, "fsync", side_effect=failure if not worker.index else real
  ):
    found["full disk"] = multi_worker_faults.attempt(
      lambda: Models([weight], optimizer).save(good)
    )
  found["the old file"] = good.read_bytes() == before

  is_last = worker.index == 1
  restore("damaged", before[:-5] if is_last else before)
  weight.assign([3.0, 3.0])
  Models([weight], optimizer).save(worker.folder / "other")
  other = (worker.folder / "other").read_bytes()
  restore("another file", other if is_last else before)
  restore("the same file", before)

  found["another model"] = multi_worker_faults.attempt(
    lambda: Models([weight] if is_last else None, optimizer).assert_in_sync()
  )
  worker.spread(weight, lambda r: [1.0, 2.0 ** (r + 1)])
  found["in sync"] = multi_worker_faults.attempt(
    lambda: Models([weight], optimizer).assert_in_sync()
  )
  Models([weight], optimizer).restore(good)
  found["at the end"] = worker.own(variables)
  found["left behind"] = sorted(
    path.name for path in worker.folder.iterdir() if "partial" in path.name
  )
  return found


CASES = (values, in_parts, resume, errors)


def run(
  strategy: tf.distribute.Strategy, folder: pathlib.Path
) -> dict[str, Any]:
  worker = Worker(strategy, folder)
  found: dict[str, Any] = {"replicas": list(worker.replicas)}
  for case in CASES:
    begin = time.monotonic()
    found[case.__name__] = case(worker)
    print(f"{time.monotonic() - begin:.2f} s: {case.__name__}", flush=True)
  return found
