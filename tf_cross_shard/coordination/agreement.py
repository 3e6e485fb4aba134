"""Workers compare what they are about to do before they do it together.

Collectives are paired by their order alone. One that only some workers enter
waits for ever, and one that fails breaks every later one in the process. So
what has to be alike is written as lines of text and compared first, where
waiting has a limit and a difference can be put into words.

    every worker ── digest of its lines ──▶ store ──▶ every worker
    every worker ── all lines, where digests differ ──▶ every worker
"""

import contextlib
import dataclasses
import hashlib
import itertools
import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard import variables as variables_lib
from tf_cross_shard import versions
from tf_cross_shard.coordination import errors, key_value_store
from tf_cross_shard.gradients.clipping import Gradient

TIMEOUT: Final = 50.0  # seconds
VARIABLE: Final = "TF_CROSS_SHARD_TIMEOUT"
# Seconds that the first worker waits longer: others compare their variables
# with it, and can tell more of what is wrong when time is up.
_LONGER: Final = 3.0

Task = tuple[str, int, str]  # job, index, address
# The same on all workers as long as they run the same program.
_rounds: Final = itertools.count()


@dataclasses.dataclass(frozen=True)
class Workers:
  """The workers that train together, and which of them this process is."""

  names: tuple[str, ...]
  index: int
  timeout: float = TIMEOUT

  @property
  def own_name(self) -> str:
    """The name of this process' worker."""
    return self.names[self.index]


def of_strategy(strategy: tf.distribute.Strategy) -> Workers | None:
  """Returns the workers of a strategy; None where there is one only."""
  resolver = getattr(strategy, "cluster_resolver", None)
  has_service = context.context().coordination_service is not None
  if resolver is None or not resolver.cluster_spec() or not has_service:
    return None
  all_tasks = tasks(resolver.cluster_spec())
  places = [task[:2] for task in all_tasks]
  place = (resolver.task_type, int(resolver.task_id))
  if len(places) < 2 or place not in places:
    return None
  names = tuple(map(name, all_tasks))
  return Workers(names, places.index(place), timeout_of(strategy))


def tasks(cluster: tf.train.ClusterSpec) -> list[Task]:
  """Returns the tasks that train together, in the order of their replicas."""
  return [
    (job, index, cluster.task_address(job, index))
    for job in ("chief", "worker")
    if job in cluster.jobs
    for index in cluster.task_indices(job)
  ]


def name(task: Task) -> str:
  """Returns how errors name a task."""
  job, index, address = task
  return f"{job} {index} ({address})"


def timeout_of(strategy: Any) -> float:
  """Returns how long workers wait: the strategy's, or the variable's."""
  timeout: Any = getattr(strategy, "timeout", None)
  if timeout is None:
    timeout = os.environ.get(VARIABLE, TIMEOUT)
  with contextlib.suppress(ValueError):
    if 0 < (seconds := float(timeout)) < math.inf:
      return seconds
  raise ValueError(
    f"`timeout` or the variable {VARIABLE} must be a positive number of"
    f" seconds; got {timeout!r}."
  )


def agree(workers: Workers, topic: str, lines: Sequence[str]) -> None:
  """Raises the same error on all workers unless all bring the same lines.

  All workers call it, in the same order of calls.
  """
  text = "\n".join(
    [f"step in the program: {topic}", *library_versions(), *lines]
  )
  # The store keeps every text for ever: all lines only where they differ.
  digest = hashlib.sha256(text.encode()).hexdigest()
  if len(set(exchange(workers, topic, digest))) == 1:
    return
  texts = exchange(workers, topic, text)
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
  workers: Workers, topic: str, text: str, patience: float = 0.0
) -> list[str]:
  """Sends a text to all workers; returns the texts of all of them.

  All workers call it, in the same order of calls. `patience`, in seconds, is
  added to the workers' timeout, and `_LONGER` to the first worker's.
  """
  key = f"round/{next(_rounds)}"
  key_value_store.put(f"{key}/{workers.index}", text)
  limit = workers.timeout + patience + (0.0 if workers.index else _LONGER)
  deadline = time.monotonic() + limit
  texts = {
    sender: key_value_store.wait(f"{key}/{index}", deadline, sender=index)
    for index, sender in enumerate(workers.names)
  }
  missing = [sender for sender, answer in texts.items() if answer is None]
  if missing:
    error = errors.MissingWorkerError(
      f"{workers.own_name} waited {limit:g} s for {', '.join(missing)} at:"
      f" {topic}. It does not run, or does something else: look into its log,"
      f" and start all workers with the same program{if_slow(workers.timeout)}"
    )
    key_value_store.report(workers.index, error)
    raise error
  # The first worker holds the store: it may not end before all have read.
  if workers.index:
    key_value_store.put(f"{key}/read/{workers.index}", "")
  else:
    deadline = time.monotonic() + limit
    for index in range(1, len(workers.names)):
      # A worker that has read may end because of what it read.
      with contextlib.suppress(RuntimeError, ValueError, tf.errors.OpError):
        key_value_store.wait(f"{key}/read/{index}", deadline, sender=index)
  return [answer for answer in texts.values() if answer is not None]


def if_slow(timeout: float) -> str:
  """Returns the end of an error: the remedy where nothing is wrong."""
  return (
    f"; if it is only slow, set {VARIABLE} to more than {timeout:g} seconds."
  )


def library_versions() -> list[str]:
  """Returns the libraries, which have to be the same, as lines."""
  return settings(
    tf_cross_shard=versions.own_version(),
    tensorflow=tf.__version__,
    keras=versions.keras_version(),
  )


def settings(**values: object) -> list[str]:
  """Returns settings by name, as lines."""
  return [f"{name}: {value}" for name, value in values.items()]


def variables(trained: Iterable[Any]) -> list[str]:
  """Returns names, dtypes and shapes, as lines."""
  trained = list(trained)
  names = variables_lib.renumbered(list(map(variables_lib.path_of, trained)))
  lines = [
    f"variable {i}: {names[i]} {tf.as_dtype(v.dtype).name} {list(v.shape)}"
    for i, v in enumerate(trained)
  ]
  return [*lines, f"variables: {len(trained)}"]


def gradients(grads: Sequence[Gradient]) -> list[str]:
  """Returns for each gradient its dtype and whether it has rows, as lines."""
  kinds = [
    "None"
    if grad is None
    else grad.dtype.name + " rows" * isinstance(grad, tf.IndexedSlices)
    for grad in grads
  ]
  return [f"gradient {i}: {kind}" for i, kind in enumerate(kinds)]
