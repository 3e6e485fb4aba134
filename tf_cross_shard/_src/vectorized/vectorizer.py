"""Rewrites the graph of one replica into one that computes all replicas.

    replica's graph, tensors [...] ─ TensorFlow's pfor ─▶ tensors [N, ...]

pfor is what `tf.vectorized_map` uses: it rewrites operation by operation. A
tensor that is the same on all replicas stays as it is; any other gets a first
axis with a row for each replica. pfor has no converters for variables, for
exchanges between replicas and for what functions do besides returning values.
These are in `converters` and, for functions, below.

This is the only file that uses `tensorflow.python.ops.parallel_for.pfor`, which
is private. It was tested with TensorFlow 2.16 to 2.21.
"""
# ruff: noqa: SLF001  # pfor is private.

import collections
import contextlib
import functools
import logging as std_logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import auto_control_deps_utils, func_graph
from tensorflow.python.ops import handle_data_util, resource_variable_ops
from tensorflow.python.ops.parallel_for import pfor

# The names of pfor that this file uses.
_NEEDED: Final = (
  *("PFor", "WrappedTensor", "wrap", "_create_op", "_fallback_converter"),
  *("_partition_inputs_for_indices", "_pfor_converter_registry"),
  *("force_stateful_ops", "passthrough_stateful_ops"),
)
# More replicas than these run in a loop where an operation cannot be converted;
# fewer get an operation each, which is faster.
_MOST_UNROLLED: Final = 64
# Operations through which replicas exchange values.
_EXCHANGES: Final = {"XlaAllReduce", "XlaReduceScatter"}
_XLA: Final = "_XlaMustCompile"

Call = Any  # pfor's description of an operation and of its converted inputs.
Wrapped = Any  # pfor.WrappedTensor: a tensor, and whether it has a first axis.
Converter = Callable[[Call], Any]

# Converters by the type of operation; `converters` adds its own.
CONVERTERS: Final[dict[str, Converter]] = {}
# Stateful operations without a converter here that may run for replicas that
# are not in a branch.
_HARMLESS: Final = frozenset(
  {
    *("Placeholder", "RandomStandardNormal", "RandomUniform"),
    *("RandomUniformInt", "TruncatedNormal"),
  }
)
# Operations whose converters are for inputs that differ between replicas.
_NOT_FORCED: Final[set[str]] = set()
_lock: Final = threading.RLock()
# pfor's own converters, of those that this package replaces.
_replaced: Final[dict[str, Converter]] = {}
_looped: collections.Counter[str] = collections.Counter()
# The optionals of all branches, and how the conditional was converted, by the
# id of the optional that stands for them.
_of_branches: Final[dict[int, tuple[list[Wrapped], Any]]] = {}
_fallback: Final[Any] = getattr(pfor, "_fallback_converter", None)


def check_version() -> None:
  """Raises `NotImplementedError` if TensorFlow lacks a part of pfor."""
  missing = [name for name in _NEEDED if not hasattr(pfor, name)]
  if missing:
    raise NotImplementedError(
      "VectorizedStrategy uses private parts of TensorFlow 2.16 to 2.21, and"
      f" TensorFlow {tf.__version__} lacks {', '.join(missing)}. Use"
      " local_strategy(n, vectorized=False)."
    )


def converts(
  *types: str, forced: bool = True
) -> Callable[[Converter], Converter]:
  """Registers a converter for these types of operations.

  Args:
    *types: The types.
    forced: Whether to use the converter also if all replicas have the same
      inputs. Otherwise, the operation is then taken over as it is.
  """

  def register(converter: Converter) -> Converter:
    if not forced:
      _NOT_FORCED.update(types)
    CONVERTERS.update(dict.fromkeys(types, converter))
    return converter

  return register


def wrap(tensor: tf.Tensor, is_stacked: bool) -> Wrapped:
  """Returns a converted tensor: with a row for each replica, or shared."""
  return pfor.wrap(tensor, is_stacked)


