"""Checks that all workers run the same program, before they run collectives.

A collective that some workers do not enter waits forever, and one that fails
breaks every later one in the process. So workers compare lines of text first:

    every worker ── digest of its lines ──▶ store ──▶ every worker
    only if the digests differ:
    every worker ── all of its lines ─────▶ store ──▶ every worker
"""

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core import versions
from tf_cross_shard._src.core.keras_types import Gradient
from tf_cross_shard._src.core.workers import errors, key_value_store

# How long a worker waits for others by default, in seconds.
TIMEOUT: Final = 50.0
# The environment variable that sets a different timeout.
VARIABLE: Final = "TF_CROSS_SHARD_TIMEOUT"
# The default limit of a wait in a step, in seconds. Tracing and compiling the
# first step, or evaluating on one worker, may take minutes. PyTorch's limits
# are 10 minutes for NCCL and 30 minutes for gloo.
STEP_TIMEOUT: Final = 1800.0
STEP_VARIABLE: Final = "TF_CROSS_SHARD_STEP_TIMEOUT"
# How many seconds longer the first worker waits, because the other workers
# report more details when their timeouts end.
_LONGER: Final = 3.0
# How many seconds the first worker waits for the end of the other workers, and
# then for TensorFlow to disconnect them.
_END: Final = 10.0
_DISCONNECT: Final = 0.5

Task = tuple[str, int, str]  # Job, index, address.
# Numbers the exchanges. The numbers agree if workers run the same program.
_rounds: Final = itertools.count()


@dataclasses.dataclass(frozen=True)
class Workers:
  """The workers that train together, in the order of their replicas."""

  names: tuple[str, ...]
  index: int
  timeout: float = TIMEOUT
  step_timeout: float = STEP_TIMEOUT

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
  names = tuple(map(name, all_tasks))
  return Workers(
    names,
    jobs.index(job),
    timeout_of(strategy),
    step_timeout_of(strategy),
  )


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


def timeout_of(strategy: Any) -> float:
  """Returns how many seconds the workers of a strategy wait for each other."""
  return _seconds(strategy, "timeout", VARIABLE, TIMEOUT)


def step_timeout_of(strategy: Any) -> float:
  """Returns how many seconds workers wait for each other in a step."""
  return _seconds(strategy, "step_timeout", STEP_VARIABLE, STEP_TIMEOUT)


def _seconds(strategy: Any, name: str, variable: str, default: float) -> float:
  """Returns a time limit from the strategy, the environment or the default."""
  timeout: Any = getattr(strategy, name, None)
  if timeout is None:
    timeout = os.environ.get(variable, default)
  with contextlib.suppress(ValueError):
    if 0 < (seconds := float(timeout)) < math.inf:
      return seconds
  raise ValueError(
    f"`{name}` or the environment variable {variable} must be a positive"
    f" number of seconds; got {timeout!r}."
  )


def compare_workers(
  workers: Workers | None, topic: str, lines: Sequence[str] = ()
) -> None:
  """Raises the same error on all workers unless all have the same lines."""
  if workers is None:
    return
  text = "\n".join(
    [
      f"step in the program: {topic}",
      f"tf_cross_shard: {versions.own_version()}",
      f"tensorflow: {tf.__version__}",
      f"keras: {versions.keras_version()}",
      *lines,
    ]
  )
  # The store keeps every text forever. Send a digest, and the lines themselves
  # only if the digests differ.
  digest = hashlib.sha256(text.encode()).hexdigest()
  if len(set(exchange(workers, topic, digest))) == 1:
    return
  texts = exchange(workers, topic, text)
  # If one worker ends, TensorFlow also ends what the other workers wait for.
  # Wait here until all workers have read the texts. After this wait, each
  # worker has the texts for its error, so a failure of this last exchange does
  # not matter.
  with contextlib.suppress(RuntimeError, ValueError, tf.errors.OpError):
    exchange(workers, topic, "has read")
  # Report the first line in which each other worker differs from the first one.
  first, *others = (lines.split("\n") for lines in texts)
  differences = []
  for sender, other in zip(workers.names[1:], others, strict=True):
    pairs = itertools.zip_longest(first, other, fillvalue="nothing more")
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    if differing:
      ours, theirs = differing[0]
      differences.append(
        f"{sender} has `{theirs}` where {workers.names[0]} has `{ours}`"
      )
  raise errors.DisagreementError(
    f"Workers disagree: {'; '.join(differences)}. Run the same program with the"
    " same arguments and libraries on every worker."
  )


