"""Rewrites the program of one model into a program of all models.

    one model's graph, tensors [...] ─ TensorFlow's pfor ─▶ tensors [N, ...]

pfor is what `tf.vectorized_map` uses: it rewrites operation by operation. A
tensor that is the same in all models stays as it is, which we call shared. Any
other tensor gets a first axis with an entry for each model: it is stacked.

pfor asks a converter for each operation. This package adds converters for what
pfor does not know or converts wrongly: see `control_flow`, `converters`,
`lists`, `operations`, `convolutions` and `kernels`.
"""
# ruff: noqa: SLF001  # pfor is private.

import collections
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf
from absl import logging
from tensorflow.python.ops import (
  handle_data_util,
  list_ops,
  resource_variable_ops,
)
from tensorflow.python.util import tf_stack

from tf_cross_shard._src.vectorized import private_pfor

pfor: Final = private_pfor.load()

Call = Any  # pfor's description of an operation and of its converted inputs.
Wrapped = Any  # pfor.WrappedTensor: a tensor, and whether it is stacked.
Converter = Callable[[Call], Any]

# More models than these run in a loop where an operation cannot be converted;
# fewer get an operation each, which is faster.
_MOST_UNROLLED: Final = 64
_registry: Final[dict[str, Converter]] = pfor._pfor_converter_registry
# pfor's own converters of the operations that this package converts.
_BY_PFOR: Final[dict[str, Converter]] = {}
_in_loop_by_pfor: Final[Any] = pfor._fallback_converter
_create_op: Final[Any] = pfor._create_op


class Conversion(pfor.PForConfig):  # type: ignore[name-defined]
  """What the rewriters of one program share.

  `looped` counts the operations that run once for each model. `of_branches` has
  the lists that branches return, by the id of the tensor that stands for them.
  """

  def __init__(self, count: int) -> None:
    super().__init__()
    self.count = count
    self.looped: collections.Counter[str] = collections.Counter()
    self.of_branches: dict[int, list[Wrapped]] = {}


class Rewriter(pfor.PFor):  # type: ignore[name-defined]
  """Rewrites one graph; `mask` says which models take part, None for all.

  Models that do not take part in a branch or a loop compute, too, and their
  results are discarded. They read what model `source[i]` reads, so that nothing
  fails that would not fail there.
  """

  mask: Any = None
  source: Any = None

  @property
  def conversion(self) -> Conversion:
    """What the rewriters of this program share."""
    conversion: Conversion = self.pfor_config
    return conversion


pfor.PFor = Rewriter
# A stacked list, and an optional of stacked tensors, is one variant.
pfor._is_variant_with_internal_stacking = lambda x: x.dtype == tf.variant


def converts(
  *types: str, forced: bool = True
) -> Callable[[Converter], Converter]:
  """Registers a converter; a `forced` one also converts shared inputs."""

  def register(converter: Converter) -> Converter:
    for name in types:
      if name in _registry:
        _BY_PFOR.setdefault(name, _registry[name])
      _registry[name] = converter
    # pfor copies some stateful operations, too.
    pfor.passthrough_stateful_ops.difference_update(types)
    if forced:
      pfor.force_stateful_ops.update(types)
    return converter

  return register


def convert_by_pfor(call: Call) -> Any:
  """Converts an operation as pfor does without this package."""
  return _BY_PFOR[call.op_type](call)


def wrap(tensor: tf.Tensor, is_stacked: bool) -> Wrapped:
  """Returns a converted tensor."""
  return pfor.wrap(tensor, is_stacked)


def vectorize(
  function: Any, count: int, inputs: Sequence[tf.Tensor], stacks: dict[int, Any]
) -> list[Wrapped]:
  """Adds a model's program, for all models, to the graph being built."""
  conversion = Conversion(count)
  loop_var = tf.compat.v1.placeholder_with_default(0, shape=[])
  outer = Rewriter(loop_var, count, [], True, pfor_config=conversion)
  graph = tf.compat.v1.get_default_graph()
  captured = [
    wrap(graph.capture(stacks.get(id(tensor), tensor)), False)
    for tensor in function.captured_inputs
  ]
  given = [*(wrap(tensor, True) for tensor in inputs), *captured]
  try:
    outputs = inline(outer, function.graph, given)
  except (NotImplementedError, ValueError) as error:
    reason: Exception = error
    if isinstance(error, ValueError):
      if "No pfor vectorization defined" not in str(error):
        raise
      reason = cannot_vectorize(str(error).split()[5])
    place = _place(getattr(error, "operation", None))
    raise NotImplementedError(f"{reason}{place}") from error
  finally:  # It would keep the graph.
    getattr(pfor, "_channel_flatten_input_cache", {}).clear()
  if conversion.looped:
    logging.info(
      "VectorizedStrategy runs these operations once for each replica, because"
      " TensorFlow cannot vectorize them: %s.",
      ", ".join(f"{name} ({n})" for name, n in conversion.looped.items()),
    )
  return outputs[: len(function.outputs)]


