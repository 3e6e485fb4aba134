"""A variable with a copy per replica, and one on the host.

    host, a ResourceVariable      replicas, memory that XLA programs hold
    read, assign, checkpoints  <->  [copy 0, copy 1, ... copy N-1]

Programs take the replicas' copies and leave new ones. Nothing is copied to the
host until it looks: then the host receives copy 0, or, of a variable that is
summed or averaged on reading (metrics), the sum or mean. When the host's
value was set since, by whatever means, every replica receives it before the
next program runs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_cross_shard.virtual_tpu import tracing

if TYPE_CHECKING:
  from tf_cross_shard.virtual_tpu import xla


class ReplicaVariable(resource_variable_ops.ResourceVariable):
  """What `tf.Variable` makes under `VirtualTPUStrategy`."""

  def __init__(self, **kwargs: Any) -> None:
    """Makes the host's variable; the replicas' copies follow when needed.

    Args:
      **kwargs: What ResourceVariable takes.
    """
    self._copies: xla.Buffers | None = None
    # Whether the copies are newer than the host's value.
    self._host_is_behind = False
    # The host's value when it and the copies last agreed.
    self._agreed: tf.Tensor | None = None
    self._is_in_host_functions = False
    self._views: tuple[ReplicaView, ...] = ()
    super().__init__(**kwargs)

  @property
  def _handle(self) -> Any:
    """The resource. Whoever asks on the host is about to use its value.

    TensorFlow's fast path reads this very name, not `handle`.
    """
    if not tracing.in_replica_program():
      if not tf.executing_eagerly():
        # This function's later calls will not ask again.
        self._is_in_host_functions = True
      self.update_host()
    return self._raw_handle

  @_handle.setter
  def _handle(self, handle: Any) -> None:
    self._raw_handle = handle

  @property
  def raw_handle(self) -> Any:
    """The host's resource, whether its value is the newest or not."""
    return self._raw_handle

  @property
  def distribute_strategy(self) -> Any:
    """The strategy whose replicas have the copies."""
    return self._distribute_strategy

  def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Sets this replica's copy; on the host all copies.

    Args:
      value: The new value.
      *args: What ResourceVariable takes.
      **kwargs: What ResourceVariable takes.

    Returns:
      What ResourceVariable answers.
    """
    value = self._aggregated(value)
    self._forget_copies()
    return super().assign(value, *args, **kwargs)

  def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds to this replica's copy; on the host to the value it sees.

    Args:
      delta: What to add.
      *args: What ResourceVariable takes.
      **kwargs: What ResourceVariable takes.

    Returns:
      What ResourceVariable answers.
    """
    delta = self._aggregated(delta)
    self._forget_copies()
    return super().assign_add(delta, *args, **kwargs)

  def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Subtracts like `assign_add` adds.

    Args:
      delta: What to subtract.
      *args: What ResourceVariable takes.
      **kwargs: What ResourceVariable takes.

    Returns:
      What ResourceVariable answers.
    """
    delta = self._aggregated(delta)
    self._forget_copies()
    return super().assign_sub(delta, *args, **kwargs)

  def views(self) -> tuple["ReplicaView", ...]:
    """Each replica's copy, to read and assign on the host."""
    if not self._views:
      count = self._distribute_strategy.num_replicas_in_sync
      self._views = tuple(ReplicaView(self, i) for i in range(count))
    return self._views

  def take(self, client: "xla.Client") -> "xla.Buffers":
    """The replicas' copies, for a program to use and replace.

    Args:
      client: The replicas.

    Returns:
      Their copies, brought up to date with the host's value.
    """
    if self._copies is None or self._was_assigned():
      count = client.num_replicas
      value = self._as_array(self._read_raw())
      if self._is_read_by(tf.VariableAggregation.SUM):
        value = (value / count).astype(value.dtype)
      self._copies = client.put([value.copy() for _ in range(count)])
      self._agree(self._read_raw())
    return self._copies

  def replace(self, copies: "xla.Buffers") -> None:
    """Takes what a program left.

    Args:
      copies: The replicas' new copies.
    """
    self._copies = copies
    self._host_is_behind = True
    if self._is_in_host_functions:
      self.update_host()

  def update_host(self) -> None:
    """Gives the host the newest value."""
    if not self._host_is_behind:
      return
    assert self._copies is not None
    # Set first: what follows reads and assigns this variable.
    self._host_is_behind = False
    with tf.init_scope():
      value = tf.constant(self._seen_by_host(), self.dtype)
      tf.raw_ops.AssignVariableOp(resource=self._raw_handle, value=value)
      self._agree(self._read_raw())

  def copy(self, replica: int) -> np.ndarray:
    """One replica's value.

    Args:
      replica: Its number.

    Returns:
      A new array.
    """
    if self._copies is None or self._was_assigned():
      value = self._as_array(self._read_raw())
      if self._is_read_by(tf.VariableAggregation.SUM):
        count = self._distribute_strategy.num_replicas_in_sync
        value = (value / count).astype(value.dtype)
      return np.array(value)
    return np.array(self._copies.to_numpy(replica))

  def set_copies(self, values: Sequence[np.ndarray]) -> None:
    """Gives every replica a value of its own.

    Args:
      values: One per replica.
    """
    arrays = [np.array(value, self.dtype.as_numpy_dtype) for value in values]
    if self._copies is None:
      self._agree(self._read_raw())
    client = self._distribute_strategy.extended.client
    self.replace(client.put(arrays))

  def _seen_by_host(self) -> np.ndarray:
    """What reading this variable on the host answers."""
    copies = self._copies
    assert copies is not None
    # Copied: the memory belongs to the next program.
    if not self._is_read_by(
      tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN
    ):
      return np.array(copies.to_numpy(0))
    count = self._distribute_strategy.num_replicas_in_sync
    total = sum(copies.to_numpy(i) for i in range(1, count))
    total = copies.to_numpy(0) + total
    if self._is_read_by(tf.VariableAggregation.MEAN):
      total = total / count
    return np.asarray(total).astype(copies.dtype)

  def _is_read_by(self, *aggregations: tf.VariableAggregation) -> bool:
    """Whether copies are kept apart and combined so when they are read."""
    return (
      self.synchronization == tf.VariableSynchronization.ON_READ
      and self.aggregation in aggregations
    )

  def _aggregated(self, value: Any) -> Any:
    """What a replica assigns, combined where the variable asks for that.

    ONLY_FIRST_REPLICA is taken as this replica's own: counters are the only
    use, and all replicas count alike.
    """
    operation = {
      tf.VariableAggregation.SUM: "SUM",
      tf.VariableAggregation.MEAN: "MEAN",
    }.get(self.aggregation)
    context = tf.distribute.get_replica_context()
    if (
      operation is None
      or self.synchronization == tf.VariableSynchronization.ON_READ
      or context is None
      or not tracing.in_replica_program()
    ):
      return value
    value = tf.convert_to_tensor(value, self.dtype)
    return context.all_reduce(operation, value)

  def _forget_copies(self) -> None:
    """The host is about to set the value for all replicas."""
    if not tracing.in_replica_program():
      self.update_host()
      self._copies = self._agreed = None

  def _was_assigned(self) -> bool:
    """Whether the host's value was set since it and the copies agreed."""
    return self._agreed is None or not _same(self._read_raw(), self._agreed)

  def _agree(self, value: tf.Tensor) -> None:
    """Remembers the host's value of the moment."""
    self._agreed = value

  def _read_raw(self) -> tf.Tensor:
    """The host's value as it is; an eager tensor that shares its memory."""
    with tf.init_scope():
      return tf.raw_ops.ReadVariableOp(
        resource=self._raw_handle, dtype=self.dtype
      )

  @staticmethod
  def _as_array(value: tf.Tensor) -> np.ndarray:
    """A view of an eager tensor."""
    array: np.ndarray = value._numpy()
    return array


