"""A MultiWorkerMirroredStrategy that reports errors instead of hanging.

TensorFlow's worker 0 waits for the others without a time limit, in a call that
nothing can interrupt. So worker 0 starts when all others accept connections:

    worker 1, 2, ...   accept connections ──▶ register, or time out
    worker 0           wait for all others ─▶ start, accept registrations
"""

import contextlib
import faulthandler
import functools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard._src.multi_worker import stall_watch

# Seconds that TensorFlow adds to the time limit for registering.
_SLACK: Final = 5.0
_ADDRESS: Final = re.compile(r".+:\d{1,5}")


class MultiWorkerStrategy(tf.distribute.MultiWorkerMirroredStrategy):
  """MultiWorkerMirroredStrategy with checks, time limits and Keras 3's `fit`.

  Use it instead of `tf.distribute.MultiWorkerMirroredStrategy`. A program may
  create several strategies, one after the other. Without TF_CONFIG, the program
  is the only worker:

  >>> import tensorflow as tf
  >>> from tf_cross_shard import multi_worker
  >>> strategy = multi_worker.MultiWorkerStrategy()
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
    step_timeout: float | None = None,
  ) -> None:
    """Starts this worker and waits for the others.

    Args:
      cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver`. None
        (the default) reads the environment variable TF_CONFIG.
      communication_options: `tf.distribute.experimental.CommunicationOptions`,
        or None for TensorFlow's defaults.
      timeout: The number of seconds to wait for another worker at the start
        and whenever workers compare what they do. None (the default) means
        the value of the environment variable TF_CROSS_SHARD_TIMEOUT, or 50.
      step_timeout: The number of seconds to wait for another worker in a step.
        Choose more than your slowest step takes, including the tracing of the
        first step, and more than what only one worker does between two steps,
        such as an evaluation. None (the default) means the value of the
        environment variable TF_CROSS_SHARD_STEP_TIMEOUT, or 1800.

    Raises:
      ValueError: If TF_CONFIG, `timeout` or `step_timeout` is malformed.
      MissingWorkerError: If a worker does not start in time.
      DisagreementError: If workers have different versions of libraries.
    """
    self.timeout = workers_lib.time_limit("timeout", timeout)
    self.step_timeout = workers_lib.time_limit("step_timeout", step_timeout)
    if cluster_resolver is None:
      check_tf_config(os.environ.get("TF_CONFIG"))
      cluster_resolver = (
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
      )
    with _limited_wait(cluster_resolver, self.timeout):
      try:
        super().__init__(cluster_resolver, communication_options)
      except RuntimeError as error:
        if "program startup" not in str(error):
          raise
        raise RuntimeError(
          "MultiWorkerStrategy must be created before the first operation of"
          " TensorFlow. Create it at the start of the program; in a notebook,"
          " restart the kernel first."
        ) from error
    self._workers = workers_lib.of_strategy(self)
    workers_lib.compare_workers(self._workers, "the start")
    # `collective_ops` runs the collectives of optimizers by it, too.
    self.run_watched: Any = None
    if self._workers is not None:
      replicas = len(self.extended.worker_devices)
      self.run_watched = stall_watch.StallWatch(self._workers, replicas).run

  @contextlib.contextmanager
  def scope(self) -> Iterator[Any]:
    """Enters the strategy's scope.

    Returns:
      A context manager whose value is the strategy.
    """
    with super().scope(), tf.variable_creator_scope(self._create):
      yield self

  def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
    """Reduces values over replicas, also in the cases that Keras 3 needs.

    Three cases differ from TensorFlow's method:

    - A structure of scalars is reduced element by element.
    - A scalar is reduced over the replicas, whatever `axis` is.
    - For the mean of a structure that contains a batch, the result is the batch
      of this worker's first replica. Keras does this to learn shapes, and
      TensorFlow's method fails.

    Args:
      reduce_op: `"MEAN"` or `"SUM"`, or a `tf.distribute.ReduceOp`.
      value: A result of `strategy.run`, or a structure of such results.
      axis: The dimension to reduce in addition to the replicas, or None.

    Returns:
      The reduced value, which is the same on all workers; in the third case, a
      batch of this worker.
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
    if self.run_watched is None:
      return super().reduce(reduce_op, value, axis)
    local = self.experimental_local_results(value)
    inputs = [each for each in tf.nest.flatten(local) if tf.is_tensor(each)]
    return self.run_watched(
      inputs, functools.partial(super().reduce, reduce_op, value, axis)
    )

  def _is_scalar(self, value: Any) -> bool:
    return all(
      tf.is_tensor(local) and local.shape.rank == 0
      for local in self.experimental_local_results(value)
    )

  def _create(self, make: Callable[..., Any], **kwargs: Any) -> Any:
    """Creates a variable on all workers; an error names what went wrong."""
    workers = self._workers
    if workers is None or not tf.executing_eagerly():
      return make(**kwargs)
    name = kwargs.get("name") or "Variable"
    shape = kwargs.get("shape")
    if shape is None:
      shape = getattr(kwargs.get("initial_value"), "shape", None)
    shape = tf.TensorShape(shape)
    if shape.num_elements() == 0:
      raise ValueError(
        f"The variable {name} of shape {shape} is empty, and TensorFlow crashes"
        " when it sends an empty variable to the other workers. Create it"
        " outside the scope, or with at least one element."
      )
    try:
      return self.run_watched([], lambda: make(**kwargs))
    except tf.errors.OpError as error:
      cause = workers_lib.from_message(str(error.message))
      if cause is None:
        raise
      is_reported = " was creating " in str(cause)
      if isinstance(cause, workers_lib.DisagreementError) and not is_reported:
        cause = workers_lib.DisagreementError(
          f"{cause} {workers.own_name} was creating the variable {name}."
        )
        workers_lib.abort(cause)
      raise cause from error


def check_tf_config(text: str | None) -> None:
  """Raises `ValueError` for a TF_CONFIG with which TensorFlow would hang."""
  with workers_lib.naming_tf_config():
    config = json.loads(text or "{}")
    if not config.get("cluster"):
      return  # To TensorFlow, this is a single worker.
    cluster = tf.train.ClusterSpec(config["cluster"])
    addresses = {
      (job, str(index)): cluster.task_address(job, index)
      for job in cluster.jobs
      for index in cluster.task_indices(job)
    }
    for address in addresses.values():
      if not _ADDRESS.fullmatch(str(address)):
        raise ValueError(f"the address {address!r} is not host:port")
    task = (config["task"]["type"], str(config["task"]["index"]))
    if task not in addresses:
      known = ", ".join(f"{job} {index}" for job, index in addresses)
      raise ValueError(f"the cluster has {known}, but no {' '.join(task)}")


@contextlib.contextmanager
def _limited_wait(resolver: Any, timeout: float) -> Iterator[None]:
  """Limits the wait for workers in the constructor of TensorFlow's strategy."""
  tasks = workers_lib.tasks(resolver.cluster_spec() or tf.train.ClusterSpec({}))
  job_and_index = (resolver.task_type, int(resolver.task_id or 0))
  mine = [task for task in tasks if task[:2] == job_and_index]
  if len(tasks) < 2 or not mine:
    yield
    return
  first, *others = tasks
  # Worker 0: wait here, with a limit, until all others accept connections.
  if mine[0] == first:
    silent = _silent_tasks(others, time.monotonic() + timeout)
    if silent:
      raise _missing(first, silent, timeout)
  eager = context.context()
  # If the program has configured the coordination service, keep its settings.
  if eager.coordination_service is None:
    jobs = [job for job, *_ in tasks]
    config = tf.compat.v1.ConfigProto().experimental.coordination_config
    for job in dict.fromkeys(jobs):
      config.coordinated_job_list.add(name=job, num_tasks=jobs.count(job))
    # The settings of TensorFlow's strategy, with a time limit added.
    eager.configure_coordination_service(
      service_type="standalone",
      service_leader=f"/job:{jobs[0]}/replica:0/task:0",
      cluster_register_timeout_in_ms=int(1000 * max(1.0, timeout - _SLACK)),
      coordinated_jobs=list(config.coordinated_job_list),
    )
  # If a worker is killed while the workers connect, the others wait in C++ code
  # that holds Python's global lock. No Python thread could end this wait, but
  # faulthandler's own thread ends the process.
  limit = timeout + 2 * _SLACK
  faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or 2)
  try:
    yield
  except tf.errors.DeadlineExceededError as error:
    raise _missing(mine[0], [first], timeout) from error
  finally:
    faulthandler.cancel_dump_traceback_later()


def _silent_tasks(
  tasks: Sequence[workers_lib.Task], deadline: float
) -> Sequence[workers_lib.Task]:
  """Returns the tasks that accept no connection before the deadline."""
  while True:
    silent = []
    for task in tasks:
      host, _, port = task[2].rpartition(":")
      try:
        socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
      except (OSError, ValueError, OverflowError):  # Also a bad name or port.
        silent.append(task)
    if not silent or time.monotonic() >= deadline:
      return silent
    tasks = silent
    time.sleep(0.1)


def _missing(
  waiting: workers_lib.Task, missing: Sequence[workers_lib.Task], timeout: float
) -> workers_lib.MissingWorkerError:
  me, *names = map(workers_lib.name, (waiting, *missing))
  return workers_lib.MissingWorkerError(
    f"{me} waited {timeout:g} s for {', '.join(names)} to start. Read its"
    " log, start all workers with the same TF_CONFIG, and make sure that they"
    f" can reach each other{workers_lib.if_slow('timeout', timeout)}"
  )
