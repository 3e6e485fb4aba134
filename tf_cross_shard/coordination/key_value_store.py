"""The key-value store of TensorFlow's coordination service.

It is in the first worker's process. Reading from it waits with a time limit,
and fails when the writer is lost, with the reason why it ended if there is one.
"""

import contextlib
import time
from typing import Final

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard.coordination import errors

_PREFIX: Final = "tf_cross_shard/"  # of keys: others may use the store
# Seconds in which an existing value is read, from another machine, too.
_SHORTEST: Final = 0.2


def put(key: str, value: str) -> None:
  """Writes a value, once: a key is never written again."""
  with errors.naming_lost_workers():
    context.context().set_config_key_value(_PREFIX + key, value)


def wait(key: str, deadline: float, sender: int | None = None) -> str | None:
  """Returns the value of a key when it is there; None when time is up.

  Raises the error that the worker `sender`, who is to write it, reported, or
  `WorkerLostError` if nothing was heard of it for TensorFlow's ten seconds.
  """
  eager = context.context()
  lost: Exception | None = None
  while True:
    # Short waits, so that Ctrl-C ends them.
    left = max(_SHORTEST, min(1.0, deadline - time.monotonic()))
    with errors.naming_lost_workers():
      with contextlib.suppress(tf.errors.DeadlineExceededError):
        return str(eager.get_config_key_value(_PREFIX + key, int(left * 1000)))
    reason = sender is not None and wait(f"failed/{sender}", 0.0)
    error = errors.from_message(reason) if reason else None
    if error is not None:
      raise error
    if lost is not None:  # and it has not written before it ended
      raise lost
    if time.monotonic() >= deadline:
      return None
    lost = None if sender is None else _loss(sender)


def _loss(sender: int) -> Exception | None:
  """Returns the error for a worker that the service has lost; else None."""
  eager = context.context()
  cluster = eager._collective_ops_server_def.cluster
  sizes = {job.name: len(job.tasks) for job in cluster.job}
  jobs = [(name, sizes[name]) for name in ("chief", "worker") if name in sizes]
  with errors.naming_lost_workers():
    state = eager.get_task_states(jobs)[sender]
  return state and errors.from_message(state.message)


def report(index: int, error: Exception) -> None:
  """Tells the others why worker `index`, which is this one, does not go on.

  Ends both kinds of waiting, for a value and in a collective.
  """
  message = errors.to_message(error)
  # Where another worker has reported already, nobody is left to tell.
  with contextlib.suppress(tf.errors.OpError):
    context.context().set_config_key_value(_PREFIX + f"failed/{index}", message)
    context.context().report_error_to_cluster(
      tf.errors.INVALID_ARGUMENT, message
    )
