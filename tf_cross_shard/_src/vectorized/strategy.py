"""A `tf.distribute.Strategy` whose replicas are one vectorized program.

    strategy.run(fn) ─ trace ─▶ graph of one replica ─ vectorize ─▶ all replicas

`run` traces the replica's function as an ordinary `tf.function` and rewrites
the graph, so that every tensor that differs between replicas has a first axis
of N rows. In the device's eyes there is one program with larger tensors.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python.distribute import (
  device_util,
  distribute_lib,
  distribute_utils,
)

from tf_cross_shard._src.core import validation
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.inner import keras_private
from tf_cross_shard._src.core.inner import names as names_lib
from tf_cross_shard._src.vectorized import (  # noqa: F401  # Registers.
  arguments,
  converters,
  convolutions,
  datasets,
  kernels,
  replica_context,
  variable,
  vectorizer,
)


class NestedRunError(RuntimeError):
  """`strategy.run` was called inside a function that it is running."""

  ag_pass_through = True  # AutoGraph would replace the class of this error.


class VectorizedStrategy(tf.distribute.Strategy):
  """Trains replicas on one device, as one vectorized program.

  Use it to train several models in one `fit` on one CPU or GPU. Each replica
  has its own copy of every variable. The copies are stored as one tensor with a
  first axis, and so are the replicas' batches: 16 small networks need 16 times
  the arithmetic of one network, but not 16 times the operations.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import VectorizedStrategy
  >>> strategy = VectorizedStrategy(3)
  >>> with strategy.scope():
  ...   weight = tf.Variable(1.0)
  >>> def step(x):
  ...   return weight.assign_add(x)
  >>> values = strategy.experimental_distribute_values_from_function(
  ...   lambda context: tf.constant(float(context.replica_id_in_sync_group))
  ... )
  >>> result = strategy.run(step, args=(values,))
  >>> [float(x) for x in strategy.experimental_local_results(weight)]
  [1.0, 2.0, 3.0]

  If you read a variable outside of `run`, you get replica 0's copy, or the sum
  or mean of all copies if the variable is aggregated on reading. If you assign
  to a variable outside of `run`, all copies are set.
  `experimental_local_results(variable)` returns every replica's copy.

  Operations that TensorFlow cannot vectorize run once for each replica, with
  the same numbers; a line in the log, at level INFO of absl, names them.
  """

  def __init__(self, num_replicas: int, *, split_batches: bool = True) -> None:
    """Creates the strategy.

    Args:
      num_replicas: The number of replicas.
      split_batches: Whether the replicas share each batch of a dataset, as in
        other strategies. If False, every replica receives the whole batch, and
        N models train as in N separate calls of `fit` with the same batches.

    Raises:
      ValueError: If `num_replicas` is not a positive integer.
      NotImplementedError: If this version of TensorFlow cannot vectorize.
    """
    num_replicas = validation.check_integer(
      "num_replicas", num_replicas, "Pass, for example, 8."
    )
    vectorizer.check_version()
    super().__init__(self._extended_class(self, num_replicas, split_batches))

  @property
  def _extended_class(self) -> "type[VectorizedExtended]":
    return VectorizedExtended

  def run(
    self,
    fn: Callable[..., Any],
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    options: Any = None,
  ) -> Any:
    """Runs `fn` on every replica.

    Args:
      fn: The function of one replica.
      args: Positional arguments. A `PerReplica` value gives each replica its
        own part; every other value goes to all replicas.
      kwargs: Keyword arguments, treated like `args`.
      options: Ignored, as in TensorFlow's strategies other than TPUStrategy.

    Returns:
      The structure that `fn` returns, with one value for each replica.

    Raises:
      NestedRunError: If called by a function that `run` is running.
      NotImplementedError: If an operation of `fn` cannot be vectorized.
    """
    if replica_context.in_replica_program():
      raise NestedRunError(
        "strategy.run was called inside a function that strategy.run is"
        " running. Call it outside."
      )
    model = _evaluated_model(fn)
    for warnings in names_lib.group_warnings_of(
      getattr(model, "optimizer", None)
    ):
      if not warnings.is_evaluated_by_group:
        warnings.before_evaluating()
    if model is not None:
      self.extended.warn_of_copies(fn)
    if tf.executing_eagerly():
      return self.extended.function_of(fn)(tuple(args), kwargs or {})
    return super().run(fn, args, kwargs, options)

  @tf.autograph.experimental.do_not_convert
  def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
    """Combines the replicas' values.

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


