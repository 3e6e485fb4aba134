"""Tests the lines that workers compare, and errors about workers.

multi_worker_errors_test.py has real workers that compare lines and are lost.
"""

from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard.multi_worker import (
  DisagreementError,
  WorkerLostError,
  naming_lost_workers,
)


def _dense(name: str, units: int = 2) -> list[Any]:
  layer = tf.keras.layers.Dense(units, name=name)
  layer.build((None, 3))
  return list(layer.trainable_variables)


@pytest.mark.parametrize(
  "names", [("dense", "dense_1"), ("dense_6", "dense_9")]
)
def test_variable_lines_ignore_automatic_layer_numbers(
  names: tuple[str, str],
) -> None:
  """The order of layers still matters."""
  first, second = _dense(names[0]), _dense(names[1], units=5)
  lines = workers_lib.variable_lines([*first, *second])
  assert lines == [
    "variable 0: dense/kernel float32 [3, 2]",
    "variable 1: dense/bias float32 [2]",
    "variable 2: dense_1/kernel float32 [3, 5]",
    "variable 3: dense_1/bias float32 [5]",
    "variables: 4",
  ]
  assert lines != workers_lib.variable_lines([*second, *first])


def test_variables_of_keras_and_tensorflow_have_the_same_lines() -> None:
  mine = tf.Variable(tf.zeros([2, 1]), name="weight")
  keras = tf.keras.Variable(tf.zeros([2, 1]), name="weight")
  assert workers_lib.variable_lines([mine]) == workers_lib.variable_lines(
    [keras]
  )


def test_gradients_show_their_kind_and_no_shape() -> None:
  """The number of rows may differ; the variables' shapes are compared."""
  for rows in (1, 2):
    values = tf.zeros([rows, 2], tf.bfloat16)
    sparse = tf.IndexedSlices(values, tf.range(rows))
    grads = [tf.ones([1]), None, sparse, tf.ones([1], tf.float64)]
    assert workers_lib.gradient_lines(grads) == [
      "gradient 0: float32",
      "gradient 1: None",
      "gradient 2: bfloat16 rows",
      "gradient 3: float64",
    ]


# --------------------------------------------------------------------- errors

_UNAVAILABLE = tf.errors.UnavailableError
# The first two as TensorFlow 2.21 wrote them when a worker was killed.
LOST = {
  "heartbeats": (
    _UNAVAILABLE,
    "{{function_node __wrapped__CollectiveBcastSend_device_/job:worker"
    "/replica:0/task:0/device:CPU:0}} Collective ops is aborted by: Error"
    " reported from /job:worker/task:1: The following tasks are unhealthy"
    " (stopped sending heartbeats):\n/job:worker/replica:0/task:1\nThe tasks"
    " have crashed. Check the task logs for an earlier error, or scheduler"
    " events (e.g. preemption, eviction) to debug further.\nThe error could be"
    " from a previous operation. Restart your program to reset."
    " [Op:CollectiveBcastSend]",
    "worker 1",
  ),
  # Worker 0 of three hears of worker 1 through worker 2.
  "relayed": (
    _UNAVAILABLE,
    "Graph execution error:\n\nDetected at node"
    " CrossShardOptimizer/CollectiveGatherV2_1 defined at (most recent call"
    " last):\n\nCollective ops is aborted by: Collective ops is aborted by:"
    " Socket closed\nAdditional GRPC error information from remote target"
    " /job:worker/replica:0/task:1 while calling"
    " /tensorflow.WorkerService/RecvBuf:\n:UNKNOWN:Error received from peer "
    ' {grpc_message:"Socket closed", grpc_status:14}\nThe error could be from a'
    " previous operation. Restart your program to reset.\nAdditional GRPC error"
    " information from remote target /job:worker/replica:0/task:2 while calling"
    " /tensorflow.WorkerService/RecvBuf:\n:UNKNOWN:Error received from peer "
    ' {grpc_status:14, grpc_message:"Collective ops is aborted by: Socket'
    " closed\\nAdditional GRPC error information from remote target"
    " /job:worker/replica:0/task:1 while calling"
    " /tensorflow.WorkerService/RecvBuf:\\n:UNKNOWN:Error received from peer "
    ' {grpc_message:\\"Socket closed\\", grpc_status:14}\\nThe error could be'
    ' from a previous operation. Restart your program to reset."}\nThe error'
    " could be from a previous operation. Restart your program to reset.\n\t"
    " [[{{node CrossShardOptimizer/CollectiveGatherV2_1}}]]",
    "worker 1",
  ),
  "chief": (
    _UNAVAILABLE,
    "Collective ops is aborted by: failed to connect to all addresses\n"
    "Additional GRPC error information from remote target"
    " /job:chief/replica:0/task:0 while calling"
    " /tensorflow.WorkerService/RecvBuf",
    "chief 0",
  ),
}


def _error(kind: type[tf.errors.OpError], message: str) -> tf.errors.OpError:
  return kind(None, None, message)


@pytest.mark.parametrize("name", LOST)
def test_a_lost_worker_is_named(name: str) -> None:
  kind, text, who = LOST[name]
  with pytest.raises(WorkerLostError, match=f"^{who} was lost") as caught:
    with naming_lost_workers():
      raise _error(kind, text)
  assert isinstance(caught.value.__cause__, kind)
  assert "start all workers again" in str(caught.value)
  assert "resume from the last checkpoint" in str(caught.value)


def test_error_reported_by_another_worker_is_raised() -> None:
  text = (
    "Collective ops is aborted by: Error reported from /job:worker/task:1:"
    " [tf_cross_shard DisagreementError] Workers create different variables:"
    " as number 3.\nMore"
  )
  words = r"^Workers create different variables: as number 3\.$"
  with pytest.raises(DisagreementError, match=words):
    with naming_lost_workers():
      raise _error(tf.errors.InvalidArgumentError, text)


@pytest.mark.parametrize(
  "error",
  [
    _error(tf.errors.InvalidArgumentError, "Incompatible shapes: [2] vs. [3]"),
    _error(tf.errors.NotFoundError, "/job:worker/task:1: no such file"),
    ValueError("Collective ops is aborted by: something of the user's own"),
    KeyboardInterrupt(),
  ],
  ids=lambda error: type(error).__name__,
)
def test_other_errors_are_unchanged(error: BaseException) -> None:
  with pytest.raises(type(error)) as caught:
    with naming_lost_workers():
      raise error
  assert caught.value is error


# -------------------------------------------------------------------- waiting


class _StoppedStore:
  """TensorFlow's client of a store whose process was stopped (SIGSTOP)."""

  def __init__(self) -> None:
    self.written = 0

  def set_config_key_value(self, key: str, value: str) -> None:
    self.written += 1

  def get_config_key_value(self, key: str, milliseconds: int) -> str:
    raise tf.errors.DeadlineExceededError(None, None, key)


def test_a_first_worker_that_does_not_answer_is_lost(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """A second write would never return."""
  store = _StoppedStore()
  monkeypatch.setattr(workers_lib.context, "context", lambda: store)
  workers = workers_lib.Workers(("chief 0", "worker 0"), 1, timeout=0.1)
  with pytest.raises(WorkerLostError, match=r"^chief 0 was lost: it "):
    workers_lib.exchange(workers, "a test", "text")
  assert store.written == 1
