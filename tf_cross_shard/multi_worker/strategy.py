"""`tf.distribute.MultiWorkerMirroredStrategy` that says what is wrong.

Everything that trains is TensorFlow's. In addition the cluster is checked
before it is waited for, workers that do not come or make other variables end
in an error, and Keras 3's own `fit` works.

TensorFlow reads TF_CONFIG without a check: a wrong index hangs. And its first
worker waits for the others without a limit, in a call that nothing can
interrupt, and so is made here only when all others listen:

    worker 1, 2, ...   listen ──────────▶ register, for at most so long
    worker 0           until all listen ─▶ listen, be registered with

Where one is lost meanwhile, the process of each other ends with the place.
"""

import contextlib
import faulthandler
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard.coordination import agreement, errors, key_value_store

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
      timeout: Seconds to wait for another worker, at the start and where they
        compare what they do; not for a step. None means 50, or the value of the
        environment variable TF_CROSS_SHARD_TIMEOUT.

    Raises:
      ValueError: If TF_CONFIG or `timeout` is malformed.
      MissingWorkerError: If a worker does not start in time.
      DisagreementError: If workers have different libraries.
    """
    self.timeout = timeout
    self.timeout = agreement.timeout_of(self)
    if cluster_resolver is None:
      check_tf_config(os.environ.get("TF_CONFIG"))
      cluster_resolver = (
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
      )
    self._series = next(_series)
    self._ordinals = itertools.count()
    self._announcing = threading.local()
    with _limited_wait(cluster_resolver, self.timeout):
      super().__init__(cluster_resolver, communication_options)
    self._workers = agreement.of_strategy(self)
    if self._workers:
      agreement.agree(self._workers, "the start", [])

  @contextlib.contextmanager
  def scope(self) -> Iterator[Any]:
    """As TensorFlow's; workers compare the variables that they make in it."""
    with super().scope(), tf.variable_creator_scope(self._announce):
      yield self

  def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
    """As TensorFlow's, and two cases that Keras 3's `fit` needs.

    Keras asks for the mean of a structure with a batch in it, to learn shapes,
    for which TensorFlow fails: this returns the batch of this worker's first
    replica. Structures of scalars are reduced element by element, and scalars
    over the replicas, whatever `axis` is.

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

  def _announce(self, make: Callable[..., Any], **kwargs: Any) -> Any:
    """Compares a variable with that of the first worker, then makes it.

    To make it waits for the first worker to send the initial value: for ever,
    where the first worker makes fewer.
    """
    is_nested = getattr(self._announcing, "is_nested", False)
    if self._workers is None or is_nested:  # scopes may be entered twice
      return make(**kwargs)
    ordinal = next(self._ordinals)
    variable = _Variable(kwargs)
    self._compare(self._workers, ordinal, variable)
    if variable.is_empty:
      raise ValueError(
        f"The variable {variable} is empty: TensorFlow crashes when it sends it"
        " to the other workers. Make it outside the scope, or with an element."
      )
    self._announcing.is_nested = True
    try:
      return make(**kwargs)
    except tf.errors.InvalidArgumentError as error:
      cause = errors.from_message(str(error.message))
      if not isinstance(cause, errors.DisagreementError):
        raise
      if not errors.is_reported(str(error.message)):
        # The shape, which may show only when the variable is made.
        name = self._workers.own_name
        cause = errors.DisagreementError(
          f"{cause} It is variable {ordinal} of {name}, {variable}."
        )
        key_value_store.report(self._workers.index, cause)
      raise cause from error
    finally:
      self._announcing.is_nested = False

  def _compare(
    self, workers: agreement.Workers, ordinal: int, variable: "_Variable"
  ) -> None:
    """Raises an error unless the first worker makes the same variable.

    The first worker does not wait: it learns of an error by the report.
    """
    key = f"made/{self._series}/{ordinal}"
    if workers.index == 0:
      key_value_store.put(key, str(variable))
      return
    first = key_value_store.wait(key, time.monotonic() + workers.timeout)
    if first is not None and variable.is_like(first):
      return
    makes = f"makes {first}" if first else "makes no more variables"
    slow = agreement.if_slow(workers.timeout) if first is None else "."
    error = errors.DisagreementError(
      f"Workers make different variables: as number {ordinal}"
      f" {workers.own_name} makes {variable}, where {workers.names[0]} {makes}."
      f" Run the same program on every worker{slow}"
    )
    key_value_store.report(workers.index, error)
    raise error


class _Variable:
  """Name, dtype and shape of a variable, as far as known before it is made."""

  def __init__(self, kwargs: dict[str, Any]) -> None:
    initial = kwargs.get("initial_value")
    dtype = kwargs.get("dtype") or getattr(initial, "dtype", None)
    shape = kwargs.get("shape")
    if shape is None:
      shape = getattr(initial, "shape", None)
    shape = tf.TensorShape(shape)
    self.is_empty = shape.num_elements() == 0
    # Keras numbers names by how many of a kind a program made before.
    name = re.sub(r"_\d+(?=/|$)", "", str(kwargs.get("name") or "Variable"))
    self._known = (
      name.replace(" ", "_"),  # spaces separate the parts
      "?" if dtype is None else tf.as_dtype(dtype).name,
      "?" if shape.rank is None else str(shape),
    )

  def __str__(self) -> str:
    return " ".join(self._known)

  def is_like(self, other: str) -> bool:
    """Whether another worker's variable may be the same."""
    return all(
      ours == theirs or "?" in (ours, theirs)
      for ours, theirs in zip(self._known, other.split(" ", 2), strict=True)
    )