def _place(operation: Any) -> str:
  """Returns the user's line that created the operation; "" if unknown."""
  frames = getattr(operation, "traceback", None) or ()
  libraries = "site-packages", "dist-packages", "tf_cross_shard/_src"
  users = [f for f in frames if not any(x in f.filename for x in libraries)]
  if not users:
    return ""
  place = f"{users[-1].filename}, line {users[-1].lineno}"
  return f" {operation.name} was created at {place}."


def inline(
  outer: Rewriter,
  graph: Any,
  inputs: Sequence[Wrapped],
  mask: Any = None,
  source: Any = None,
) -> list[Wrapped]:
  """Adds a function's operations, converted, to the graph being built."""
  inner = Rewriter(
    outer.loop_var,
    outer.conversion.count,
    graph.get_operations(),
    True,
    all_indices=outer.all_indices,
    pfor_config=outer.conversion,
  )
  inner.mask = outer.mask if mask is None else mask
  inner.source = outer.source if source is None else source
  for placeholder, value in zip(graph.inputs, inputs, strict=True):
    inner._add_conversion(placeholder, value)
  outputs = [inner._convert_helper(output) for output in graph.outputs]
  # pfor converts only what the outputs depend on. What the function does
  # besides, TensorFlow's automatic control dependencies keep in order.
  for operation in graph.control_outputs:
    inner._convert_helper((*operation.outputs, operation)[0])
  return outputs


def cannot_vectorize(operation: str) -> NotImplementedError:
  """Returns the error for an operation that cannot be vectorized."""
  return NotImplementedError(
    f"TensorFlow cannot vectorize the operation {operation} over replicas."
    " Replace it, or train the models in separate fits, and replicas under"
    " local_strategy(n)."
  )


# Operations without a converter.


def in_loop(call: Call, root_cause: str = "", warn: bool = False) -> Any:
  """Runs an operation that has no converter once for each model."""
  del root_cause, warn
  # On the stack, the operation would read and change other numbers.
  if any(has_stack(call, i) for i in range(call.num_inputs)):
    raise cannot_vectorize(call.op_type)
  # TensorFlow keeps one tape for all calls of a function.
  is_gradient = "gradient_tape/" in call.op.name
  if call.op_type == "EagerPyFunc" and is_gradient:
    raise cannot_vectorize(f"{call.op_type}, a gradient of tf.py_function,")
  call.pfor.conversion.looped[call.op_type] += 1
  if call.pfor.mask is not None and call.op.op_def.is_stateful:
    return _for_those_that_take_part(call)
  if num_models(call) > _MOST_UNROLLED and call.op.outputs:
    return _in_loop_by_pfor(call)
  results = [_run_for(call, i) for i in range(num_models(call))]
  if not call.op.outputs:
    return tf.group(*results)
  return [
    wrap(_stack_of_equal(call, output, of_models), True)
    for output, of_models in zip(
      call.op.outputs, zip(*results, strict=True), strict=True
    )
  ]


pfor._fallback_converter = in_loop


def _run_for(call: Call, model: Any) -> Any:
  """Runs an operation for one model; returns its outputs, or the operation."""
  inputs = [x.t[model] if x.is_stacked else x.t for x in call.inputs]
  dtypes = [x.dtype for x in call.op.outputs]
  made = _create_op(call.op_type, inputs, dtypes, attrs=call.op.node_def.attr)
  return made.outputs or made


def _for_those_that_take_part(call: Call) -> Any:
  """Runs an operation with side effects for the models in the mask."""
  models = tf.where(call.pfor.mask)[:, 0]
  count = tf.size(models)
  arrays = [tf.TensorArray(x.dtype, count) for x in call.op.outputs]

  def body(i: tf.Tensor, *written: Any) -> Any:
    results = _run_for(call, models[i])
    if not written:
      with tf.control_dependencies([results]):
        return [i + 1]
    return [i + 1, *(a.write(i, x) for a, x in zip(written, results))]  # noqa: B905

  finished, *arrays = tf.while_loop(
    lambda i, *_: i < count, body, [0, *arrays], parallel_iterations=1
  )
  if not arrays:
    return tf.group(finished)
  # The others get the results of a model that takes part.
  order = tf.cumsum(tf.cast(call.pfor.mask, tf.int32)) - 1
  places = tf.gather(order, source_of(call.pfor, call.pfor.mask))
  return [wrap(tf.gather(array.stack(), places), True) for array in arrays]


