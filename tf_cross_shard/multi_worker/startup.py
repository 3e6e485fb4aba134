"""The start of a cluster, with an end where a worker does not come.

TensorFlow's first worker waits for the others without a limit, in a call that
nothing can interrupt. So it is made only when all others listen. They listen
first, and register with the first worker until time is up.

    worker 1, 2, ...   listen ──────────▶ register, for at most so long
    worker 0           until all listen ─▶ listen, be registered with
"""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard.multi_worker import coordination, errors

_BETWEEN_TRIES = 0.1
_SLACK = 5.0  # what TensorFlow adds to the time for registering


@contextlib.contextmanager
def waiting(resolver: Any, timeout: float) -> Iterator[None]:
  """A context in which to make the strategy."""
  cluster = resolver.cluster_spec()
  tasks = coordination.tasks(cluster.as_dict() if cluster else {})
  me = (resolver.task_type, int(resolver.task_id or 0))
  if len(tasks) < 2 or me not in [task[:2] for task in tasks]:
    yield
    return
  first, *others = tasks
  if me == first[:2]:
    silent = _still_silent([address for *_, address in others], timeout)
    missing = [task for task in others if task[2] in silent]
    if missing:
      raise errors.MissingWorkerError(_why(first, missing, timeout))
  _limit_registering([job for job, *_ in tasks], timeout)
  try:
    yield
  except tf.errors.DeadlineExceededError as error:
    mine = next(task for task in tasks if task[:2] == me)
    raise errors.MissingWorkerError(_why(mine, [first], timeout)) from error


def _limit_registering(jobs: Sequence[str], timeout: float) -> None:
  """Configures what the strategy would configure, and a limit with it."""
  eager = context.context()
  if eager.coordination_service is not None:
    return  # The program has done so itself.
  coordinated = (
    tf.compat.v1.ConfigProto().experimental.coordination_config
  ).coordinated_job_list
  for job in dict.fromkeys(jobs):
    coordinated.add(name=job, num_tasks=jobs.count(job))
  eager.configure_coordination_service(
    service_type="standalone",
    service_leader=f"/job:{jobs[0]}/replica:0/task:0",
    cluster_register_timeout_in_ms=int(1000 * max(1.0, timeout - _SLACK)),
    coordinated_jobs=list(coordinated),
  )


def _still_silent(addresses: Sequence[str], timeout: float) -> set[str]:
  """The addresses where nobody listens when time is up."""
  silent = set(addresses)
  deadline = time.monotonic() + timeout
  while silent:
    for address in sorted(silent):
      if _listens(address):
        silent.remove(address)
      elif time.monotonic() >= deadline:
        return silent
    if silent:
      time.sleep(_BETWEEN_TRIES)
  return silent


def _listens(address: str) -> bool:
  """Whether anybody does."""
  host, _, port = address.rpartition(":")
  try:
    socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
  except (OSError, UnicodeError):  # the latter of no name of a host
    return False
  return True


def _why(me: Any, missing: Sequence[Any], timeout: float) -> str:
  """The error for workers that did not start."""
  names = ", ".join(coordination.name(task) for task in missing)
  return (
    f"{coordination.name(me)} waited {timeout:g} s for {names} to start. Look"
    " into its log, start all workers with the same TF_CONFIG, and let them"
    f" reach each other{coordination.if_slow(timeout)}"
  )
