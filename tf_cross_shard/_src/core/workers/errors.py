"""Errors about other workers, and how to find them in TensorFlow's errors.

TensorFlow's error mentions a connection, or repeats what a worker reported.
Many lines later, the message says which worker was lost, and why.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final

import tensorflow as tf

_REPORTED: Final = re.compile(r"\[tf_cross_shard (\w+)\] (.*)")
_TASK: Final = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")
# TensorFlow's words for members of a collective whose calls do not match.
_MISFIT: Final = re.compile(
  r"(?:[Ss]hape mismatch|[Ii]nconsisten|is expecting|has already been"
  r"|Collective instance \d+ expected).*"
)
# An error about a lost worker contains one of these.
_SIGNS: Final = re.compile(
  "Collective ops is aborted|unhealthy|heartbeat timeout|WorkerService"
  "|CoordinationService"
)


# These classes use the constructor of Exception, because most of their errors
# are raised in functions that AutoGraph converts. AutoGraph keeps the type of
# an error only if it has that constructor, and otherwise raises a StagingError.
class DisagreementError(ValueError):
  """Workers are about to do different things, but must do the same thing."""

  __init__ = Exception.__init__


class MissingWorkerError(RuntimeError):
  """A worker did not connect, answer or finish a step within a time limit."""

  __init__ = Exception.__init__


class WorkerLostError(RuntimeError):
  """Another worker ended or cannot be reached."""

  __init__ = Exception.__init__


@contextlib.contextmanager
def naming_lost_workers() -> Iterator[None]:
  """Turns TensorFlow's errors about lost workers into `WorkerLostError`.

  Put it around the training:

  >>> with naming_lost_workers():
  ...   pass  # model.fit(...), or your own loop

  Raises:
    WorkerLostError: If a worker was lost. The error names the worker.
    DisagreementError: If a worker ended because it was about to do something
      different from the others. The error says what.
  """
  try:
    yield
  except tf.errors.OpError as error:
    cause = from_message(str(error.message))
    if cause is None:
      raise
    raise cause from error


@contextlib.contextmanager
def naming_tf_config() -> Iterator[None]:
  """Turns errors from reading TF_CONFIG into one that says the remedy."""
  try:
    yield
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"TF_CONFIG cannot be used ({type(error).__name__}: {error}); got"
      f" {os.environ.get('TF_CONFIG')}. Set it like"
      ' {"cluster": {"worker": ["host0:12345", "host1:12345"]},'
      ' "task": {"type": "worker", "index": 0}}.'
    ) from error


def to_message(error: Exception) -> str:
  """Encodes an error for TensorFlow; `from_message` decodes it."""
  return f"[tf_cross_shard {type(error).__name__}] {error}"


def is_reported(text: str) -> bool:
  """Returns whether a message repeats an error that another worker reported."""
  return _REPORTED.search(text) is not None


def from_message(text: str) -> Exception | None:
  """Returns the error about workers that is behind a message of TensorFlow."""
  reported = _REPORTED.search(text)
  if reported:
    is_missing = reported[1] == MissingWorkerError.__name__
    error = MissingWorkerError if is_missing else DisagreementError
    return error(reported[2])
  if not _SIGNS.search(text):
    return None
  misfit = _MISFIT.search(text)
  if misfit:
    return DisagreementError(
      f"Workers do different things: {misfit[0]} Run the same program on every"
      " worker."
    )
  # If the message contains "unhealthy", the lost worker is the first one named
  # after this word. If not, it is the last worker that the message names,
  # beside the innermost cause.
  _, unhealthy, cause = text.rpartition("unhealthy")
  tasks = _TASK.findall(cause)
  return lost(" ".join(tasks[0 if unhealthy else -1]) if tasks else "A worker")


def lost(worker: str) -> WorkerLostError:
  """Returns the error about a lost worker, such as "worker 1"."""
  return WorkerLostError(
    f"{worker} was lost: it ended or cannot be reached, and TensorFlow cannot"
    " continue in this process. An unfinished update, if any, changed"
    " nothing: start all workers again, and resume from the last checkpoint."
  )
