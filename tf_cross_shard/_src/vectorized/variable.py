"""A variable whose replicas' copies are one stack.

The stack has the shape `[N, ...]`. It is created when a program or the host
first needs it; until then there is one initial value for all replicas.

Replicas see a variable of the shape `[...]`. Their program is traced with a
handle that has this shape and, once there is a stack, no value. `vectorizer`
puts the stack in its place.

The host reads copy 0 or, if the variable is aggregated on reading, as metrics
are, an aggregate of the copies: for models the mean. An assignment on the host
sets all copies.
"""

import functools
import inspect
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager import record, tape
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.trackable import base as trackable
from tensorflow.python.training.saving import saveable_object_util

from tf_cross_shard._src.vectorized import replica_context

_Aggregation: Final = tf.VariableAggregation
_Synchronization: Final = tf.VariableSynchronization
_in_replica: Final = replica_context.in_replica_program
# What the methods that assign do to the stack.
_ON_HOST: Final = {
  "assign": tf.raw_ops.AssignVariableOp,
  "assign_add": tf.raw_ops.AssignAddVariableOp,
  "assign_sub": tf.raw_ops.AssignSubVariableOp,
}


_OVERWRITTEN: Final = (
  "%s gave all %d models the same weights, although they differed (for example"
  " in %s). Use callbacks.PerModelEarlyStopping, Models(model).set_weights or"
  " Models(model).restore, which keep the weights of each model."
)
_READ: Final = (
  "%s reads the values of model 0 only, but the %d models differ (for example"
  " in %s). Use Models(model).save, Models(model)[i].save or"
  " Models(model).values(variable)."
)
# The methods by which programs read or overwrite variables.
_METHODS: Final = frozenset(
  ("get_weights", "set_weights", "load_weights", "save_weights", "save")
  + ("save_model", "read", "write", "restore", "numpy", "assign")
)
_LIBRARIES: Final = ("keras", "tf_keras", "tensorflow", "tf_cross_shard")


