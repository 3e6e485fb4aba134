"""From a replica's function to one XLA module for all replicas.

    fn(arguments)  --trace-->  graph  --tf2xla-->  HLO module
                                                   arguments..., variables...
                                                -> outputs..., new variables...

TensorFlow's own lowering does it, so a TPU would receive the same module. Its
variables are parameters that the program replaces.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.eager import context

from tf_cross_shard.virtual_tpu import hlo, replica_context, replica_variable

_lock: Final = threading.Lock()


class TPUCompileError(tf.errors.InvalidArgumentError):
  """A program has an operation, a shape or a dtype that no TPU runs."""

  ag_pass_through = True  # AutoGraph would raise a class of its own instead.

  def __init__(self, message: str) -> None:
    super().__init__(None, None, message)


@dataclasses.dataclass(frozen=True)
class Traced:
  """A replica's function as a graph."""

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
  """A replica's function as an XLA module, and what the module returns."""

  module: bytes
  outputs: list[tf.TensorSpec]
  updated: list[replica_variable.ReplicaVariable]


def is_variable(captured: Any) -> bool:
  """Whether a captured input is a variable of the virtual TPU."""
  return isinstance(captured, replica_variable.ReplicaVariable)


def trace(
  fn: Callable[..., Any],
  specs: Sequence[tf.TensorSpec],
  known: Callable[[], Sequence[replica_variable.ReplicaVariable]],
) -> Traced:
  """Builds the graph of a replica's function."""

  def marked(*tensors: tf.Tensor) -> Any:
    replica_context.mark_replica_program()
    outputs = fn(*tensors)
    flat = tf.nest.flatten(outputs, expand_composites=True)
    flat = [tensor for tensor in flat if tensor is not None]
    if not flat:
      return outputs
    # XLA leaves outputs that it knows at compile time out of the module, and
    # does not say which. Behind a barrier it knows none.
    hidden = iter(gen_xla_ops.xla_optimization_barrier(input=flat))
    return tf.nest.map_structure(
      lambda leaf: None if leaf is None else next(hidden),
      outputs,
      expand_composites=True,
    )

  def build() -> Any:
    function = tf.function(marked, autograph=False, jit_compile=True)
    return function.get_concrete_function(*specs)

  # Not their number: others may be collected meanwhile.
  before = {variable._unique_id for variable in known()}
  function = build()
  if any(variable._unique_id not in before for variable in known()):
    # As tf.function does: the first trace makes variables, such as optimizer
    # state, and Python code may have branched on their absence.
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
        f" {names.get(id(tensor), tensor)}. Make variables inside"
        " `with strategy.scope():`, and read datasets outside `strategy.run`."
      )
  return Traced(function, captures, function.structured_outputs)


def lower(traced: Traced, shapes: Sequence[tf.TensorShape]) -> Lowered:
  """Lowers a graph for arguments of these shapes."""
  inputs, results = traced.function.inputs, traced.function.outputs
  num_arguments = len(inputs) - len(traced.captures)
  module = hlo.Module(_to_hlo(traced, shapes, num_arguments))
  _check_module(module, len(inputs))
  output_shapes = module.output_shapes()
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
  """The serialized module of a graph.

  The public `experimental_get_compiler_ir` does not take a function that
  captures a tensor of a function being built. Calling the graph from another
  function instead hides constants from XLA that nested loops need.
  """
  inputs = traced.function.inputs
  specs = [
    tf.TensorSpec(shape, tensor.dtype)
    for shape, tensor in zip(shapes, inputs[:num_arguments], strict=False)
  ]
  captured_shapes = iter(shapes[num_arguments:])
  with tf.init_scope(), _lock:
    # Of captured tensors only dtype and shape count.
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
        "A TPU cannot compile this program, which is to run inside"
        " `strategy.run`. Take out what must run on the host (strings, files,"
        " tf.print, tf.py_function, tf.summary) and give every tensor a shape"
        f" that is known when the program is compiled. XLA says: {error}"
      ) from error
  return module


def _check_module(module: hlo.Module, num_parameters: int) -> None:
  """Raises an error for what XLA compiles for CPUs and not for TPUs."""
  # Without what this file adds.
  dynamic = {
    name
    for name in module.dynamic_operations()
    if "XlaOptimizationBarrier" not in name and "XLA_Retvals" not in name
  }
  if dynamic:
    raise TPUCompileError(
      "A TPU program's shapes must not depend on data; those of"
      f" {', '.join(sorted(dynamic)[:3])} do."
      " Replace tf.boolean_mask, tf.where with one argument, tf.unique and the"
      " like by tf.where with three arguments, or by a weight of 0."
    )
  if module.num_parameters != num_parameters:
    raise TPUCompileError(
      f"TensorFlow lowered {num_parameters} inputs to"
      f" {module.num_parameters} parameters. A tensor from outside"
      " `strategy.run` may be needed as a shape or an axis there: pass a number"
      " instead."
    )