class _Rewriter(pfor.PFor):
  """Rewrites one graph, and knows which replicas take part.

  Attributes:
    mask: A boolean for each replica: whether it is in the branch that this
      graph is. None for all. All replicas compute the branch, and only those
      in it change variables.
    graph: The graph.
  """

  mask: Any = None
  graph: Any = None

  @functools.cached_property
  def own(self) -> set[int]:
    """The ids of operations that depend on a replica's own arguments.

    What an exchange returns does not: the members of a group have it alike.
    """
    captured = {id(inside) for _, inside in self.graph.captures}
    own = {id(x.op) for x in self.graph.inputs if id(x) not in captured}
    for op in self.graph.get_operations():
      is_exchange = op.type in _EXCHANGES
      if not is_exchange and any(id(x.op) in own for x in op.inputs):
        own.add(id(op))
    return own


def vectorize(
  function: Any,
  count: int,
  inputs: Sequence[tf.Tensor],
  stacks: dict[int, Any],
  replicas: Sequence[int] | None = None,
) -> list[Wrapped]:
  """Adds a replica's program, for all replicas, to the graph being built.

  Args:
    function: The replica's program, a concrete function.
    count: The number of replicas.
    inputs: For each input of the program, a tensor with a first axis.
    stacks: Maps the id of a variable's handle in the program to the handle of
      the variable's stack.
    replicas: The replicas that run the program, if it is not all of them.

  Returns:
    The outputs of the program.

  Raises:
    NotImplementedError: If TensorFlow cannot vectorize an operation.
  """
  loop_var = tf.compat.v1.placeholder_with_default(0, shape=[])
  outer = pfor.PFor(loop_var, count, [], fallback_to_while_loop=True)
  graph = tf.compat.v1.get_default_graph()
  captured = [
    pfor.wrap(graph.capture(stacks.get(id(tensor), tensor)), False)
    for tensor in function.captured_inputs
  ]
  given = [*(pfor.wrap(tensor, True) for tensor in inputs), *captured]
  with _converting():
    indices = None if replicas is None else tf.constant(replicas)
    outputs = _inline(outer, function.graph, given, indices=indices)
  return outputs[: len(function.outputs)]


def only_changes(function: Any, handles: Collection[int]) -> bool:
  """Returns whether a program changes no variables but these.

  Args:
    function: The program, a concrete function.
    handles: Ids of variables' handles.

  Programs whose replicas exchange values are never found to be such.
  """
  graph = function.graph
  library = graph.as_graph_def().library.function
  operations = [op.type for op in graph.get_operations()]
  operations += [node.op for body in library for node in body.node_def]
  if not _EXCHANGES.isdisjoint(operations):
    return False
  read_only = auto_control_deps_utils.get_read_only_resource_input_indices_graph
  kept = {id(graph.inputs[i]) for i in read_only(graph)}
  return all(
    id(outside) in handles or id(inside) in kept
    for outside, inside in graph.captures
    if outside.dtype == tf.resource
  )


def _inline(
  outer: Any,
  graph: Any,
  inputs: Sequence[Wrapped],
  mask: Any = None,
  indices: Any = None,
) -> list[Wrapped]:
  """Adds a function's operations, converted, to the graph being built.

  Args:
    outer: The rewriter of the graph that calls the function.
    graph: The function's graph.
    inputs: The function's converted inputs.
    mask: See `_Rewriter`.
    indices: The replicas that take part, if it is not all of them.
  """
  is_part = indices is not None
  inner = _Rewriter(
    outer.loop_var,
    tf.size(indices) if is_part else num_rows(outer),
    graph.get_operations(),
    fallback_to_while_loop=True,
    all_indices=indices if is_part else outer.all_indices,
    all_indices_partitioned=is_part or outer.all_indices_partitioned,
    pfor_config=outer.pfor_config,
  )
  inner.mask = mask if mask is not None else getattr(outer, "mask", None)
  inner.graph = graph
  for placeholder, value in zip(graph.inputs, inputs, strict=True):
    inner._add_conversion(placeholder, value)
  outputs = [inner._convert_helper(output) for output in graph.outputs]
  # What the function does besides returning values. TensorFlow's automatic
  # control dependencies, in the graph being built, keep the order.
  for operation in graph.control_outputs:
    inner._convert_helper((*operation.outputs, operation)[0])
  return outputs


