"""Ends a wait between workers that would otherwise last forever.

A worker that is stuck in Python code (a deadlock, a dead disk, a debugger)
still sends heartbeats, so TensorFlow lets the others wait without a limit.

    this worker entered a collective, and has not left it for `step_timeout`
    this worker ── alarm ──────────────────────────────▶ store ─▶ all workers
    all workers ── whether they wait, and where they are ▶ store ─▶ all workers
    workers that wait: name those that do not wait, and abort the collective
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
from typing import Final, TypeVar

import tensorflow as tf
from absl import logging
from tensorflow.python.eager import context

from tf_cross_shard._src.core import workers as workers_lib

# The longest time between two looks at the counters, in seconds.
_INTERVAL: Final = 10.0
# How many seconds longer than one interval to wait for a worker's answer.
_SLACK: Final = 5.0
# Numbers the watches. The numbers agree if workers run the same program.
_series: Final = itertools.count()
_stop: Final = threading.Event()
_threads: Final[list[threading.Thread]] = []
_Result = TypeVar("_Result")


class StallWatch:
  """Counts the collectives of this process, and ends those that stall."""

  def __init__(self, workers: workers_lib.Workers, replicas: int = 1) -> None:
    """Takes the number of replicas in this process."""
    self._workers = workers
    self._key = f"stall/{next(_series)}"
    # Variables, so that a step counts without Python. Replicas share none: the
    # tf.cond of one replica would wait for that of another, and so forever.
    with tf.device("CPU:0"):
      zero = tf.constant(0, tf.int64)
      self._entered, self._left = (
        [tf.Variable(zero, trainable=False) for _ in range(replicas)]
        for _ in range(2)
      )
    # The counters at the last look, and when a look first found these values.
    self._counts = (0, 0)
    self._changed = time.monotonic()
    self._interval = min(_INTERVAL, workers.step_timeout / 10)
    thread = threading.Thread(
      target=_watch, args=(weakref.ref(self), self._interval), daemon=True
    )
    thread.start()
    _threads.append(thread)

  def run(
    self,
    tensors: Sequence[tf.Tensor],
    collectives: Callable[[], _Result],
    replica: int = 0,
  ) -> _Result:
    place = replica % len(self._entered)  # Among the replicas of this process.
    # Count when the inputs are computed; collectives do not wait for it.
    _increment_after(tensors, self._entered[place])
    results: object = ()
    try:
      results = collectives()
    finally:
      _increment_after(tf.nest.flatten(results), self._left[place])
    return results

  def look(self) -> tuple[bool, float]:
    """Returns whether this worker waits, and for how long nothing changed."""
    entered = sum(int(counter.numpy()) for counter in self._entered)
    left = sum(int(counter.numpy()) for counter in self._left)
    counts = entered, left
    if counts != self._counts:
      self._counts, self._changed = counts, time.monotonic()
    return counts[0] > counts[1], time.monotonic() - self._changed

  def check(self, alarm: int) -> bool | None:
    """Returns None without this alarm; otherwise whether a wait was ended."""
    workers = self._workers
    key = f"{self._key}/{alarm}"
    waits, seconds = self.look()
    if workers_lib.get(key) is None:
      if not waits or seconds < workers.step_timeout:
        return None
      workers_lib.put(key, "")
    main = threading.main_thread().ident or 0
    # The stack of the main thread, the innermost line last.
    stack = traceback.extract_stack(sys._current_frames().get(main))  # noqa: SLF001
    workers_lib.put(
      f"{key}/{workers.index}", json.dumps([waits, seconds, _line(stack[-1])])
    )
    # Workers do not look at the same moment. A worker that trains in a
    # different group has changed its counters recently.
    long = workers.step_timeout / 2
    deadline = time.monotonic() + self._interval + _SLACK
    stuck = []
    for index, name in enumerate(workers.names):
      answer = workers_lib.get(f"{key}/{index}", deadline - time.monotonic())
      if answer is None:
        stuck.append(f"{name}, which does not answer")
        continue
      also_waits, unchanged, line = json.loads(answer)
      if not also_waits and unchanged > long:
        stuck.append(f"{name}, which is at {line}")
    waits, seconds = self.look()
    if seconds <= long:
      return False
    at = f"This worker is at:\n{''.join(stack.format())}"
    if waits:
      self._abort(stuck, at)
    else:
      logging.error(
        "The other workers have waited %g s for this worker, and end now. %s",
        *(workers.step_timeout, at),
      )
    return waits

  def _abort(self, stuck: Sequence[str], at: str) -> None:
    """Ends the collectives in which this worker waits."""
    workers = self._workers
    cause = " and for ".join(stuck) or (
      "the other workers, which wait for different collectives"
    )
    error = workers_lib.MissingWorkerError(
      f"{workers.own_name} has waited {workers.step_timeout:g} s in a step"
      f" (collective {self._counts[0]} of this process) for {cause}. Read the"
      " log of that worker"
      f"{workers_lib.if_slow('step_timeout', workers.step_timeout)}"
    )
    logging.error("%s %s", error, at)
    context.context().abort_collective_ops(
      tf.errors.DEADLINE_EXCEEDED, workers_lib.to_message(error)
    )


def _increment_after(
  tensors: Sequence[tf.Tensor], counter: tf.Variable
) -> None:
  with tf.control_dependencies(tensors), tf.device("CPU:0"):
    counter.assign_add(1, read_value=False)


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
    del watch  # The strategy may end before the next look.


@atexit.register
def _join() -> None:
  """Ends the threads before TensorFlow destroys what they use."""
  _stop.set()
  for thread in _threads:
    thread.join(_SLACK)


def _line(frame: traceback.FrameSummary) -> str:
  file = pathlib.Path(frame.filename).name
  return f"{file}, line {frame.lineno}, in {frame.name}"
