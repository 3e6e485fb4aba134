"""The end of a worker in mid-step, in words.

TensorFlow ends the other workers' steps with an error about a connection. Which
worker was lost stands in it, many lines down.
"""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")
_ERRORS = (
  tf.errors.UnavailableError,
  tf.errors.AbortedError,
  tf.errors.CancelledError,
  tf.errors.DeadlineExceededError,
  tf.errors.InternalError,
)
# What tells the end of a peer from other errors of these types.
_SIGNS = ("Collective ops is aborted", "unhealthy", "WorkerService")


class WorkerLostError(RuntimeError):
  """Another worker ended while this one was in a step with it."""


@contextlib.contextmanager
def naming_lost_workers() -> Iterator[None]:
  """Turns TensorFlow's errors about lost workers into `WorkerLostError`.

  Put it around the training:

  >>> with naming_lost_workers():
  ...   pass  # model.fit(...), or a loop of your own

  Yields:
    None.

  Raises:
    WorkerLostError: If a worker was lost; names it.
  """
  try:
    yield
  except _ERRORS as error:
    text = str(error.message)
    if not any(sign in text for sign in _SIGNS):
      raise
    raise WorkerLostError(
      f"{_lost(text)} was lost in mid-step. This worker's variables are as"
      " they were before the step. TensorFlow cannot go on in this process:"
      " start all workers again, and resume from the last checkpoint"
    ) from error


def _lost(text: str) -> str:
  """Who is meant: the task named last, next to the cause."""
  cause = text.rsplit("unhealthy", 1)[-1]
  tasks = _TASK.findall(cause) or _TASK.findall(text)
  if not tasks:
    return "A worker"
  job, index = tasks[-1] if cause == text else tasks[0]
  return f"{job} {index}"