def num_rows(rewriter: Any) -> Any:
  """Returns how many replicas take part; an int unless it depends on data."""
  length = rewriter.loop_len_vector
  static = tf.get_static_value(length)
  return length[0] if static is None else int(static[0])


class _Silence(std_logging.Filter):
  """Hides what pfor logs about an error, and notes the operation that failed.

  pfor logs hundreds of lines, which would hide the error itself.
  """

  operation: Any = None

  def filter(self, record: std_logging.LogRecord) -> bool:
    given = [x for x in record.args or () if isinstance(x, tf.Operation)]
    self.operation = self.operation or next(iter(given), None)
    return "parallel_for" not in record.pathname

  def place(self) -> str:
    """Returns the user's line that created the operation; "" if unknown."""
    frames = getattr(self.operation, "traceback", None) or ()
    libraries = "site-packages", "dist-packages", "tf_cross_shard/_src"
    own = [f for f in frames if not any(x in f.filename for x in libraries)]
    if not own:
      return ""
    place = f"{own[-1].filename}, line {own[-1].lineno}"
    return f" {self.operation.name} was created at {place}."


@contextlib.contextmanager
def _converting() -> Iterator[None]:
  """Gives pfor the converters, while one function is vectorized."""
  silence, logger = _Silence(), tf.get_logger()
  registry, forced = pfor._pfor_converter_registry, pfor.force_stateful_ops
  passed = pfor.passthrough_stateful_ops
  with _lock:
    before = {name: registry.get(name) for name in CONVERTERS}
    # pfor takes some operations over unchanged, without asking for a converter:
    # those in `passed`, and those without a stacked input unless in `forced`.
    saved = set(passed), set(forced)
    _replaced.update((k, v) for k, v in before.items() if v is not None)
    registry.update(CONVERTERS)
    passed.difference_update(CONVERTERS)
    forced.update(CONVERTERS.keys() - _NOT_FORCED)
    pfor._fallback_converter = in_loop
    _looped.clear()
    _of_branches.clear()
    logger.addFilter(silence)
    try:
      yield
      if _looped:
        logging.info(
          "VectorizedStrategy runs these operations once for each replica,"
          " because TensorFlow cannot vectorize them: %s.",
          ", ".join(f"{name} ({n})" for name, n in _looped.items()),
        )
    except NotImplementedError as error:
      raise NotImplementedError(f"{error}{silence.place()}") from error
    except ValueError as error:
      if "No pfor vectorization defined" not in str(error):
        raise
      unknown = cannot_vectorize(str(error).split()[5])
      raise NotImplementedError(f"{unknown}{silence.place()}") from error
    finally:
      logger.removeFilter(silence)
      pfor._fallback_converter = _fallback
      for name, converter in before.items():
        registry.pop(name)
        if converter is not None:
          registry[name] = converter
      passed.clear()
      passed.update(saved[0])
      forced.clear()
      forced.update(saved[1])


def cannot_vectorize(operation: str) -> NotImplementedError:
  """Returns the error for an operation that cannot be vectorized."""
  return NotImplementedError(
    f"TensorFlow cannot vectorize the operation {operation} over replicas."
    " Replace it, or use local_strategy(n, vectorized=False), where each"
    " replica is a logical device."
  )


