"""Ends a wait between workers that would otherwise last forever.

A worker that is stuck in Python code (a deadlock, a dead disk, a debugger)
still sends heartbeats to TensorFlow. The other workers would wait for it in
their next collective without a limit. Each process therefore counts the
collectives that it enters and leaves, and a thread looks at the counters. If a
worker waits longer than `step_timeout`, it writes an *alarm* into the store:

    this worker entered a collective, and has not left it for `step_timeout`
    this worker ── alarm ──────────────────────────────▶ store ─▶ all workers
    all workers ── whether they wait, and where they are ▶ store ─▶ all workers
    workers that wait: name those that do not wait, and abort the collective

While there is no alarm, each worker only reads one key of the store in each
interval of ten seconds or less. The counters are variables, so a step changes
them without Python: each collective costs two additions of an integer.
"""

import atexit
import itertools
import json
import pathlib
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import tensorflow as tf
from absl import logging
from tensorflow.python.eager import context

from tf_cross_shard._src.core.workers import agreement, errors, key_value_store

# The longest time between two looks at the counters, in seconds.
_INTERVAL: Final = 10.0
# How many seconds longer than one interval to wait for a worker's answer.
_SLACK: Final = 5.0
# Numbers the watches. The numbers agree if workers run the same program.
_series: Final = itertools.count()
_Result = TypeVar("_Result")
_stop: Final = threading.Event()
_threads: Final[list[threading.Thread]] = []


class StallWatch:
  """Counts the collectives of this process, and ends those that stall."""

  def __init__(self, workers: agreement.Workers) -> None:
    """Creates the counters, and starts the thread that looks at them."""
    self._workers = workers
    self._key = f"stall/{next(_series)}"
    self._entered = _Counter()
    self._left = _Counter()
    # The counters at the last look, and the time at which their last change was
    # seen.
    self._seen = (0, 0)
    self._changed = time.monotonic()
    thread = threading.Thread(
      target=_watch, args=(weakref.ref(self), self._interval), daemon=True
    )
    thread.start()
    _threads.append(thread)

  @property
  def _interval(self) -> float:
    """The number of seconds between two looks at the counters."""
    return min(_INTERVAL, self._workers.step_timeout / 10)

  def run_watched(
    self, tensors: Sequence[tf.Tensor], collectives: Callable[[], _Result]
  ) -> _Result:
    """Runs collectives, and counts when they are entered and left.

    Args:
      tensors: The inputs. The collectives count as entered when all of these
        are computed, but do not wait for the counting.
      collectives: A function that runs the collectives.

    Returns:
      What `collectives` returns.
    """
    self._entered.increment_after(tensors)
    results = collectives()
    self._left.increment_after(tf.nest.flatten(results))
    return results

  def look(self) -> tuple[bool, float]:
    """Returns whether this worker waits, and for how long nothing changed."""
    seen = self._entered.value(), self._left.value()
    if seen != self._seen:
      self._seen, self._changed = seen, time.monotonic()
    entered, left = seen
    return entered > left, time.monotonic() - self._changed

  def check(self, alarm: int) -> bool | None:
    """Looks at the counters, and for an alarm of another worker.

    Args:
      alarm: The number of the next alarm.

    Returns:
      None if there is no alarm; otherwise whether this worker ended its wait.
    """
    key = f"{self._key}/{alarm}"
    if key_value_store.read(key) is None:
      waits, seconds = self.look()
      if not waits or seconds < self._workers.step_timeout:
        return None
      key_value_store.put_if_missing(key, "")
    return self._answer(key)

  def _answer(self, key: str) -> bool:
    """Tells others what this worker does; ends its wait for a stuck worker."""
    workers = self._workers
    place = _place_of_main_thread()
    key_value_store.put_if_missing(
      f"{key}/{workers.index}", json.dumps([*self.look(), place])
    )
    deadline = time.monotonic() + self._interval + _SLACK
    answers = [
      key_value_store.wait(f"{key}/{index}", deadline)
      for index in range(len(workers.names))
    ]
    found = [
      None if answer is None else json.loads(answer) for answer in answers
    ]
    stuck = []
    for name, state in zip(workers.names, found, strict=True):
      if state is None:
        stuck.append(f"{name}, which does not answer")
      elif not state[0] and self._is_long(state[1]):
        stuck.append(f"{name}, which is at {state[2]}")
    waits, seconds = self.look()
    if not self._is_long(seconds):
      return False
    if not waits:
      logging.error(
        "The other workers have waited %g s for this worker, and end now. This"
        " worker is at:\n%s",
        workers.step_timeout,
        _stack_of_main_thread(),
      )
      return False
    self._abort(stuck)
    return True

  def _is_long(self, seconds: float) -> bool:
    """Returns whether a worker was idle for at least half of `step_timeout`.

    Workers do not look at the same moment. A worker that trains in a different
    group has changed its counters recently.
    """
    return seconds > self._workers.step_timeout / 2

  def _abort(self, stuck: Sequence[str]) -> None:
    """Ends the collectives in which this worker waits."""
    workers = self._workers
    cause = " and for ".join(stuck) or (
      "the other workers, which wait for different collectives"
    )
    error = errors.MissingWorkerError(
      f"{workers.own_name} has waited {workers.step_timeout:g} s in a step"
      f" (collective {self._entered.value()} of this process) for {cause}."
      f" Read the log of that worker{agreement.if_slow_in_step(workers)}"
    )
    logging.error("%s This worker is at:\n%s", error, _stack_of_main_thread())
    context.context().abort_collective_ops(
      tf.errors.DEADLINE_EXCEEDED, errors.to_message(error)
    )


