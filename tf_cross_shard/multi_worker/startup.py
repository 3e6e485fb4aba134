"""The start of a cluster, with an end where a worker does not come.

TensorFlow reads TF_CONFIG without a check: a wrong index hangs, and other
faults fail far away. And its first worker waits for the others without a
limit, in a call that nothing can interrupt, so that is made only when all
others listen. They listen first, and register with the first worker until
time is up.

    worker 1, 2, ...   listen ──────────▶ register, for at most so long
    worker 0           until all listen ─▶ listen, be registered with
"""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard.multi_worker import consistency, errors

_BETWEEN_TRIES: Final = 0.1
_SLACK: Final = 5.0  # what TensorFlow adds to the time for registering
_ADDRESS: Final = re.compile(r".+:\d{1,5}")


def check_tf_config(text: str | None) -> None:
  """Raises `ValueError` unless `text` is a usable TF_CONFIG."""
  if not text:
    return
  try:
    config = json.loads(text)
    if not config.get("cluster"):
      return  # TensorFlow takes this for one worker without peers.
    cluster = config["cluster"]
    places = {
      (job, str(index)): address
      for job, addresses in cluster.items()
      for index, address in (
        addresses.items()  # a job may number its tasks itself
        if isinstance(addresses, dict)
        else enumerate(addresses)
      )
    }
    me = (config["task"]["type"], str(config["task"]["index"]))
  except json.JSONDecodeError as error:
    raise ValueError(_fault(f"is not JSON ({error})", text)) from error
  except (AttributeError, KeyError, TypeError) as error:
    fault = f"must have a `cluster` of lists and a `task` ({error!r})"
    raise ValueError(_fault(fault, text)) from error
  for address in places.values():
    if not _ADDRESS.fullmatch(str(address)):
      fault = f"has the address {address!r}, which is no host:port"
      raise ValueError(_fault(fault, text))
  if len(set(places.values())) < len(places):
    raise ValueError(_fault("gives one address to two tasks", text))
  if me not in places:
    known = ", ".join(f"{job} {index}" for job, index in places)
    fault = f"has the task {me[0]} {me[1]}, but the cluster has {known}"
    raise ValueError(_fault(fault, text))


def _fault(fault: str, text: str) -> str:
  """Returns the words for one fault."""
  return (
    f"TF_CONFIG {fault}; got {text}. Set it like"
    ' {"cluster": {"worker": ["host0:12345", "host1:12345"]},'
    ' "task": {"type": "worker", "index": 0}}.'
  )


@contextlib.contextmanager
def limited_wait(resolver: Any, timeout: float) -> Iterator[None]:
  """A context in which to make the strategy."""
  cluster = resolver.cluster_spec()
  tasks = consistency.tasks(cluster.as_dict() if cluster else {})
  me = (resolver.task_type, int(resolver.task_id or 0))
  if len(tasks) < 2 or me not in [task[:2] for task in tasks]:
    yield
    return
  first, *others = tasks
  if me == first[:2]:
    silent = _silent_addresses([address for *_, address in others], timeout)
    missing = [task for task in others if task[2] in silent]
    if missing:
      raise _missing(first, missing, timeout)
  _limit_registering([job for job, *_ in tasks], timeout)
  try:
    yield
  except tf.errors.DeadlineExceededError as error:
    mine = next(task for task in tasks if task[:2] == me)
    raise _missing(mine, [first], timeout) from error


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


def _silent_addresses(addresses: Sequence[str], timeout: float) -> set[str]:
  """Returns the addresses where nobody listens when time is up."""
  silent = set(addresses)
  deadline = time.monotonic() + timeout
  while True:
    silent = {address for address in silent if not _is_listening(address)}
    if not silent or time.monotonic() >= deadline:
      return silent
    time.sleep(_BETWEEN_TRIES)


def _is_listening(address: str) -> bool:
  """Whether anybody accepts a connection."""
  host, _, port = address.rpartition(":")
  try:
    socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
  except (OSError, ValueError, OverflowError):  # also of no name of a host
    return False
  return True


def _missing(
  me: consistency.Task, missing: Sequence[consistency.Task], timeout: float
) -> errors.MissingWorkerError:
  """Returns the error for workers that did not start."""
  names = ", ".join(map(consistency.name, missing))
  return errors.MissingWorkerError(
    f"{consistency.name(me)} waited {timeout:g} s for {names} to start. Look"
    " into its log, start all workers with the same TF_CONFIG, and let them"
    f" reach each other{consistency.if_slow(timeout)}"
  )
