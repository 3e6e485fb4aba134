"""Decides when to back up and when to exit, with one decision for all workers.

SIGTERM may reach one worker only, and the clocks of workers differ. All workers
have to act after the same batch, so they compare what they know:

every worker ── SIGTERM? backup old? time passed ──▶ all-gather ──▶ one decision

TensorFlow's `tf.distribute.experimental.TerminationConfig` cannot do this: the
functions that ask a cloud are private, and `PreemptionWatcher` knows TPUs only.
"""

import math
import os
import signal
import time
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import replicas as replicas_lib

_PAUSE: Final = 1e6  # Microseconds from one comparison of workers to the next.
# At most this many batches from one comparison to the next: later batches may
# take longer than those from which the interval was computed.
_MAX_BATCHES_BETWEEN: Final = 100


class PreemptionMonitor:
  """Watches for SIGTERM and for the age of the last backup."""

  def __init__(self, on_preemption: bool, seconds: float | None) -> None:
    """Takes the greatest age of a backup in seconds, or None for any age."""
    self._catches_signal = on_preemption
    self.is_needed = self._catches_signal or seconds is not None
    self._seconds = math.inf if seconds is None else seconds
    self._previous: Any = None  # The program's own handler of SIGTERM.
    self._is_caught = False

  def begin(self, strategy: tf.distribute.Strategy) -> None:
    self._copies = replicas_lib.Copies(strategy)
    self._calls = self._last = self._due = 0
    self._compared = self._saved = time.monotonic()
    if self._catches_signal:
      self._is_caught, self._process = False, os.getpid()
      handler = signal.signal(signal.SIGTERM, self._catch)
      # After a `fit` that failed, our own handler is still there.
      if handler != self._catch:
        self._previous = handler or signal.SIG_DFL

  def end(self) -> None:
    """Restores the program's own handler of SIGTERM, when `fit` ends."""
    if self._previous is not None:
      signal.signal(signal.SIGTERM, self._previous)
      self._previous = None
      if self._is_caught:  # After the last comparison: the program gets it.
        os.kill(os.getpid(), signal.SIGTERM)

  def restart_clock(self) -> None:
    self._saved = time.monotonic()

  def compare(self, is_epoch_end: bool = False) -> tuple[bool, bool]:
    """Returns whether to exit, and to back up; the same on all workers."""
    self._calls += 1
    if not self.is_needed or (self._calls < self._due and not is_epoch_end):
      return False, False
    now = time.monotonic()
    passed = max(1, int((now - self._compared) * 1e6))
    flags = [self._is_caught, now - self._saved >= self._seconds, passed]
    count = len(self._copies.engine.local_replicas)
    rows = self._copies.gather([np.array(flags, np.int64)] * count)
    if self._copies.workers is not None:
      # Compare about once a second, by the time of the slowest worker. Count
      # calls until then, because all workers count calls alike.
      slowest = max(int(row[2]) for row in rows)
      calls = (self._calls - self._last) * _PAUSE / slowest
      self._due = self._calls + min(max(1, int(calls)), _MAX_BATCHES_BETWEEN)
    self._compared, self._last = now, self._calls
    # A SIGTERM that any worker has received ends all workers. The clock of the
    # first worker decides whether a backup is too old.
    return any(row[0] for row in rows), bool(rows[0][1])

  def _catch(self, number: int, frame: Any) -> None:
    """Notes the first signal; the program's own handler gets a second one."""
    signal.signal(number, self._previous)
    if os.getpid() == self._process:
      self._is_caught = True
    else:
      # A child process, for example of a pool that reads data, inherited this
      # handler. It has no backup to make: let the signal have its usual effect.
      os.kill(os.getpid(), number)