def _stack_of_equal(
  call: Call, output: tf.Tensor, results: Sequence[tf.Tensor]
) -> tf.Tensor:
  """Stacks models' results; an error, if their sizes depend on the data."""
  is_returned = any(output is x for x in call.op.graph.outputs)
  if not output.consumers() and not is_returned:
    return tf.stack([results[0]] * len(results))  # Nothing reads it.
  if output.shape.rank is None or output.shape.is_fully_defined():
    return tf.stack(results)
  sizes = tf.stack([tf.shape(result) for result in results])
  message = (
    f"{call.op_type} ({call.op.name}) returned results of different shapes on"
    " the replicas, which a vectorized program cannot have. Use operations"
    " whose shapes do not depend on the data, such as a product with a mask."
    f"{_place(call.op)} The shapes are:"
  )
  with check(tf.reduce_all(sizes == sizes[0]), message, sizes):
    return tf.stack(results)


class _WithoutFrames(tf_stack.StackTraceFilter):
  """Lets operations have no traceback: TensorFlow puts it before a message."""

  def get_filtered_filenames(self) -> set[str]:
    modules = [getattr(x, "__dict__", {}) for x in [*sys.modules.values()]]
    files = {str(names.get("__file__")) for names in modules}
    return files | {frame.filename for frame in inspect.stack(0)}


def check(condition: tf.Tensor, message: str, *values: tf.Tensor) -> Any:
  """Returns a context whose operations fail with `message` first."""
  with _WithoutFrames():
    made = tf.debugging.Assert(condition, [message, *values])
  return tf.control_dependencies([made])


# What converters need.


def num_models(call: Call) -> int:
  """Returns how many models take part in the program."""
  count: int = call.pfor.conversion.count
  return count


def handle_rank(handle: tf.Tensor) -> int | None:
  """Returns the number of axes of the variable that a handle belongs to."""
  data = resource_variable_ops.get_eager_safe_handle_data(handle)
  if not data.is_set:
    return None
  rank: int | None = tf.TensorShape(data.shape_and_type[0].shape).rank
  return rank


def has_stack(call: Call, i: int) -> bool:
  """Returns whether input i is the handle of a variable with a stack."""
  before, after = call.op.inputs[i], call.input(i)[0]
  return before.dtype == tf.resource and (
    handle_rank(before) != handle_rank(after)
  )


def stacked(call: Call, i: int) -> tf.Tensor:
  """Returns input i with an entry for each model."""
  return with_models(call.pfor, call.input(i))


def with_models(rewriter: Rewriter, x: Wrapped) -> tf.Tensor:
  """Returns a converted tensor with an entry for each model."""
  count = rewriter.conversion.count
  if x.is_stacked:
    return x.t
  if x.t.dtype != tf.variant:
    return tf.repeat(x.t[tf.newaxis], count, axis=0)
  data = resource_variable_ops.get_eager_safe_handle_data(x.t)
  if any(e.dtype == tf.variant.as_datatype_enum for e in data.shape_and_type):
    return x.t  # A list of lists.
  if x.t.op.type != "EmptyTensorList":
    return rewriter._unwrap_or_tile(x)
  shape, most = x.t.op.inputs
  dtype = x.t.op.get_attr("element_dtype")
  if shape.shape.rank and dtype != tf.variant:
    shape = tf.concat([[count], shape], axis=0)
  return list_ops.empty_tensor_list(shape, dtype, most)


def wrap_stacked(before: tf.Tensor, after: tf.Tensor, count: int) -> Wrapped:
  """Wraps a tensor or a list, and notes the shapes of the list's elements."""
  data = resource_variable_ops.get_eager_safe_handle_data(before)
  if before.dtype != tf.variant or not data.is_set:
    return wrap(after, True)
  of_stack = type(data)()
  of_stack.CopyFrom(data)
  for element in of_stack.shape_and_type:
    if element.dtype != tf.variant.as_datatype_enum:
      shape = tf.TensorShape([count]).concatenate(tf.TensorShape(element.shape))
      element.shape.CopyFrom(shape.as_proto())
  handle_data_util.set_handle_data(after, of_stack)
  return wrap(after, True)


def select(mask: Any, values: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
  """Returns `values` for the models in the mask, and `others` elsewhere."""
  if values.shape.rank is None:  # TensorFlow selects vectors of any rank.
    return tf.raw_ops.Select(condition=mask, x=values, y=others)
  ones = [1] * (values.shape.rank - 1)
  return tf.where(tf.reshape(mask, [-1, *ones]), values, others)


def source_of(rewriter: Rewriter, mask: Any) -> tf.Tensor:
  """Returns each model's number, or that of the first model in the mask."""
  first = tf.argmax(mask, output_type=tf.int32)
  return tf.where(mask, tf.range(rewriter.conversion.count), first)
