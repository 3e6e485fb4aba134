"""A variable with a copy per replica, and one on the host.

    host, a ResourceVariable      replicas, memory that XLA programs hold
    read, assign, checkpoints  <->  [copy 0, copy 1, ... copy N-1]

Programs take the replicas' copies and leave new ones. Nothing is copied to the
host until it looks: then the host receives copy 0, or, of a variable that is
summed or averaged on reading (metrics), the sum or mean. When the host's
value was set since, by whatever means, every replica receives it before the
next program runs.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_cross_shard.virtual_tpu import tracing, views

if TYPE_CHECKING:
  from tf_cross_shard.virtual_tpu import xla


class ReplicaVariable(resource_variable_ops.ResourceVariable):
  """What `tf.Variable` makes under `VirtualTPUStrategy`."""

  def __init__(self, **kwargs: Any) -> None:
    """Makes the host's variable; the replicas' copies follow when needed."""
    self._copies: xla.Buffers | None = None
    # Whether the copies are newer than the host's value.
    self._host_is_behind = False
    # The host's value when it and the copies last agreed.
    self._agreed: tf.Tensor | None = None
    self._is_in_host_functions = False
    self._views: tuple[views.ReplicaView, ...] = ()
    super().__init__(**kwargs)
    if self._is_read_by(tf.VariableAggregation.SUM):
      # Every copy has the initial value, and the host sees their sum.
      count = self._distribute_strategy.num_replicas_in_sync
      self._write_raw(np.asarray(self._read_raw()._numpy()) * count)

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
    """Sets this replica's copy; on the host all copies."""
    self._host_will_assign()
    return super().assign(self._aggregated(value), *args, **kwargs)

  def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds to this replica's copy; on the host to the value it sees."""
    self._host_will_assign()
    return super().assign_add(self._aggregated(delta), *args, **kwargs)

  def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Subtracts like `assign_add` adds."""
    self._host_will_assign()
    return super().assign_sub(self._aggregated(delta), *args, **kwargs)

  def _restore_from_tensors(self, restored_tensors: Any) -> Any:
    self._host_will_assign()
    return super()._restore_from_tensors(restored_tensors)

  def __deepcopy__(self, memo: dict[int, Any]) -> "ReplicaVariable":
    """A variable of the same strategy, every copy copied."""
    with self._distribute_strategy.scope():
      made: ReplicaVariable = tf.Variable(
        self.read_value(),
        trainable=self.trainable,
        name=self._shared_name,
        synchronization=self.synchronization,
        aggregation=self.aggregation,
        constraint=self.constraint,
      )
    made.set_copies([view.numpy() for view in self.views()])
    memo[id(self)] = made
    return made

  def views(self) -> tuple["views.ReplicaView", ...]:
    """Each replica's copy, to read and assign on the host."""
    if not self._views:
      count = self._distribute_strategy.num_replicas_in_sync
      self._views = tuple(views.ReplicaView(self, i) for i in range(count))
    return self._views

  def take(self, client: "xla.Client") -> "xla.Buffers":
    """The replicas' copies, for a program to use and replace."""
    with self._lock:
      if self._copies is None or self._was_assigned():
        value = self._set_by_host()
        self._copies = client.put(
          [value.copy() for _ in range(client.num_replicas)]
        )
        self._agreed = self._read_raw()
      return self._copies

  def replace(self, copies: "xla.Buffers") -> None:
    """Takes what a program left."""
    with self._lock:
      self._copies = copies
      self._host_is_behind = True
      if self._is_in_host_functions:
        self.update_host()

  def update_host(self) -> None:
    """Gives the host the newest value."""
    with self._lock:
      if not self._host_is_behind:
        return
      # Set first: what follows reads and assigns this variable.
      self._host_is_behind = False
      self._write_raw(self._seen_by_host())
      self._agreed = self._read_raw()

  def copy(self, replica: int) -> np.ndarray:
    """One replica's value."""
    with self._lock:
      if self._copies is None or self._was_assigned():
        return np.array(self._set_by_host())
      return np.array(self._copies.to_numpy(replica))

  def set_copies(self, values: Sequence[np.ndarray]) -> None:
    """Gives every replica a value of its own."""
    arrays = [np.array(value, self.dtype.as_numpy_dtype) for value in values]
    client = self._distribute_strategy.extended.client
    with self._lock:
      self._agreed = self._read_raw()
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

  def _host_will_assign(self) -> None:
    """Unless a replica assigns, all copies follow the host's next value.

    Also when it has the value that replica 0 has already.
    """
    if tracing.in_replica_program():
      return
    if tf.executing_eagerly():
      self._forget_copies()
      return
    # In every call of the function being built, after what stands before. As
    # `_handle` is asked first, a weak reference will do: its graph has one.
    variable = weakref.ref(self)

    def forget(handle: tf.Tensor) -> None:
      del handle
      this = variable()
      if this is not None:
        this._forget_copies()

    tf.py_function(forget, [self._handle], [])

  def _forget_copies(self) -> None:
    """Lets the replicas receive the host's value before the next program."""
    with self._lock:
      self.update_host()
      self._copies = self._agreed = None

  @property
  def _lock(self) -> Any:
    """Held by whoever changes copies; by programs while they run."""
    return self._distribute_strategy.extended.lock

  def _set_by_host(self) -> np.ndarray:
    """What each replica receives of the host's value."""
    value = np.asarray(self._read_raw()._numpy())
    if self._is_read_by(tf.VariableAggregation.SUM):
      count = self._distribute_strategy.num_replicas_in_sync
      value = (value / count).astype(value.dtype)
    return value

  def _was_assigned(self) -> bool:
    """Whether the host's value was set since it and the copies agreed."""
    return self._agreed is None or not _same(self._read_raw(), self._agreed)

  def _read_raw(self) -> tf.Tensor:
    """The host's value as it is; an eager tensor that shares its memory."""
    with tf.init_scope():
      return tf.raw_ops.ReadVariableOp(
        resource=self._raw_handle, dtype=self.dtype
      )

  def _write_raw(self, array: np.ndarray) -> None:
    """Sets the host's value and no more."""
    with tf.init_scope():
      value = tf.constant(array, self.dtype)
      tf.raw_ops.AssignVariableOp(resource=self._raw_handle, value=value)


def _assigning(name: str) -> Any:
  """A method of ResourceVariable that assigns, for `ReplicaVariable`."""
  of_base = getattr(resource_variable_ops.ResourceVariable, name)

  @functools.wraps(of_base)
  def assign(self: ReplicaVariable, *args: Any, **kwargs: Any) -> Any:
    self._host_will_assign()
    return of_base(self, *args, **kwargs)

  return assign


for _name in (
  "_strided_slice_assign",
  "batch_scatter_update",
  "scatter_add",
  "scatter_div",
  "scatter_max",
  "scatter_min",
  "scatter_mul",
  "scatter_nd_add",
  "scatter_nd_max",
  "scatter_nd_min",
  "scatter_nd_sub",
  "scatter_nd_update",
  "scatter_sub",
  "scatter_update",
):
  setattr(ReplicaVariable, _name, _assigning(_name))


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
