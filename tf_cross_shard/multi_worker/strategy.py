"""`tf.distribute.MultiWorkerMirroredStrategy` that says what is wrong.

Everything that trains is TensorFlow's. What is added: the cluster is checked
before it is waited for, workers that do not come or make other variables end
in an error, and Keras 3's own `fit` works.

TensorFlow reads TF_CONFIG without a check: a wrong index hangs, and other
faults fail far away. And its first worker waits for the others without a
limit, in a call that nothing can interrupt, so that is made only when all
others listen. They listen first, and register with the first worker until
time is up.

    worker 1, 2, ...   listen ──────────▶ register, for at most so long
    worker 0           until all listen ─▶ listen, be registered with
"""

import contextlib
import itertools
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard.coordination import agreement, errors

_BETWEEN_TRIES: Final = 0.1
_SLACK: Final = 5.0  # what TensorFlow adds to the time for registering
_ADDRESS: Final = re.compile(r".+:\d{1,5}")
# The same on all workers as long as they run the same program.
_series: Final = itertools.count()


class MultiWorkerStrategy(tf.distribute.MultiWorkerMirroredStrategy):
  """MultiWorkerMirroredStrategy with checks, timeouts and Keras 3's `fit`.

  Use it in the place of TensorFlow's. A program may make several, one after the
  other. Without TF_CONFIG it is one worker:

  >>> import tensorflow as tf
  >>> strategy = MultiWorkerStrategy()
  >>> strategy.num_replicas_in_sync
  1
  >>> strategy.reduce("MEAN", tf.constant(3.0), axis=0).numpy().item()
  3.0

  Attributes:
    timeout: Seconds that workers wait for each other where they compare what
      they do; not for a step.
  """

  def __init__(
    self,
    cluster_resolver: Any = None,
    communication_options: Any = None,
    *,
    timeout: float | None = None,
  ) -> None:
    """Starts this worker and waits for the others.

    Args:
      cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver`; None
        reads the environment variable TF_CONFIG.
      communication_options: `tf.distribute.experimental.CommunicationOptions`.
      timeout: Seconds to wait for another worker. None means 50, or what the
        environment variable TF_CROSS_SHARD_TIMEOUT says.

    Raises:
      ValueError: If TF_CONFIG or `timeout` is malformed.
      MissingWorkerError: If a worker does not start in time.
      DisagreementError: If workers have different libraries.
    """
    if timeout is not None and not 0 < timeout < math.inf:
      raise ValueError(
        f"`timeout` must be a positive number of seconds; got {timeout!r}."
      )
    if cluster_resolver is None:
      check_tf_config(os.environ.get("TF_CONFIG"))
      cluster_resolver = (
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
      )
    self.timeout = timeout
    self.timeout = agreement.timeout_of(self)
    self._series = next(_series)
    self._ordinals = itertools.count()
    self._announcing = threading.local()
    with _limited_wait(cluster_resolver, self.timeout):
      super().__init__(cluster_resolver, communication_options)
    self._workers = agreement.of_strategy(self)
    if self._workers:
      agreement.agree(self._workers, "the start", [])

  def scope(self) -> Any:
    """As TensorFlow's; workers compare the variables that they make in it."""
    return self._comparing(super().scope())

  def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
    """As TensorFlow's, and two cases that Keras 3's `fit` needs.

    For its shapes Keras asks the mean of a structure with a batch in it. Where
    MirroredStrategy returns it as it came, TensorFlow fails here; this returns
    the batch of this worker's first replica. A structure of scalars is reduced
    one by one. A scalar has no dimension to reduce: over any `axis`, its mean
    or sum is that over the replicas.

    Args:
      reduce_op: `"MEAN"` or `"SUM"`, or a `tf.distribute.ReduceOp`.
      value: What `strategy.run` returned, or a structure of such values.
      axis: The dimension to reduce beside the replicas, or None.

    Returns:
      The reduced value, the same on all workers; a batch of this worker.
    """
    if isinstance(value, (tuple, list, dict)) and axis is None:
      if all(map(self._is_scalar, tf.nest.flatten(value))):
        return tf.nest.map_structure(
          lambda each: self.reduce(reduce_op, each, None), value
        )
      if str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN":
        return tf.nest.map_structure(
          lambda each: self.experimental_local_results(each)[0], value
        )
    if axis is not None and self._is_scalar(value):
      axis = None
    return super().reduce(reduce_op, value, axis)

  def _is_scalar(self, value: Any) -> bool:
    """Whether each replica has one number."""
    return all(
      tf.is_tensor(local) and local.shape.rank == 0
      for local in self.experimental_local_results(value)
    )

  @contextlib.contextmanager
  def _comparing(self, scope: Any) -> Iterator[Any]:
    """A scope in which the making of a variable is announced."""
    with scope as strategy, tf.variable_creator_scope(self._announce):
      yield strategy

  def _announce(self, make: Callable[..., Any], **kwargs: Any) -> Any:
    """Compares a variable with that of the first worker, then makes it.

    Making one waits for the first worker to send the initial value. That would
    be for ever where the first worker makes fewer.
    """
    is_nested = getattr(self._announcing, "is_nested", False)
    if self._workers is None or is_nested:  # scopes may be entered twice
      return make(**kwargs)
    ordinal = next(self._ordinals)
    mine = _Variable(kwargs)
    self._compare(self._workers, ordinal, mine)
    if mine.is_empty:
      raise ValueError(
        f"The variable {mine} is empty: TensorFlow crashes when it sends it to"
        " the other workers. Make it outside the scope, or with an element."
      )
    self._announcing.is_nested = True
    try:
      return make(**kwargs)
    except tf.errors.InvalidArgumentError as error:
      found = errors.from_message(str(error.message))
      if not isinstance(found, errors.DisagreementError):
        raise
      if errors.is_reported(str(error.message)):
        raise found from error
      # The shape, which may show only when the variable is made.
      me = self._workers.names[self._workers.index]
      detailed = errors.DisagreementError(
        f"{found} It is variable {ordinal} of {me}, {mine}."
      )
      agreement.report(self._workers.index, detailed)
      raise detailed from error
    finally:
      self._announcing.is_nested = False

  def _compare(
    self, workers: agreement.Workers, ordinal: int, mine: "_Variable"
  ) -> None:
    """Says what this worker makes next; the others compare it with the first's.

    One way only: the first worker does not wait. What the others find wrong it
    learns from them, in the next call of `agree` or by their end.
    """
    key = f"made/{self._series}/{ordinal}"
    if workers.index == 0:
      agreement.put(key, str(mine))
      return
    deadline = time.monotonic() + workers.timeout
    theirs = agreement.wait(key, deadline)
    if theirs is not None and mine.is_like(theirs):
      return
    me, first = workers.names[workers.index], workers.names[0]
    found = f"makes {theirs}" if theirs else "makes no more variables"
    slow = agreement.if_slow(workers.timeout) if theirs is None else "."
    error = errors.DisagreementError(
      f"Workers make different variables: as number {ordinal} {me} makes"
      f" {mine}, where {first} {found}. Run the same program on every worker"
      f"{slow}"
    )
    agreement.report(workers.index, error)
    raise error


