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
# A group of collectives that is never met in.
_PROBE: Final = 0x3FFFFFFF
# What the store raises when the talk is over.
_OVER: Final = (
  tf.errors.FailedPreconditionError,
  tf.errors.UnavailableError,
  tf.errors.CancelledError,
)


def put(key: str, value: str) -> None:
  """Writes once; a key is never written again."""
  try:
    context.context().set_config_key_value(_PREFIX + key, value)
  except _OVER as over:
    _raise_why(over)


def wait(key: str, deadline: float, unless: str | None = None) -> str | None:
  """Reads a key when it is there.

  Short waits, so that Ctrl-C ends them.
  """
  while True:
    left = max(_SHORTEST, min(1.0, deadline - time.monotonic()))
    try:
      return str(
        context.context().get_config_key_value(_PREFIX + key, int(left * 1000))
      )
    except tf.errors.DeadlineExceededError:
      if time.monotonic() >= deadline:
        return None
      if unless is not None and wait(unless, 0.0) is not None:
        return None
    except _OVER as over:
      _raise_why(over)


def failure_of(index: int) -> str:
  """Where a worker says why it does not go on."""
  return f"failed/{index}"


def report(index: int, error: Exception) -> None:
  """Tells the others why this worker does not go on.

  It ends what they wait for: a comparison, or a collective.
  """
  message = errors.to_message(error)
  # Where another worker has reported already, there is nobody to tell.
  with contextlib.suppress(tf.errors.OpError):
    context.context().set_config_key_value(_PREFIX + failure_of(index), message)
    context.context().report_error_to_cluster(
      tf.errors.INVALID_ARGUMENT, message
    )


def _raise_why(over: tf.errors.OpError) -> NoReturn:
  """Raises what ended the talk: the store tells it badly, a collective well."""
  lost = over
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
  raise errors.of_message(str(lost.message)) or lost from over