class VectorizedExtended(distribute_lib.StrategyExtendedV1):
  """The methods that TensorFlow and Keras call on a strategy."""

  should_checkpoint = True
  should_save_summary = True
  _global_batch_size = True
  warns_before_evaluating = True  # In `run`.
  # Whether replicas' programs are traced for XLA.
  _for_xla: bool | None = None

  def __init__(
    self,
    strategy: tf.distribute.Strategy,
    num_replicas: int,
    split_batches: bool,
  ) -> None:
    super().__init__(strategy)
    self._count = num_replicas
    self._split_batches = split_batches
    self._warned: set[str] = set()
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    self._device = device_util.canonicalize(f"/device:{kind}:0")
    # Maps the id of a variable's handle in replicas' programs to the variable.
    self._variables: weakref.WeakValueDictionary[int, Any] = (
      weakref.WeakValueDictionary()
    )
    self._num_created = 0
    # Functions that were called eagerly, with references to what owns them.
    self._functions: dict[Any, tuple[Any, weakref.ref[Any]]] = {}
    self._tracing = threading.RLock()

  @property
  def _num_replicas_in_sync(self) -> int:
    return self._count

  @property
  def worker_devices(self) -> tuple[str, ...]:
    """The device, once for each replica."""
    return (self._device,) * self._count

  def non_slot_devices(self, var_list: Any) -> str:
    """Returns the device for variables that are not slots."""
    return self._device

  def _in_multi_worker_mode(self) -> bool:
    return False

  def _get_local_replica_id(self, replica_id: Any) -> Any:
    return replica_id

  def _use_merge_call(self) -> bool:
    return False

  # Input.

  def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
    distribute = datasets.split if self._split_batches else datasets.share
    return distribute(dataset, self._count, options)

  def _distribute_datasets_from_function(
    self, dataset_fn: Callable[..., Any], options: Any
  ) -> Any:
    replicas = self._count if self._split_batches else 1
    dataset = dataset_fn(
      tf.distribute.InputContext(num_replicas_in_sync=replicas)
    )
    distribute = datasets.deal if self._split_batches else datasets.share
    return distribute(dataset, self._count, options)

  def _experimental_distribute_values_from_function(
    self, value_fn: Callable[..., Any]
  ) -> Any:
    contexts = [
      distribute_lib.ValueContext(i, self._count) for i in range(self._count)
    ]
    return distribute_utils.regroup(
      tuple(map(value_fn, contexts)), always_wrap=True
    )

  def warn_of_copies(self, fn: Callable[..., Any]) -> None:
    """Warns once that `predict` returns N times as many rows as examples.

    This is so with `split_batches=False`: all replicas predict all examples.
    """
    if self._split_batches or "predict" not in getattr(fn, "__qualname__", ""):
      return
    if self._count > 1 and "copies" not in self._warned:
      self._warned.add("copies")
      logging.warning(
        "predict() with split_batches=False returns the predictions of all %d"
        " replicas for each batch, one after the other: %d times as many rows."
        " Use the models that replica_state.load_group or"
        " replica_state.ensemble returns.",
        *(self._count, self._count),
      )

  def _warn_of_filling(self, size: Any) -> None:
    """Warns once that training repeats examples: see `stack_batch`."""
    if not isinstance(size, int):
      size = keras_private.arguments_of_fit().get("batch_size")
    is_known = isinstance(size, int)
    if is_known and size % self._count and "filling" not in self._warned:
      self._warned.add("filling")
      logging.warning(
        "Each batch has %d examples, which %d replicas cannot share equally, so"
        " a training step repeats the first %d examples of the batch. Choose a"
        " batch size that is a multiple of the number of replicas.",
        *(size, self._count, -size % self._count),
      )

  # Replicas.

  def function_of(self, fn: Callable[..., Any]) -> Any:
    """Returns a tf.function that runs `fn` on every replica.

    Functions are compared by identity. They are kept as long as `fn` lives.
    """
    # Python creates a new bound method at each lookup: its object owns it.
    method = getattr(fn, "__func__", None)
    owner: Any = fn if method is None else getattr(fn, "__self__", fn)
    functions, key = self._functions, (id(owner), method)
    if key in functions:
      return functions[key][0]
    try:
      kept: Any = weakref.ref(fn) if method is None else weakref.WeakMethod(fn)
      lives: Any = weakref.ref(owner, lambda _: functions.pop(key, None))
    except TypeError:  # It has no weak references.
      kept, lives = lambda: fn, None
    # In a tf.function, the strategy's own method would look for `fn` again.
    run = functools.partial(
      tf.distribute.Strategy.run, self._container_strategy()
    )

    def run_all(args: Any, kwargs: Any) -> Any:
      return run(kept(), args, kwargs)

    function = tf.function(run_all)
    if lives is not None:
      functions[key] = function, lives
    return function

  # The base class's `run` has converted `fn`, and nothing here needs AutoGraph.
  @tf.autograph.experimental.do_not_convert
  def _call_for_each_replica(
    self, fn: Callable[..., Any], args: Any, kwargs: Any
  ) -> Any:
    with self._tracing:
      given = arguments.Arguments(args, kwargs, self._count)
      structure, function = self.trace(fn, given)
      return self._results(function, structure, given)

  def _results(
    self, function: Any, structure: Any, given: arguments.Arguments
  ) -> Any:
    """Runs a replica's program on all replicas; returns their results."""
    variables = self.variables_of(function)
    for other in function.graph.variables:
      is_stack = isinstance(other, variable.StackedVariable)
      if is_stack and id(other.replica_handle) not in variables:
        raise ValueError(
          f"{other.name} belongs to another VectorizedStrategy. Create it"
          " inside `with strategy.scope():` of the strategy that runs the"
          " function."
        )
    vectorize = functools.partial(
      vectorizer.vectorize,
      function,
      self._count,
      stacks={key: own.stack_handle for key, own in variables.items()},
    )
    metrics = {key for key, x in variables.items() if x.may_change_on_one}
    if given.batches and vectorizer.only_changes(function, metrics):
      outputs = self._evaluate(function, given, vectorize)
    else:
      if given.batches:
        self._warn_of_filling(given.size)
      outputs = self._values(function, given, vectorize(given.stacks))
    return arguments.pack_results(structure, outputs)

  def _values(
    self, function: Any, given: arguments.Arguments, outputs: Any
  ) -> list[arguments.ReplicaValues]:
    """Returns the outputs of a program that ran on all replicas."""
    values = []
    for output, converted in zip(function.outputs, outputs, strict=True):
      tensor, layout = converted.t, arguments.Layout.SHARED
      if converted.is_stacked:
        layout = given.layout_of(output)
      if layout == arguments.Layout.BATCH:
        tensor = given.without_filling(tensor)
      values.append(arguments.ReplicaValues(tensor, self._count, layout))
    return values

  def _evaluate(
    self, function: Any, given: arguments.Arguments, vectorize: Any
  ) -> list[arguments.ReplicaValues]:
    """Runs a program that changes only metrics, on a batch of any size.

    If the replicas do not divide the batch, replica 0 evaluates all of it: the
    host reads the sum of the replicas' metrics.
    """
    layouts = list(map(given.layout_of, function.outputs))

    def run(inputs: Any, replicas: list[int] | None = None) -> list[tf.Tensor]:
      return [
        given.without_filling(x.t if x.is_stacked else x.t[tf.newaxis])
        if layout == arguments.Layout.BATCH
        else vectorizer.with_count(x, self._count)
        for x, layout in zip(
          vectorize(inputs, replicas=replicas), layouts, strict=True
        )
      ]

    def run_on_first() -> list[tf.Tensor]:
      return run(given.of_first_replica(), [0])

    is_divisible = given.size % self._count == 0
    if tf.is_tensor(is_divisible):
      tensors = tf.cond(is_divisible, lambda: run(given.stacks), run_on_first)
    else:
      tensors = run_on_first()
    return [
      arguments.ReplicaValues(tensor, self._count, layout)
      for tensor, layout in zip(tensors, layouts, strict=True)
    ]

  def variables_of(self, function: Any) -> dict[int, Any]:
    """Returns the captured variables of this strategy, by id of the handle."""
    captured = map(id, function.captured_inputs)
    return {
      key: self._variables[key] for key in captured if key in self._variables
    }

  def trace(
    self, fn: Callable[..., Any], given: arguments.Arguments
  ) -> tuple[Any, Any]:
    """Returns the structure of a function's results, and its graph."""
    strategy = self._container_strategy()
    structure: list[Any] = []

    def replica_fn(*tensors: tf.Tensor) -> Any:
      replica_context.mark_replica_program()
      args, kwargs = given.bind(tensors)
      with (
        strategy.scope(),
        replica_context.TracedReplicaContext(strategy, 0),
      ):
        results = arguments.as_results(fn(*args, **kwargs))
      structure[:] = [results]
      leaves = tf.nest.flatten(results, expand_composites=True)
      return [leaf for leaf in leaves if leaf is not None]

    def build() -> Any:
      function = tf.function(
        replica_fn, autograph=False, jit_compile=self._for_xla
      )
      return function.get_concrete_function(*given.specs)

    before = self._num_created
    function = build()
    if self._num_created != before:
      # The first trace created variables, such as slots, and Python code may
      # have branched on their absence. Trace again, as tf.function does.
      function = build()
    return structure[0], function

  # Replicas are the rows of stacks, and send nothing. So gradients of tables
  # stay row-sparse, half precision is added in float32, and XLA does not
  # compile whole programs. It updates the stacks of many elements together. A
  # kernel would take one learning rate for all replicas, and as operations its
  # formula reads and writes each stack some ten times. CPU time of a step of 16
  # networks of three layers of 256 with Adam: 15.2 ms, by operations 21.3 ms.
  # With 0.3 million elements in all, XLA gains at most a tenth and compiles for
  # up to 4 s.
  stacks_replicas = True
  # The core's collectives look for these methods: a strategy that has them runs
  # its replicas as one program.
  cross_replica_sum = staticmethod(replica_context.cross_replica_sum)
  all_to_all = staticmethod(replica_context.all_to_all)
  same_on_all_replicas = staticmethod(replica_context.same_on_all_replicas)

  def _replica_ctx_all_reduce(
    self, reduce_op: Any, value: Any, options: Any = None
  ) -> Any:
    def reduce(tensor: Any) -> tf.Tensor:
      total = replica_context.cross_replica_sum(
        tf.convert_to_tensor(tensor), [list(range(self._count))]
      )
      is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
      return total / self._count if is_mean else total

    return [reduce(tensor) for tensor in tf.nest.flatten(value)]

  # Variables.

  def _create_variable(
    self, next_creator: Callable[..., Any], **kwargs: Any
  ) -> Any:
    # tf.compat.v1.Variable adds "expected_shape".
    ignored = "use_resource", "colocate_with", "partitioner", "expected_shape"
    for name in ignored:
      kwargs.pop(name, None)
    # A tensor of the function that is being traced has no value outside.
    value = kwargs.get("initial_value")
    if tf.is_symbolic_tensor(value) and tf.get_static_value(value) is not None:
      kwargs["initial_value"] = tf.get_static_value(value)
    with tf.init_scope(), tf.device(self._device):
      created = variable.StackedVariable(count=self._count, **kwargs)
    self._variables[id(created.replica_handle)] = created
    self._num_created += 1
    return created

  def _update(
    self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
  ) -> Any:
    """Calls `fn` on a variable.

    On the host, `fn` is called for each copy if its arguments differ between
    replicas, and once for the whole variable otherwise.
    """
    if not replica_context.in_replica_program():
      given = tf.nest.flatten((args, kwargs or {}))
      if any(_differs(leaf) for leaf in given):
        results = []
        for i, copy in enumerate(self._local_results(var)):
          own = [self._local_results(x)[i] if _differs(x) else x for x in given]
          own_args, own_kwargs = tf.nest.pack_sequence_as(
            (args, kwargs or {}), own
          )
          results.append(fn(copy, *own_args, **own_kwargs))
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
      native = _stacked_variable(value)
      if native is not None:
        return native.values
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
    if axis is None and isinstance(value, arguments.ReplicaValues):
      # Keras adds up the replicas' examples in each `fit`, for their shape.
      parts = value.equal_parts()
    else:
      parts = self._local_results(value)
    # A value that is not per replica counts once for each replica.
    parts = parts * (self._count // len(parts))
    tensors = [tf.convert_to_tensor(part) for part in parts]
    if tensors[0].dtype in (tf.bool, tf.string):
      return tensors[0]  # Keras averages a batch only for its shape.
    # How many elements are added up in each element of the sum.
    count: Any = self._count
    if axis is not None:
      size = tf.add_n(list(map(tf.size, tensors)))
      tensors = [tf.reduce_sum(x, axis) for x in tensors]
      count = size // tf.maximum(tf.size(tensors[0]), 1)
    total = tf.add_n(tensors)
    if operation == tf.distribute.ReduceOp.SUM:
      return total
    return total / tf.cast(count, total.dtype)

  def _reduce_to(
    self, reduce_op: Any, value: Any, destinations: Any, options: Any
  ) -> tf.Tensor:
    return self.combine(reduce_op, value)

  def _gather_to_implementation(
    self, value: Any, destinations: Any, axis: int, options: Any
  ) -> tf.Tensor:
    return tf.concat(self._local_results(value), axis)


def _stacked_variable(value: Any) -> variable.StackedVariable | None:
  """Returns the variable that a Keras variable or another object wraps."""
  # An AutoCastVariable of tf_keras wraps the variable.
  native = variables_lib.native(getattr(value, "_variable", value))
  return native if isinstance(native, variable.StackedVariable) else None


def _evaluated_model(fn: Any, depth: int = 4) -> Any:
  """Returns the Keras model whose `evaluate` or `predict` passes `fn` to `run`.

  Keras passes a method of the model, or nested functions that call it.
  """
  fn = getattr(fn, "python_function", fn)
  model = getattr(fn, "__self__", None)
  if model is not None:
    is_one = getattr(fn, "__name__", "") in ("test_step", "predict_step")
    return model if is_one and hasattr(model, "optimizer") else None
  name = getattr(fn, "__qualname__", "")
  makers = "make_test_function", "make_predict_function"
  evaluates = any(maker in name for maker in makers)
  if not depth or not (evaluates or "autoconvert_optionals" in name):
    return None
  values = [
    cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()
  ]
  models = [v for v in values if evaluates and hasattr(v, "optimizer")]
  models += [_evaluated_model(v, depth - 1) for v in values if callable(v)]
  return next((found for found in models if found is not None), None)


def _differs(value: Any) -> bool:
  """Returns whether a value differs between replicas."""
  return isinstance(value, tf.distribute.DistributedValues) or (
    _stacked_variable(value) is not None
  )


def _call(fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
  """Calls an update function; ungrouped results become tuples."""
  result = fn(*args, **(kwargs or {}))
  return result if group else tf.nest.map_structure(lambda x: (x,), result)
