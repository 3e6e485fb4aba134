"""A variable with a copy per replica, and one on the host.

    host, a ResourceVariable      replicas, memory that XLA programs hold
    read, assign, checkpoints  <->  [copy 0, copy 1, ... copy N-1]

Programs take the replicas' copies and leave new ones. The host receives a value
only when it reads: copy 0, or the sum or mean of the copies if the variable is
aggregated on reading (metrics). After the host's value was set, by whatever
means, every replica receives it before the next program runs.
"""

import functools
import re
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_cross_shard.virtual_tpu import replica_context, xla

_Aggregation: Final = tf.VariableAggregation


class ReplicaVariable(resource_variable_ops.ResourceVariable):
  """A variable of `VirtualTPUStrategy`, with a copy for each replica."""

  def __init__(self, **kwargs: Any) -> None:
    # Made when the first program needs them.
    self._copies: xla.Buffers = None
    # Whether the copies are newer than the host's value.
    self._host_is_behind = False
    # The host's value when it and the copies last agreed.
    self._agreed: tf.Tensor | None = None
    self._is_in_host_functions = False
    super().__init__(**kwargs)
    is_mean = self.aggregation == _Aggregation.MEAN
    if is_mean and not self.dtype.is_floating:
      raise ValueError(
        "`aggregation` must not be MEAN for a variable whose dtype is not"
        f" floating; got {self.dtype.name}. Choose SUM or ONLY_FIRST_REPLICA."
      )
    on_read = self.synchronization == tf.VariableSynchronization.ON_READ
    # How copies are combined when the host reads, or when replicas assign.
    self._on_read = self.aggregation if on_read else _Aggregation.NONE
    self._on_assign = _Aggregation.NONE if on_read else self.aggregation
    if self._on_read == _Aggregation.SUM:
      # Every copy has the initial value, and the host reads their sum.
      self._write_raw(
        np.asarray(self._read_raw()._numpy()) * self._replicas.num_replicas
      )

  @property
  def _handle(self) -> Any:
    """The resource. A caller on the host is about to use its value.

    TensorFlow's fast path reads this very name, not `handle`.
    """
    if not replica_context.in_replica_program():
      if not tf.executing_eagerly():
        # Later calls of the function being built will not pass here.
        self._is_in_host_functions = True
      self.update_host()
    return self.raw_handle

  @_handle.setter
  def _handle(self, handle: Any) -> None:
    # The host's resource, whether its value is the newest or not.
    self.raw_handle = handle

  @property
  def distribute_strategy(self) -> Any:
    """The strategy whose replicas have the copies."""
    return self._distribute_strategy

  def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Sets this replica's copy; on the host all copies."""
    self._prepare_host_assignment()
    return super().assign(self._aggregate(value), *args, **kwargs)

  def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds to this replica's copy; on the host to the value it reads."""
    self._prepare_host_assignment()
    return super().assign_add(self._aggregate(delta), *args, **kwargs)

  def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Subtracts as `assign_add` adds."""
    self._prepare_host_assignment()
    return super().assign_sub(self._aggregate(delta), *args, **kwargs)

  def views(self) -> tuple["ReplicaView", ...]:
    """Each replica's copy, to read and assign on the host."""
    return tuple(
      ReplicaView(self, i) for i in range(self._replicas.num_replicas)
    )

  def take(self) -> xla.Buffers:
    """The replicas' copies, for a program to use and replace."""
    with self._replicas.lock:
      if self._copies is None or self._was_assigned():
        value = self._value_for_replicas()
        self._copies = self._replicas.client.put(
          [value.copy() for _ in range(self._replicas.num_replicas)]
        )
        self._agreed = self._read_raw()
      return self._copies

  def replace(self, copies: xla.Buffers) -> None:
    """Takes the copies that a program left."""
    with self._replicas.lock:
      self._copies = copies
      self._host_is_behind = True
      if self._is_in_host_functions:
        self.update_host()

  def update_host(self) -> None:
    """Gives the host the newest value."""
    with self._replicas.lock:
      if not self._host_is_behind:
        return
      # Set first: the lines below read and assign this variable.
      self._host_is_behind = False
      self._write_raw(self._value_for_host())
      self._agreed = self._read_raw()

  def set_copies(self, values: Sequence[np.ndarray]) -> None:
    """Gives every replica a value of its own."""
    arrays = [np.array(value, self.dtype.as_numpy_dtype) for value in values]
    with self._replicas.lock:
      self._agreed = self._read_raw()
      self.replace(self._replicas.client.put(arrays))

  def _value_for_host(self) -> np.ndarray:
    """The value that reading this variable on the host returns."""
    copies = self._copies
    # Copied: the next program reuses the memory.
    if self._on_read not in (_Aggregation.SUM, _Aggregation.MEAN):
      return np.array(xla.to_numpy(copies, 0))
    count = self._replicas.num_replicas
    total = np.sum([xla.to_numpy(copies, i) for i in range(count)], axis=0)
    is_mean = self._on_read == _Aggregation.MEAN
    return np.asarray(total / count if is_mean else total, copies.dtype)

  def _value_for_replicas(self) -> np.ndarray:
    """The part of the host's value that each replica receives."""
    value = np.asarray(self._read_raw()._numpy())
    if self._on_read == _Aggregation.SUM:
      value = (value / self._replicas.num_replicas).astype(value.dtype)
    return value

  def _aggregate(self, value: Any) -> Any:
    """The value that a replica assigns, combined if the variable says so."""
    if not self._combines():
      return value
    context = tf.distribute.get_replica_context()
    value = tf.convert_to_tensor(value, self.dtype)
    if self._on_assign == _Aggregation.ONLY_FIRST_REPLICA:
      return context.of_first_replica(value)
    return context.all_reduce(self._on_assign.name, value)

  def _combines(self) -> bool:
    """Whether a replica that assigns here needs other replicas' values."""
    # In a merge call, and while a replica is isolated, the context is another.
    return self._on_assign != _Aggregation.NONE and isinstance(
      tf.distribute.get_replica_context(), replica_context.TracedReplicaContext
    )

  def _prepare_host_assignment(self) -> None:
    """Makes all copies follow the host's next value, unless a replica assigns.

    Also when that is the value that replica 0 has already.
    """
    if replica_context.in_replica_program():
      return
    if tf.executing_eagerly():
      self._forget_copies()
      return
    # In every call of the function being built, after the operations before. A
    # weak reference will do: the graph holds one since `_handle` was read.
    forget = weakref.WeakMethod(self._forget_copies)
    tf.py_function(lambda _: forget()(), [self._handle], [])  # type: ignore[misc]

  def _forget_copies(self) -> None:
    """Makes the replicas receive the host's value before the next program."""
    with self._replicas.lock:
      self.update_host()
      self._copies = self._agreed = None

  @property
  def _replicas(self) -> Any:
    """Their number and devices, and the lock held while copies change."""
    return self._distribute_strategy.extended.replicas

  def _was_assigned(self) -> bool:
    """Whether the host's value was set since it and the copies agreed.

    As long as `_agreed` lives, neither is its memory used again nor does
    TensorFlow write to it: at the same address nothing was assigned. At another
    one the elements tell, since reading may copy.
    """
    if self._agreed is None:
      return True
    new = np.asarray(self._read_raw()._numpy())
    old = np.asarray(self._agreed._numpy())
    if new.ndim and new.ctypes.data == old.ctypes.data:
      return False
    return new.tobytes() != old.tobytes()

  def _read_raw(self) -> tf.Tensor:
    """The host's value as it is; an eager tensor that shares its memory."""
    with tf.init_scope():
      return tf.raw_ops.ReadVariableOp(
        resource=self.raw_handle, dtype=self.dtype
      )

  def _write_raw(self, array: np.ndarray) -> None:
    """Sets the host's value only."""
    with tf.init_scope():
      value = tf.constant(array, self.dtype)
      tf.raw_ops.AssignVariableOp(resource=self.raw_handle, value=value)


