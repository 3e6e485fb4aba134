"""Workers compare what they are about to do before they do it together.

Collectives are paired by their order alone. One that only some workers enter
waits for ever, and one that fails breaks every later one in the process. So
what has to be alike is written as lines and compared first, through the
key-value store of TensorFlow's coordination service, in the first worker's
process, where reading waits with a timeout, and where a difference can be put
into words.

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
from typing import Any, Final, NoReturn

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard import variables as variables_lib
from tf_cross_shard import versions
from tf_cross_shard.coordination import errors
from tf_cross_shard.gradients.clipping import Gradient

TIMEOUT: Final = 50.0
VARIABLE: Final = "TF_CROSS_SHARD_TIMEOUT"
_PREFIX: Final = "tf_cross_shard/"  # of keys: others may use the store
# Seconds in which what is there is read; the store may be on another machine.
_SHORTEST: Final = 0.2
# Seconds that the first worker waits longer: others compare their variables
# with it, and can tell more of what is wrong when time is up.
_LONGER: Final = 3.0
# A group of collectives in which no worker ever takes part.
_PROBE: Final = 0x3FFFFFFF
# What the store raises when the service has ended.
_ENDED: Final = (
  tf.errors.FailedPreconditionError,
  tf.errors.UnavailableError,
  tf.errors.CancelledError,
)

Task = tuple[str, int, str]  # job, index, address
# The same on all workers as long as they run the same program.
_rounds: Final = itertools.count()


@dataclasses.dataclass(frozen=True)
class Workers:
  """The workers that train together, and which of them this process is."""

  names: tuple[str, ...]
  index: int
  timeout: float = TIMEOUT


def of_strategy(strategy: tf.distribute.Strategy) -> Workers | None:
  """Returns the workers of a strategy; None where there is one only."""
  resolver = getattr(strategy, "cluster_resolver", None)
  if resolver is None or not resolver.cluster_spec():
    return None
  if context.context().coordination_service is None:
    return None
  found = tasks(resolver.cluster_spec())
  places = [task[:2] for task in found]
  me = (resolver.task_type, int(resolver.task_id))
  if len(found) < 2 or me not in places:
    return None
  names = tuple(map(name, found))
  return Workers(names, places.index(me), timeout_of(strategy))


def tasks(cluster: tf.train.ClusterSpec) -> list[Task]:
  """Returns the tasks that train together, in the order of their replicas."""
  return [
    (job, index, cluster.task_address(job, index))
    for job in ("chief", "worker")
    if job in cluster.jobs
    for index in cluster.task_indices(job)
  ]


def name(task: Task) -> str:
  """Returns what errors call a task."""
  job, index, address = task
  return f"{job} {index} ({address})"


def timeout_of(strategy: Any) -> float:
  """Returns how long workers wait: the strategy's, or the variable's."""
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


# ------------------------------------------------------------------ comparison


def agree(workers: Workers, topic: str, lines: Sequence[str]) -> None:
  """Raises the same error on all workers unless all bring the same lines.

  All workers call it, in the same order of calls.
  """
  text = "\n".join(
    [f"step in the program: {topic}", *library_versions(), *lines]
  )
  # The store keeps for ever what is told: all lines only where they differ.
  digest = hashlib.sha256(text.encode()).hexdigest()
  if len(set(exchange(workers, topic, digest))) == 1:
    return
  first, *others = exchange(workers, topic, text)
  differences = [
    _difference(workers.names, index, first.split("\n"), other.split("\n"))
    for index, other in enumerate(others, 1)
    if other != first
  ]
  raise errors.DisagreementError(
    f"Workers disagree: {'; '.join(differences)}. Run the same program with the"
    " same arguments and libraries on every worker."
  )


def exchange(
  workers: Workers, topic: str, text: str, patience: float = 0.0
) -> list[str]:
  """Tells all workers a text; returns what each of them told.

  All workers call it, in the same order of calls. `patience`, in seconds, is
  added to the workers' timeout, and `_LONGER` to the first worker's.
  """
  key = f"round/{next(_rounds)}"
  put(f"{key}/{workers.index}", text)
  limit = workers.timeout + patience + (0.0 if workers.index else _LONGER)
  deadline = time.monotonic() + limit
  told = [
    wait(f"{key}/{index}", deadline, sender=index)
    for index in range(len(workers.names))
  ]
  missing = [
    name for name, each in zip(workers.names, told, strict=True) if each is None
  ]
  if missing:
    error = errors.MissingWorkerError(
      f"{workers.names[workers.index]} waited {limit:g} s"
      f" for {', '.join(missing)} at: {topic}. It does not run, or does"
      " something else: look into its log, and start all workers with the same"
      f" program{if_slow(workers.timeout)}"
    )
    report(workers.index, error)
    raise error
  # The first worker holds the store: it may not end before all have read.
  if workers.index:
    put(f"{key}/read/{workers.index}", "")
  else:
    deadline = time.monotonic() + limit
    for index in range(1, len(workers.names)):
      # One that has read may end because of what it read.
      with contextlib.suppress(RuntimeError, ValueError, tf.errors.OpError):
        wait(f"{key}/read/{index}", deadline, sender=index)
  return [each for each in told if each is not None]


def if_slow(timeout: float) -> str:
  """Returns the end of an error: what to do when nothing is wrong."""
  return (
    f"; if it is only slow, set {VARIABLE} to more than {timeout:g} seconds."
  )


def library_versions() -> list[str]:
  """Returns the libraries, which have to be the same, as lines."""
  return [
    f"tf_cross_shard: {versions.own_version()}",
    f"tensorflow: {tf.__version__}",
    f"keras: {versions.keras_version()}",
  ]


def _difference(
  names: Sequence[str], index: int, first: Sequence[str], other: Sequence[str]
) -> str:
  """Returns the first line of a worker that differs, in words."""
  pairs = itertools.zip_longest(first, other, fillvalue="nothing more")
  ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
  return f"{names[index]} has `{theirs}` where {names[0]} has `{ours}`"


# ------------------------------------------------------------------------ store


def put(key: str, value: str) -> None:
  """Writes once; a key is never written again."""
  try:
    context.context().set_config_key_value(_PREFIX + key, value)
  except _ENDED as ended:
    _raise_cause(ended)


def wait(key: str, deadline: float, sender: int | None = None) -> str | None:
  """Returns the value of a key when it is there; None when time is up.

  Raises what the worker `sender`, who is to write it, reported instead.
  """
  while True:
    # Short waits, so that Ctrl-C ends them.
    left = max(_SHORTEST, min(1.0, deadline - time.monotonic()))
    try:
      return str(
        context.context().get_config_key_value(_PREFIX + key, int(left * 1000))
      )
    except tf.errors.DeadlineExceededError:
      reason = sender is not None and wait(f"failed/{sender}", 0.0)
      error = errors.from_message(reason) if reason else None
      if error is not None:
        raise error from None
      if time.monotonic() >= deadline:
        return None
    except _ENDED as ended:
      _raise_cause(ended)


def report(index: int, error: Exception) -> None:
  """Tells the others why worker `index`, which is this one, does not go on.

  It ends what they wait for: a comparison, or a collective.
  """
  message = errors.to_message(error)
  # Where another worker has reported already, nobody is left to tell.
  with contextlib.suppress(tf.errors.OpError):
    context.context().set_config_key_value(_PREFIX + f"failed/{index}", message)
    context.context().report_error_to_cluster(
      tf.errors.INVALID_ARGUMENT, message
    )


def _raise_cause(ended: tf.errors.OpError) -> NoReturn:
  """Raises why the service ended: a collective's error tells it best."""
  lost = ended
  if not errors.is_reported(str(lost.message)):
    try:
      tf.raw_ops.CollectiveReduceV2(
        input=tf.zeros([]),
        group_size=2,
        group_key=_PROBE,
        instance_key=_PROBE,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
        timeout_seconds=1.0,
      )
    except tf.errors.OpError as aborted:
      lost = aborted
  raise errors.from_message(str(lost.message)) or lost from ended


# ----------------------------------------------------------------------- lines


def settings(**values: object) -> list[str]:
  """Returns settings by name, as lines."""
  return [f"{name}: {value}" for name, value in values.items()]


def variables(trained: Iterable[Any]) -> list[str]:
  """Returns names, dtypes and shapes, as lines."""
  trained = list(trained)
  names = variables_lib.renumbered(
    [str(getattr(v, "path", None) or v.name).split(":")[0] for v in trained]
  )
  lines = [
    f"variable {i}: {name} {tf.as_dtype(variable.dtype).name}"
    f" {list(variable.shape)}"
    for i, (name, variable) in enumerate(zip(names, trained, strict=True))
  ]
  return [*lines, f"variables: {len(trained)}"]


def gradients(grads: Sequence[Gradient]) -> list[str]:
  """Returns which gradients there are and of what kind, as lines."""
  lines = []
  for i, grad in enumerate(grads):
    rows = " rows" if isinstance(grad, tf.IndexedSlices) else ""
    kind = "None" if grad is None else f"{grad.dtype.name}{rows}"
    lines.append(f"gradient {i}: {kind}")
  return lines
