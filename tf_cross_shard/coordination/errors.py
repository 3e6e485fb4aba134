"""What can be wrong among workers, and how TensorFlow's errors tell it.

TensorFlow ends what a worker waits for with an error about a connection, or
with what another worker reported. Who and why is in it, many lines down.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Final

import tensorflow as tf

_REPORTED: Final = re.compile(r"\[tf_cross_shard (\w+)\] (.*)")
_TASK: Final = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")
# TensorFlow's own words for members of a collective that do not fit.
_MISFIT: Final = re.compile(
  r"(?:[Ss]hape mismatch|[Ii]nconsisten|is expecting|has already been).*"
)
# What tells the end of a peer from other errors.
_SIGNS: Final = (
  "Collective ops is aborted",
  "unhealthy",
  "WorkerService",
  "CoordinationService",
)


# AutoGraph, in which most of this is raised, keeps the type of an error that is
# made like `Exception` and turns any other into a StagingError.


class DisagreementError(ValueError):
  """Workers that have to do the same are about to do different things."""

  __init__ = Exception.__init__


class MissingWorkerError(RuntimeError):
  """A worker that others wait for does not come."""

  __init__ = Exception.__init__


class WorkerLostError(RuntimeError):
  """Another worker ended while this one was in a step with it."""

  __init__ = Exception.__init__


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
    DisagreementError: If a worker ended because it was about to do something
      else than the others; says what.
  """
  try:
    yield
  except tf.errors.OpError as error:
    meant = from_message(str(error.message))
    if meant is None:
      raise
    raise meant from error


def to_message(error: Exception) -> str:
  """Returns a text that `from_message` finds in TensorFlow's errors."""
  return f"[tf_cross_shard {type(error).__name__}] {error}"


def is_reported(text: str) -> bool:
  """Whether a message repeats what another worker reported."""
  return _REPORTED.search(text) is not None


def from_message(text: str) -> Exception | None:
  """Returns the error that the message of one of TensorFlow's amounts to.

  It is what another worker reported, a `DisagreementError` with what TensorFlow
  found, a `WorkerLostError`, or None if the message is about something else.
  """
  reported = _REPORTED.search(text)
  if reported:
    is_missing = reported[1] == MissingWorkerError.__name__
    return (MissingWorkerError if is_missing else DisagreementError)(
      reported[2]
    )
  if not any(sign in text for sign in _SIGNS):
    return None
  misfit = _MISFIT.search(text)
  if misfit:
    return DisagreementError(
      f"Workers do different things: {misfit[0]} Run the same program on every"
      " worker."
    )
  return WorkerLostError(
    f"{_lost_worker(text)} was lost: it ended, or cannot be reached, and"
    " TensorFlow cannot go on in this process. The update under way changed"
    " nothing: start all workers again, and resume from the last checkpoint."
  )


def _lost_worker(text: str) -> str:
  """Returns the worker after "unhealthy", or next to the innermost cause."""
  _, unhealthy, cause = text.rpartition("unhealthy")
  tasks = _TASK.findall(cause)
  if not tasks:
    return "A worker"
  job, index = tasks[0] if unhealthy else tasks[-1]
  return f"{job} {index}"
