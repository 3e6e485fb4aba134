"""What TensorFlow and Keras call on a strategy whose replicas are models.

A replica is the program of one device: `num_replicas_in_sync` is 1, and there
is nothing to exchange.
"""

import functools
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf
from absl import logging
from tensorflow.python.distribute import (
  device_util,
  distribute_lib,
  distribute_utils,
)

from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core import variables as variables_lib
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

# What TensorFlow and tf_keras say of a replica's function, and what helps.
OF_SCOPES: Final = {
  r"(Must not nest|Mixing different) tf\.distribute\.Strategy": (
    "An optimizer or a variable was created under another strategy. Create the"
    " optimizer, the model and the metrics, and call model.compile, inside"
    " `with strategy.scope():`."
  )
}
_WEIGHTS: Final = (
  "`sample_weight` must be [examples] in fit, the same for all models. For"
  " weights of each model, pass dataset_per_model((x, y, per_model(weights)),"
  " batch_size) with weights of shape [models, examples]."
)
# Keras' functions of a step, unless a user's model overrides them.
_STEPS: Final = re.compile(
  r"^TensorFlowTrainer\.(train|test)_step$|\bmake_(train|test)_function\b"
)
_OF_LOSSES: Final = {
  r"must be equal.*compile_loss/\w+/mul\}\}": _WEIGHTS,
  r"Please use `tf\.keras\.losses\.Reduction\.SUM`": (
    "tf_keras allows no mean as `reduction` of a loss object in strategy.run,"
    ' although each replica is a model. Pass reduction="none", and take'
    " tf.reduce_mean(loss(y, outputs)), which is the same number."
  ),
}


