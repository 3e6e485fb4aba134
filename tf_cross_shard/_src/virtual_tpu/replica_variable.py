"""A variable of the virtual TPU, with a copy for each replica.

    on the host: a ResourceVariable       on replicas: memory of XLA programs
    read, assign, checkpoints       ◀──▶  [copy 0, copy 1, ... copy N-1]

A program takes the replicas' copies and returns new ones. The host's value is
updated only when the host reads it: it becomes copy 0, or the sum or mean of
the copies if the variable is aggregated on reading, as metrics are. After the
host's value was set, by whatever means, every replica receives it before the
next program runs.
"""

import functools
import re
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_cross_shard._src.virtual_tpu import replica_context, xla

_Aggregation: Final = tf.VariableAggregation


def host_view(tensor: tf.Tensor) -> np.ndarray:
  """Returns an array that shares the memory of an eager tensor."""
  # The public `numpy` copies. Every argument of every step passes here, and
  # `_was_assigned` compares addresses.
  return np.asarray(tensor._numpy())  # noqa: SLF001


class ReplicaVariable(resource_variable_ops.ResourceVariable):
  """A variable of `VirtualTPUStrategy`, with a copy for each replica."""

  def __init__(self, **kwargs: Any) -> None:
    # The replicas' copies; None until the first program needs them.
    self._copies: xla.Buffers = None
    # Whether the copies are newer than the host's value.
    self._is_host_stale = False
    # The host's value when the host and the copies last agreed.
    self._agreed: tf.Tensor | None = None
    # Whether a tf.function on the host reads or assigns this variable.
    self._is_in_host_functions = False
    super().__init__(**kwargs)
    is_mean = self.aggregation == _Aggregation.MEAN
    if is_mean and not self.dtype.is_floating:
      raise ValueError(
        "`aggregation` must not be MEAN for a variable whose dtype is not"
        f" floating; got {self.dtype.name}. Choose SUM or ONLY_FIRST_REPLICA."
      )
    on_read = self.synchronization == tf.VariableSynchronization.ON_READ
    # How copies are combined when the host reads them, and how values are
    # combined when replicas assign them.
    self._on_read = self.aggregation if on_read else _Aggregation.NONE
    self._on_assign = _Aggregation.NONE if on_read else self.aggregation
    if self._on_read == _Aggregation.SUM:
      # Every copy starts with the initial value, and the host reads their sum.
      self._write_raw(host_view(self._read_raw()) * self._replicas.num_replicas)

  @property
  def _handle(self) -> Any:
    """The resource of the host's value, which is updated before it is read.

    TensorFlow's fast path reads this private name, not `handle`.
    """
    if not replica_context.in_replica_program():
      if not tf.executing_eagerly():
        # Later calls of this tf.function do not read this property. From now
        # on, the host's value is updated after every program.
        self._is_in_host_functions = True
      self.update_host()
    return self.raw_handle

  @_handle.setter
  def _handle(self, handle: Any) -> None:
    # `raw_handle` gives the host's resource without updating its value.
    self.raw_handle = handle

  @property
  def distribute_strategy(self) -> Any:
    """The strategy whose replicas hold the copies."""
    return self._distribute_strategy

  def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Sets this replica's copy, or all copies if called on the host."""
    self._prepare_host_assignment()
    return super().assign(self._aggregate(value), *args, **kwargs)

  def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds to this replica's copy.

    On the host, it adds to the value that the host reads, and sets all copies.
    """
    self._prepare_host_assignment()
    return super().assign_add(self._aggregate(delta), *args, **kwargs)

  def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Subtracts from this replica's copy; works like `assign_add`."""
    self._prepare_host_assignment()
    return super().assign_sub(self._aggregate(delta), *args, **kwargs)

  def views(self) -> tuple["ReplicaView", ...]:
    """Returns each replica's copy, to read and assign on the host."""
    return tuple(
      ReplicaView(self, i) for i in range(self._replicas.num_replicas)
    )

  def take(self) -> xla.Buffers:
    """Returns the copies for a program.

    After the program has run, call `replace`.

    If the host's value was set, the copies are made from it first.
    """
    with self._replicas.lock:
      if self._copies is None or self._was_assigned():
        value = self._value_for_replicas()
        self._copies = self._replicas.client.put(
          [value.copy() for _ in range(self._replicas.num_replicas)]
        )
        self._agreed = self._read_raw()
      return self._copies

  def replace(self, copies: xla.Buffers) -> None:
    """Stores the new copies that a program returned."""
    with self._replicas.lock:
      self._copies = copies
      self._is_host_stale = True
      if self._is_in_host_functions:
        self.update_host()

  def update_host(self) -> None:
    """Sets the host's value from the copies if those are newer."""
    with self._replicas.lock:
      if not self._is_host_stale:
        return
      # Reset the flag first: the next lines read and assign this variable.
      self._is_host_stale = False
      self._write_raw(self._value_for_host())
      self._agreed = self._read_raw()

  def set_copies(self, values: Sequence[np.ndarray]) -> None:
    """Sets each replica's copy to that replica's value."""
    arrays = [np.array(value, self.dtype.as_numpy_dtype) for value in values]
    with self._replicas.lock:
      self._agreed = self._read_raw()
      self.replace(self._replicas.client.put(arrays))

  def _value_for_host(self) -> np.ndarray:
    """Computes the value that the host reads from the copies."""
    copies = self._copies
    # Copy the array: the next program reuses the memory of the copies.
    if self._on_read not in (_Aggregation.SUM, _Aggregation.MEAN):
      return np.array(xla.to_numpy(copies, 0))
    count = self._replicas.num_replicas
    total = np.sum([xla.to_numpy(copies, i) for i in range(count)], axis=0)
    is_mean = self._on_read == _Aggregation.MEAN
    return np.asarray(total / count if is_mean else total, copies.dtype)

  def _value_for_replicas(self) -> np.ndarray:
    """Computes the value that each replica receives from the host's value."""
    value = host_view(self._read_raw())
    # The host reads the sum of the copies, so each copy is an equal part.
    if self._on_read == _Aggregation.SUM:
      value = (value / self._replicas.num_replicas).astype(value.dtype)
    return value

  def _aggregate(self, value: Any) -> Any:
    """Combines the values that replicas assign, if the variable aggregates."""
    if not self._combines():
      return value
    context = tf.distribute.get_replica_context()
    value = tf.convert_to_tensor(value, self.dtype)
    if self._on_assign == _Aggregation.ONLY_FIRST_REPLICA:
      return context.of_first_replica(value)
    return context.all_reduce(self._on_assign.name, value)

  def _combines(self) -> bool:
    """Returns whether assigning here combines the values of all replicas."""
    # In a merge call, and while a replica is isolated, the replica context is
    # another one, and each value is assigned as it is.
    return self._on_assign != _Aggregation.NONE and isinstance(
      tf.distribute.get_replica_context(), replica_context.TracedReplicaContext
    )

  def _prepare_host_assignment(self) -> None:
    """Discards the replicas' copies before the host assigns a value.

    `_was_assigned` alone would not notice that the host assigns the value that
    replica 0 has already. In a replica's program nothing happens.
    """
    if replica_context.in_replica_program():
      return
    if tf.executing_eagerly():
      self._forget_copies()
      return
    # Add an operation, so that every call of the tf.function discards the
    # copies. It takes the handle, which orders it after earlier operations. A
    # weak reference suffices: the graph keeps the variable alive since
    # `_handle` was read.
    forget = weakref.WeakMethod(self._forget_copies)
    tf.py_function(lambda _: forget()(), [self._handle], [])  # type: ignore[misc]

  def _forget_copies(self) -> None:
    """Discards the copies: the next program starts from the host's value."""
    with self._replicas.lock:
      self.update_host()
      self._copies = self._agreed = None

  @property
  def _replicas(self) -> Any:
    """The devices of the strategy, and the lock held while copies change."""
    return self._distribute_strategy.extended.replicas

  def _was_assigned(self) -> bool:
    """Returns whether the host's value is newer than the copies.

    As long as `_agreed` exists, TensorFlow neither writes to its memory nor
    reuses it. So the value is unchanged if it has the same address. At another
    address, the elements are compared, since reading may have created a copy.
    """
    if self._agreed is None:
      return True
    new, old = host_view(self._read_raw()), host_view(self._agreed)
    if new.ndim and new.ctypes.data == old.ctypes.data:
      return False
    return new.tobytes() != old.tobytes()

  def _read_raw(self) -> tf.Tensor:
    """Returns the host's value without updating it.

    The result is an eager tensor that shares the memory of the variable.
    """
    with tf.init_scope():
      return tf.raw_ops.ReadVariableOp(
        resource=self.raw_handle, dtype=self.dtype
      )

  def _write_raw(self, array: np.ndarray) -> None:
    """Sets the host's value and leaves the replicas' copies."""
    with tf.init_scope():
      value = tf.constant(array, self.dtype)
      tf.raw_ops.AssignVariableOp(resource=self.raw_handle, value=value)