class StackedVariable(resource_variable_ops.ResourceVariable):
  """A variable of `VectorizedStrategy`."""

  def __init__(self, *, count: int, are_models: bool, **kwargs: Any) -> None:
    self._count = count
    self._stack: Any = None
    super().__init__(**kwargs)
    if self._shape.rank is None:
      raise ValueError(
        "`shape` must have a known rank under VectorizedStrategy; got"
        f" {self._shape}. Use for example [None]."
      )
    if self.aggregation == _Aggregation.MEAN and not self.dtype.is_floating:
      raise ValueError(
        "`aggregation` must not be MEAN for a variable whose dtype is not"
        f" floating; got {self.dtype.name}. Choose SUM or ONLY_FIRST_REPLICA."
      )
    if not are_models and self.synchronization == _Synchronization.AUTO:
      self._synchronization = _Synchronization.ON_WRITE
    on_read = self.synchronization == _Synchronization.ON_READ
    # How copies are combined when the host reads them, and how values are
    # combined when replicas assign them.
    self._on_read = self.aggregation if on_read else _Aggregation.NONE
    self._on_assign = _Aggregation.NONE if on_read else self.aggregation
    if are_models:  # No model aggregates; the host reads what one model has.
      self._on_assign = _Aggregation.NONE
      if self._on_read == _Aggregation.SUM:
        self._on_read = _Aggregation.MEAN

  @property
  def handle(self) -> Any:
    """The replicas' handle in their program, and the stack's elsewhere."""
    return self.replica_handle if _in_replica() else self.stack_handle

  @property
  def _handle(self) -> Any:
    """None on the host, so that TensorFlow reads the value by our method."""
    # TensorFlow's fast path would read all of the stack.
    return self.replica_handle if _in_replica() else None

  @_handle.setter
  def _handle(self, handle: Any) -> None:
    # The handle that replicas' programs capture.
    self.replica_handle = handle

  @property
  def stack_handle(self) -> Any:
    """The handle of the stack."""
    if self._stack is None:
      with tf.init_scope(), tf.device(self.device):
        value = _read(self.replica_handle, self._dtype)
        self._stack = resource_variable_ops.ResourceVariable(
          initial_value=tf.repeat(value[tf.newaxis], self._count, axis=0),
          shape=self._with_copies(self._shape),
          trainable=False,
          dtype=self._dtype,
          name=f"{self._shared_name}/stack",
        )
        # Free the memory of the initial value.
        tf.raw_ops.AssignVariableOp(
          resource=self.replica_handle, value=tf.zeros([0], self._dtype)
        )
    return self._stack.handle

  @property
  def device(self) -> str:
    """The device of the stack."""
    device: str = self.replica_handle.device
    return device

  def _with_copies(self, shape: Any) -> tf.TensorShape:
    return tf.TensorShape([self._count]).concatenate(shape)

  @property
  def distribute_strategy(self) -> Any:
    """The strategy whose replicas have the copies."""
    return self._distribute_strategy

  @property
  def values(self) -> tuple[tf.Tensor, ...]:
    """Each replica's copy."""
    return tuple(tf.unstack(self.read_stack()))

  @property
  def is_summed_on_reading(self) -> bool:
    """Whether the host reads the sum of all copies, as of metrics."""
    return self._on_read == _Aggregation.SUM

  def read_stack(self) -> tf.Tensor:
    """Returns the copies of all replicas, of shape `[N, ...]`."""
    stack = _read(self.stack_handle, self._dtype)
    stack.set_shape(self._with_copies(self._shape))
    return stack

  def whole_copies(self) -> Sequence[np.ndarray]:
    """Returns the copies of all replicas; they may change with the variable."""
    return list(self.read_stack().numpy())

  def set_copies(self, arrays: Sequence[np.ndarray]) -> None:
    """Sets the copy of each replica."""
    stack = tf.ensure_shape(np.stack(arrays), self._with_copies(self._shape))
    tf.raw_ops.AssignVariableOp(
      resource=self.stack_handle, value=tf.cast(stack, self._dtype)
    )

  def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
    if _in_replica():
      value = super()._read_variable_op(no_copy)
      # tf_keras asks for the sum to compute the result of a metric.
      asks = distribute_lib.in_variable_sync_on_read_context()
      if asks and self.is_summed_on_reading:
        return tf.distribute.get_replica_context().combine(value)
      return value
    resource_variable_ops.variable_accessed(self)
    with record.stop_recording():
      value = self._read_on_host()
    # To a gradient tape, the value is a read of this variable.
    record.record_operation(
      "ReadVariableOp",
      [value],
      [self.handle],
      backward_function=lambda gradient: [gradient],
      forward_function=lambda value: [value],
    )
    return value

  def _read_on_host(self) -> tf.Tensor:
    """Returns replica 0's value, or the sum or mean of all values."""
    if self._stack is None and tf.executing_eagerly():
      value = _read(self.replica_handle, self._dtype)
      return value * self._count if self.is_summed_on_reading else value
    stack = self.read_stack()
    if self.is_summed_on_reading:
      return tf.reduce_sum(stack, axis=0)
    if self._on_read == _Aggregation.MEAN:
      return _mean(stack)
    return stack[0]

  # TensorFlow's methods would gather rows of the stack.

  def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
    """Returns rows of the value: replica 0's copy, if called on the host."""
    if _in_replica():
      return super().sparse_read(indices, name)
    return tf.gather(self._read_variable_op(), indices, name=name)

  def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
    """Returns slices of the value; works like `sparse_read`."""
    if _in_replica():
      return super().gather_nd(indices, name)
    return tf.gather_nd(self._read_variable_op(), indices, name=name)

  def numpy(self) -> np.ndarray:
    """Returns the value that the host reads."""
    if not tf.executing_eagerly():
      raise NotImplementedError("numpy() is only available eagerly.")
    self._warn(_READ)
    return self._read_variable_op().numpy()

  def read_value_no_copy(self) -> tf.Tensor:
    """Returns the value that the host reads; checkpoints call it to save."""
    self._warn(_READ)
    return super().read_value_no_copy()

  def _warn(self, text: str) -> None:
    """Warns if models differ, once for each method that the program calls."""
    extended = self.distribute_strategy.extended
    can_differ = self._shape.rank and self.dtype.is_floating
    if (
      not (extended.are_models and can_differ)
      or self._stack is None
      or self._on_read != _Aggregation.NONE
      or _in_replica()
      or not tf.executing_eagerly()
    ):
      return
    topic = text, (caller := _caller())
    if topic in extended.told:
      return
    stack = self.read_stack()
    if tf.reduce_any(stack != stack[:1]):
      extended.told.add(topic)
      extended.are_overwritten |= text == _OVERWRITTEN
      logging.warning(text, caller, self._count, self._shared_name)

  def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Sets this replica's copy, or all copies if called on the host."""
    return self._change("assign", value, *args, **kwargs)

  def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds to this replica's copy, or to all copies if called on the host."""
    return self._change("assign_add", delta, *args, **kwargs)

  def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Subtracts from this replica's copy, or from all if called on the host."""
    return self._change("assign_sub", delta, *args, **kwargs)

  def _change(
    self,
    method: str,
    value: Any,
    use_locking: bool | None = None,
    name: str | None = None,
    read_value: bool = True,
  ) -> Any:
    """Assigns a value, as TensorFlow's `method` of this name does."""
    if _in_replica():
      value = self._aggregate(value)
      return getattr(super(), method)(value, use_locking, name, read_value)
    if method == "assign" and self.trainable:
      self._warn(_OVERWRITTEN)
    value = self._share(tf.convert_to_tensor(value, self._dtype))
    value.set_shape(self._shape.merge_with(value.shape))
    copies = tf.stack([value] * self._count)
    made = _ON_HOST[method](resource=self.stack_handle, value=copies)
    return self if read_value else made

  def _restore_from_tensors(self, restored_tensors: Any) -> Any:
    """Sets all copies to the value in a `tf.train.Checkpoint`."""
    return self.assign(restored_tensors[trackable.VARIABLE_VALUE_KEY])

  def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
    """Returns what restores the variable in tf_keras' AutoCastVariable."""
    # TensorFlow's own would assign to the stack.
    return {
      trackable.VARIABLE_VALUE_KEY: lambda name=self._shared_name: _Saveable(
        self, "", name
      )
    }

  def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
      f"A SavedModel has one value of each variable, but {self.name} has"
      f" {self._count} copies. Export a plain model,"
      " tf_cross_shard.Models(model)[i]."
    )

  def _share(self, value: tf.Tensor) -> tf.Tensor:
    """Returns what each copy gets of a value that the host assigns."""
    if not self.is_summed_on_reading:
      return value
    # The host reads the sum of the copies, so each copy is an equal part.
    return tf.cast(value / self._count, value.dtype)

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
    # In a merge call, and while a replica is isolated, the context is another
    # one: each value is assigned as it is.
    return self._on_assign != _Aggregation.NONE and isinstance(
      tf.distribute.get_replica_context(), replica_context.TracedReplicaContext
    )


