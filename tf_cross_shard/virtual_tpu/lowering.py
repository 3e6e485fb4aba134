"""From a replica's function to one XLA module for all replicas.

    fn(arguments)  --trace-->  graph  --tf2xla-->  HLO module
                                                   arguments..., variables...
                                                -> outputs..., new variables...

TensorFlow's own lowering does it; the module is the one that a TPU would be
given, and the variables in it are parameters that the program replaces.
"""

import dataclasses
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from tf_cross_shard.virtual_tpu import hlo, replica, tracing
from tf_cross_shard.virtual_tpu import variables as variables_lib

_lock: Final = threading.Lock()


class TPUCompileError(tf.errors.InvalidArgumentError):
  """What a TPU cannot run: an operation, a shape, a dtype."""

  ag_pass_through = True  # AutoGraph would raise a class of its own instead.

  def __init__(self, message: str) -> None:
    """Makes the error.

    Args:
      message: What a TPU cannot run, and what to do about it.
    """
    super().__init__(None, None, message)


@dataclasses.dataclass(frozen=True)
class Traced:
  """A replica's function as a graph.

  Attributes:
    function: The graph. It takes tensors and answers tensors.
    captured: Tensors of the surrounding program that it uses, in order.
    variables: The variables that it uses, in order.
    structure: What the Python function returned, tensors being symbolic.
  """

  function: Any
  captured: list[tf.Tensor]
  variables: list[variables_lib.ReplicaVariable]
  structure: Any

  @property
  def output_specs(self) -> list[tf.TensorSpec]:
    """Dtype and shape of each output, as far as the graph knows."""
    return [
      tf.TensorSpec(each.shape, each.dtype) for each in self.function.outputs
    ]


@dataclasses.dataclass(frozen=True)
class Lowered:
  """A replica's function as an XLA module.

  Attributes:
    module: A serialized HloModuleProto. Its parameters are the arguments and
      captured tensors, then `variables`; its outputs are those of the
      function, then the new values of `updated`.
    variables: Parameters, after the arguments.
    updated: Those of them that the program replaces, in order of the outputs.
    outputs: Shape and dtype of the function's own outputs.
  """

  module: bytes
  variables: list[variables_lib.ReplicaVariable]
  updated: list[variables_lib.ReplicaVariable]
  outputs: list[tf.TensorSpec]


def trace(
  fn: Callable[..., Any],
  specs: Sequence[tf.TensorSpec],
  known: Sequence[variables_lib.ReplicaVariable],
) -> Traced:
  """Builds the graph of a replica's function.

  Args:
    fn: Takes one tensor per item of `specs`.
    specs: Their shapes, which may be partly unknown, and dtypes.
    known: All variables of the strategy.

  Returns:
    The graph.

  Raises:
    TPUCompileError: If a variable or dtype cannot be on a TPU.
  """
  for spec in specs:
    _check_dtype(spec.dtype, "an argument")

  def marked(*tensors: tf.Tensor) -> Any:
    tracing.mark_replica_program()
    return fn(*tensors)

  function = tf.function(marked, autograph=False).get_concrete_function(*specs)
  by_handle = {id(each.raw_handle): each for each in known}
  captured, used = [], []
  for tensor in function.captured_inputs:
    if tensor.dtype != tf.resource:
      _check_dtype(tensor.dtype, "a captured tensor")
      captured.append(tensor)
    elif id(tensor) in by_handle:
      used.append(by_handle[id(tensor)])
    else:
      raise TPUCompileError(
        "A replica's program uses a resource that is not on the virtual TPU:"
        f" {_describe(tensor, function)}. Make variables inside"
        " `with strategy.scope():`, and read datasets outside `strategy.run`."
      )
  for output in function.outputs:
    _check_dtype(output.dtype, "an output")
  return Traced(function, captured, used, function.structured_outputs)


