"""A signal and a clock, on which all workers act after the same batch.

The signal may reach one worker only, and clocks differ. So workers compare:

every worker ── signalled? old? seconds ──▶ all-gather ──▶ the same decision
"""

import math
import os
import signal
import time
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard.replica_state import replica_values

_PAUSE: Final = 1e6  # microseconds between two comparisons
_LONGEST: Final = 100  # batches between them: later ones may be slower


class Watch:
  """Says after which batches to save, and when to end.

  Attributes:
    is_needed: Whether there is a signal or a clock to look at.
  """

  def __init__(self, catches_signal: bool, seconds: float | None) -> None:
    """Looks at SIGTERM, and at how old the last backup is, if asked to."""
    self.is_needed = catches_signal or seconds is not None
    self._catches_signal = catches_signal
    self._seconds = math.inf if seconds is None else seconds
    self._previous: Any = None  # handler of the signal
    self._is_caught = False

  def begin(self, strategy: tf.distribute.Strategy) -> None:
    """Begins to watch."""
    self._copies = replica_values.Copies(strategy)
    self._calls = self._last = self._due = 0
    self._compared = self._saved = time.monotonic()
    if self._catches_signal:
      self._is_caught, self._process = False, os.getpid()
      handler = signal.signal(signal.SIGTERM, self._catch)
      if handler != self._catch:  # of a `fit` that failed
        self._previous = handler or signal.SIG_DFL

  def end(self) -> None:
    """Ends watching; a signal that nobody acted on finds the former handler."""
    if self._previous is not None:
      signal.signal(signal.SIGTERM, self._previous)
      self._previous = None
      if self._is_caught:
        os.kill(os.getpid(), signal.SIGTERM)

  def restart_clock(self) -> None:
    """Notes that a backup was made."""
    self._saved = time.monotonic()

  def compare(self, is_epoch_end: bool = False) -> tuple[bool, bool]:
    """Returns whether to end, and whether the last backup is old.

    All workers call it after each batch and epoch, and decide alike.
    """
    self._calls += 1
    if not self.is_needed or (self._calls < self._due and not is_epoch_end):
      return False, False
    now = time.monotonic()
    passed = max(1, int((now - self._compared) * 1e6))
    own = [self._is_caught, now - self._saved >= self._seconds, passed]
    count = len(self._copies.engine.replicas_here)
    rows = self._copies.gather([np.array(own, np.int64)] * count)
    if self._copies.workers is not None:
      slowest = max(int(row[2]) for row in rows)
      calls = (self._calls - self._last) * _PAUSE / slowest
      self._due = self._calls + min(max(1, int(calls)), _LONGEST)
    self._compared, self._last = now, self._calls
    return any(row[0] for row in rows), bool(rows[0][1])

  def _catch(self, number: int, frame: Any) -> None:
    """Notes the signal; a second one does what it would have done."""
    signal.signal(number, self._previous)
    if os.getpid() == self._process:
      self._is_caught = True
    else:  # a child, say of a pool of processes that read data
      os.kill(os.getpid(), number)