class _Counter:
  """An integer variable of this process, outside every strategy."""

  def __init__(self) -> None:
    """Creates the variable with the value 0."""
    with tf.init_scope(), tf.device("CPU:0"):
      self._handle = tf.raw_ops.VarHandleOp(
        dtype=tf.int64, shape=[], shared_name=f"tf_cross_shard_count_{id(self)}"
      )
      tf.raw_ops.AssignVariableOp(
        resource=self._handle, value=tf.constant(0, tf.int64)
      )

  def increment_after(self, tensors: Sequence[tf.Tensor]) -> None:
    """Adds 1 when all of the tensors are computed."""
    with tf.control_dependencies(tensors), tf.device("CPU:0"):
      tf.raw_ops.AssignAddVariableOp(
        resource=self._handle, value=tf.constant(1, tf.int64)
      )

  def value(self) -> int:
    """Returns the value, also while a step runs in another thread."""
    value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64)
    return int(value.numpy())


_of_strategy: "weakref.WeakKeyDictionary[Any, StallWatch]" = (
  weakref.WeakKeyDictionary()
)


def of_strategy(strategy: tf.distribute.Strategy) -> StallWatch | None:
  """Returns the watch of a strategy; None if it has only one worker."""
  if strategy not in _of_strategy:
    workers = agreement.of_strategy(strategy)
    if workers is None:
      return None
    _of_strategy[strategy] = StallWatch(workers)
  return _of_strategy[strategy]


def _watch(
  reference: "weakref.ReferenceType[StallWatch]", interval: float
) -> None:
  """Looks at the counters until the strategy or the program ends."""
  alarms = 0
  while not _stop.wait(interval):
    watch = reference()
    if watch is None:
      return
    try:
      ended = watch.check(alarms)
    except (tf.errors.OpError, RuntimeError, ValueError):
      return  # A worker is lost, so TensorFlow ends all waits.
    if ended:
      return
    alarms += ended is not None


@atexit.register
def _join() -> None:
  """Ends the threads before TensorFlow destroys what they use."""
  _stop.set()
  for thread in _threads:
    thread.join(_SLACK)


def _main_stack() -> traceback.StackSummary:
  """Returns the stack of the main thread, the innermost line last."""
  frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
  return traceback.extract_stack(frame)


def _stack_of_main_thread() -> str:
  return "".join(_main_stack().format())


def _place_of_main_thread() -> str:
  """Returns the innermost line of the main thread, for a message."""
  line = _main_stack()[-1]
  return (
    f"{pathlib.Path(line.filename).name}, line {line.lineno}, in {line.name}"
  )
