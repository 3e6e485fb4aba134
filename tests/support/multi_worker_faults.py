"""Programs with faults, for the tests of errors of several workers.

Every worker runs each function. If the function has an argument `odd`, it says
whether this worker is the one with the fault.
"""

import functools
import math
import os
import pathlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.support import multi_worker_cases as cases
from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer
from tf_cross_shard._src.backup import preemption
from tf_cross_shard._src.core import versions
from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard._src.models import group_state
from tf_cross_shard.multi_worker import (
  BackupAndRestore,
  MultiWorkerStrategy,
  naming_lost_workers,
)

# What differs on worker 1, in programs that can continue after the error.
DIFFERENCES = (
  "group_assignment",
  "order",
  "sparse gradient",
  "iterations",
)
# How the layers that worker 1 creates in the scope differ from those of worker
# 0.
MADE = ("fewer", "shape")


def attempt(function: Callable[[], Any]) -> dict[str, Any]:
  """Returns an error's text, and the seconds until it was raised."""
  begin = time.monotonic()
  found = {"error": None, "message": ""}
  try:
    function()
  except Exception as error:
    found = {
      "error": type(error).__name__,
      "message": str(error),
      "errno": getattr(error, "errno", None),
      "cause": str(error.__cause__),
    }
  return {**found, "seconds": time.monotonic() - begin}


def start(older: bool = False, timeout: float | None = None) -> dict[str, Any]:
  """Starts a worker; returns its error, if there is one."""
  if older:
    versions.own_version = lambda: "0.0.1"
  return attempt(lambda: MultiWorkerStrategy(timeout=timeout))


def differ(
  what: str, odd: bool, strategy: tf.distribute.Strategy
) -> dict[str, Any]:
  """Takes one step, which is different on the odd worker."""
  singletons = [[i] for i in range(strategy.num_replicas_in_sync)]
  groups = singletons if odd and what == "group_assignment" else None
  with strategy.scope():
    make = tf.keras.Variable
    a = make(np.ones([3], "float32"), name="a")
    b = make(np.ones([2, 3], "float32"), name="b")
    sgd = tf.keras.optimizers.SGD(1.0)
    optimizer = CrossShardOptimizer(sgd, group_assignment=groups)
  trained = [b, a] if odd and what == "order" else [a, b]
  grads: list[Any] = [tf.ones(v.shape, v.dtype) for v in trained]
  if odd and what == "sparse gradient":
    grads[1] = tf.IndexedSlices(
      tf.ones([1, 3]), tf.constant([1]), tf.constant([2, 3])
    )

  def step() -> None:
    if odd and what == "absence":
      time.sleep(strategy.timeout + 5.0)
      return
    if what == "absence" and cases.place_of(strategy) == 2:
      time.sleep(strategy.timeout / 2)
    optimizer.build(trained)
    if odd and what == "iterations":
      (own,) = strategy.experimental_local_results(optimizer.iterations.value)
      own.assign(5)

    @tf.function  # with AutoGraph, as users have it
    def run() -> None:
      def replica_step() -> None:
        optimizer.apply_gradients(zip(grads, trained, strict=True))

      strategy.run(replica_step)

    run()

  before = cases.own([a, b])
  found = attempt(step)
  after = cases.own([a, b])
  found["unchanged"] = all(
    (x == y).all() for x, y in zip(before, after, strict=True)
  )
  return found


def disagree(odd: bool, strategy: tf.distribute.Strategy) -> dict[str, Any]:
  """Takes a step with each kind of difference between workers.

  A step without a difference comes next, and must work. Returns the errors.
  """
  found = {what: differ(what, odd, strategy) for what in DIFFERENCES}
  found["empty"] = attempt(lambda: _make_empty(strategy))
  found["nothing"] = differ("nothing", odd, strategy)
  found["absence"] = differ("absence", odd, strategy)  # ends the agreement
  return found


def _make_empty(strategy: tf.distribute.Strategy) -> None:
  with strategy.scope():
    tf.Variable(np.zeros([0, 3]))