def _override(name: str) -> None:
  """Returns an assigning method that sets all copies on the host."""
  method = getattr(resource_variable_ops.ResourceVariable, name)

  @functools.wraps(method)
  def assign(self: ReplicaVariable, *args: Any, **kwargs: Any) -> Any:
    self._prepare_host_assignment()
    if self._combines():
      raise NotImplementedError(
        f"Replicas cannot call {name} on {self.name}, because it has"
        f" aggregation={self._on_assign.name}. Use assign or assign_add, or"
        " aggregation NONE."
      )
    return method(self, *args, **kwargs)

  setattr(ReplicaVariable, name, assign)


# The methods that assign to a part of the variable or restore it.
for _name in dir(resource_variable_ops.ResourceVariable):
  if re.match("(batch_)?scatter_|_strided_slice_assign|_restore_from", _name):
    _override(_name)


class ReplicaView:
  """One replica's copy of a variable, which the host can read and assign."""

  def __init__(self, variable: ReplicaVariable, replica: int) -> None:
    self._variable = variable
    self._replica = replica
    self.trainable: bool = variable.trainable
    self.dtype: tf.DType = variable.dtype
    self.shape: tf.TensorShape = variable.shape
    self.name = f"{variable.name}/replica_{replica}"

  @property
  def handle(self) -> Any:
    """The handle of the variable, which a tape records when it reads a copy."""
    return self._variable.handle

  def numpy(self) -> np.ndarray:
    """Returns the value of this copy as an array."""
    with self._variable.distribute_strategy.extended.replicas.lock:
      return np.array(xla.to_numpy(self._variable.take(), self._replica))

  def read_value(self) -> tf.Tensor:
    """Returns the value of this copy as a tensor."""
    return tf.constant(self.numpy(), self.dtype)

  def assign(self, value: Any) -> "ReplicaView":
    """Sets this copy; the copies of other replicas do not change."""
    tensor = tf.convert_to_tensor(value, self.dtype)
    tensor = tf.ensure_shape(tensor, self.shape, name="assign")
    with self._variable.distribute_strategy.extended.replicas.lock:
      values = [view.numpy() for view in self._variable.views()]
      values[self._replica] = tensor.numpy()
      self._variable.set_copies(values)
    return self

  # The callback SwapEMAWeights of Keras adds and subtracts copies.

  def assign_add(self, delta: Any) -> "ReplicaView":
    """Adds a value to this copy."""
    return self.assign(tf.add(self, delta))

  def __sub__(self, other: Any) -> tf.Tensor:
    return tf.subtract(self, other)

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    return self.numpy() if dtype is None else self.numpy().astype(dtype)

  def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
    return tf.convert_to_tensor(self.numpy(), dtype or self.dtype, name=name)

  def __repr__(self) -> str:
    return f"<ReplicaView {self.name}, numpy={self.numpy()}>"
