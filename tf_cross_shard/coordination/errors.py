"""Errors among workers, and how to read them from TensorFlow's errors.

TensorFlow ends what a worker waits for with an error about a connection, or
with what another worker reported. Who and why is many lines down in it.
"""

import contextlib
import os
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
# Errors about a lost worker have one of these.
_SIGNS: Final = re.compile(
  "Collective ops is aborted|unhealthy|heartbeat timeout|WorkerService"
  "|CoordinationService"
)


# AutoGraph, in which most of these are raised, keeps the type of an error that
# is made like `Exception` and turns any other into a StagingError.
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

  Raises:
    WorkerLostError: If a worker was lost; names it.
    DisagreementError: If a worker ended because it was about to do something
      else than the others; says what.
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
  """Turns errors from reading TF_CONFIG into one that shows it and a remedy.

  Raises:
    ValueError: If what is done inside the context fails.
  """
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
  """Returns a text that `from_message` recognizes in TensorFlow's errors."""
  return f"[tf_cross_shard {type(error).__name__}] {error}"


def is_reported(text: str) -> bool:
  """Whether a message repeats what another worker reported."""
  return _REPORTED.search(text) is not None


def from_message(text: str) -> Exception | None:
  """Returns the error that a message of TensorFlow's amounts to.

  None if the message is not about workers.
  """
  reported = _REPORTED.search(text)
  if reported:
    is_missing = reported[1] == MissingWorkerError.__name__
    kind = MissingWorkerError if is_missing else DisagreementError
    return kind(reported[2])
  if not _SIGNS.search(text):
    return None
  misfit = _MISFIT.search(text)
  if misfit:
    return DisagreementError(
      f"Workers do different things: {misfit[0]} Run the same program on every"
      " worker."
    )
  # The worker after "unhealthy", or next to the innermost cause.
  _, unhealthy, cause = text.rpartition("unhealthy")
  tasks = _TASK.findall(cause)
  lost = " ".join(tasks[0 if unhealthy else -1]) if tasks else "A worker"
  return WorkerLostError(
    f"{lost} was lost: it ended, or cannot be reached, and TensorFlow cannot go"
    " on in this process. The update under way changed nothing: start all"
    " workers again, and resume from the last checkpoint."
  )
