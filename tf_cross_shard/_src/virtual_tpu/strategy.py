"""A `tf.distribute.Strategy` that runs its replicas as one XLA program.

`run` traces the replica's function once for each kind of arguments. If called
eagerly, `run` then runs the program. In a tf.function, it adds an operation to
the graph that runs the program.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
  device_util,
  distribute_lib,
  distribute_utils,
  values,
)

from tf_cross_shard._src.core import validation
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.virtual_tpu import (
  datasets,
  lowering,
  program,
  replica_context,
  replica_variable,
  xla,
)


class NestedRunError(RuntimeError):
  """`strategy.run` was called inside a function that it is running."""

  ag_pass_through = True  # AutoGraph would replace the class of this error.


class VirtualTPUStrategy(tf.distribute.Strategy):
  """Trains on `num_replicas` virtual TPU replicas on this machine's CPU.

  Use it like `tf.distribute.TPUStrategy`. The function that you pass to `run`
  is lowered to the XLA program that a TPU would run, compiled for the CPU, and
  run as `num_replicas` replicas. Each replica has its own copy of every
  variable.

  >>> import tensorflow as tf
  >>> strategy = VirtualTPUStrategy(num_replicas=2)
  >>> with strategy.scope():
  ...   weight = tf.Variable(0.0)
  >>> def step(x):
  ...   context = tf.distribute.get_replica_context()
  ...   return weight.assign_add(context.all_reduce("SUM", x))
  >>> values = strategy.experimental_distribute_values_from_function(
  ...   lambda context: tf.constant(1.0 + context.replica_id_in_sync_group)
  ... )
  >>> result = strategy.run(step, args=(values,))  # 1 + 2
  >>> [float(x) for x in strategy.experimental_local_results(result)]
  [3.0, 3.0]
  >>> float(weight.numpy())
  3.0

  If you read a variable on the host (outside `run`), you get replica 0's
  copy, or the sum or mean of all copies if the variable is aggregated on
  reading. If you assign to a variable on the host, all copies are set.
  `experimental_local_results(variable)` returns every replica's copy.
  """

  def __init__(self, num_replicas: int = 8) -> None:
    """Creates the strategy. The virtual devices are created in the first step.

    Args:
      num_replicas: The number of replicas, 8 by default.

    Raises:
      ValueError: If `num_replicas` is not a positive integer.
      ImportError: If jax or jaxlib is missing or of an untested version.
    """
    num_replicas = validation.check_integer(
      "num_replicas", num_replicas, "Pass, for example, 8."
    )
    for distribution in ("jax", "jaxlib"):
      xla.require(distribution)
    super().__init__(VirtualTPUExtended(self, num_replicas))

  def run(
    self,
    fn: Callable[..., Any],
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    options: Any = None,
  ) -> Any:
    """Runs `fn` on every replica.

    `fn` is traced once for each kind of arguments.

    Args:
      fn: The function of one replica.
      args: Positional arguments. A `PerReplica` value gives each replica its
        own part; every other value goes to all replicas.
      kwargs: Keyword arguments, treated like `args`.
      options: `tf.distribute.RunOptions`, or None.

    Returns:
      The structure that `fn` returns, with one value for each replica.

    Raises:
      NestedRunError: If called by a function that `run` is running.
      TPUCompileError: If a TPU could not run `fn`.
    """
    if replica_context.in_replica_program():
      raise NestedRunError(
        "strategy.run was called inside a function that strategy.run is"
        " running. Call it outside."
      )
    if not tf.executing_eagerly():
      return super().run(fn, args, kwargs, options)
    # The base class would wrap `fn` in a new function at each call, and the
    # cache would not find its programs.
    with self.scope():
      return self.extended.call_for_each_replica(fn, args, kwargs)

  @tf.autograph.experimental.do_not_convert
  def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
    """Combines the replicas' values on the host.

    The base class would run a second program to reduce over `axis`.

    Args:
      reduce_op: `"MEAN"` or `"SUM"`, or a `tf.distribute.ReduceOp`.
      value: A result of `run`, or a structure of such results.
      axis: The dimension to reduce in addition to the replicas, or None.

    Returns:
      The sum or mean, in the structure of `value`.

    Raises:
      RuntimeError: If called in a function that `run` is running.
    """
    operation = tf.distribute.ReduceOp(
      reduce_op.upper() if isinstance(reduce_op, str) else reduce_op
    )
    # No public function raises this error, which names the right method.
    distribute_lib._require_cross_replica_or_default_context_extended(  # noqa: SLF001
      self.extended
    )
    return tf.nest.map_structure(
      lambda x: self.extended.combine(operation, x, axis), value
    )


class VirtualTPUExtended(distribute_lib.StrategyExtendedV1):
  """The methods that TensorFlow and Keras call on a strategy."""

  should_checkpoint = True
  should_save_summary = True
  _global_batch_size = True

  def __init__(
    self, strategy: tf.distribute.Strategy, num_replicas: int
  ) -> None:
    super().__init__(strategy)
    self._host = device_util.canonicalize("/device:CPU:0")
    # TensorFlow then requires static shapes of datasets, as for a TPU.
    self._require_static_shapes = True
    self.replicas = program.Replicas(num_replicas)
    # Keys are ids, because variables cannot be hashed.
    self._variables: weakref.WeakValueDictionary[int, Any] = (
      weakref.WeakValueDictionary()
    )
    self._programs = program.Cache()
    self._tracing = threading.RLock()

  @property
  def _num_replicas_in_sync(self) -> int:
    return self.replicas.num_replicas

  @property
  def worker_devices(self) -> tuple[str, ...]:
    """The host's CPU, once for each replica."""
    return (self._host,) * self._num_replicas_in_sync

  def non_slot_devices(self, var_list: Any) -> str:
    """Returns the device for variables that are not slots: the host's CPU."""
    return self._host

  def _in_multi_worker_mode(self) -> bool:
    return False

  def _get_local_replica_id(self, replica_id: Any) -> Any:
    return replica_id

  def _use_merge_call(self) -> bool:
    return False

  # Input.

  def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
    return datasets.split(dataset, self._num_replicas_in_sync, options)

  def _distribute_datasets_from_function(
    self, dataset_fn: Callable[..., Any], options: Any
  ) -> Any:
    count = self._num_replicas_in_sync
    with tf.device(self._host):
      dataset = dataset_fn(
        tf.distribute.InputContext(num_replicas_in_sync=count)
      )
    return datasets.deal(dataset, count, options)

  def _experimental_distribute_values_from_function(
    self, value_fn: Callable[..., Any]
  ) -> Any:
    count = self._num_replicas_in_sync
    contexts = [distribute_lib.ValueContext(i, count) for i in range(count)]
    return distribute_utils.regroup(
      tuple(value_fn(context) for context in contexts), always_wrap=True
    )

  # Replicas.

  def _call_for_each_replica(
    self, fn: Callable[..., Any], args: Any, kwargs: Any
  ) -> Any:
    arguments = program.RunArguments(args, kwargs, self._num_replicas_in_sync)
    if tf.executing_eagerly():
      with self._tracing:
        step = self._programs.get(
          fn, arguments, lambda: self._trace(fn, arguments)
        )
      outputs = step(*arguments.with_captured(step.traced))
    else:
      step = self._trace(fn, arguments)
      outputs = step.as_operation(arguments.with_captured(step.traced))
    return program.pack_results(step.traced.structure, outputs)

  def _trace(
    self, fn: Callable[..., Any], arguments: program.RunArguments
  ) -> program.Program:
    """Traces `fn` for arguments of this kind."""
    strategy = self._container_strategy()
    target = fn
    if tf.executing_eagerly() and not isinstance(
      fn, tf.types.experimental.PolymorphicFunction
    ):
      # Convert `fn` as tf.function does. Inside a tf.function, the base class
      # has done it.
      autograph = tf.__internal__.autograph
      target = autograph.tf_convert(fn, autograph.control_status_ctx())

    def replica_fn(*tensors: tf.Tensor) -> Any:
      args, kwargs = arguments.bind(tensors)
      with (
        strategy.scope(),
        replica_context.TracedReplicaContext(strategy, 0),
      ):
        return program.as_results(target(*args, **kwargs))

    traced = lowering.trace(
      replica_fn, arguments.specs, lambda: self.known_variables
    )
    return program.Program(traced, self.replicas)

  # The core's `collectives` look for this method: a strategy that has it runs
  # its replicas as one XLA program.
  cross_replica_sum = staticmethod(replica_context.cross_replica_sum)
  all_to_all = staticmethod(replica_context.all_to_all)

  def _replica_ctx_all_reduce(
    self, reduce_op: Any, value: Any, options: Any = None
  ) -> Any:
    count = self._num_replicas_in_sync

    def reduce(tensor: Any) -> tf.Tensor:
      total = replica_context.cross_replica_sum(
        tf.convert_to_tensor(tensor), [list(range(count))]
      )
      is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
      return total / count if is_mean else total

    return [reduce(tensor) for tensor in tf.nest.flatten(value)]

  # Variables.

  def _create_variable(
    self, next_creator: Callable[..., Any], **kwargs: Any
  ) -> Any:
    # tf.compat.v1.Variable adds "expected_shape".
    ignored = "use_resource", "colocate_with", "partitioner", "expected_shape"
    for name in ignored:
      kwargs.pop(name, None)
    with tf.init_scope(), tf.device(self._host):
      variable = replica_variable.ReplicaVariable(**kwargs)
    self._variables[id(variable)] = variable
    return variable

  @property
  def known_variables(self) -> list[Any]:
    """Every variable that was created in the scope and is still in use."""
    return list(self._variables.values())

  def _update(
    self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
  ) -> Any:
    """Calls `fn` on a variable.

    On the host, `fn` is called for each copy if its arguments differ between
    replicas, and once for the whole variable otherwise.
    """
    if not replica_context.in_replica_program():
      given = _with_views((args, kwargs or {}))
      if any(
        isinstance(leaf, tf.distribute.DistributedValues)
        for leaf in tf.nest.flatten(given)
      ):
        results = []
        for i, copy in enumerate(self._local_results(var)):
          args, kwargs = distribute_utils.select_replica(i, given)
          results.append(fn(copy, *args, **kwargs))
        return tuple(results)
    return _call(fn, (var, *args), kwargs, group)

  _replica_ctx_update = _update

  def _update_non_slot(
    self,
    colocate_with: Any,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    group: bool,
  ) -> Any:
    return _call(fn, args, kwargs, group)

  def value_container(self, value: Any) -> Any:
    """Returns the variable itself: there is one object for all replicas."""
    return value

  # Values of replicas.

  def _local_results(self, value: Any) -> tuple[Any, ...]:
    if not replica_context.in_replica_program():
      value = _with_views(value)
    return super()._local_results(value)

  def combine(
    self, operation: tf.distribute.ReduceOp, value: Any, axis: Any = None
  ) -> tf.Tensor:
    """Returns the sum or mean of the replicas' values.

    If `axis` is given, that dimension is reduced as well. Replicas may have
    different numbers of elements along it; the mean weighs all elements alike:

        mean = sum of elements / number of elements that were added up
    """
    if replica_context.in_replica_program():  # In a merge call.
      return self._replica_ctx_all_reduce(operation, [value])[0]
    # A value that is not per replica counts once for each replica.
    parts = self._local_results(value)
    parts = parts * (self._num_replicas_in_sync // len(parts))
    tensors = [tf.convert_to_tensor(part) for part in parts]
    size = tf.add_n(list(map(tf.size, tensors)))
    if axis is not None:
      tensors = [tf.reduce_sum(x, axis) for x in tensors]
    total = tf.add_n(tensors)
    if operation == tf.distribute.ReduceOp.SUM:
      return total
    # How many elements are added up in each element of `total`.
    count = size // tf.maximum(tf.size(total), 1)
    return total / tf.cast(count, total.dtype)

  def _reduce_to(
    self, reduce_op: Any, value: Any, destinations: Any, options: Any
  ) -> tf.Tensor:
    return self.combine(reduce_op, value)

  def _gather_to_implementation(
    self, value: Any, destinations: Any, axis: int, options: Any
  ) -> tf.Tensor:
    return tf.concat(self._local_results(value), axis)


def _call(fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
  """Calls an update function; ungrouped results become tuples."""
  result = fn(*args, **(kwargs or {}))
  return result if group else tf.nest.map_structure(lambda x: (x,), result)


def _with_views(structure: Any) -> Any:
  """Replaces each variable in a structure with a PerReplica value of copies."""

  def view(value: Any) -> Any:
    # An AutoCastVariable of tf_keras wraps the variable.
    variable = variables_lib.native(getattr(value, "_variable", value))
    if isinstance(variable, replica_variable.ReplicaVariable):
      return values.PerReplica(variable.views())
    return value

  return tf.nest.map_structure(view, structure)
