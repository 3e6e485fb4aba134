"""Converters of functions, conditionals and loops.

All models compute each branch and each iteration, so that shapes stay static:

    conditional   every branch runs if a model takes it; each model's results
                  are selected
    loop          runs until all models have left it; a model that has left
                  keeps its values

The results of models that do not take part are discarded, and their variables
do not change. Where their computation could fail, they compute what a model
that takes part does: see `Rewriter.source`.
"""
# ruff: noqa: SLF001  # pfor is private.

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import handle_data_util

from tf_cross_shard._src.vectorized import speculatable, vectorizer
from tf_cross_shard._src.vectorized.vectorizer import (
  Call,
  Rewriter,
  Wrapped,
  converts,
  inline,
  select,
  with_models,
  wrap,
)

_XLA: Final = "_XlaMustCompile"


def _graph_of(call: Call, function: Any) -> Any:
  return call.op.graph._get_function(function.name).graph


def _result(call: Call, outputs: Sequence[Wrapped]) -> Any:
  return list(outputs) if call.op.outputs else tf.no_op()


@converts("PartitionedCall", "StatefulPartitionedCall")
def _convert_call(call: Call) -> Any:
  graph = _graph_of(call, call.get_attr("f"))
  if not (_XLA in call.op.node_def.attr and call.get_attr(_XLA)):
    return _result(call, inline(call.pfor, graph, call.inputs))
  stacked: list[bool] = []

  def convert() -> list[tf.Tensor]:
    outputs = inline(call.pfor, graph, call.inputs)
    stacked[:] = [output.is_stacked for output in outputs]
    return [output.t for output in outputs]

  tensors = tf.function(convert, autograph=False, jit_compile=True)()
  return _result(call, list(map(wrap, tensors, stacked)))


# Conditionals.


@converts("If", "StatelessIf")
def _convert_if(call: Call) -> Any:
  condition, differs, _ = call.input(0)
  branches = [
    _graph_of(call, call.get_attr(f"{name}_branch"))
    for name in ("else", "then")
  ]
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
  inputs = _inputs_of_branches(call, branches)
  if not chosen.is_stacked:
    together = _choose_together(call, chosen.t, branches, inputs)
    return _result(call, together)
  masks = [tf.equal(chosen.t, i) for i in range(len(branches))]
  if call.pfor.mask is not None:
    masks = [mask & call.pfor.mask for mask in masks]
  results = [
    _run_branch(call.pfor, *of_branch)
    for of_branch in zip(branches, inputs, masks, strict=True)
  ]
  return _result(call, _merge(call, branches, masks, results))


def _choose_together(
  call: Call, index: Any, branches: Sequence[Any], inputs: Sequence[Any]
) -> list[Wrapped]:
  """Converts a choice that is the same in all models."""
  are_optional = list(map(_is_optional, branches[-1].outputs))
  count = len(branches)

  def convert(number: int) -> list[tf.Tensor]:
    outputs = inline(call.pfor, branches[number], inputs[number])
    none = tf.raw_ops.OptionalNone() if any(are_optional) else None
    return [
      _pack([output.t if i == number else none for i in range(count)])
      if is_optional
      else with_models(call.pfor, output)
      for output, is_optional in zip(outputs, are_optional, strict=True)
    ]

  functions = [functools.partial(convert, i) for i in range(count)]
  outputs = (
    tf.cond(tf.cast(index, tf.bool), *functions[::-1])
    if count == 2
    else tf.switch_case(index, functions)
  )
  return [wrap(x, True) for x in outputs or ()]


def _is_optional(tensor: tf.Tensor) -> bool:
  """Returns whether a tensor of the original graph is an optional."""
  kind = tensor.op.type
  if kind == "Identity":
    return _is_optional(tensor.op.inputs[0])
  if kind in _CHOICES and tensor.dtype == tf.variant:
    name = "then_branch" if "If" in kind else "branches"
    function = tensor.op.get_attr(name)
    function = function[0] if isinstance(function, list) else function
    graph = tensor.op.graph._get_function(function.name).graph
    return _is_optional(graph.outputs[tensor.value_index])
  return kind in ("OptionalFromValue", "OptionalNone")


_CHOICES: Final = {"Case", "If", "StatelessCase", "StatelessIf"}


