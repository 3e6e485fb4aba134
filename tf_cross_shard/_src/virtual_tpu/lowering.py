"""Lowers a replica's program to the XLA module that a TPU would receive.

    concrete function  --tf2xla-->  HLO module
                                    arguments..., variables...
                                 -> outputs..., new variables...

TensorFlow itself lowers the graph. A variable is a parameter of the module, and
its new value is an output that reuses the parameter's memory.
"""

import threading
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import resource_variable_ops

from tf_cross_shard._src.core import variables
from tf_cross_shard._src.virtual_tpu import hlo

_lock: Final = threading.Lock()
_DEVICE: Final = "/job:localhost/replica:0/task:0/device:CPU:0"


class TPUCompileError(tf.errors.InvalidArgumentError):
  """A program has an operation, a shape or a dtype that no TPU can run."""

  ag_pass_through = True  # AutoGraph would replace the class of this error.

  def __init__(self, message: str) -> None:
    super().__init__(None, None, message)


class Program:
  """The program of a replica, as a graph."""

  def __init__(self, function: Any, variables: dict[int, Any]) -> None:
    """Raises a `TPUCompileError` if the program uses a foreign resource."""
    self.function = function
    self._variables = variables
    for tensor in function.captured_inputs:
      if tensor.dtype == tf.resource and id(tensor) not in variables:
        names = {
          id(getattr(v, "replica_handle", v.handle)): v.name
          for v in function.graph.variables
        }
        raise TPUCompileError(
          "This is not on the virtual TPU:"
          f" {names.get(id(tensor), tensor)}. Create variables inside"
          " `with strategy.scope():`, and read datasets outside `strategy.run`."
        )

  @property
  def shapes(self) -> list[tf.TensorShape]:
    """The shapes of the inputs that are not variables."""
    inputs = self.function.inputs
    return [x.shape for x in inputs if x.dtype != tf.resource]

  @property
  def has_known_shapes(self) -> bool:
    return all(shape.is_fully_defined() for shape in self.shapes)

  def lower(self) -> hlo.Module:
    """Lowers the program, or raises a `TPUCompileError`."""
    module = hlo.Module(self._to_hlo())
    _check_module(module, len(self.function.inputs))
    return module

  def _to_hlo(self) -> bytes:
    """Returns the serialized HLO module of the graph."""
    # Two other ways failed. The public `experimental_get_compiler_ir` does not
    # accept a function that captures a tensor of a graph being built. Calling
    # the graph from another function hides constants that nested loops need.
    function = self.function
    captures = function.captured_inputs
    num_arguments = len(function.inputs) - len(captures)
    specs = [
      tf.TensorSpec(tensor.shape, tensor.dtype)
      for tensor in function.inputs[:num_arguments]
    ]
    with tf.init_scope(), tf.device(_DEVICE), _lock:
      # XLA uses only the dtypes and shapes of captured values: zeros will do.
      stand_ins: list[Any] = []
      for tensor in captures:
        variable = self._variables.get(id(tensor))
        like = tensor if variable is None else variable
        zeros = tf.zeros(like.shape, like.dtype)
        if variable is not None:
          # Not tf.Variable, which would ask the strategy.
          zeros = resource_variable_ops.ResourceVariable(zeros)
        stand_ins.append(zeros)
      handles = [getattr(value, "handle", value) for value in stand_ins]
      try:
        module: bytes = context.context().get_compiler_ir(
          device_name=_DEVICE,
          platform_name=None,
          function_name=function.name,
          flat_args=specs,
          captured_inputs=handles,
          stage="hlo_serialized",
        )
      except (tf.errors.OpError, ValueError, TypeError) as error:
        raise TPUCompileError(
          "A TPU cannot run the function in `strategy.run`. Move strings,"
          " files, tf.print, tf.py_function and tf.summary out of it, and give"
          f" tensors a known shape. XLA: {error}"
        ) from error
    return module


def check_dense(value: Any) -> None:
  is_dense = isinstance(value, tf.Tensor) or variables.is_variable(value)
  if tf.is_tensor(value) and not is_dense:
    raise TPUCompileError(
      f"A TPU takes dense tensors only; got a {type(value).__name__}. Convert"
      " it outside `strategy.run`."
    )


def _check_module(module: hlo.Module, num_parameters: int) -> None:
  """Raises an error for what XLA compiles for CPUs but not for TPUs."""
  # XLA adds operations that collect the results.
  dynamic = {
    name for name in module.dynamic_operations() if "XLA_Retvals" not in name
  }
  if dynamic:
    raise TPUCompileError(
      "Shapes in a TPU program must not depend on data; the shapes of"
      f" {', '.join(sorted(dynamic)[:3])} do. Use tf.where with three"
      " arguments, or weights of 0."
    )
  if module.num_parameters != num_parameters:
    raise TPUCompileError(
      f"TensorFlow lowered {num_parameters} inputs to {module.num_parameters}"
      " parameters. Pass shapes and axes into `strategy.run` as Python numbers."
    )
