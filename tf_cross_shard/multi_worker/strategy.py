"""`tf.distribute.MultiWorkerMirroredStrategy` that says what is wrong.

Everything that trains is TensorFlow's. What is added: the cluster is checked
before it is waited for, workers that do not come or make other variables end
in an error, and Keras 3's own `fit` works.
"""

import contextlib
import itertools
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard.multi_worker import (
  coordination,
  errors,
  key_value_store,
  startup,
  tf_config,
)

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
      tf_config.check(os.environ.get("TF_CONFIG"))
      cluster_resolver = (
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
      )
    self.timeout = timeout
    self.timeout = coordination.timeout_of(self)
    self._series = next(_series)
    self._ordinals = itertools.count()
    self._announcing = threading.local()
    with startup.waiting(cluster_resolver, self.timeout):
      super().__init__(cluster_resolver, communication_options)
    self._workers = coordination.of_strategy(self)
    if self._workers:
      coordination.agree(self._workers, "the start", [])

  def scope(self) -> Any:
    """As TensorFlow's; workers compare the variables that they make in it."""
    return self._guarded(super().scope())

  def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
    """As TensorFlow's, and two cases that Keras 3's `fit` needs.

    Of a structure with a batch in it Keras asks the mean for its shapes. Where
    MirroredStrategy answers it as it came, TensorFlow fails here; this answers
    the batch of this worker's first replica. A structure of scalars is reduced
    one by one. A scalar has no dimension to reduce: over any `axis`, its mean
    or sum is that over the replicas.

    Args:
      reduce_op: `"MEAN"` or `"SUM"`, or a `tf.distribute.ReduceOp`.
      value: What `strategy.run` answered, or a structure of such values.
      axis: The dimension to reduce beside the replicas, or None.

    Returns:
      The reduced value, the same on all workers; a batch of this worker.
    """
    if isinstance(value, (tuple, list, dict)) and axis is None:
      if all(map(self._is_scalar, tf.nest.flatten(value))):
        return tf.nest.map_structure(
          lambda each: self.reduce(reduce_op, each, None), value
        )
      if _is_mean(reduce_op):
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
  def _guarded(self, scope: Any) -> Iterator[Any]:
    """A scope in which the making of a variable is announced."""
    with scope as strategy, tf.variable_creator_scope(self._announce):
      yield strategy

  def _announce(self, make: Callable[..., Any], **kwargs: Any) -> Any:
    """Compares a variable with that of the first worker, then makes it.

    Making one waits for the first worker to send the initial value. That would
    be for ever where the first worker makes fewer.
    """
    within = getattr(self._announcing, "within", False)
    if self._workers is None or within:  # scopes may be entered twice
      return make(**kwargs)
    ordinal = next(self._ordinals)
    mine = _Variable(kwargs)
    coordination.announce(
      self._workers, self._series, ordinal, str(mine), mine.is_like
    )
    self._announcing.within = True
    try:
      return make(**kwargs)
    except tf.errors.InvalidArgumentError as error:
      raise self._not_alike(ordinal, str(mine), error) from error
    finally:
      self._announcing.within = False

  def _not_alike(
    self, ordinal: int, what: str, error: tf.errors.InvalidArgumentError
  ) -> Exception:
    """The error for what shows only when a variable is made: its shape."""
    found = errors.of_message(str(error.message))
    if self._workers is None or not isinstance(found, errors.DisagreementError):
      return error
    if errors.is_reported(str(error.message)):
      return found
    name = self._workers.names[self._workers.index]
    detailed = errors.DisagreementError(
      f"{found} It is variable {ordinal} of {name}, {what}."
    )
    key_value_store.report(self._workers.index, detailed)
    return detailed


def _is_mean(reduce_op: Any) -> bool:
  """Whether a mean is asked for, in any spelling."""
  return str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"


class _Variable:
  """What is known of a variable before it is made."""

  def __init__(self, kwargs: dict[str, Any]) -> None:
    initial = kwargs.get("initial_value")
    dtype = kwargs.get("dtype") or getattr(initial, "dtype", None)
    shape = kwargs.get("shape")
    if shape is None:
      shape = getattr(initial, "shape", None)
    # Keras numbers names by how many of a kind a program made before.
    name = re.sub(r"_\d+(?=/|$)", "", str(kwargs.get("name") or "Variable"))
    name = name.replace(" ", "_")  # which stand between what is known
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
