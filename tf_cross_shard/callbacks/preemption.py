"""A signal, a notice and a clock, on which workers act after the same batch.

Signal and notice may reach one worker only, and clocks differ. So they compare:

every worker ── to end? old? seconds ──▶ all-gather ──▶ the same decision

TensorFlow's TerminationConfig has nothing that can be used alone: what asks a
cloud is private, and PreemptionWatcher knows Google's own TPUs only.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard.replica_state import replica_values

_PAUSE: Final = 1e6  # microseconds between two comparisons, or notices
_LONGEST: Final = 100  # batches between them: later ones may be slower


class Watch:
  """Says after which batches to save, and when to end.

  Attributes:
    is_needed: Whether there is a signal or a clock to look at.
  """

  def __init__(
    self, on_preemption: bool | Callable[[], bool], seconds: float | None
  ) -> None:
    """Looks at SIGTERM, and at how old the last backup is, if asked to.

    A function is asked for a notice, too.
    """
    self._catches_signal = bool(on_preemption)
    self.is_needed = self._catches_signal or seconds is not None
    self._has_notice = on_preemption if callable(on_preemption) else None
    self._seconds = math.inf if seconds is None else seconds
    self._previous: Any = None  # handler of the signal
    self._is_caught = False

  def begin(self, strategy: tf.distribute.Strategy) -> None:
    """Begins to watch."""
    self._copies = replica_values.Copies(strategy)
    self._calls = self._last = self._due = 0
    self._compared = self._saved = time.monotonic()
    self._asked = -math.inf
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
    is_end = self._is_caught or self._is_noticed(now)
    own = [is_end, now - self._saved >= self._seconds, passed]
    count = len(self._copies.engine.replicas_here)
    rows = self._copies.gather([np.array(own, np.int64)] * count)
    if self._copies.workers is not None:
      slowest = max(int(row[2]) for row in rows)
      calls = (self._calls - self._last) * _PAUSE / slowest
      self._due = self._calls + min(max(1, int(calls)), _LONGEST)
    self._compared, self._last = now, self._calls
    return any(row[0] for row in rows), bool(rows[0][1])

  def _is_noticed(self, now: float) -> bool:
    """Asks, about once a second; a network may fail for a while."""
    if self._has_notice is None or now - self._asked < _PAUSE / 1e6:
      return False
    self._asked = now
    try:
      return bool(self._has_notice())
    except OSError as error:
      logging.warning("No notice of a preemption could be read: %s", error)
      return False

  def _catch(self, number: int, frame: Any) -> None:
    """Notes the signal; a second one does what it would have done."""
    signal.signal(number, self._previous)
    if os.getpid() == self._process:
      self._is_caught = True
    else:  # a child, say of a pool of processes that read data
      os.kill(os.getpid(), number)
