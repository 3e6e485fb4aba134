"""Reads and writes the key-value store of TensorFlow's coordination service.

The store is in the first worker's process.
"""

import contextlib
import time
from collections.abc import Iterable
from typing import Final

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard._src.core.workers import errors

# All keys begin with this, because other libraries may use the store.
_PREFIX: Final = "tf_cross_shard/"
# Enough seconds to read an existing value, even from a different machine.
_SHORTEST: Final = 0.2
# The first worker counts as lost if it does not answer for this many seconds,
# as it does after TensorFlow's own time limit for heartbeats.
_LONGEST: Final = 10.0
# The last key that this process has written.
_written: list[str] = []


def put(key: str, value: str) -> None:
  """Writes the value of a key, which must not have a value yet."""
  with errors.naming_lost_workers():
    context.context().set_config_key_value(_PREFIX + key, value)
  _written[:] = [_PREFIX + key]


def put_if_missing(key: str, value: str) -> None:
  """Writes the value of a key, unless a worker has written one."""
  with contextlib.suppress(tf.errors.AlreadyExistsError):
    context.context().set_config_key_value(_PREFIX + key, value)


def read(key: str) -> str | None:
  """Returns the value of a key; None if there is none."""
  with contextlib.suppress(tf.errors.DeadlineExceededError):
    milliseconds = int(_SHORTEST * 1000)
    eager = context.context()
    return str(eager.get_config_key_value(_PREFIX + key, milliseconds))
  return None


def wait(
  key: str,
  deadline: float,
  sender: int | None = None,
  reporters: Iterable[int] = (),
) -> str | None:
  """Waits for the value of a key; raises what `reporters` reported."""
  eager = context.context()
  lost: Exception | None = None
  while True:
    # Wait in short intervals, so that Ctrl-C can end the wait.
    left = max(_SHORTEST, min(1.0, deadline - time.monotonic()))
    with errors.naming_lost_workers():
      with contextlib.suppress(tf.errors.DeadlineExceededError):
        return str(eager.get_config_key_value(_PREFIX + key, int(left * 1000)))
    for reporter in reporters:
      reason = wait(f"failed/{reporter}", 0.0)
      error = errors.from_message(reason) if reason else None
      if error is not None:
        raise error
    # The sender may have written the value just before it ended. Raise the
    # error about its loss only if one more wait has not found the value.
    if lost is not None:
      raise lost
    if time.monotonic() >= deadline:
      return None
    lost = None if sender is None else _loss(sender)


def _loss(sender: int) -> Exception | None:
  """Returns the error if a worker or the service is lost, or None."""
  eager = context.context()
  # No public member lists the jobs that the service knows.
  cluster = eager._collective_ops_server_def.cluster  # noqa: SLF001
  sizes = {job.name: len(job.tasks) for job in cluster.job}
  jobs = [(name, sizes[name]) for name in ("chief", "worker") if name in sizes]
  with errors.naming_lost_workers():
    # If the first worker's process is stopped (SIGSTOP), `get_task_states`
    # never returns. A key that has a value is read at once, or not at all.
    try:
      for key in _written:
        eager.get_config_key_value(key, int(_LONGEST * 1000))
    except tf.errors.DeadlineExceededError:
      return errors.lost(f"{jobs[0][0]} 0")
    state = eager.get_task_states(jobs)[sender]
  return state and errors.from_message(state.message)


def tell(index: int, error: Exception) -> None:
  """Makes workers that wait for this worker's values stop waiting."""
  # If another worker has reported an error before, all workers are ending.
  with contextlib.suppress(tf.errors.OpError):
    context.context().set_config_key_value(
      f"{_PREFIX}failed/{index}", errors.to_message(error)
    )


def abort(error: Exception) -> None:
  """Makes workers that wait in collectives stop waiting."""
  with contextlib.suppress(tf.errors.OpError):
    context.context().report_error_to_cluster(
      tf.errors.INVALID_ARGUMENT, errors.to_message(error)
    )
