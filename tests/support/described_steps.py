"""Compares `optimizer.describe()` with the graphs of the steps that ran.

`describe` follows the plan of a step. A graph has the operations that
TensorFlow really traced: the kernels, the collectives, and the sizes of what
they sum. A traced step must contain exactly the operations that `describe`
lists.
"""

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import tensorflow as tf

from tf_cross_shard._src.core import describe as describe_lib
from tf_cross_shard._src.core import step as step_lib
from tf_cross_shard._src.core import variables
from tf_cross_shard._src.core.reduce import collective_ops

_COLLECTIVES = "Collective"
_KERNELS = "ResourceApply"
_CALL = "described_call"

_Row = dict[str, Any]  # Of `describe().rows()`.


class Traced(NamedTuple):
  """A traced function that calls an optimizer: its step, and the graph."""

  step: step_lib.Step
  graph: Any


@contextlib.contextmanager
def recorded() -> Iterator[list[Traced]]:
  """Yields a list, which receives the traced functions when the context ends.

  When the context ends, the traced functions are added to the list.
  """
  graphs: dict[Traced, None] = {}
  plain = step_lib.Step.perform

  def perform(step: step_lib.Step, call: step_lib.Call) -> tf.Tensor:
    if tf.inside_function():
      graphs[Traced(step, collective_ops.outermost_function())] = None
      # TensorFlow may trace a loop or a first step twice, and keep one of
      # the two. This operation counts the calls that are in the graph.
      tf.no_op(_CALL)
    return plain(step, call)

  traced: list[Traced] = []
  with mock.patch.object(step_lib.Step, "perform", perform):
    yield traced
  traced += graphs


def check(traced: Traced, gradients: Mapping[int, bool]) -> None:
  """Raises `AssertionError` unless a function does what `describe` says.

  Args:
    traced: The function.
    gradients: The `id` of each TensorFlow variable that has a gradient, and
      whether this gradient is row-sparse although `describe` cannot know this.
  """
  content = describe_lib.describe(traced.step, "").to_dict()
  state = traced.step.context.inner.whole
  keys = [id(variables.native(v)) for v in state.trainable_variables]
  pairs = list(zip(keys, content["variables"], strict=True))
  rows = [row for key, row in pairs if key in gradients]
  known = [row for key, row in pairs if gradients.get(key) is False]
  graph = _Graph(traced.graph)
  try:
    _check_kernels(graph, rows, known, content["sharding"] is not None)
    if content["group_size"] == 1:
      assert not graph.collectives
    else:
      _check_sums(graph, rows, known, traced.step, content)
  except AssertionError as error:
    raise AssertionError(f"{error}\nDescribed is\n{content}") from error


class _Graph:
  """Holds the operations of a graph and of all functions that it calls."""

  def __init__(self, graph: Any) -> None:
    definition = graph.as_graph_def(add_shapes=True)
    functions = definition.library.function
    self.is_compiled = any(f.attr["_XlaMustCompile"].b for f in functions)
    self.bodies = {f.signature.name: f.node_def for f in functions}
    self.bodies["main"] = definition.node
    nodes = [node for body in self.bodies.values() for node in body]
    self.counts = collections.Counter(node.op for node in nodes)
    self.calls = sum(_CALL in node.name for node in nodes)
    # The names of the functions that have collectives.
    self.collectives = {
      name
      for name, body in self.bodies.items()
      if any(node.op.startswith(_COLLECTIVES) for node in body)
    }


def _check_kernels(
  graph: _Graph, rows: Sequence[_Row], known: Sequence[_Row], is_sharded: bool
) -> None:
  """Checks which kernels update the variables."""
  least, most = (
    collections.Counter(row["updated_by"] for row in some)
    for some in (known, rows)
  )
  assert bool(least["XLA"]) <= graph.is_compiled <= bool(most["XLA"])
  for op in {*graph.counts, *least}:
    if op.startswith(_KERNELS):
      found = graph.counts[op] / graph.calls
      if is_sharded:  # One kernel updates a whole shard.
        assert bool(least[op]) <= bool(found) <= bool(most[op]), op
      else:
        assert least[op] <= found <= most[op], f"{found} {op}"
  scatters = graph.counts["ResourceScatterUpdate"] / graph.calls
  assert scatters >= least["rows"], f"{scatters} updates of rows"