class ReplicaView:
  """One replica's copy of a variable, seen from the host."""

  def __init__(self, variable: ReplicaVariable, replica: int) -> None:
    """A view of one copy.

    Args:
      variable: The variable.
      replica: The replica's number.
    """
    self._variable = variable
    self._replica = replica

  @property
  def handle(self) -> Any:
    """The variable's: what a tape records when this is read in a scope."""
    return self._variable.handle

  @property
  def trainable(self) -> bool:
    """The variable's."""
    return bool(self._variable.trainable)

  @property
  def dtype(self) -> tf.DType:
    """The variable's."""
    return self._variable.dtype

  @property
  def shape(self) -> tf.TensorShape:
    """The variable's."""
    return self._variable.shape

  @property
  def name(self) -> str:
    """The variable's name and the replica's number."""
    return f"{self._variable.name}/replica_{self._replica}"

  def numpy(self) -> np.ndarray:
    """The value."""
    return self._variable.copy(self._replica)

  def read_value(self) -> tf.Tensor:
    """The value, as a tensor."""
    return tf.constant(self.numpy(), self.dtype)

  def assign(self, value: Any) -> "ReplicaView":
    """Sets this copy and leaves those of other replicas.

    Args:
      value: What `np.array` takes, of the variable's shape.

    Returns:
      This view.

    Raises:
      ValueError: If `value` has another shape.
    """
    array = np.array(value)
    if array.shape != tuple(self.shape):
      raise ValueError(
        f"`value` must have the shape {tuple(self.shape)} of {self.name}; got"
        f" {array.shape}."
      )
    views = self._variable.views()
    values = [view.numpy() for view in views]
    values[self._replica] = array
    self._variable.set_copies(values)
    return self

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    """The value, for NumPy."""
    del copy
    return self.numpy() if dtype is None else self.numpy().astype(dtype)

  def __repr__(self) -> str:
    """Name and value."""
    return f"<ReplicaView {self.name}, numpy={self.numpy()}>"


def _same(value: tf.Tensor, earlier: tf.Tensor) -> bool:
  """Whether a variable still has the value that was read from it earlier.

  As long as `earlier` lives its memory is not used again, and TensorFlow never
  writes to memory that a tensor shares with a variable: the same address means
  that nothing was assigned. The other way round, reading copies once an
  IndexedSlices was assigned; then the elements tell.
  """
  new, old = np.asarray(value._numpy()), np.asarray(earlier._numpy())
  if new.ndim and new.ctypes.data == old.ctypes.data:
    return True
  return new.tobytes() == old.tobytes()


tf.register_tensor_conversion_function(
  ReplicaView,
  lambda view, dtype=None, name=None, as_ref=False: tf.convert_to_tensor(
    view.numpy(), dtype or view.dtype, name
  ),
)
