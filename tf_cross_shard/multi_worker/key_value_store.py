"""The key-value store that workers talk through.

TensorFlow's coordination service keeps it in the first worker's process. It
also carries what one worker finds wrong to all that wait in a collective.
"""

import contextlib
import time
from typing import Final, NoReturn

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard.multi_worker import errors

_PREFIX: Final = "tf_cross_shard/"  # of keys: others may use the store
# Seconds in which what is there is read; the store may be on another machine.
_SHORTEST: Final = 0.2
# A group of collectives in which no worker ever takes part.
_PROBE: Final = 0x3FFFFFFF
# What the store raises when the service has ended.
_ENDED: Final = (
  tf.errors.FailedPreconditionError,
  tf.errors.UnavailableError,
  tf.errors.CancelledError,
)


def put(key: str, value: str) -> None:
  """Writes once; a key is never written again."""
  try:
    context.context().set_config_key_value(_PREFIX + key, value)
  except _ENDED as ended:
    _raise_cause(ended)


def wait(key: str, deadline: float, sender: int | None = None) -> str | None:
  """Returns the value of a key when it is there; None when time is up.

  Raises what the worker `sender`, who is to write it, reported instead.
  """
  while True:
    # Short waits, so that Ctrl-C ends them.
    left = max(_SHORTEST, min(1.0, deadline - time.monotonic()))
    try:
      return str(
        context.context().get_config_key_value(_PREFIX + key, int(left * 1000))
      )
    except tf.errors.DeadlineExceededError:
      reason = sender is not None and wait(_failure_of(sender), 0.0)
      error = errors.from_message(reason) if reason else None
      if error is not None:
        raise error from None
      if time.monotonic() >= deadline:
        return None
    except _ENDED as ended:
      _raise_cause(ended)


def report(index: int, error: Exception) -> None:
  """Tells the others why worker `index`, which is this one, does not go on.

  It ends what they wait for: a comparison, or a collective.
  """
  message = errors.to_message(error)
  # Where another worker has reported already, nobody is left to tell.
  with contextlib.suppress(tf.errors.OpError):
    context.context().set_config_key_value(
      _PREFIX + _failure_of(index), message
    )
    context.context().report_error_to_cluster(
      tf.errors.INVALID_ARGUMENT, message
    )


def _failure_of(index: int) -> str:
  """Returns the key where a worker says why it does not go on."""
  return f"failed/{index}"


def _raise_cause(ended: tf.errors.OpError) -> NoReturn:
  """Raises why the service ended: a collective's error tells it best."""
  lost = ended
  if not errors.is_reported(str(lost.message)):
    try:
      tf.raw_ops.CollectiveReduceV2(
        input=tf.zeros([]),
        group_size=2,
        group_key=_PROBE,
        instance_key=_PROBE,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
        timeout_seconds=1.0,
      )
    except tf.errors.OpError as aborted:
      lost = aborted
  raise errors.from_message(str(lost.message)) or lost from ended