def _check_sums(
  graph: _Graph,
  rows: Sequence[_Row],
  known: Sequence[_Row],
  step: step_lib.Step,
  content: dict[str, Any],
) -> None:
  """Checks which operations sum, and how many bytes each replica sends."""
  size = content["group_size"]
  if content["sums"].startswith("add_n"):
    outside = [name for name in graph.collectives if "cond" not in name]
    assert not outside, f"collectives in {outside}"
  sums = gathers = small = 0.0
  for body in graph.bodies.values():
    nodes = {node.name: node for node in body}
    for node in body:
      replicas = _replicas(node, step.settings.name, size)
      if not replicas:
        continue
      elements = _num_elements(node)
      num_bytes = replicas * elements * _item_bytes(node, nodes) / graph.calls
      if node.op == collective_ops.ALL_GATHER:
        gathers += num_bytes
      else:
        sums += num_bytes
      # `describe` does not list the sums for norms and for the check that all
      # numbers are finite.
      if elements <= (len(rows) if content["sharding"] else 1):
        small += num_bytes
  reductions = content["calls_per_step"] if step.window is None else 1
  ring = (size - 1) / size
  # The bytes of each variable are rounded up.
  slack = ring * small + content["padding_sent"] + 2 * len(rows)
  least, _ = _described_bytes(known, ring, reductions)
  most, weights = _described_bytes(rows, ring, reductions)
  found = ring * sums
  assert least - 2 * len(rows) <= found <= most + slack, (
    f"{found} bytes of gradients, not {least} to {most}"
  )
  found = ring * gathers
  assert found <= weights + slack, f"{found} bytes of weights, not {weights}"


def _described_bytes(
  rows: Sequence[_Row], ring: float, reductions: int
) -> tuple[float, float]:
  """Returns the bytes of gradients that are summed, and of gathered weights."""
  grads = weights = 0.0
  for row in rows:
    elements = math.prod(row["shape"])
    sent = (row["bytes_sent"] or 0) / reductions
    if set(row["elements"]) == {elements} and row["owner"] is None:
      grads += sent / 2  # An all-reduce also gathers the sums.
    else:
      gathered = ring * elements * tf.as_dtype(row["dtype"]).size
      grads += sent - gathered
      weights += gathered
  return grads, weights


def _replicas(node: Any, scope: str, size: int) -> int:
  """Returns how many replicas send the tensor of a node; 0 if none does."""
  if node.op.startswith(_COLLECTIVES):
    return 1
  inputs = [name for name in node.input if not name.startswith("^")]
  is_merge = node.op == "AddN" and scope in node.name and len(inputs) == size
  return size if is_merge else 0


def _item_bytes(node: Any, nodes: Mapping[str, Any]) -> int:
  """Returns the bytes of an element, as it was before a merge call widened it.

  0 for counts of rows, which are integers.
  """
  dtype = tf.as_dtype(node.attr["T"].type)
  source = nodes.get(node.input[0].partition(":")[0])
  if node.op == "AddN" and source is not None and source.op == "Cast":
    narrow = tf.as_dtype(source.attr["SrcT"].type)
    dtype = min(dtype, narrow, key=lambda each: each.size)
  return int(dtype.size) if dtype.is_floating else 0


def _num_elements(node: Any) -> int:
  """Returns the size of a node's output; 0 if it depends on data."""
  [shape] = node.attr["_output_shapes"].list.shape
  sizes = [dim.size for dim in shape.dim]
  is_known = not shape.unknown_rank and all(size >= 0 for size in sizes)
  return math.prod(sizes) if is_known else 0
