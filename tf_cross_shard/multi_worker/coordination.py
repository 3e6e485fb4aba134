"""What workers tell each other before they meet in collectives.

A collective that only some workers enter waits for ever, and one that fails
breaks every later one in the process. So what has to be alike is compared
first, through the key-value store of TensorFlow's coordination service, which
the first worker's process holds: reading waits with a timeout, and what is
found can be put into words.

    every worker ── its text ──▶ store ──▶ first worker compares all
    every worker ◀── the verdict ── store ◀──────────┘
"""

import dataclasses
import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard import versions
from tf_cross_shard.multi_worker import errors, key_value_store

# Issue: an error within 60 s, and the others learn of it a little later.
TIMEOUT: Final = 50.0
VARIABLE: Final = "TF_CROSS_SHARD_TIMEOUT"
_GRACE: Final = 2.0
_AGREED: Final = "agreed"
_NONE: Final = "none"

Task = tuple[str, int, str]
# The same on all workers as long as they run the same program.
_rounds: Final = itertools.count()


@dataclasses.dataclass(frozen=True)
class Workers:
  """The workers that train together, and which of them this process is."""

  names: tuple[str, ...]
  index: int
  timeout: float = TIMEOUT

  @property
  def is_first(self) -> bool:
    """Whether this process compares."""
    return self.index == 0


def of_strategy(strategy: tf.distribute.Strategy) -> Workers | None:
  """The workers of a strategy."""
  resolver = getattr(strategy, "cluster_resolver", None)
  if resolver is None or not resolver.cluster_spec():
    return None
  if context.context().coordination_service is None:
    return None
  found = tasks(resolver.cluster_spec().as_dict())
  me = (resolver.task_type, int(resolver.task_id))
  places = [task[:2] for task in found]
  if len(found) < 2 or me not in places:
    return None
  names = tuple(map(name, found))
  return Workers(names, places.index(me), timeout_of(strategy))


def tasks(cluster: dict[str, Any]) -> list[Task]:
  """The tasks that train together, in the order of their replicas."""
  found: list[Task] = []
  for job in ("chief", "worker"):
    addresses = cluster.get(job, ())
    if not isinstance(addresses, dict):  # a job may number its tasks itself
      addresses = dict(enumerate(addresses))
    found += [(job, int(i), addresses[i]) for i in sorted(addresses)]
  return found


def name(task: Task) -> str:
  """What errors call a task."""
  job, index, address = task
  return f"{job} {index} ({address})"


def timeout_of(strategy: Any) -> float:
  """How long workers wait for each other: the strategy's, or the variable's."""
  timeout = getattr(strategy, "timeout", None)
  if timeout is not None:
    return float(timeout)
  text = os.environ.get(VARIABLE, str(TIMEOUT))
  try:
    timeout = float(text)
  except ValueError:
    timeout = 0.0
  if not 0 < timeout < math.inf:
    raise ValueError(
      f"{VARIABLE} must be a positive number of seconds; got {text!r}."
    )
  return timeout


def agree(workers: Workers, topic: str, lines: Sequence[str]) -> None:
  """Raises the same error on all workers unless all bring the same lines.

  All workers call it, in the same order of calls.
  """
  meeting = f"round/{next(_rounds)}"
  mine = "\n".join(
    [f"step in the program: {topic}", *library_versions(), *lines]
  )
  if workers.is_first:
    error = _compare(workers, meeting, topic, mine)
    verdict = errors.to_message(error) if error else _AGREED
    key_value_store.put(f"{meeting}/verdict", verdict)
  else:
    key_value_store.put(f"{meeting}/{workers.index}", _digest(mine))
    key_value_store.put(f"{meeting}/{workers.index}/text", mine)
    error = _verdict_of_first(workers, f"{meeting}/verdict", topic)
  if isinstance(error, errors.MissingWorkerError):
    _raise_on_all(workers, error)
  _raise_if(error)  # all read the same verdict


def _raise_on_all(workers: Workers, error: Exception) -> NoReturn:
  """Raises an error here, and where other workers wait in a collective."""
  key_value_store.report(workers.index, error)
  raise error


def _raise_if(error: Exception | None) -> None:
  """Raises an error, if there is one."""
  if error is not None:
    raise error


def tell(
  workers: Workers, topic: str, text: str, patience: float = 0.0
) -> list[str]:
  """Every worker tells all of them something.

  All workers call it, in the same order of calls.
  """
  meeting = f"round/{next(_rounds)}/told"
  key_value_store.put(f"{meeting}/{workers.index}", text)
  deadline = time.monotonic() + workers.timeout + patience
  found: list[str] = []
  for index in range(len(workers.names)):
    told = key_value_store.wait(f"{meeting}/{index}", deadline)
    if told is None:
      missing = errors.MissingWorkerError(_missing(workers, [index], topic))
      _raise_on_all(workers, missing)
    found.append(told)
  return found