def _override(name: str) -> None:
  """Lets a method of ResourceVariable that assigns reach all copies."""
  method = getattr(resource_variable_ops.ResourceVariable, name)

  @functools.wraps(method)
  def assign(self: ReplicaVariable, *args: Any, **kwargs: Any) -> Any:
    self._prepare_host_assignment()
    if self._combines():
      raise NotImplementedError(
        f"{self.name} has aggregation={self._on_assign.name}, by which replicas"
        f" cannot {name}. Use assign or assign_add, or aggregation NONE."
      )
    return method(self, *args, **kwargs)

  setattr(ReplicaVariable, name, assign)


for _name in dir(resource_variable_ops.ResourceVariable):
  if re.match("(batch_)?scatter_|_strided_slice_assign|_restore_from", _name):
    _override(_name)


class ReplicaView:
  """One replica's copy of a variable, for the host to read and assign."""

  def __init__(self, variable: ReplicaVariable, replica: int) -> None:
    self._variable = variable
    self._replica = replica
    self.trainable: bool = variable.trainable
    self.dtype: tf.DType = variable.dtype
    self.shape: tf.TensorShape = variable.shape
    self.name = f"{variable.name}/replica_{replica}"

  @property
  def handle(self) -> Any:
    """The variable's: a tape records it when this is read in a scope."""
    return self._variable.handle

  def numpy(self) -> np.ndarray:
    """The value."""
    with self._variable.distribute_strategy.extended.replicas.lock:
      return np.array(xla.to_numpy(self._variable.take(), self._replica))

  def read_value(self) -> tf.Tensor:
    """The value, as a tensor."""
    return tf.constant(self.numpy(), self.dtype)

  def assign(self, value: Any) -> "ReplicaView":
    """Sets this copy and leaves those of other replicas."""
    tensor = tf.convert_to_tensor(value, self.dtype)
    tensor = tf.ensure_shape(tensor, self.shape, name="assign")
    with self._variable.distribute_strategy.extended.replicas.lock:
      values = [view.numpy() for view in self._variable.views()]
      values[self._replica] = tensor.numpy()
      self._variable.set_copies(values)
    return self

  # Keras' SwapEMAWeights adds and subtracts copies.

  def assign_add(self, delta: Any) -> "ReplicaView":
    """Adds to this copy."""
    return self.assign(tf.add(self, delta))

  def __sub__(self, other: Any) -> tf.Tensor:
    return tf.subtract(self, other)

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    return self.numpy() if dtype is None else self.numpy().astype(dtype)

  def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
    return tf.convert_to_tensor(self.numpy(), dtype or self.dtype, name=name)

  def __repr__(self) -> str:
    return f"<ReplicaView {self.name}, numpy={self.numpy()}>"
