"""Tests reading from a store whose process does not answer.

multi_worker_errors_test.py has real stores that answer, or that are lost.
"""

import time

import pytest
import tensorflow as tf

from tf_cross_shard._src.core.workers import errors, key_value_store


class _StoppedStore:
  """TensorFlow's client of a store whose process is stopped (SIGSTOP)."""

  def __init__(self) -> None:
    # TensorFlow's context has this attribute.
    self._collective_ops_server_def = tf.train.ServerDef()
    for name, count in (("chief", 1), ("worker", 1)):
      job = self._collective_ops_server_def.cluster.job.add(name=name)
      for index in range(count):
        job.tasks[index] = "host:1"

  def set_config_key_value(self, key: str, value: str) -> None:
    """Writes nothing that could be read."""

  def get_config_key_value(self, key: str, milliseconds: int) -> str:
    raise tf.errors.DeadlineExceededError(None, None, key)

  def get_task_states(self, jobs: object) -> None:
    pytest.fail("TensorFlow would wait here forever.")


def test_a_first_worker_that_does_not_answer_is_lost(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  store = _StoppedStore()
  monkeypatch.setattr(key_value_store.context, "context", lambda: store)
  key_value_store.put("text", "is lost")
  with pytest.raises(errors.WorkerLostError, match=r"^chief 0 was lost: it "):
    key_value_store.wait("other", time.monotonic() + 60, sender=1)
