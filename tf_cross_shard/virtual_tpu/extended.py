"""What TensorFlow asks of a strategy, answered for the virtual TPU.

`run` traces the replica's function once. Called eagerly it then runs the
program; inside a tf.function it becomes one operation that does so.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils

from tf_cross_shard.virtual_tpu import (
  binding,
  lowering,
  replica,
  runtime,
  single_host,
  tracing,
  variables,
)


class VirtualTPUExtended(single_host.SingleHost):
  """What TensorFlow asks of a strategy."""

  def __init__(
    self, strategy: tf.distribute.Strategy, num_replicas: int
  ) -> None:
    """Called by `VirtualTPUStrategy`."""
    super().__init__(strategy, num_replicas)
    self._replicas = runtime.Replicas(num_replicas)
    # By number: variables cannot be hashed.
    self._variables: weakref.WeakValueDictionary[int, Any] = (
      weakref.WeakValueDictionary()
    )
    self._programs = binding.Cache()
    self._tracing = threading.RLock()

  @property
  def client(self) -> Any:
    """The devices that run programs."""
    return self._replicas.client

  @property
  def lock(self) -> Any:
    """Held while replicas' copies of variables change."""
    return self._replicas.lock

  # Replicas.

  def _call_for_each_replica(
    self, fn: Callable[..., Any], args: Any, kwargs: Any
  ) -> Any:
    call = binding.Call(args, kwargs, self._num_replicas_in_sync)
    eager = tf.executing_eagerly()
    if eager:
      with self._tracing:
        step = self._programs.get(fn, call)
        if step is None:
          step = self._trace(fn, call)
          self._programs.add(fn, call, step)
    else:
      step = self._trace(fn, call)
    recorder = binding.recorder()
    if recorder is not None:
      recorder(step, call)
    arguments = [*call.tensors, *map(call.to_all, step.traced.captured)]
    if eager:
      outputs = step(*arguments)
    else:
      outputs = step.as_operation(arguments, compile_now=recorder is None)
    return binding.pack(step.traced.structure, outputs)

  def _trace(
    self, fn: Callable[..., Any], call: binding.Call
  ) -> runtime.Program:
    """Traces `fn` for arguments like those of `call`."""
    strategy = self._container_strategy()
    name = getattr(fn, "__name__", type(fn).__name__)
    target = fn
    if tf.executing_eagerly() and not isinstance(
      fn, tf.types.experimental.PolymorphicFunction
    ):
      # As tf.function would; within one, `run` has done so.
      autograph = tf.__internal__.autograph
      target = autograph.tf_convert(fn, autograph.control_status_ctx())

    def replica_fn(*tensors: tf.Tensor) -> Any:
      args, kwargs = call.bind(tensors)
      with strategy.scope(), replica.TracedContext(strategy):
        return binding.check_outputs(target(*args, **kwargs), name)

    traced = lowering.trace(
      replica_fn, call.specs, lambda: self.known_variables
    )
    return runtime.Program(traced, self._replicas)

  cross_replica_sum = staticmethod(replica.cross_replica_sum)

  def _replica_ctx_all_reduce(
    self, reduce_op: Any, value: Any, options: Any = None
  ) -> Any:
    del options
    count = self._num_replicas_in_sync
    everyone = [list(range(count))]

    def reduce(tensor: Any) -> tf.Tensor:
      total = self.cross_replica_sum(tf.convert_to_tensor(tensor), everyone)
      if reduce_op == tf.distribute.ReduceOp.MEAN:
        total = tf.cast(total / count, total.dtype)
      return total

    return [reduce(tensor) for tensor in tf.nest.flatten(value)]

  def _replica_ctx_update(
    self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
  ) -> Any:
    result = fn(var, *args, **(kwargs or {}))
    return result if group else tf.nest.map_structure(lambda x: (x,), result)

  def _use_merge_call(self) -> bool:
    return False

  # Variables.

  def _create_variable(
    self, next_creator: Callable[..., Any], **kwargs: Any
  ) -> Any:
    del next_creator
    # The last is what tf.compat.v1.Variable adds.
    for name in (
      "use_resource",
      "colocate_with",
      "partitioner",
      "expected_shape",
    ):
      kwargs.pop(name, None)
    initial = kwargs.get("initial_value")
    if tf.is_tensor(initial) and not hasattr(initial, "numpy"):
      raise ValueError(
        f"The variable {kwargs.get('name')!r} is made inside a function, with"
        " an initial value that is computed there. Make it inside"
        " `with strategy.scope():` before the first step."
      )
    with tf.init_scope(), tf.device(self._host):
      variable = variables.ReplicaVariable(**kwargs)
    self._variables[id(variable)] = variable
    return variable

  @property
  def known_variables(self) -> list[Any]:
    """Every variable that was made in the scope and still exists."""
    return list(self._variables.values())

  def colocate_vars_with(
    self, colocate_with_variable: Any
  ) -> contextlib.AbstractContextManager[None]:
    """All variables are in one place."""
    del colocate_with_variable
    return contextlib.nullcontext()

  def _validate_colocate_with_variable(self, variable: Any) -> None:
    del variable

  def _update(
    self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
  ) -> Any:
    """On the host: every copy with its own arguments, if those differ."""
    flat = tf.nest.flatten((args, kwargs))
    differ = any(
      _is_distributed(x) or _replica_variable(x) is not None for x in flat
    )
    if tracing.in_replica_program() or not differ:
      result = fn(var, *args, **(kwargs or {}))
      return result if group else tf.nest.map_structure(lambda x: (x,), result)
    results = []
    for i, view in enumerate(self._local_results(_native(var))):

      def copy(x: Any, replica: int = i) -> Any:
        variable = _replica_variable(x)
        return x if variable is None else variable.views()[replica]

      own_args, own_kwargs = distribute_utils.select_replica(
        i, tf.nest.map_structure(copy, (args, kwargs or {}))
      )
      results.append(fn(view, *own_args, **own_kwargs))
    return tuple(results)

  def _update_non_slot(
    self,
    colocate_with: Any,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    group: bool,
  ) -> Any:
    del colocate_with
    result = fn(*args, **(kwargs or {}))
    return result if group else tf.nest.map_structure(lambda x: (x,), result)

  def read_var(self, var: Any) -> tf.Tensor:
    """What the host reads."""
    return var.read_value()

  def value_container(self, value: Any) -> Any:
    """A variable is one object."""
    return value

  # Values of replicas.

  def _local_results(self, value: Any) -> tuple[Any, ...]:
    variable = _replica_variable(value)
    if variable is not None:
      if tracing.in_replica_program():
        return (value,)
      return variable.views()
    if isinstance(value, tf.distribute.DistributedValues):
      return tuple(value.values)
    if tf.nest.is_nested(value):
      flat = [self._local_results(x) for x in tf.nest.flatten(value)]
      count = max(map(len, flat), default=1)
      return tuple(
        tf.nest.pack_sequence_as(
          value, [x[i] if len(x) > 1 else x[0] for x in flat]
        )
        for i in range(count)
      )
    return (value,)

  def combine(
    self, operation: tf.distribute.ReduceOp, value: Any, axis: Any = None
  ) -> tf.Tensor:
    """Sum or mean of the replicas' values, over elements of `axis` too."""
    if tracing.in_replica_program():  # In a merge call.
      return self._replica_ctx_all_reduce(operation, [value])[0]
    parts = self._local_results(value)
    parts = parts * (self._num_replicas_in_sync // len(parts))
    tensors = [tf.convert_to_tensor(part) for part in parts]
    count: Any = len(tensors)
    if axis is not None:
      axes = tf.reshape(axis, [-1]) % tf.rank(tensors[0])
      count = tf.add_n(
        [tf.reduce_prod(tf.gather(tf.shape(x), axes)) for x in tensors]
      )
      tensors = [tf.reduce_sum(x, axis) for x in tensors]
    total = tf.add_n(tensors)
    if operation == tf.distribute.ReduceOp.SUM:
      return total
    return tf.cast(total / tf.cast(count, total.dtype), total.dtype)

  def _reduce(self, reduce_op: Any, value: Any) -> tf.Tensor:
    return self.combine(reduce_op, value)

  def _reduce_to(
    self, reduce_op: Any, value: Any, destinations: Any, options: Any
  ) -> tf.Tensor:
    del destinations, options
    return self.combine(reduce_op, value)

  def _batch_reduce_to(
    self, reduce_op: Any, value_destination_pairs: Any, options: Any
  ) -> list[tf.Tensor]:
    del options
    return [self.combine(reduce_op, x) for x, _ in value_destination_pairs]

  def _gather_to_implementation(
    self, value: Any, destinations: Any, axis: int, options: Any
  ) -> tf.Tensor:
    del destinations, options
    return tf.concat(self._local_results(value), axis)

  def _broadcast_to(self, tensor: tf.Tensor, destinations: Any) -> tf.Tensor:
    del destinations
    return tensor


def _native(value: Any) -> Any:
  """What is within a variable of Keras 3, or within one that tf_keras casts."""
  value = getattr(value, "_variable", value)
  within = getattr(value, "value", None)
  return within if isinstance(within, variables.ReplicaVariable) else value


def _replica_variable(value: Any) -> variables.ReplicaVariable | None:
  """The variable with a copy per replica, if `value` is one."""
  native = _native(value)
  return native if isinstance(native, variables.ReplicaVariable) else None


def _is_distributed(value: Any) -> bool:
  """Whether replicas have values of their own."""
  return isinstance(value, tf.distribute.DistributedValues)
