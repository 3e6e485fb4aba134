"""Tests how TensorFlow's errors about workers are translated."""

import pytest
import tensorflow as tf

from tf_cross_shard.multi_worker import (
  DisagreementError,
  WorkerLostError,
  naming_lost_workers,
)

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
