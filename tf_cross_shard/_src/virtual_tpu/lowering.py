"""Lowers a replica's function to one XLA module for all replicas.

    fn(arguments)  --trace-->  graph  --tf2xla-->  HLO module
                                                   arguments..., variables...
                                                -> outputs..., new variables...

TensorFlow itself lowers the graph, so a TPU would receive the same module.
A variable is a parameter of the module, and its new value is an output that
reuses the parameter's memory.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.eager import context

from tf_cross_shard._src.virtual_tpu import (
  hlo,
  replica_context,
  replica_variable,
)

_lock: Final = threading.Lock()


class TPUCompileError(tf.errors.InvalidArgumentError):
  """A program has an operation, a shape or a dtype that no TPU can run."""

  ag_pass_through = True  # AutoGraph would replace the class of this error.

  def __init__(self, message: str) -> None:
    super().__init__(None, None, message)


@dataclasses.dataclass(frozen=True)
class Traced:
  """A replica's function as a graph.

  Attributes:
    function: TensorFlow's concrete function.
    captures: The tensors and variables from outside the function, in the
      order of the graph's last inputs.
    structure: The structure that the function returns.
  """

  function: Any
  captures: list[tf.Tensor | replica_variable.ReplicaVariable]
  structure: Any

  @property
  def captured(self) -> list[tf.Tensor]:
    """The tensors among the captures."""
    return [x for x in self.captures if not is_variable(x)]

  @property
  def variables(self) -> list[replica_variable.ReplicaVariable]:
    """The variables among the captures."""
    return [x for x in self.captures if is_variable(x)]


@dataclasses.dataclass(frozen=True)
class Lowered:
  """A replica's function as an XLA module.

  Attributes:
    module: The serialized module.
    outputs: The shape and dtype of each result.
    updated: The variables whose new values follow the results, in order.
  """

  module: bytes
  outputs: list[tf.TensorSpec]
  updated: list[replica_variable.ReplicaVariable]


def is_variable(captured: Any) -> bool:
  """Returns whether a captured input is a variable of the virtual TPU."""
  return isinstance(captured, replica_variable.ReplicaVariable)


def trace(
  fn: Callable[..., Any],
  specs: Sequence[tf.TensorSpec],
  known: Callable[[], Sequence[replica_variable.ReplicaVariable]],
) -> Traced:
  """Traces a replica's function for arguments of these dtypes and shapes.

  `known` returns the variables of the strategy that exist now.

  Raises:
    TPUCompileError: If the function uses a resource that is not a variable of
      the strategy.
  """

  def marked(*tensors: tf.Tensor) -> Any:
    replica_context.mark_replica_program()
    outputs = fn(*tensors)
    flat = tf.nest.flatten(outputs, expand_composites=True)
    flat = [tensor for tensor in flat if tensor is not None]
    if not flat:
      return outputs
    # XLA drops outputs that are constants from the module without telling
    # which. Behind a barrier, no output is a constant to XLA.
    hidden = iter(gen_xla_ops.xla_optimization_barrier(input=flat))
    return tf.nest.map_structure(
      lambda leaf: None if leaf is None else next(hidden),
      outputs,
      expand_composites=True,
    )

  def build() -> Any:
    function = tf.function(marked, autograph=False, jit_compile=True)
    return function.get_concrete_function(*specs)

  # Compare the variables, not their number: Python may delete other variables
  # meanwhile.
  before = {variable.ref() for variable in known()}
  function = build()
  if any(variable.ref() not in before for variable in known()):
    # The first trace created variables, such as slots, and Python code may have
    # branched on their absence. Trace again, as tf.function does.
    function = build()
  by_handle = {id(variable.raw_handle): variable for variable in known()}
  captures: list[tf.Tensor | replica_variable.ReplicaVariable] = []
  for tensor in function.captured_inputs:
    if tensor.dtype != tf.resource:
      captures.append(tensor)
    elif id(tensor) in by_handle:
      captures.append(by_handle[id(tensor)])
    else:
      names = {id(v.handle): v.name for v in function.graph.variables}
      raise TPUCompileError(
        "A replica's program uses a resource that is not on the virtual TPU:"
        f" {names.get(id(tensor), tensor)}. Create variables inside"
        " `with strategy.scope():`, and read datasets outside `strategy.run`."
      )
  return Traced(function, captures, function.structured_outputs)


def lower(traced: Traced, shapes: Sequence[tf.TensorShape]) -> Lowered:
  """Lowers a graph for inputs of these shapes.

  Raises:
    TPUCompileError: If a TPU could not run the program.
  """
  inputs, results = traced.function.inputs, traced.function.outputs
  num_arguments = len(inputs) - len(traced.captures)
  module = hlo.Module(_to_hlo(traced, shapes, num_arguments))
  _check_module(module, len(inputs))
  output_shapes = module.output_shapes()
  # An output after the results is the new value of a variable. It reuses the
  # memory of a parameter, which tells which variable it is.
  aliases = module.outputs_to_parameters()
  return Lowered(
    module=module.portable(),
    outputs=[
      tf.TensorSpec(shape, result.dtype)
      for shape, result in zip(output_shapes, results, strict=False)
    ],
    updated=[
      traced.captures[aliases[i] - num_arguments]
      for i in range(len(results), len(output_shapes))
    ],
  )


def _to_hlo(
  traced: Traced, shapes: Sequence[tf.TensorShape], num_arguments: int
) -> bytes:
  """Returns the serialized HLO module of a graph.

  Two other ways failed. The public `experimental_get_compiler_ir` does not
  accept a function that captures a tensor of a graph being built. Calling the
  graph from another function hides constants from XLA that nested loops need.
  """
  inputs = traced.function.inputs
  specs = [
    tf.TensorSpec(shape, tensor.dtype)
    for shape, tensor in zip(shapes, inputs[:num_arguments], strict=False)
  ]
  captured_shapes = iter(shapes[num_arguments:])
  with tf.init_scope(), _lock:
    # XLA uses only the dtype and shape of captured tensors: zeros will do.
    captured = [
      x.raw_handle
      if is_variable(x)
      else tf.zeros(next(captured_shapes), x.dtype)
      for x in traced.captures
    ]
    try:
      module: bytes = context.context().get_compiler_ir(
        device_name="/job:localhost/replica:0/task:0/device:CPU:0",
        platform_name=None,
        function_name=traced.function.name,
        flat_args=specs,
        captured_inputs=captured,
        stage="hlo_serialized",
      )
    except (tf.errors.OpError, ValueError, TypeError) as error:
      raise TPUCompileError(
        "The function in `strategy.run` cannot be compiled for a TPU. Move what"
        " must run on the host (strings, files, tf.print, tf.py_function,"
        " tf.summary) out of it, and give every tensor a shape that is known"
        f" when the program is compiled. XLA's error: {error}"
      ) from error
  return module


def _check_module(module: hlo.Module, num_parameters: int) -> None:
  """Raises an error for what XLA compiles for CPUs but not for TPUs."""
  # Leave out the operations that this file and XLA add.
  dynamic = {
    name
    for name in module.dynamic_operations()
    if "XlaOptimizationBarrier" not in name and "XLA_Retvals" not in name
  }
  if dynamic:
    raise TPUCompileError(
      "Shapes in a TPU program must not depend on data; the shapes of"
      f" {', '.join(sorted(dynamic)[:3])} do. Replace tf.boolean_mask, tf.where"
      " with one argument, tf.unique and similar operations by tf.where with"
      " three arguments, or by weights of 0."
    )
  if module.num_parameters != num_parameters:
    raise TPUCompileError(
      f"TensorFlow lowered {num_parameters} inputs to"
      f" {module.num_parameters} parameters. A likely cause: a tensor created"
      " outside `strategy.run` is used as a shape or axis inside it; pass a"
      " Python number instead."
    )