class Early:
  """Variables that are trained for one step before a worker fails."""

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
    self._strategy = strategy
    with strategy.scope():
      # The variables have two dtypes, so at least two buffers are sent.
      self.variables = [
        tf.keras.Variable(np.zeros([3]), dtype="float32", name="early"),
        tf.keras.Variable(np.zeros([3]), dtype="float64", name="early"),
        tf.keras.Variable(np.zeros([1500, 1000]), dtype="float32", name="big"),
        tf.keras.Variable(np.zeros([5, 2]), dtype="float32", name="table"),
      ]
      self.optimizer = CrossShardOptimizer(
        tf.keras.optimizers.SGD(1.0, momentum=0.5), "sum"
      )
      self.optimizer.build(self.variables)

  def state(self) -> list[np.ndarray]:
    return cases.own([*self.variables, *self.optimizer.variables])

  def step(self, wait: Callable[[], None] | None = None) -> None:
    """Takes a step. The last gradient is computed after `wait` has returned."""

    def replica_step() -> None:
      grads = [tf.ones(v.shape, v.dtype) for v in self.variables[:3]]
      rows = tf.ones([2, 2])
      if wait is not None:
        with tf.control_dependencies([tf.py_function(wait, [], [])]):
          rows = tf.identity(rows)
      table = tf.IndexedSlices(rows, tf.constant([1, 3]), tf.constant([5, 2]))
      pairs = zip([*grads, table], self.variables, strict=True)
      self.optimizer.apply_gradients(pairs)

    @tf.function
    def run() -> None:
      self._strategy.run(replica_step)

    run()


def make_others(
  what: str, odd: bool, strategy: tf.distribute.Strategy
) -> dict[str, Any]:
  """Creates layers that differ between the workers, and trains them."""
  early = Early(strategy)
  early.step()
  before = early.state()
  layers = tf.keras.layers
  widths = {"fewer": [4], "shape": [5, 2]}[what] if odd else [4, 2]

  def train() -> None:
    with strategy.scope():
      model = tf.keras.Sequential(
        [
          tf.keras.Input((3,)),
          *(layers.Dense(width) for width in widths),
        ]
      )
      optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(1.0))
      optimizer.build(model.trainable_variables)

    @tf.function
    def step() -> None:
      def replica_step() -> None:
        optimizer.minimize(
          lambda: tf.reduce_sum(model(tf.ones([2, 3]))),
          var_list=model.trainable_variables,
        )

      strategy.run(replica_step)

    step()

  def named() -> None:
    with naming_lost_workers():
      train()

  return {**attempt(named), "unchanged": _same(before, early.state())}


def lose(
  kind: str, killed: int, strategy: tf.distribute.Strategy
) -> dict[str, Any]:
  """Kills a worker in the middle of a step.

  Returns what the other workers report, and whether their variables are
  unchanged.
  """
  found: dict[str, Any] = {}
  mine = cases.place_of(strategy)
  if kind == "tensorflow":
    found["differ"] = differ("sparse gradient", mine == 2, strategy)
  early = Early(strategy)
  early.step()
  before = early.state()

  def die() -> None:
    time.sleep(1.0)  # meanwhile the other sums of this step are complete
    os.kill(os.getpid(), signal.SIGKILL)

  def step() -> None:
    with naming_lost_workers():
      early.step(die if mine == killed else None)

  found |= attempt(step)
  found["trained"] = float(before[0][0])
  found["unchanged"] = _same(before, early.state())
  return found


def lose_waiting(strategy: tf.distribute.Strategy) -> dict[str, Any]:
  """Kills the last worker while the others wait for it without a time limit.

  Workers wait in this way while the first worker evaluates groups.
  """
  workers = workers_lib.of_strategy(strategy)
  assert workers is not None
  if workers.index == len(workers.names) - 1:
    os.kill(os.getpid(), signal.SIGKILL)
  return attempt(lambda: workers_lib.exchange(workers, "a test", "", math.inf))