def newest_common(workers: Workers, have: Sequence[int]) -> int | None:
  """The greatest number that every worker has."""
  text = ",".join(map(str, have)) or _NONE
  found = [
    set() if told == _NONE else set(map(int, told.split(",")))
    for told in tell(workers, "the choice of a checkpoint", text)
  ]
  common = set.intersection(*found)
  if common or not any(found):
    return max(common, default=None)
  inventory = "; ".join(
    f"{name} has {sorted(numbers) or _NONE}"
    for name, numbers in zip(workers.names, found, strict=True)
  )
  raise errors.DisagreementError(
    f"There is no checkpoint that all workers have: {inventory}. Copy those"
    " that are missing to their workers, or delete all to start anew."
  )


def announce(
  workers: Workers,
  series: int,
  ordinal: int,
  what: str,
  same: Callable[[str], bool],
) -> None:
  """Says what this worker makes next; the others compare it with the first's.

  One way only: the first worker does not wait. What the others find wrong it
  learns from them, in the next call of `agree` or by their end.
  """
  key = f"made/{series}/{ordinal}"
  if workers.is_first:
    key_value_store.put(key, what)
    return
  theirs = key_value_store.wait(key, time.monotonic() + workers.timeout)
  if theirs is not None and same(theirs):
    return
  me, first = workers.names[workers.index], workers.names[0]
  found = f"makes {theirs}" if theirs else "makes no more variables"
  error = errors.DisagreementError(
    f"Workers make different variables: as number {ordinal} {me} makes {what},"
    f" where {first} {found}. Run the same program on every worker"
    f"{if_slow(workers.timeout) if theirs is None else '.'}"
  )
  _raise_on_all(workers, error)


def if_slow(timeout: float) -> str:
  """What to do when nothing is wrong: the end of an error."""
  return (
    f"; if it is only slow, set {VARIABLE} to more than {timeout:g} seconds."
  )


def library_versions() -> list[str]:
  """The libraries that have to be the same on all workers."""
  return [
    f"tf_cross_shard: {versions.own_version()}",
    f"tensorflow: {tf.__version__}",
    f"keras: {versions.keras_version()}",
  ]


def _compare(
  workers: Workers, meeting: str, topic: str, mine: str
) -> Exception | None:
  """What the first worker finds."""
  # A little longer than others wait for the first: what ended them is told.
  deadline = time.monotonic() + workers.timeout + _GRACE
  missing, differing = [], []
  for index in range(1, len(workers.names)):
    failure = key_value_store.failure_of(index)
    digest = key_value_store.wait(
      f"{meeting}/{index}", deadline, unless=failure
    )
    if digest is None:
      reason = key_value_store.wait(failure, 0.0)
      if reason:
        return errors.of_message(reason)
      missing.append(index)
    elif digest != _digest(mine):
      differing.append(index)
  if missing:
    return errors.MissingWorkerError(_missing(workers, missing, topic))
  if not differing:
    return None
  differences = []
  for index in differing:
    text = key_value_store.wait(f"{meeting}/{index}/text", deadline) or ""
    differences.append(_difference(workers, index, mine, text))
  return errors.DisagreementError(
    f"Workers disagree: {'; '.join(differences)}. Run the same program with the"
    " same arguments and libraries on every worker."
  )


def _difference(workers: Workers, index: int, first: str, other: str) -> str:
  """The first line that differs, in words."""
  firsts, others = first.split("\n"), other.split("\n")
  name, first_name = workers.names[index], workers.names[0]
  for ours, theirs in itertools.zip_longest(firsts, others):
    if ours != theirs:
      return (
        f"{name} has {_quoted(theirs)} where {first_name} has {_quoted(ours)}"
      )
  return f"{name} differs from {first_name}"


def _quoted(line: str | None) -> str:
  """A line, or that there is none."""
  return "nothing more" if line is None else f"`{line}`"


def _verdict_of_first(
  workers: Workers, key: str, topic: str
) -> Exception | None:
  """What the first worker found, which takes it a little longer than others."""
  verdict = key_value_store.wait(
    key, time.monotonic() + workers.timeout + 2 * _GRACE
  )
  if verdict is None:
    return errors.MissingWorkerError(_missing(workers, [0], topic))
  return errors.of_message(verdict)


def _missing(workers: Workers, indices: Sequence[int], topic: str) -> str:
  """The error for workers that did not come."""
  names = ", ".join(workers.names[index] for index in indices)
  return (
    f"{workers.names[workers.index]} waited {workers.timeout:g} s for {names}"
    f" at: {topic}. It does not run, or does something else. Look into its log"
    f" and start all workers with the same program{if_slow(workers.timeout)}"
  )


def _digest(text: str) -> str:
  """A short form of a text."""
  return hashlib.sha256(text.encode()).hexdigest()