def lower(traced: Traced, shapes: Sequence[tf.TensorShape]) -> Lowered:
  """Lowers a graph for arguments of these shapes.

  Args:
    traced: The graph.
    shapes: Of the arguments and of the captured tensors, all known.

  Returns:
    The module.

  Raises:
    TPUCompileError: If the program has what a TPU cannot compile.
  """
  function = traced.function
  is_resource = [x.dtype == tf.resource for x in function.captured_inputs]
  num_arguments = len(shapes) - len(traced.captured)
  dtypes = [x.dtype for x in function.inputs[:num_arguments]]
  dtypes += [x.dtype for x in traced.captured]

  def closed(*tensors: tf.Tensor) -> list[tf.Tensor]:
    tracing.mark_replica_program()
    given, handles = iter(tensors[num_arguments:]), iter(traced.variables)
    captured = [
      next(handles).raw_handle if resource else next(given)
      for resource in is_resource
    ]
    outputs = tf.raw_ops.StatefulPartitionedCall(
      args=[*tensors[:num_arguments], *captured],
      Tout=[x.dtype for x in function.outputs],
      f=function,
    )
    # XLA leaves outputs that it knows at compile time out of the module, and
    # says nowhere which. Behind a barrier it does not look.
    if not function.outputs:
      return []
    return gen_xla_ops.xla_optimization_barrier(input=outputs)

  specs = [
    tf.TensorSpec(shape, dtype)
    for shape, dtype in zip(shapes, dtypes, strict=True)
  ]
  with tf.init_scope():
    jitted = tf.function(closed, jit_compile=True, autograph=False)
    module = hlo.Module(_to_hlo(jitted, specs))
    handles = jitted.get_concrete_function(*specs).captured_inputs
  by_handle = {id(each.raw_handle): each for each in traced.variables}
  parameters = [by_handle[id(handle)] for handle in handles]
  _check_module(module, len(specs) + len(parameters))
  num_outputs = len(function.outputs)
  aliases = module.outputs_to_parameters()
  updated = [
    parameters[aliases[i] - len(specs)]
    for i in range(num_outputs, module.num_outputs)
  ]
  return Lowered(
    module=module.portable(replica.FLOAT64_SUM),
    variables=parameters,
    updated=updated,
    outputs=[
      tf.TensorSpec(shape, output.dtype)
      for shape, output in zip(
        module.output_shapes()[:num_outputs], function.outputs, strict=True
      )
    ],
  )


def _to_hlo(jitted: Any, specs: Sequence[tf.TensorSpec]) -> bytes:
  """The serialized module of a compiled function."""
  with _lock, warnings.catch_warnings():
    # "device_name is being deprecated": without it, no variables.
    warnings.simplefilter("ignore", UserWarning)
    try:
      lowering = jitted.experimental_get_compiler_ir(*specs)
      module: bytes = lowering(
        stage="hlo_serialized", device_name="/device:CPU:0"
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
  """Raises an error for what XLA takes on a CPU and a TPU does not."""
  dynamic = module.dynamic_operations()
  if dynamic:
    names = ", ".join(sorted(set(dynamic))[:3])
    raise TPUCompileError(
      f"A TPU program's shapes must not depend on data; those of {names} do."
      " Replace tf.boolean_mask, tf.where with one argument, tf.unique and the"
      " like by tf.where with three arguments, or by a weight of 0."
    )
  calls = module.custom_calls()
  if calls:
    raise TPUCompileError(
      f"A TPU cannot run {', '.join(sorted(set(calls)))}, code for CPUs that"
      " XLA calls but does not compile. Do this step outside `strategy.run`."
    )
  if module.num_parameters != num_parameters:
    raise RuntimeError(
      f"TensorFlow lowered {num_parameters} inputs to"
      f" {module.num_parameters} parameters; this package does not know this"
      f" TensorFlow ({tf.__version__}). Please report it."
    )


def _check_dtype(dtype: tf.DType, where: str) -> None:
  """Raises an error for a dtype that only hosts have."""
  if dtype in (tf.string, tf.variant, tf.resource):
    raise TPUCompileError(
      f"A TPU has no dtype {dtype.name}, which {where} of the replica's"
      " function has. Convert it outside `strategy.run`."
    )


def _describe(tensor: tf.Tensor, function: Any) -> str:
  """A name that the user knows, of a resource."""
  for variable in function.graph.variables:
    if variable.handle is tensor:
      return f"the variable {variable.name}"
  return repr(tensor)