class _Variable:
  """What is known of a variable before it is made."""

  def __init__(self, kwargs: dict[str, Any]) -> None:
    initial = kwargs.get("initial_value")
    dtype = kwargs.get("dtype") or getattr(initial, "dtype", None)
    shape = kwargs.get("shape")
    if shape is None:
      shape = getattr(initial, "shape", None)
    self.is_empty = shape is not None and (
      tf.TensorShape(shape).num_elements() == 0
    )
    # Keras numbers names by how many of a kind a program made before.
    name = re.sub(r"_\d+(?=/|$)", "", str(kwargs.get("name") or "Variable"))
    name = name.replace(" ", "_")  # spaces separate what is known
    self._known = (
      name,
      tf.as_dtype(dtype).name if dtype is not None else "?",
      str(tf.TensorShape(shape)) if shape is not None else "?",
    )

  def __str__(self) -> str:
    return " ".join(self._known)

  def is_like(self, other: str) -> bool:
    """Whether another worker's variable may be the same."""
    others = other.split(" ", 2)
    return all(
      mine == theirs or "?" in (mine, theirs)
      for mine, theirs in zip(self._known, others, strict=True)
    )


# ------------------------------------------------------------------------ start


def check_tf_config(text: str | None) -> None:
  """Raises `ValueError` unless `text` is a usable TF_CONFIG."""
  if not text:
    return
  try:
    config = json.loads(text)
    if not config.get("cluster"):
      return  # TensorFlow takes this for one worker without peers.
    cluster = tf.train.ClusterSpec(config["cluster"])
    places = {
      (job, str(index)): cluster.task_address(job, index)
      for job in cluster.jobs
      for index in cluster.task_indices(job)
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
def _limited_wait(resolver: Any, timeout: float) -> Iterator[None]:
  """A context in which to make the strategy."""
  tasks = agreement.tasks(resolver.cluster_spec() or tf.train.ClusterSpec({}))
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
  me: agreement.Task, missing: Sequence[agreement.Task], timeout: float
) -> errors.MissingWorkerError:
  """Returns the error for workers that did not start."""
  names = ", ".join(map(agreement.name, missing))
  return errors.MissingWorkerError(
    f"{agreement.name(me)} waited {timeout:g} s for {names} to start. Look"
    " into its log, start all workers with the same TF_CONFIG, and let them"
    f" reach each other{agreement.if_slow(timeout)}"
  )