def _run_branch(
  rewriter: Rewriter, branch: Any, inputs: Sequence[Wrapped], mask: tf.Tensor
) -> list[Wrapped]:
  """Runs a branch for the models in the mask."""
  if speculatable.is_speculatable(branch):
    return inline(rewriter, branch, inputs, mask=mask)
  made: list[Wrapped] = []

  def run() -> list[tf.Tensor]:
    source = vectorizer.source_of(rewriter, mask)
    given = _of_source(inputs, source)
    made[:] = inline(rewriter, branch, given, mask=mask, source=source)
    return [x.t for x in made]

  outputs = tf.cond(
    tf.reduce_any(mask), run, lambda: [_placeholder(x.t) for x in made]
  )
  passed = {
    id(x): given for x, given in zip(branch.inputs, inputs, strict=True)
  }
  results = []
  for output, before, after in zip(
    branch.outputs, made, outputs if made else (), strict=True
  ):
    handle_data_util.copy_handle_data(before.t, after)
    # A list that the branch returns as it is stays the same tensor.
    is_passed = after.dtype == tf.variant and id(output) in passed
    result = wrap(after, before.is_stacked)
    results.append(passed[id(output)] if is_passed else result)
  return results


def _of_source(inputs: Sequence[Wrapped], source: tf.Tensor) -> list[Wrapped]:
  """Gives each model the inputs of its source; lists are read by source."""
  return [
    wrap(tf.gather(x.t, source), True)
    if x.is_stacked and x.t.dtype != tf.variant
    else x
    for x in inputs
  ]


def _placeholder(like: tf.Tensor) -> tf.Tensor:
  """Returns a tensor that nobody reads, in place of a branch's result."""
  if like.dtype == tf.variant:
    return tf.raw_ops.OptionalNone()
  shape = [size or 0 for size in like.shape] if like.shape.rank else []
  return tf.zeros(shape, like.dtype)


def _merge(
  call: Call,
  branches: Sequence[Any],
  masks: Sequence[tf.Tensor],
  results: Sequence[list[Wrapped]],
) -> list[Wrapped]:
  """Gives each model the outputs of the branch that it takes."""
  merged = []
  for i, values in enumerate(zip(*results, strict=True)):
    output, last = call.op.outputs[i], values[-1]
    if output.dtype != tf.variant:
      tensors = [with_models(call.pfor, x) for x in values]
      merged.append(wrap(_merge_tensors(masks, tensors), True))
    elif any(_is_optional(branch.outputs[i]) for branch in branches):
      merged.append(wrap(_pack([x.t for x in values]), True))
    elif all(x.t is last.t for x in values):
      merged.append(last)
    elif all(op.type in _CHOICES for op in output.consumers()):
      # Under XLA, lists go to the gradient as they are.
      call.pfor.conversion.of_branches[id(last.t)] = list(values)
      merged.append(last)
    else:
      raise vectorizer.cannot_vectorize(
        f"{call.op_type}, which chooses between lists,"
      )
  return merged


def _merge_tensors(
  masks: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]
) -> tf.Tensor:
  """Selects each model's entry from the results of the branches."""
  merged, shape = tensors[0], tensors[0].shape
  before = masks[0]
  for mask, other in zip(masks[1:], tensors[1:], strict=True):
    both = functools.partial(select, mask, other, merged)
    if shape.is_fully_defined() and other.shape == shape:
      merged = both()
    else:  # A branch that nobody takes may have results of another size.
      merged = tf.cond(
        tf.reduce_any(mask),
        lambda b=both, o=other, m=before: tf.cond(
          tf.reduce_any(m), b, lambda: tf.identity(o)
        ),
        lambda m=merged: tf.identity(m),
      )
    before |= mask
  return merged


# The gradient of a conditional receives what the branches have computed as
# optionals: one branch gives a value, and the other one gives none. Here, the
# value is stacked, and all branches may give one. So an optional of the
# original graph becomes an optional of all branches' optionals.
# The form for XLA has no optionals, but TensorFlow fails to differentiate it if
# a loop in a branch reads a variable: its handle is a result of the branch.


def _pack(optionals: Sequence[tf.Tensor]) -> tf.Tensor:
  """Returns an optional that holds those of all branches."""
  return tf.raw_ops.OptionalFromValue(components=optionals)


def _inputs_of_branches(
  call: Call, branches: Sequence[Any]
) -> list[list[Wrapped]]:
  """Returns what each branch receives."""
  kept, count = call.pfor.conversion.of_branches, len(branches)

  def unpack(i: int, x: Wrapped) -> list[Wrapped]:
    if id(x.t) in kept:
      return kept[id(x.t)]
    consumers = [op for b in branches for op in b.inputs[i].consumers()]
    if not any(op.type == "OptionalGetValue" for op in consumers):
      return [x] * count
    optionals = tf.raw_ops.OptionalGetValue(
      optional=x.t,
      output_types=[tf.variant] * count,
      output_shapes=[tf.TensorShape([])] * count,
    )
    return [wrap(optional, True) for optional in optionals]

  inputs = [unpack(i, x) for i, x in enumerate(call.inputs[1:])]
  return [[x[number] for x in inputs] for number in range(count)]


@converts("OptionalFromValue")
def _convert_optional(call: Call) -> Any:
  values = [with_models(call.pfor, x) for x in call.inputs]
  return [wrap(tf.raw_ops.OptionalFromValue(components=values), True)]