def check_tf_config(text: str | None) -> None:
  """Raises `ValueError` unless `text` is a usable TF_CONFIG."""
  with errors.naming_tf_config():
    config = json.loads(text or "{}")
    if not config.get("cluster"):
      return  # TensorFlow takes this for one worker without peers.
    cluster = tf.train.ClusterSpec(config["cluster"])
    places = {
      (job, str(index)): cluster.task_address(job, index)
      for job in cluster.jobs
      for index in cluster.task_indices(job)
    }
    for address in places.values():
      if not _ADDRESS.fullmatch(str(address)):
        raise ValueError(f"the address {address!r} is no host:port")
    place = (config["task"]["type"], str(config["task"]["index"]))
    if place not in places:
      known = ", ".join(f"{job} {index}" for job, index in places)
      raise ValueError(f"the cluster has {known}, and no {' '.join(place)}")


@contextlib.contextmanager
def _limited_wait(resolver: Any, timeout: float) -> Iterator[None]:
  """Limits how long TensorFlow's strategy, made inside, waits for workers."""
  tasks = agreement.tasks(resolver.cluster_spec() or tf.train.ClusterSpec({}))
  place = (resolver.task_type, int(resolver.task_id or 0))
  own = [task for task in tasks if task[:2] == place]
  if len(tasks) < 2 or not own:
    yield
    return
  first, *others = tasks
  if place == first[:2]:
    silent = _silent_tasks(others, time.monotonic() + timeout)
    if silent:
      raise _missing(first, silent, timeout)
  eager = context.context()
  if eager.coordination_service is None:  # else the program has done so itself
    jobs = [job for job, *_ in tasks]
    config = tf.compat.v1.ConfigProto().experimental.coordination_config
    for job in dict.fromkeys(jobs):
      config.coordinated_job_list.add(name=job, num_tasks=jobs.count(job))
    # As the strategy would configure it, and a limit in addition.
    eager.configure_coordination_service(
      service_type="standalone",
      service_leader=f"/job:{jobs[0]}/replica:0/task:0",
      cluster_register_timeout_in_ms=int(1000 * max(1.0, timeout - _SLACK)),
      coordinated_jobs=list(config.coordinated_job_list),
    )
  # A worker that is killed while they connect leaves the others in C++, which
  # holds Python's lock: no thread of Python's could end that.
  limit = timeout + 2 * _SLACK
  faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or 2)
  try:
    yield
  except tf.errors.DeadlineExceededError as error:
    raise _missing(own[0], [first], timeout) from error
  finally:
    faulthandler.cancel_dump_traceback_later()


def _silent_tasks(
  tasks: Sequence[agreement.Task], deadline: float
) -> Sequence[agreement.Task]:
  """Returns the tasks that accept no connection until time is up."""
  while True:
    silent = []
    for task in tasks:
      host, _, port = task[2].rpartition(":")
      try:
        socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
      except (OSError, ValueError, OverflowError):  # also of no name of a host
        silent.append(task)
    if not silent or time.monotonic() >= deadline:
      return silent
    tasks = silent
    time.sleep(0.1)


def _missing(
  waiting: agreement.Task, missing: Sequence[agreement.Task], timeout: float
) -> errors.MissingWorkerError:
  """Returns the error for workers that did not start."""
  me, *names = map(agreement.name, (waiting, *missing))
  return errors.MissingWorkerError(
    f"{me} waited {timeout:g} s for {', '.join(names)} to start. Look into its"
    " log, start all workers with the same TF_CONFIG, and let them reach each"
    f" other{agreement.if_slow(timeout)}"
  )