class ModelsExtended(
  distribute_lib.StrategyExtendedV1, single_program.SingleProgram
):
  """The methods that TensorFlow, Keras and the core call on a strategy."""

  should_checkpoint = True
  should_save_summary = True
  _global_batch_size = True
  are_models = True
  # Whether replicas' programs are traced for XLA.
  _for_xla: bool | None = None
  _context_class: type[Any] = replica_context.ModelContext
  _advice = OF_SCOPES | _OF_LOSSES

  def __init__(self, strategy: tf.distribute.Strategy, num_copies: int) -> None:
    super().__init__(strategy)
    self.num_copies = num_copies
    # The topics that a warning was given of.
    self.told: set[Any] = set()
    # Whether something else gave models that differed the same weights.
    self.are_overwritten = False
    kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
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
    return 1

  @property
  def worker_devices(self) -> tuple[str, ...]:
    """The device, once for each replica."""
    return (self._device,) * self.num_copies

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
    return datasets.share(dataset, self.num_copies, options)

  def _distribute_datasets_from_function(
    self, dataset_fn: Callable[..., Any], options: Any
  ) -> Any:
    dataset = dataset_fn(tf.distribute.InputContext(num_replicas_in_sync=1))
    return datasets.share(dataset, self.num_copies, options)

  def _experimental_distribute_values_from_function(
    self, value_fn: Callable[..., Any]
  ) -> Any:
    contexts = [
      distribute_lib.ValueContext(i, self.num_copies)
      for i in range(self.num_copies)
    ]
    return distribute_utils.regroup(
      tuple(map(value_fn, contexts)), always_wrap=True
    )

  def warn_of_predict(self, fn: Callable[..., Any]) -> None:
    """Warns once that Keras' `predict` returns the rows of all models."""
    is_predict = "predict" in getattr(fn, "__qualname__", "")
    returns_all = self.are_models and self.num_copies > 1
    if not (is_predict and returns_all) or "predict" in self.told:
      return
    self.told.add("predict")
    logging.warning(
      "predict() returns the predictions of all %d models for each batch, one"
      " after the other: %d times as many rows. Use Models(model).predict(x) or"
      " a plain model, Models(model)[i].",
      *(self.num_copies, self.num_copies),
    )

  def check_weights(self, fn: Callable[..., Any], args: Any) -> None:
    """Raises `ValueError` if Keras' `sample_weight` has a column per model."""
    data = args[0] if len(args) == 1 else ()
    is_step = _STEPS.search(getattr(fn, "__qualname__", ""))
    if not (is_step and isinstance(data, tuple) and len(data) == 3):
      return
    y, weights = (tf.TensorShape(getattr(x, "shape", None)) for x in data[1:])
    count = self.num_copies
    has_columns = count > 1 and weights.rank == 2 and weights[1] == count
    if has_columns and y.rank in (1, 2) and y[1:] != [count]:
      raise ValueError(_WEIGHTS)

  # Replicas.

  def function_of(self, fn: Callable[..., Any]) -> Any:
    """Returns a tf.function that runs `fn` everywhere, kept as long as `fn`."""
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
    if tf.executing_eagerly():  # TensorFlow's `run` does not get here.
      return self._container_strategy().run(fn, args, kwargs)
    with self._tracing:
      given = arguments.Arguments(args, kwargs, self.num_copies)
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
          f"{other.name} belongs to another VectorizedStrategy object. Create"
          " the strategy once, and the variable inside its scope."
        )
    stacks = {key: variable.stack_handle for key, variable in variables.items()}
    outputs = vectorizer.vectorize(
      function, self.num_copies, given.stacks, stacks
    )
    values = [
      arguments.ReplicaValues(x.t, self.num_copies, x.is_stacked)
      for x in outputs
    ]
    return arguments.pack_results(structure, values)

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
      with strategy.scope(), self._context_class(strategy, 0):
        results = arguments.as_results(fn(*args, **kwargs))
      structure[:] = [results]
      leaves = tf.nest.flatten(results, expand_composites=True)
      return [leaf for leaf in leaves if leaf is not None]

    def build() -> Any:
      function = tf.function(
        replica_fn, autograph=False, jit_compile=self._for_xla
      )
      try:
        return function.get_concrete_function(*given.specs)
      except (RuntimeError, ValueError) as error:
        self.advise(error)
        raise

    before = self._num_created
    function = build()
    if self._num_created != before:
      # The first trace created variables, such as slots, and Python code may
      # have branched on their absence. Trace again, as tf.function does.
      function = build()
    return structure[0], function

  def advise(self, error: BaseException) -> None:
    """Raises an error that says what helps, in place of TensorFlow's."""
    for words, advice in self._advice.items():
      if re.search(words, str(error)):
        raise type(error)(advice) from error

  # Exchanges. A replica is alone, so that each returns what it receives.

  def cross_replica_sum(
    self, tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
  ) -> tf.Tensor:
    del group_assignment
    return tensor

  all_to_all = cross_replica_sum

  def same_on_all_replicas(self, value: tf.Tensor) -> tf.Tensor:
    return replica_context.same_on_all_replicas(value)

  def _replica_ctx_all_reduce(
    self, reduce_op: Any, value: Any, options: Any = None
  ) -> Any:
    del reduce_op, options
    return value

  # Variables.

  def _create_variable(
    self, next_creator: Callable[..., Any], **kwargs: Any
  ) -> Any:
    if not tf.compat.v1.executing_eagerly_outside_functions():
      raise NotImplementedError(
        "VectorizedStrategy has no variables in a graph of TensorFlow 1. Create"
        " them outside of tf.Graph, with eager execution enabled."
      )
    # tf.compat.v1.Variable adds "expected_shape".
    ignored = "use_resource", "colocate_with", "partitioner", "expected_shape"
    for name in ignored:
      kwargs.pop(name, None)
    value = kwargs.get("initial_value")
    if value is None:
      raise NotImplementedError(
        "Variables of VectorizedStrategy need an `initial_value`, so you cannot"
        " load a SavedModel inside of its scope. Load it outside, create the"
        " model inside, and copy the weights: model.set_weights(loaded"
        ".get_weights())."
      )
    # A tensor of the function that is being traced has no value outside.
    if tf.is_symbolic_tensor(value) and tf.get_static_value(value) is not None:
      kwargs["initial_value"] = tf.get_static_value(value)
    with tf.init_scope(), tf.device(self._device):
      created = variable.StackedVariable(
        count=self.num_copies, are_models=self.are_models, **kwargs
      )
    self._variables[id(created.replica_handle)] = created
    self._num_created += 1
    return created

  def _update(
    self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
  ) -> Any:
    """Calls `fn` on a variable: in all replicas, if its arguments differ."""
    given = tf.nest.flatten((args, kwargs or {}))
    if replica_context.in_replica_program() or not any(map(_differs, given)):
      return _call(fn, (var, *args), kwargs, group)
    run = self._container_strategy().run
    # An eager `run` would pass the variables to a tf.function.
    return tf.function(lambda: run(fn, (var, *args), kwargs), autograph=False)()

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
  ) -> Any:
    """Returns the sum or mean of the replicas' values, also over axes."""
    if replica_context.in_replica_program():  # In a merge call.
      return self._combine_here(operation, value)
    parts = list(map(tf.convert_to_tensor, self._local_results(value)))
    if len(parts) == 1 or not getattr(value, "is_stacked", True):
      total = parts[0]
      if axis is not None:
        total = _mean_or_sum(operation, [total], axis)
      if operation == tf.distribute.ReduceOp.MEAN:
        return total
      return total * tf.cast(self.num_copies, total.dtype)
    if axis is None:
      return _mean_or_sum(operation, [tf.stack(parts)], 0)
    return _mean_or_sum(operation, parts, axis)

  def _combine_here(self, operation: tf.distribute.ReduceOp, value: Any) -> Any:
    """Combines the replicas' values inside a replica's program."""
    del operation
    return value

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


def _mean_or_sum(
  operation: tf.distribute.ReduceOp, values: Sequence[tf.Tensor], axis: Any
) -> tf.Tensor:
  """Combines all elements along an axis of values, which may differ in size."""
  total = tf.add_n([tf.reduce_sum(value, axis) for value in values])
  if operation == tf.distribute.ReduceOp.SUM:
    return total
  # How many elements are added up in each element of the sum.
  size = tf.add_n(list(map(tf.size, values)))
  count = size // tf.maximum(tf.size(total), 1)
  return total / tf.cast(count, total.dtype)


def _differs(value: Any) -> bool:
  """Returns whether a value differs between replicas."""
  return isinstance(value, tf.distribute.DistributedValues) or (
    _stacked_variable(value) is not None
  )


def _call(fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
  """Calls an update function; ungrouped results become tuples."""
  result = fn(*args, **(kwargs or {}))
  return result if group else tf.nest.map_structure(lambda x: (x,), result)