@converts("OptionalNone")
def _convert_no_optional(call: Call) -> Any:
  return [wrap(tf.raw_ops.OptionalNone(), True)]


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
  count = vectorizer.num_models(call)
  return [
    vectorizer.wrap_stacked(before, value, count)
    for before, value in zip(call.op.outputs, values, strict=True)
  ]


# Loops.


@converts("While", "StatelessWhile")
def _convert_while(call: Call) -> Any:
  functions = [
    call.op.graph._get_function(call.get_attr(name).name)
    for name in ("cond", "body")
  ]
  # Functions of TensorFlow 1, as tf.nn.ctc_loss calls them, have no graph.
  if not all(hasattr(function, "graph") for function in functions):
    for function in functions:
      function.add_to_graph(tf.compat.v1.get_default_graph())
    return vectorizer.in_loop(call)
  loop = _Loop(call, *(function.graph for function in functions))
  loop.find_layout()
  results = loop.run_one_by_one() if loop.differs else loop.run_together()
  return loop.values(results)


class _Loop:
  """A loop of the original graph.

  `stacked` says of each loop variable, by its place, whether it is stacked.
  `differs` says whether models leave the loop one by one.
  """

  def __init__(self, call: Call, test: Any, body: Any) -> None:
    self._call, self._rewriter = call, call.pfor
    self._test, self._body = test, body
    self.stacked = {
      i: call.inputs[i].is_stacked
      for i, (before, after) in enumerate(
        zip(body.inputs, body.outputs, strict=True)
      )
      if before is not after
    }
    self.differs = False

  def find_layout(self) -> None:
    """Finds out which variables the body stacks, and whether models part."""
    count = self._rewriter.conversion.count
    while True:
      with func_graph.FuncGraph("scratch").as_default():
        placeholders = []
        for i, shape in zip(self.stacked, self._shapes(), strict=True):
          like = self._call.inputs[i].t
          made = tf.compat.v1.placeholder(like.dtype, shape)
          handle_data_util.copy_handle_data(like, made)
          placeholders.append(made)
        values, parting = self.values(placeholders), {}
        if self.differs:
          parting = {"mask": tf.fill([count], True), "source": tf.range(count)}
        [test] = inline(self._rewriter, self._test, values)
        outputs = inline(self._rewriter, self._body, values, **parting)
      self.differs = test.is_stacked
      grown = {
        i: is_stacked or outputs[i].is_stacked or self._is_selected(i)
        for i, is_stacked in self.stacked.items()
      }
      if grown == self.stacked:
        return
      self.stacked = grown

  def _is_selected(self, i: int) -> bool:
    """Returns whether models that have left the loop keep variable i."""
    return self.differs and self._call.inputs[i].t.dtype != tf.variant

  def values(self, loop_vars: Sequence[tf.Tensor]) -> list[Wrapped]:
    """Returns the inputs of the body, by the values of the loop variables."""
    remaining = iter(loop_vars)
    return [
      wrap(next(remaining), self.stacked[i]) if i in self.stacked else x
      for i, x in enumerate(self._call.inputs)
    ]

  def _tensors(self, values: Sequence[Wrapped]) -> list[tf.Tensor]:
    """Returns the loop variables of the inputs or outputs of the body."""
    return [
      with_models(self._rewriter, values[i]) if is_stacked else values[i].t
      for i, is_stacked in self.stacked.items()
    ]

  def _shapes(self) -> list[tf.TensorShape]:
    count = self._rewriter.conversion.count
    outputs = [(self._call.op.outputs[i], x) for i, x in self.stacked.items()]
    return [
      tf.TensorShape([count]).concatenate(x.shape)
      if is_stacked and x.dtype != tf.variant
      else x.shape
      for x, is_stacked in outputs
    ]

  def _run(self, test: Any, body: Any, first: Any, shapes: Any) -> Any:
    return tf.while_loop(
      test,
      body,
      first,
      shape_invariants=shapes,
      parallel_iterations=self._call.get_attr("parallel_iterations"),
    )

  def run_together(self) -> list[tf.Tensor]:
    """Runs the loop, which all models leave together."""
    mask = self._rewriter.mask

    def test(*x: tf.Tensor) -> tf.Tensor:
      goes_on = inline(self._rewriter, self._test, self.values(x))[0].t
      return goes_on if mask is None else goes_on & tf.reduce_any(mask)

    def body(*x: tf.Tensor) -> list[tf.Tensor]:
      return self._tensors(inline(self._rewriter, self._body, self.values(x)))

    first = self._tensors(self._call.inputs)
    return self._run(test, body, first, self._shapes())

  def run_one_by_one(self) -> list[tf.Tensor]:
    """Runs the loop until all models have left it."""
    self._check_lists()
    first = self._tensors(self._call.inputs)
    active, goes_on = self._schedule(first)
    count = self._rewriter.conversion.count

    def body(step: tf.Tensor, mask: Any, *x: tf.Tensor) -> list[tf.Tensor]:
      after = self._iterate(mask, x)
      return [step + 1, goes_on(step + 1, mask, after), *after]

    _, _, *results = self._run(
      lambda step, mask, *_: tf.reduce_any(mask),
      body,
      [tf.constant(0), active, *first],
      [tf.TensorShape([]), tf.TensorShape([count]), *self._shapes()],
    )
    return results

  def _iterate(self, mask: Any, x: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Runs the body; returns the values after it, of the models in the mask."""
    source, values = None, self.values(x)
    if not speculatable.is_speculatable(self._body):
      source = vectorizer.source_of(self._rewriter, mask)
      values = _of_source(values, source)
    outputs = inline(
      self._rewriter, self._body, values, mask=mask, source=source
    )
    return [
      _select_equal(mask, after, before) if self._is_selected(i) else after
      for i, before, after in zip(
        self.stacked, x, self._tensors(outputs), strict=True
      )
    ]

  def _schedule(
    self, first: Sequence[tf.Tensor]
  ) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
    """Returns the mask of the first iteration, and a function for the next."""
    # The gradient of a loop reads the last iteration first. Models that took
    # fewer iterations wait until it reaches theirs.
    outer = self._rewriter.mask

    def run_test(mask: Any, x: Sequence[tf.Tensor]) -> tf.Tensor:
      [test] = inline(self._rewriter, self._test, self.values(x), mask=mask)
      test = with_models(self._rewriter, test)
      return test if mask is None else test & mask

    if not self._is_gradient():
      return run_test(outer, first), lambda _, mask, x: run_test(mask, x)
    steps = with_models(self._rewriter, self._call.inputs[2])
    if outer is not None:
      steps = tf.where(outer, steps, 0)
    most = tf.reduce_max(steps)

    def is_due(step: tf.Tensor, *_: Any) -> tf.Tensor:
      due = (step >= most - steps) & (step < most)
      return due if outer is None else due & outer

    return is_due(tf.constant(0)), is_due

  def _is_gradient(self) -> bool:
    """Returns whether this is the gradient of a loop."""
    # TensorFlow makes it of three variables, besides others: a counter, which
    # begins with 0, the maximum, and the number of iterations of the loop.
    test = self._test.outputs[0].op
    while test.type == "Identity":
      test = test.inputs[0].op
    return (
      test.type == "Less"
      and len(self._test.inputs) > 2
      and test.inputs[0] is self._test.inputs[0]
      and test.inputs[1] is self._test.inputs[2]
      and any(
        op.type == "TensorListPopBack" for op in self._body.get_operations()
      )
    )

  def _check_lists(self) -> None:
    """Raises an error if models that have left would change their lists."""
    for i in self.stacked:
      output = self._body.outputs[i]
      if output.dtype == tf.variant and not _keeps_others(output):
        raise vectorizer.cannot_vectorize(
          f"{self._call.op_type}, a loop that replicas leave after different"
          " numbers of iterations and that replaces a list of tensors,"
        )


# Operations that change lists only for the models that take part, or whose
# other entries nobody reads.
_LISTS: Final = {
  *("TensorListPushBack", "TensorListPopBack", "TensorListSetItem"),
  *("TensorListReserve", "EmptyTensorList", "ZerosLike", "AddN", "Identity"),
  *("TensorListResize", "Placeholder"),
}


def _keeps_others(tensor: tf.Tensor) -> bool:
  """Returns whether a list changes only for the models that take part."""
  operation = tensor.op
  inputs = (
    operation.inputs if operation.type == "AddN" else operation.inputs[:1]
  )
  return operation.type in _LISTS and all(
    _keeps_others(x) for x in inputs if x.dtype == tf.variant
  )


def _select_equal(
  mask: tf.Tensor, after: tf.Tensor, before: tf.Tensor
) -> tf.Tensor:
  """Selects; an error, if a variable of the loop has changed its shape."""
  if after.shape.is_fully_defined() and after.shape == before.shape:
    return select(mask, after, before)
  message = (
    "A variable of a loop changes its shape, and the replicas leave the loop"
    " after different numbers of iterations. Give it its largest shape from the"
    " beginning. Its shapes are:"
  )
  shapes = tf.shape(before), tf.shape(after)
  fits = tf.reduce_all(mask) | _equal(*shapes)
  with vectorizer.check(fits, message, *(shape[1:] for shape in shapes)):
    return tf.cond(
      tf.reduce_all(mask),
      lambda: tf.identity(after),
      lambda: select(mask, after, before),
    )


def _equal(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
  return tf.reduce_all(tf.equal(x, y))