def in_loop(call: Call, root_cause: str = "", warn: bool = False) -> Any:
  """Runs an operation that has no converter once for each replica."""
  del root_cause, warn
  # On the stack, the operation would read and change other numbers.
  if any(has_stack(call, i) for i in range(call.num_inputs)):
    raise cannot_vectorize(call.op_type)
  # TensorFlow keeps one tape for all calls of a function.
  is_gradient = "gradient_tape/" in call.op.name
  if call.op_type == "EagerPyFunc" and is_gradient:
    raise cannot_vectorize(f"{call.op_type}, a gradient of tf.py_function,")
  _looped[call.op_type] += 1
  count = tf.get_static_value(call.pfor.loop_len_vector)
  if count is None or count[0] > _MOST_UNROLLED:
    return _fallback(call)
  results = []
  for i in range(count[0]):
    inputs = [x.t[i] if x.is_stacked else x.t for x in call.inputs]
    dtypes = [x.dtype for x in call.op.outputs]
    made = pfor._create_op(
      call.op_type, inputs, dtypes, attrs=call.op.node_def.attr
    )
    results.append(made.outputs or made)
  if not call.op.outputs:
    return tf.group(*results)
  return [
    wrap(_stack_of_equal(call, output, rows), True)
    for output, rows in zip(
      call.op.outputs, zip(*results, strict=True), strict=True
    )
  ]


def _stack_of_equal(
  call: Call, output: tf.Tensor, rows: Sequence[tf.Tensor]
) -> tf.Tensor:
  """Stacks results of replicas; an error, if their sizes depend on the data."""
  if output.shape.rank is None or output.shape.is_fully_defined():
    return tf.stack(rows)
  sizes = tf.stack([tf.shape(row) for row in rows])
  message = (
    f"{call.op_type} ({call.op.name}) returned results of different shapes on"
    " the replicas, which a vectorized program cannot have. Use operations"
    " whose shapes do not depend on the data, such as a product with a mask, or"
    " local_strategy(n, vectorized=False). The shapes are:"
  )
  check = tf.debugging.Assert(
    tf.reduce_all(sizes == sizes[0]), [message, sizes]
  )
  with tf.control_dependencies([check]):
    return tf.stack(rows)


def is_own(call: Call) -> bool:
  """Returns whether an operation depends on a replica's own arguments."""
  own: set[int] = call.pfor.own
  return id(call.op) in own


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


# Functions. pfor converts only the outputs of functions, and what outputs
# depend on: assignments in a branch would be lost.


def _function(call: Call, attribute: str) -> Any:
  """Returns the graph of a function that an operation calls."""
  return _graph_of(call, call.get_attr(attribute))


def _graph_of(call: Call, function: Any) -> Any:
  return call.op.graph._get_function(function.name).graph


def _result(call: Call, outputs: Sequence[Wrapped]) -> Any:
  return list(outputs) if call.op.outputs else tf.no_op()


@converts("PartitionedCall", "StatefulPartitionedCall")
def _convert_call(call: Call) -> Any:
  graph = _function(call, "f")
  if not _is_compiled(call.op):
    return _result(call, _inline(call.pfor, graph, call.inputs))
  stacked: list[bool] = []

  def convert() -> list[tf.Tensor]:
    outputs = _inline(call.pfor, graph, call.inputs)
    stacked[:] = [output.is_stacked for output in outputs]
    return [output.t for output in outputs]

  tensors = tf.function(convert, autograph=False, jit_compile=True)()
  return _result(call, list(map(wrap, tensors, stacked)))


def _is_compiled(operation: tf.Operation) -> bool:
  return _XLA in operation.node_def.attr and operation.get_attr(_XLA)


@converts("If", "StatelessIf")
def _convert_if(call: Call) -> Any:
  condition, differs, _ = call.input(0)
  branches = [_function(call, f"{name}_branch") for name in ("else", "then")]
  return _choose(call, wrap(tf.cast(condition, tf.int32), differs), branches)


@converts("Case", "StatelessCase")
def _convert_case(call: Call) -> Any:
  index, differs, _ = call.input(0)
  branches = [_graph_of(call, f) for f in call.get_attr("branches")]
  last = len(branches) - 1  # TensorFlow's default.
  index = tf.where((index < 0) | (index > last), last, index)
  return _choose(call, wrap(index, differs), branches)