def exchange(
  workers: Workers, topic: str, text: str, extra_timeout: float = 0.0
) -> list[str]:
  """Sends a text to all workers; returns the texts in the workers' order."""
  _register_end(workers.index, len(workers.names))
  key = f"round/{next(_rounds)}"
  key_value_store.put(f"{key}/{workers.index}", text)
  limit = workers.timeout + extra_timeout + (0.0 if workers.index else _LONGER)
  deadline = time.monotonic() + limit
  try:
    texts = [
      key_value_store.wait(
        f"{key}/{index}",
        deadline,
        sender=index,
        # Also look for an error that the first worker reported, because the
        # store ends when the first worker ends.
        reporters={index, 0} - {workers.index},
      )
      for index in range(len(workers.names))
    ]
  except (errors.DisagreementError, errors.MissingWorkerError):
    # The first worker has reported this error, and waits for the mark. Do not
    # write the mark after a WorkerLostError: if the first worker is lost,
    # writing to the store never returns.
    _mark_as_done(key, workers.index)
    raise
  _mark_as_done(key, workers.index)
  answers = dict(zip(workers.names, texts, strict=True))
  missing = [sender for sender, answer in answers.items() if answer is None]
  if missing:
    error = errors.MissingWorkerError(
      f"{workers.own_name} waited {limit:g} s for {', '.join(missing)} at:"
      f" {topic}. Each missing worker is not running, or is doing something"
      " else: see its log, and start all workers with the same"
      f" program{if_slow(workers.timeout)}"
    )
    key_value_store.tell(workers.index, error)
  if workers.index == 0:
    present = [i for i, answer in enumerate(texts) if i and answer is not None]
    _wait_until_done(key, present, limit)
  if missing:
    key_value_store.abort(error)
    raise error
  return [answer for answer in texts if answer is not None]


@functools.cache
def _register_end(index: int, count: int) -> None:
  """Makes the first worker, whose process has the store, end last."""

  # TensorFlow would log an error about heartbeats in the other processes.
  def end() -> None:
    with contextlib.suppress(RuntimeError, ValueError, tf.errors.OpError):
      if index:
        key_value_store.put(f"end/{index}", "")
      elif not hasattr(sys, "last_value"):  # No exception ends this process.
        deadline = time.monotonic() + _END
        for other in range(1, count):
          key_value_store.wait(f"end/{other}", deadline, sender=other)
        time.sleep(_DISCONNECT)

  atexit.register(end)


def _mark_as_done(key: str, index: int) -> None:
  """Tells the first worker that this worker has ended an exchange."""
  if index == 0:
    return
  # The first worker may end before its answer to this mark arrives. This does
  # not matter: this exchange is complete, and the next exchange notices that
  # the worker is lost.
  with contextlib.suppress(errors.WorkerLostError, tf.errors.OpError):
    key_value_store.put(f"{key}/done/{index}", "")


def _wait_until_done(key: str, others: Iterable[int], limit: float) -> None:
  """Makes the first worker keep the store until others have read from it."""
  deadline = time.monotonic() + limit
  for index in others:
    # A worker may have ended because of the texts that it read.
    with contextlib.suppress(RuntimeError, ValueError, tf.errors.OpError):
      key_value_store.wait(f"{key}/done/{index}", deadline, sender=index)


def if_slow(timeout: float) -> str:
  """Returns the end of an error: what to do if a worker is merely slow."""
  return (
    f"; if it is only slow, set {VARIABLE} to more than {timeout:g} seconds."
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
  return [*lines, f"variables: {len(trained)}"]


def gradient_lines(grads: Sequence[Gradient]) -> list[str]:
  """Returns the dtypes of gradients, and which are row-sparse, as lines."""
  dtypes = [
    "None"
    if grad is None
    else grad.dtype.name + " rows" * isinstance(grad, tf.IndexedSlices)
    for grad in grads
  ]
  return [f"gradient {i}: {dtype}" for i, dtype in enumerate(dtypes)]
