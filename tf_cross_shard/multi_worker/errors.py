"""What can be wrong among workers, and how TensorFlow's errors tell it.

TensorFlow ends what a worker waits for with an error about a connection, or
with what another worker reported. Who and why stands in it, many lines down.
"""

import re
from typing import Final

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


def to_message(error: Exception) -> str:
  """What one worker tells the others of an error of its own.

  >>> of_message(to_message(DisagreementError("Worker 1 has two.")))
  DisagreementError('Worker 1 has two.')

  Args:
    error: `DisagreementError` or `MissingWorkerError`.

  Returns:
    A text that `of_message` finds in whatever TensorFlow makes of it.
  """
  return f"[tf_cross_shard {type(error).__name__}] {error}"


def is_reported(text: str) -> bool:
  """Whether another worker said so.

  >>> is_reported("Socket closed")
  False

  Args:
    text: The message of an error of TensorFlow's.

  Returns:
    Whether what `to_message` answered is in it.
  """
  return _REPORTED.search(text) is not None


def of_message(text: str) -> Exception | None:
  """The error that one of TensorFlow's amounts to.

  >>> lost = of_message(
  ...   "recvmsg:Connection reset by peer from remote target"
  ...   " /job:worker/replica:0/task:2 while calling /tensorflow.WorkerService"
  ... )
  >>> str(lost).split(":")[0]
  'worker 2 was lost'
  >>> of_message("Incompatible shapes: [2] vs. [3]")

  Args:
    text: The message of an error of TensorFlow's.

  Returns:
    The error that another worker reported, `DisagreementError` with what
    TensorFlow found, or `WorkerLostError` with the worker's name; None if the
    error is about something else.
  """
  reported = _REPORTED.search(text)
  if reported:
    is_missing = reported[1] == MissingWorkerError.__name__
    kind = MissingWorkerError if is_missing else DisagreementError
    return kind(reported[2])
  if not any(sign in text for sign in _SIGNS):
    return None
  misfit = _MISFIT.search(text)
  if misfit:
    return DisagreementError(
      f"Workers do different things: {misfit[0]} Run the same program on every"
      " worker."
    )
  return WorkerLostError(
    f"{_lost(text)} was lost: it ended, or cannot be reached. The update that a"
    " CrossShardOptimizer had under way changed nothing. TensorFlow cannot go"
    " on in this process: start all workers again, and resume from the last"
    " checkpoint."
  )


def _lost(text: str) -> str:
  """Who is meant: after "unhealthy", or else next to the innermost cause."""
  _, unhealthy, cause = text.rpartition("unhealthy")
  tasks = _TASK.findall(cause)
  if not tasks:
    return "A worker"
  job, index = tasks[0] if unhealthy else tasks[-1]
  return f"{job} {index}"