def _choose(call: Call, chosen: Wrapped, branches: Sequence[Any]) -> Any:
  """Converts a choice between branches, by the number of the branch."""
  index, differs, _ = chosen
  inputs = call.inputs[1:]
  if not differs:
    return _result(call, _branch_together(call, index, branches, inputs))
  # The gradient of a conditional reads what the conditional has kept.
  kept = [_of_branches[id(x.t)][1] for x in inputs if id(x.t) in _of_branches]
  if kept:
    convert = kept[0]
  elif all(map(_is_harmless, branches)):
    convert = _branch_by_mask
  else:
    convert = _branch_by_rows
  results = convert(call, index, branches, inputs)
  return _result(call, _merge(call, branches[-1], results, convert))


def _branch_together(
  call: Call, index: Any, branches: Sequence[Any], inputs: Any
) -> list[Wrapped]:
  """Converts a choice that is the same on all replicas."""
  are_optional = list(map(_is_optional, branches[-1].outputs))

  def convert(branch: Any) -> list[tf.Tensor]:
    outputs = _inline(call.pfor, branch, inputs)
    return [
      output.t if is_optional else with_rows(call, output)
      for output, is_optional in zip(outputs, are_optional, strict=True)
    ]

  functions = [functools.partial(convert, branch) for branch in branches]
  outputs = (
    tf.cond(tf.cast(index, tf.bool), *functions[::-1])
    if len(functions) == 2
    else tf.switch_case(index, functions)
  )
  return [
    wrap(x, not is_optional)
    for x, is_optional in zip(outputs or (), are_optional, strict=True)
  ]


# What each branch returns for a conditional, and a function that merges one
# output of all branches.
_Results = tuple[list[list[Wrapped]], Callable[..., tf.Tensor]]


def _branch_by_mask(
  call: Call, index: Any, branches: Sequence[Any], inputs: Any
) -> _Results:
  """Computes all branches for all replicas, and selects.

  This works with static shapes, and so with XLA.
  """
  outer, results = getattr(call.pfor, "mask", None), []
  masks = [tf.equal(index, i) for i in range(len(branches))]
  for i, (branch, own) in enumerate(zip(branches, masks, strict=True)):
    mask = own if outer is None else own & outer
    given = _inputs_of(i, inputs)
    results.append(_inline(call.pfor, branch, given, mask=mask))

  def merge(first: Wrapped, *others: Wrapped) -> tf.Tensor:
    rows = with_rows(call, first)
    for mask, other in zip(masks[1:], others, strict=True):
      rows = select(mask, with_rows(call, other), rows)
    return rows

  return results, merge


def _branch_by_rows(
  call: Call, index: Any, branches: Sequence[Any], inputs: Any
) -> _Results:
  """Computes each branch for the replicas that are in it."""
  count = len(branches)
  replicas = tf.dynamic_partition(call.pfor.all_indices, index, count)
  rows = tf.range(call.pfor.loop_len_vector[0])
  places = tf.dynamic_partition(rows, index, count)
  outer, results = getattr(call.pfor, "mask", None), []
  for i, branch in enumerate(branches):
    given = pfor._partition_inputs_for_indices(_inputs_of(i, inputs), places[i])
    mask = None if outer is None else tf.gather(outer, places[i])
    results.append(
      _inline(call.pfor, branch, given, mask=mask, indices=replicas[i])
    )

  def merge(*parts: Wrapped) -> tf.Tensor:
    rows = [
      x.t if x.is_stacked else _repeat(x.t, tf.size(own))
      for x, own in zip(parts, replicas, strict=True)
    ]
    return tf.dynamic_stitch(places, rows)

  return results, merge


def _merge(call: Call, branch: Any, merging: _Results, way: Any) -> list[Any]:
  """Gives each replica the outputs of the branch that it takes."""
  results, merge = merging
  merged = []
  for output, *values in zip(branch.outputs, *results, strict=True):
    last = values[-1]
    if _is_optional(output):
      # The same branch of the gradient's conditional reads it.
      _of_branches[id(last.t)] = values, way
      merged.append(last)
    elif last.t.dtype != tf.variant:
      merged.append(wrap(merge(*values), True))
    elif all(x.t is last.t for x in values):
      merged.append(last)
    else:
      raise cannot_vectorize(f"{call.op_type}, which chooses between lists,")
  return merged


