"""Tests which workers are named when a worker waits for too long.

multi_worker_errors_test.py tests the same with real workers.
"""

import json
from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard._src.core.workers import agreement, key_value_store
from tf_cross_shard._src.multi_worker import stall_watch

NAMES = ("worker 0 (a:1)", "worker 1 (b:1)", "worker 2 (c:1)")
LIMIT = 1000.0
WAITS = json.dumps([True, LIMIT, "a place"])
IS_STUCK = json.dumps([False, LIMIT + 1, "callback.py, line 3, in save"])
TRAINS = json.dumps([False, 0.1, "a place"])


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> stall_watch.StallWatch:
  """Returns the stall watch of worker 0, with an empty store."""
  store: dict[str, str] = {}
  monkeypatch.setattr(key_value_store, "put_if_missing", store.setdefault)
  monkeypatch.setattr(key_value_store, "read", store.get)
  monkeypatch.setattr(
    key_value_store, "wait", lambda key, deadline: store.get(key)
  )
  workers = agreement.Workers(NAMES, 0, step_timeout=LIMIT)
  made = stall_watch.StallWatch(workers)
  made.store = store
  return made


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


def _wait(watch: stall_watch.StallWatch, seconds: float) -> None:
  """Simulates that this worker has waited in a collective."""
  watch._entered.assign_add(1)
  watch.look()
  watch._changed -= seconds


def _answer(watch: Any, *answers: str | None) -> None:
  """Makes the other workers answer the first alarm."""
  for index, answer in enumerate(answers, start=1):
    if answer is not None:
      watch.store[f"{watch._key}/0/{index}"] = answer


def test_counts_collectives_in_traced_functions(
  watch: stall_watch.StallWatch,
) -> None:
  waiting = []

  @tf.function
  def step(value: tf.Tensor) -> tf.Tensor:
    def collective() -> list[tf.Tensor]:
      with tf.control_dependencies([value]):
        tf.py_function(lambda: waiting.append(watch.look()[0]), [], [])
        return [2 * value]

    [doubled] = watch.run([value], collective)
    return doubled

  assert float(step(tf.constant(2.0))) == 4.0
  assert float(step(tf.constant(3.0))) == 6.0
  assert len(waiting) == 2
  assert (int(watch._entered), int(watch._left)) == (2, 2)
  assert not watch.look()[0]


@pytest.mark.parametrize(
  ("answers", "named", "other"),
  [
    (
      [IS_STUCK, WAITS],
      f"{NAMES[1]}, which is at callback.py, line 3",
      NAMES[2],
    ),
    ([WAITS, None], f"{NAMES[2]}, which does not answer", NAMES[1]),
    # It trains in another group.
    ([IS_STUCK, TRAINS], NAMES[1], NAMES[2]),
    ([WAITS, WAITS], "which wait for different collectives", None),
  ],
)
def test_names_workers_that_do_not_wait(
  watch: stall_watch.StallWatch,
  aborted: list[str],
  answers: list[str | None],
  named: str,
  other: str | None,
) -> None:
  _wait(watch, LIMIT)
  _answer(watch, *answers)
  assert watch.check(0)
  [message] = aborted
  assert named in message
  assert "more than 1000 seconds" in message
  assert other is None or other not in message


def test_a_short_wait_raises_no_alarm(
  watch: stall_watch.StallWatch, aborted: list[str]
) -> None:
  _wait(watch, LIMIT - 1)
  assert watch.check(0) is None
  assert watch.store == {}
  assert aborted == []


def test_training_worker_is_not_aborted_by_another_workers_alarm(
  watch: stall_watch.StallWatch, aborted: list[str]
) -> None:
  watch.store[f"{watch._key}/0"] = ""
  _answer(watch, WAITS, IS_STUCK)
  _wait(watch, 1.0)
  assert watch.check(0) is False
  assert aborted == []


@pytest.mark.parametrize("value", ["0", "soon", "nan", "inf"])
def test_refuses_a_limit_that_is_no_number_of_seconds(
  monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
  monkeypatch.setenv("TF_CROSS_SHARD_STEP_TIMEOUT", value)
  with pytest.raises(ValueError, match=r"`step_timeout` or .*positive number"):
    agreement.step_timeout_of(None)