def stall(odd: bool, strategy: tf.distribute.Strategy) -> dict[str, Any]:
  """Delays the odd worker before one step, and for longer before the next.

  The others wait for it in a collective.
  """
  early = Early(strategy)
  early.step()
  time.sleep(0.5 * strategy.step_timeout * odd)
  early.step()
  trained = float(early.state()[0][0])

  def step() -> None:
    time.sleep(2.0 * strategy.step_timeout * odd)
    with naming_lost_workers():
      early.step()

  return {**attempt(step), "trained": trained}


def resume(
  folder: pathlib.Path,
  dies: bool,
  strategy: tf.distribute.Strategy,
  signalled: int | None = None,
) -> dict[str, Any]:
  """Trains with backups; each worker is a group.

  If `dies`, worker 1 is killed half-way. If `signalled` is given, worker 1
  receives SIGTERM after that batch of epoch 1.
  """
  trained: list[int] = []
  losses: list[float] = []
  write = group_state.GroupState.write

  def write_or_die(state: Any, path: pathlib.Path, *args: Any) -> None:
    """Kills worker 1 while worker 0 writes the third backup."""
    if dies and path.name == "epoch_3.npz" and cases.place_of(strategy) == 1:
      # Worker 0 may still wait for our values, and would write nothing then.
      while not any("epoch_3" in found.name for found in folder.iterdir()):
        time.sleep(0.01)
      os.kill(os.getpid(), signal.SIGKILL)
    write(state, path, *args)

  with strategy.scope():
    model = testbed.network(dropout=0.5)
    adam = tf.keras.optimizers.Adam(0.01)
    model.compile(CrossShardOptimizer(adam, group_assignment=[[0], [1]]), "mse")
  backup = BackupAndRestore(folder, delete_checkpoint=False, on_preemption=True)
  listed: list[Any] = [backup]
  if signalled is not None and cases.place_of(strategy) == 1:
    terminate = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
    listed.append(testbed.Interruption(1, signalled, terminate))
  data = cases.batches(*cases.fit_data(strategy.num_replicas_in_sync))

  def train() -> None:
    with (
      mock.patch.object(group_state.GroupState, "write", write_or_die),
      # These epochs are shorter than the pause between two comparisons.
      mock.patch.object(preemption, "_PAUSE", 0),
    ):
      history = model.fit(data, epochs=4, verbose=0, callbacks=listed)
    trained.extend(history.epoch)
    losses.extend(history.history["loss"])

  result = attempt(train)
  variables = [*model.variables, *model.optimizer.variables]
  files = sorted(path.name for path in folder.glob("*"))
  return {
    **result,
    "epochs": trained,
    "losses": losses,
    "state": cases.own(variables),
    "files": files,
  }


def fit(
  folder: pathlib.Path, killed_after: int | None, strategy: Any
) -> dict[str, Any]:
  """Trains one group with backups; may kill worker 0 after some steps."""
  with strategy.scope():
    model = testbed.network()
    adam = tf.keras.optimizers.Adam(0.01)
    model.compile(CrossShardOptimizer(adam), "mse")
  is_first = cases.place_of(strategy) == 0

  def kill(batch: int, logs: Any) -> None:
    del batch, logs
    if is_first and model.optimizer.iterations.numpy() == killed_after:
      os.kill(os.getpid(), signal.SIGKILL)

  rng = np.random.default_rng(0)
  examples = rng.normal(size=[256, 3]), rng.normal(size=[256, 2])
  history = model.fit(
    tf.data.Dataset.from_tensor_slices(examples).batch(32),
    epochs=3,
    verbose=0,
    callbacks=[
      BackupAndRestore(folder, every=3),
      tf.keras.callbacks.LambdaCallback(on_train_batch_end=kill),
    ],
  )
  return {"epochs": history.epoch, "weights": model.get_weights()}


def _same(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> bool:
  return all((x == y).all() for x, y in zip(before, after, strict=True))