def _is_optional(tensor: tf.Tensor) -> bool:
  """Returns whether a tensor of the original graph is an optional."""
  kind = tensor.op.type
  if kind == "Identity":
    return _is_optional(tensor.op.inputs[0])
  return kind in ("OptionalFromValue", "OptionalNone")


def _inputs_of(branch: int, inputs: Sequence[Wrapped]) -> list[Wrapped]:
  """Returns what a branch of a conditional receives."""
  return [
    _of_branches[id(x.t)][0][branch] if id(x.t) in _of_branches else x
    for x in inputs
  ]


def _is_harmless(graph: Any) -> bool:
  """Returns whether a branch may run for replicas that are not in it."""
  for op in graph.get_operations():
    if op.type in ("While", "StatelessWhile", "CheckNumerics", "Case"):
      return False
    names = [
      op.get_attr(name).name
      for name in ("f", "then_branch", "else_branch")
      if name in op.node_def.attr
    ]
    if names:
      inner = [graph._get_function(name).graph for name in names]
      if not all(map(_is_harmless, inner)):
        return False
      continue
    is_stateful = op.op_def is not None and op.op_def.is_stateful
    if is_stateful and op.type not in (*CONVERTERS, *_HARMLESS):
      return False
  return True


@converts("While", "StatelessWhile")
def _convert_while(call: Call) -> Any:
  """Converts a loop that all replicas leave together.

  pfor's own converter handles other loops. In its loops the number of replicas
  is not known when the graph is built, which is slower.
  """
  functions = [
    call.op.graph._get_function(call.get_attr(name).name)
    for name in ("cond", "body")
  ]
  # Functions of TensorFlow 1, as tf.nn.ctc_loss calls them, have no graph.
  if not all(hasattr(function, "graph") for function in functions):
    for function in functions:
      function.add_to_graph(tf.compat.v1.get_default_graph())
    return in_loop(call)
  test, body = (function.graph for function in functions)
  is_partial = call.pfor.all_indices_partitioned
  if is_partial or not isinstance(num_rows(call.pfor), int):
    # There, pfor calls the places of rows in this part the replicas' numbers.
    if any(x.dtype == tf.resource and x.consumers() for x in test.inputs):
      raise cannot_vectorize(
        f"{call.op_type}, a loop in a conditional whose test reads variables,"
      )
    return _replaced["While"](call)
  # What the body returns unchanged is no loop variable. For each of the others,
  # by its place: whether it has rows.
  has_rows = {
    i: call.inputs[i].is_stacked
    for i, (before, after) in enumerate(
      zip(body.inputs, body.outputs, strict=True)
    )
    if before is not after
  }

  def merged(loop_vars: Sequence[tf.Tensor]) -> list[Wrapped]:
    own = iter(loop_vars)
    return [
      wrap(next(own), has_rows[i]) if i in has_rows else x
      for i, x in enumerate(call.inputs)
    ]

  def tensors(values: Sequence[Wrapped]) -> list[tf.Tensor]:
    return [
      with_rows(call, values[i]) if rows else values[i].t
      for i, rows in has_rows.items()
    ]

  def shapes() -> list[tf.TensorShape]:
    outputs = [(call.op.outputs[i], rows) for i, rows in has_rows.items()]
    return [
      tf.TensorShape([num_rows(call.pfor)]).concatenate(x.shape)
      if rows and x.dtype != tf.variant
      else x.shape
      for x, rows in outputs
    ]

  # A variable that is shared at first has rows if the body gives it rows.
  while True:
    with func_graph.FuncGraph("scratch").as_default():
      placeholders = []
      for i, shape in zip(has_rows, shapes(), strict=True):
        made = tf.compat.v1.placeholder(call.inputs[i].t.dtype, shape)
        handle_data_util.copy_handle_data(call.inputs[i].t, made)
        placeholders.append(made)
      [ends] = _inline(call.pfor, test, merged(placeholders))
      outputs = _inline(call.pfor, body, merged(placeholders))
    if ends.is_stacked:
      if any(call.inputs[i].t.dtype == tf.variant for i in has_rows):
        raise cannot_vectorize(
          f"{call.op_type}, a loop with gradients that replicas leave after"
          " different numbers of iterations,"
        )
      return _replaced["While"](call)
    grown = {i: rows or outputs[i].is_stacked for i, rows in has_rows.items()}
    if grown == has_rows:
      break
    has_rows = grown

  results = tf.while_loop(
    lambda *x: _inline(call.pfor, test, merged(x))[0].t,
    lambda *x: tensors(_inline(call.pfor, body, merged(x))),
    tensors(call.inputs),
    shape_invariants=shapes(),
    parallel_iterations=call.get_attr("parallel_iterations"),
  )
  return merged(results)


