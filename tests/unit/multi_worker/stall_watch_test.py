"""Tests which workers are named when a worker waits for too long.

multi_worker_errors_test.py tests the same with real workers.
"""

import json
import time

import pytest
import tensorflow as tf

from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard._src.multi_worker import stall_watch

NAMES = ("worker 0 (a:1)", "worker 1 (b:1)", "worker 2 (c:1)")
LIMIT = 1000.0
WAITS = json.dumps([True, LIMIT, "a place"])
IS_STUCK = json.dumps([False, LIMIT + 1, "callback.py, line 3, in save"])
TRAINS = json.dumps([False, 0.1, "a place"])


class _Store:
  """The key-value store of worker 0, with what the other workers write.

  Attributes:
    answers: The answers of workers 1 and 2 to an alarm; None for no answer.
    alarms: Who has raised an alarm: "this worker" or "another worker".
  """

  def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
    self.answers: list[str | None] = [None, None]
    self.alarms: list[str] = []
    self._answer: str | None = None
    monkeypatch.setattr(workers_lib, "put", self._put)
    monkeypatch.setattr(workers_lib, "get", self._get)

  def _put(self, key: str, value: str) -> None:
    if value:
      self._answer = value
    else:
      self.alarms.append("this worker")

  def _get(self, key: str, seconds: float | None = None) -> str | None:
    if seconds is None:
      return "" if self.alarms else None
    return [self._answer, *self.answers][int(key.rpartition("/")[2])]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> _Store:
  return _Store(monkeypatch)


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """Returns the messages with which collectives were aborted."""
  messages: list[str] = []
  monkeypatch.setattr(
    stall_watch.context.context(),
    "abort_collective_ops",
    lambda code, message: messages.append(message),
  )
  return messages


def _watch() -> stall_watch.StallWatch:
  workers = workers_lib.Workers(NAMES, 0, step_timeout=LIMIT)
  return stall_watch.StallWatch(workers)


def _check_in_collective(
  monkeypatch: pytest.MonkeyPatch, seconds: float
) -> bool | None:
  """Returns what the watch says while a collective takes this long."""
  watch = _watch()
  checked: list[bool | None] = []

  def collective() -> list[tf.Tensor]:
    assert watch.look()[0]
    later = time.monotonic() + seconds
    with monkeypatch.context() as patch:
      patch.setattr(stall_watch.time, "monotonic", lambda: later)
      checked.append(watch.check(0))
    return []

  watch.run([], collective)
  return checked[0]


@pytest.mark.parametrize(
  ("answers", "named", "other"),
  [
    ([IS_STUCK, WAITS], f"{NAMES[1]}, which is at callback.py", NAMES[2]),
    ([WAITS, None], f"{NAMES[2]}, which does not answer", NAMES[1]),
    # It trains in another group.
    ([IS_STUCK, TRAINS], NAMES[1], NAMES[2]),
    ([WAITS, WAITS], "which wait for different collectives", None),
  ],
)
def test_names_workers_that_do_not_wait(
  store: _Store,
  aborted: list[str],
  monkeypatch: pytest.MonkeyPatch,
  answers: list[str | None],
  named: str,
  other: str | None,
) -> None:
  store.answers = answers
  assert _check_in_collective(monkeypatch, LIMIT)
  [message] = aborted
  assert named in message
  assert "more than 1000 seconds" in message
  assert other is None or other not in message
  assert store.alarms == ["this worker"]


def test_a_short_wait_raises_no_alarm(
  store: _Store, aborted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  assert _check_in_collective(monkeypatch, LIMIT - 1) is None
  assert store.alarms == aborted == []


def test_training_worker_is_not_aborted_by_another_workers_alarm(
  store: _Store, aborted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  store.alarms = ["another worker"]
  store.answers = [WAITS, IS_STUCK]
  assert _check_in_collective(monkeypatch, 1.0) is False
  assert aborted == []