class _Saveable(saveable_object_util.ResourceVariableSaveable):
  """Saves the value that the host reads, and restores all copies."""

  def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
    value = restored_tensors[0]
    if restored_shapes is not None:
      value = tf.reshape(value, restored_shapes[0])
    return self.op.assign(value)


def _caller() -> str:
  """Returns who reads or assigns a variable, for a log line only."""
  name, frame = "", inspect.currentframe()
  while frame is not None:
    method, owner = frame.f_code.co_name, frame.f_locals.get("self")
    if method.startswith("on_") and hasattr(owner, "set_params"):
      return f"{type(owner).__name__}.{method}"  # A callback of Keras.
    library = frame.f_globals.get("__name__", "").partition(".")[0]
    if method in _METHODS and library in _LIBRARIES:
      name = method
    frame = frame.f_back
  return name


def _read(handle: Any, dtype: tf.DType) -> tf.Tensor:
  return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def _mean(stack: tf.Tensor) -> tf.Tensor:
  """Returns the mean of the copies; for integers, rounded."""
  if stack.dtype.is_floating or stack.dtype.is_complex:
    return tf.reduce_mean(stack, axis=0)
  mean = tf.reduce_mean(tf.cast(stack, tf.float64), axis=0)
  return tf.cast(tf.round(mean), stack.dtype)


def _override(name: str) -> None:
  """Overrides a method that assigns to a part: on the host, all replicas do."""
  method = getattr(resource_variable_ops.ResourceVariable, name)

  @functools.wraps(method)
  def assign(self: StackedVariable, *args: Any, **kwargs: Any) -> Any:
    if not _in_replica():
      # Each replica assigns to its own copy, whatever `aggregation` is.
      def assign_copy() -> None:
        method(self, *args, **kwargs)

      self.distribute_strategy.run(assign_copy)
      return self
    if self._combines():
      raise NotImplementedError(
        f"Replicas cannot call {name} on {self.name}, because it has"
        f" aggregation={self._on_assign.name}. Use assign or assign_add, or"
        " aggregation NONE."
      )
    return method(self, *args, **kwargs)

  setattr(StackedVariable, name, assign)


for _name in dir(resource_variable_ops.ResourceVariable):
  if re.match("(batch_)?scatter_|_strided_slice_assign", _name):
    _override(_name)


# In a strategy's scope, a tape watches what `experimental_local_results`
# returns. Tensors have no handle: it watches the variable itself instead.
_watched = tape._variables_override  # noqa: SLF001
tape._variables_override = lambda variable: (  # noqa: SLF001
  [variable] if isinstance(variable, StackedVariable) else _watched(variable)
)
