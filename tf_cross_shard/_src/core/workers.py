"""Compares what workers are about to do, and names those that are missing.

A collective that some workers do not enter waits forever, and one that fails
breaks every later one in the process. So workers exchange texts first, in the
store of TensorFlow's coordination service, which is in the first worker.
"""

import atexit
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core import versions
from tf_cross_shard._src.core.variables import Gradient

# How many seconds a worker waits for others by default. Tracing and compiling
# the first step, or evaluating on one worker, may take minutes. PyTorch's
# limits are 10 minutes for NCCL and 30 minutes for gloo.
_LIMITS: Final = {"timeout": 50.0, "step_timeout": 1800.0}
# Seconds in which the first worker waits for the ends of the others, if it ends
# because of an exception, and if not.
_PAUSE: Final = 2.0
_END: Final = 10.0
_PREFIX: Final = "tf_cross_shard/"  # Other libraries may use the store, too.
# Numbers the exchanges. The numbers agree if workers run the same program.
_rounds: Final = itertools.count()

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

Task = tuple[str, int, str]  # Job, index, address.


# AutoGraph keeps the type of an error only if it has Exception's constructor.
class DisagreementError(ValueError):
  """Workers are about to do different things, but must do the same thing."""

  __init__ = Exception.__init__


class MissingWorkerError(RuntimeError):
  """A worker did not connect, answer or finish a step within a time limit."""

  __init__ = Exception.__init__


class WorkerLostError(RuntimeError):
  """Another worker ended or cannot be reached."""

  __init__ = Exception.__init__


@dataclasses.dataclass(frozen=True)
class Workers:
  """The workers that train together, in the order of their replicas."""

  names: tuple[str, ...]
  index: int
  timeout: float = _LIMITS["timeout"]
  step_timeout: float = _LIMITS["step_timeout"]

  @property
  def own_name(self) -> str:
    return self.names[self.index]


def of_strategy(strategy: tf.distribute.Strategy) -> Workers | None:
  """Returns the workers of a strategy; None if there is only one."""
  resolver = getattr(strategy, "cluster_resolver", None)
  has_service = context.context().coordination_service is not None
  if resolver is None or not resolver.cluster_spec() or not has_service:
    return None
  all_tasks = tasks(resolver.cluster_spec())
  jobs = [task[:2] for task in all_tasks]
  job = (resolver.task_type, int(resolver.task_id))
  if len(jobs) < 2 or job not in jobs:
    return None
  limits = {n: time_limit(n, getattr(strategy, n, None)) for n in _LIMITS}
  return Workers(tuple(map(name, all_tasks)), jobs.index(job), **limits)


def tasks(cluster: tf.train.ClusterSpec) -> list[Task]:
  """Returns the tasks that train together, in the order of their replicas."""
  return [
    (job, index, cluster.task_address(job, index))
    for job in ("chief", "worker")
    if job in cluster.jobs
    for index in cluster.task_indices(job)
  ]


def name(task: Task) -> str:
  job, index, address = task
  return f"{job} {index} ({address})"


def time_limit(name: str, seconds: Any = None) -> float:
  """Returns a time limit: as given, from the environment or the default."""
  variable = f"TF_CROSS_SHARD_{name.upper()}"
  if seconds is None:
    seconds = os.environ.get(variable, _LIMITS[name])
  with contextlib.suppress(ValueError):
    if 0 < float(seconds) < math.inf:
      return float(seconds)
  raise ValueError(
    f"`{name}` or the environment variable {variable} must be a positive"
    f" number of seconds; got {seconds!r}."
  )


def if_slow(name: str, seconds: float) -> str:
  """Returns the end of an error: the remedy if a worker is only slow."""
  return (
    f"; if it is only slow, set TF_CROSS_SHARD_{name.upper()} to more than"
    f" {seconds:g} seconds."
  )


def compare_workers(
  workers: Workers | None, topic: str, lines: Sequence[str] = ()
) -> None:
  """Raises the same error on all workers unless all have the same lines."""
  if workers is None:
    return
  own_lines = [
    f"step in the program: {topic}",
    f"tf_cross_shard: {versions.own_version()}",
    f"tensorflow: {tf.__version__}",
    f"keras: {versions.keras_version()}",
    *lines,
  ]
  texts = exchange(workers, topic, "\n".join(own_lines))
  # Report the first line in which each other worker differs from the first one.
  first, *others = (text.split("\n") for text in texts)
  differences = []
  for sender, other in zip(workers.names[1:], others, strict=True):
    pairs = itertools.zip_longest(first, other, fillvalue="nothing more")
    for ours, theirs in [pair for pair in pairs if pair[0] != pair[1]][:1]:
      differences.append(
        f"{sender} has `{theirs}` where {workers.names[0]} has `{ours}`"
      )
  if differences:
    raise DisagreementError(
      f"Workers disagree: {'; '.join(differences)}. Run the same program with"
      " the same arguments and libraries on every worker."
    )