# The gradient of a conditional receives what the branches have computed as
# optionals: one branch gives a value, and the other one gives none. Here, the
# value has a row for each replica that takes part in the branch, and the
# optional itself counts as shared.


@converts("OptionalFromValue")
def _convert_optional(call: Call) -> Any:
  for before, x in zip(call.op.inputs, call.inputs, strict=True):
    if before.dtype == tf.variant and not x.is_stacked:
      raise cannot_vectorize(
        "If, inside another conditional, with gradients outside of XLA,"
      )
  rows = [with_rows(call, x) for x in call.inputs]
  return [wrap(tf.raw_ops.OptionalFromValue(components=rows), False)]


@converts("OptionalNone")
def _convert_no_optional(call: Call) -> Any:
  return [wrap(tf.raw_ops.OptionalNone(), False)]


@converts("OptionalGetValue")
def _convert_optional_value(call: Call) -> Any:
  values = tf.raw_ops.OptionalGetValue(
    optional=call.input(0)[0],
    output_types=call.get_attr("output_types"),
    output_shapes=[
      tf.TensorShape(None if x.dtype != tf.variant else [])
      for x in call.op.outputs
    ],
  )
  for value, before in zip(values, call.op.outputs, strict=True):
    handle_data_util.copy_handle_data(before, value)
  return [wrap(value, True) for value in values]


@converts("ZerosLike", forced=False)
def _convert_zeros(call: Call) -> Any:
  """Converts zeros; pfor's own converter fails for lists of tensors."""
  given = call.input(0)
  zeros = tf.raw_ops.ZerosLike(x=given.t)
  handle_data_util.copy_handle_data(given.t, zeros)
  return [wrap(zeros, given.is_stacked)]


def convert_by_pfor(call: Call) -> Any:
  """Converts an operation as pfor does without this package."""
  return _replaced[call.op_type](call)


def select(mask: Any, rows: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
  """Returns `rows` for the replicas in the mask, and `others` elsewhere."""
  shape = [-1, *[1] * (rows.shape.rank - 1)]
  return tf.where(tf.reshape(mask, shape), rows, others)


def with_rows(call: Call, x: Wrapped) -> tf.Tensor:
  """Returns a converted tensor with a row for each replica."""
  if x.is_stacked or x.t.dtype == tf.variant:
    return call.pfor._unwrap_or_tile(x)
  return _repeat(x.t, num_rows(call.pfor))


def with_count(x: Wrapped, count: int) -> tf.Tensor:
  """Returns an output of `vectorize` with `count` rows.

  An output that is shared, or that has one row, is repeated.
  """
  rows = x.t if x.is_stacked else x.t[tf.newaxis]
  return tf.broadcast_to(rows, tf.concat([[count], tf.shape(rows)[1:]], axis=0))


def _repeat(tensor: tf.Tensor, count: Any) -> tf.Tensor:
  return tf.repeat(tensor[tf.newaxis], count, axis=0)