def exchange(
  workers: Workers, topic: str, text: str, extra_timeout: float = 0.0
) -> list[str]:
  """Sends a text to all workers; returns the texts in the workers' order.

  every worker ── its text ──▶ store ──▶ first worker
  first worker ── all texts, or an error ──▶ store ──▶ every worker
  """
  _register_end(workers)
  number = next(_rounds)
  key = f"round/{number}"
  limit = workers.timeout + extra_timeout
  deadline = time.monotonic() + limit
  put(f"{key}/{workers.index}", text)
  outcome = None
  if workers.index:
    outcome = _wait(workers, f"{key}/outcome", deadline)
  # If the first worker does not answer, writing would never return.
  if outcome is None and get(f"{key}/{workers.index}", 1.0) is not None:
    texts = {
      sender: _wait(workers, f"{key}/{index}", deadline)
      for index, sender in enumerate(workers.names)
    }
    failure = ""
    missing = [sender for sender in workers.names if texts[sender] is None]
    if missing:
      missing_error = MissingWorkerError(
        f"{workers.own_name} waited {limit:g} s for {', '.join(missing)} at:"
        f" {topic}. Each missing worker is not running, or is doing something"
        " else: see its log, and start all workers with the same"
        f" program{if_slow('timeout', workers.timeout)}"
      )
      failure = to_message(_loss(workers) or missing_error)
    # The first value of a key stays, so all workers read the same outcome.
    put(f"{key}/outcome", json.dumps([list(texts.values()), failure]))
    outcome = get(f"{key}/outcome", _PAUSE)
  if outcome is None:
    raise lost(workers.names[0])
  if workers.index == 0:  # All workers have read the outcome before this one.
    context.context().delete_config_key_value(f"{_PREFIX}round/{number - 1}")
  answers, failure = json.loads(outcome)
  error = from_message(failure)
  if error is not None:
    abort(error)
    raise error
  return list(answers)


@functools.cache
def _register_end(workers: Workers) -> None:
  """Makes the first worker, whose process has the store, end last."""

  # Otherwise, the others may not read why all workers end, and TensorFlow logs
  # errors about heartbeats in their processes.
  def end() -> None:
    with contextlib.suppress(RuntimeError, ValueError, tf.errors.OpError):
      put(f"end/{workers.index}", "reached")
      if workers.index == 0:
        # An exception may end only this worker, while the others wait for it.
        limit = _PAUSE if hasattr(sys, "last_value") else _END
        deadline = time.monotonic() + limit
        for index in range(len(workers.names)):
          if _wait(workers, f"end/{index}", deadline) is None:
            break
        time.sleep(0.5)  # TensorFlow disconnects the others.

  atexit.register(end)


def _wait(workers: Workers, key: str, deadline: float) -> str | None:
  """Waits for a value until the deadline, or until a worker is lost."""
  loss: Exception | None = None
  while True:
    left = deadline - time.monotonic()
    # Wait in short intervals, so that Ctrl-C can end the wait.
    value = get(key, min(left, 1.0))
    if value is not None or left <= 0 or loss is not None:
      return value
    # Then read once more: the sender may have written just before it ended.
    loss = _loss(workers)


def _loss(workers: Workers) -> Exception | None:
  """Returns the error about a lost worker, if TensorFlow has noticed it."""
  # Without this, the first worker would wait for a killed one for the whole
  # limit. On others, the call never returns if the first worker is stopped.
  if workers.index:
    return None
  counts = collections.Counter(name.split()[0] for name in workers.names)
  states = context.context().get_task_states(list(counts.items()))
  causes = (from_message(state.message) for state in states if state)
  return next(filter(None, causes), None)


def put(key: str, value: str) -> None:
  """Writes the value of a key, unless a worker has written one."""
  with naming_lost_workers(), contextlib.suppress(tf.errors.AlreadyExistsError):
    context.context().set_config_key_value(_PREFIX + key, value)


def get(key: str, seconds: float = 0.0) -> str | None:
  """Waits for the value of a key; returns None if there is none."""
  # Even an existing value may take 0.2 s from a different machine.
  milliseconds = int(1000 * max(0.2, seconds))
  eager = context.context()
  with naming_lost_workers():
    with contextlib.suppress(tf.errors.DeadlineExceededError):
      return str(eager.get_config_key_value(_PREFIX + key, milliseconds))
  return None


def abort(error: Exception) -> None:
  """Makes workers that wait in collectives raise an error."""
  with contextlib.suppress(tf.errors.OpError):
    context.context().report_error_to_cluster(
      tf.errors.INVALID_ARGUMENT, to_message(error)
    )


def setting_lines(**values: object) -> list[str]:
  return [f"{name}: {value}" for name, value in values.items()]


def variable_lines(trained: Iterable[Any]) -> list[str]:
  """Returns the names, dtypes and shapes of variables as lines."""
  trained = list(trained)
  names = variables_lib.renumbered(list(map(variables_lib.path_of, trained)))
  lines = [
    f"variable {i}: {names[i]} {tf.as_dtype(v.dtype).name} {list(v.shape)}"
    for i, v in enumerate(trained)
  ]
  return [*lines, f"variables: {len(lines)}"]


def gradient_lines(grads: Sequence[Gradient]) -> list[str]:
  """Returns the dtypes of gradients, and which are row-sparse, as lines."""
  dtypes = [
    "None"
    if grad is None
    else grad.dtype.name + " rows" * isinstance(grad, tf.IndexedSlices)
    for grad in grads
  ]
  return [f"gradient {i}: {dtype}" for i, dtype in enumerate(dtypes)]


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


def from_message(text: str) -> Exception | None:
  """Returns the error about workers that is behind a message of TensorFlow."""
  reported = _REPORTED.search(text)
  if reported:
    kinds = (DisagreementError, MissingWorkerError, WorkerLostError)
    return {kind.__name__: kind for kind in kinds}[reported[1]](reported[2])
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
  found = _TASK.findall(cause)
  return lost(" ".join(found[0 if unhealthy else -1]) if found else "A worker")


def lost(worker: str) -> WorkerLostError:
  """Returns the error about a lost worker, such as "worker 1"."""
  return WorkerLostError(
    f"{worker} was lost: it ended or cannot be reached, and TensorFlow cannot"
    " continue in this process. An unfinished update, if any, changed"
    " nothing: start all workers again, and resume from the last checkpoint."
  )
