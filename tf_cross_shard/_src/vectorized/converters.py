"""Converters of operations on variables.

A converter receives an operation of one model's program, with its inputs
already converted, and adds operations that do the same for all models:

    read              the stack is the value, with its first axis
    assign, add, ...  the same operation on the stack

Models outside of `Rewriter.mask` do not change their variables.
"""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.vectorized import (  # noqa: F401  # Register.
  control_flow,
  lists,
  operations,
  replica_context,
  vectorizer,
)
from tf_cross_shard._src.vectorized.vectorizer import (
  Call,
  converts,
  select,
  stacked,
  wrap,
)

_raw: Final = tf.raw_ops


def values_of(call: Call, i: int = 0) -> tf.Tensor:
  """Returns the value that each model reads of the variable of handle i."""
  dtype = call.op.get_attr("dtype" if "dtype" in call.op.node_def.attr else "T")
  values = _raw.ReadVariableOp(resource=call.input(i)[0], dtype=dtype)
  source = call.pfor.source
  return values if source is None else tf.gather(values, source)


def _value(call: Call) -> tuple[tf.Tensor, bool]:
  """Returns the value of a variable, and whether it differs by model."""
  if vectorizer.has_stack(call, 0):
    return values_of(call), True
  # A variable from outside the scope.
  dtype = call.op.get_attr("dtype")
  return _raw.ReadVariableOp(resource=call.input(0)[0], dtype=dtype), False


@converts("ReadVariableOp")
def _read(call: Call) -> Any:
  return [wrap(*_value(call))]


@converts("VariableShape")
def _shape(call: Call) -> Any:
  out_type = call.op.get_attr("out_type")
  shape = _raw.VariableShape(input=call.input(0)[0], out_type=out_type)
  return [wrap(shape[1:] if vectorizer.has_stack(call, 0) else shape, False)]


@converts("VarIsInitializedOp")
def _is_initialized(call: Call) -> Any:
  return [wrap(_raw.VarIsInitializedOp(resource=call.input(0)[0]), False)]


@converts("XlaReplicaId")
def _number(call: Call) -> Any:
  numbers = tf.range(vectorizer.num_models(call))
  if call.pfor.source is not None:
    numbers = tf.gather(numbers, call.pfor.source)
  return [wrap(tf.cast(numbers, call.op.outputs[0].dtype), True)]


@converts("ResourceGather")
def _gather(call: Call) -> Any:
  (table, is_own), (indices, is_stacked, _) = _value(call), call.input(1)
  axis, batch_dims = int(is_own), int(is_own and is_stacked)
  rows = tf.gather(table, indices, axis=axis, batch_dims=batch_dims)
  return [wrap(rows, is_own or is_stacked)]


@converts("ResourceGatherNd")
def _gather_nd(call: Call) -> Any:
  table, is_own = _value(call)
  rows = tf.gather_nd(table, stacked(call, 1), batch_dims=int(is_own))
  return [wrap(rows, True)]


_ASSIGN: Final = {
  "": _raw.AssignVariableOp,
  "Add": _raw.AssignAddVariableOp,
  "Sub": _raw.AssignSubVariableOp,
}


def assign_stack(
  call: Call, handle: tf.Tensor, values: tf.Tensor, kind: str = ""
) -> tf.Operation:
  """Assigns, adds or subtracts a value for each model that takes part."""
  if call.pfor.mask is not None:
    other = tf.zeros_like(values)
    if not kind:
      other = _raw.ReadVariableOp(resource=handle, dtype=values.dtype)
    values = select(call.pfor.mask, values, other)
  return _ASSIGN[kind](resource=handle, value=values)


def _assigning(kind: str) -> Any:
  """Returns a converter of an assignment."""

  def convert(call: Call) -> Any:
    if not vectorizer.has_stack(call, 0):
      return _assign_outside(call, _ASSIGN[kind])
    return assign_stack(call, call.input(0)[0], stacked(call, 1), kind)

  return convert


def _assign_outside(call: Call, operation: Any) -> Any:
  """Assigns to a variable that was created outside the scope, once."""
  value, is_stacked, _ = call.input(1)
  if is_stacked:
    raise ValueError(
      "Replicas assign different values to a variable that was created outside"
      " of the strategy's scope, so there is one value for all replicas. Create"
      " variables, and metrics and optimizers for compile, inside `with"
      " strategy.scope():`."
    )
  if call.pfor.mask is not None:
    raise vectorizer.cannot_vectorize(
      f"{call.op_type}, on a variable from outside of the strategy's scope and"
      " in a conditional that replicas do not share,"
    )
  return operation(resource=call.input(0)[0], value=value)


for _kind in _ASSIGN:
  converts(f"Assign{_kind}VariableOp")(_assigning(_kind))


def _scattering(operation: Any, adds: bool) -> Any:
  """Returns a converter of a scatter operation on rows of the variable."""

  def convert(call: Call) -> Any:
    if not vectorizer.has_stack(call, 0):
      raise vectorizer.cannot_vectorize(call.op_type)
    handle, indices = call.input(0)[0], stacked(call, 1)
    if not call.op_type.startswith("ResourceScatterNd"):
      indices = indices[..., tf.newaxis]
    numbers = tf.reshape(
      tf.range(vectorizer.num_models(call), dtype=indices.dtype),
      [-1, *[1] * (indices.shape.rank - 1)],
    )
    numbers = tf.broadcast_to(numbers, tf.shape(indices[..., :1]))
    places = tf.concat([numbers, indices], axis=-1)
    updates = stacked(call, 2)
    if updates.shape.rank == 1:  # One number for all rows.
      updates = tf.reshape(updates, [-1, *[1] * (indices.shape.rank - 2)])
      updates = tf.broadcast_to(updates, tf.shape(indices)[:-1])
    if call.pfor.mask is not None:
      stack = _raw.ReadVariableOp(resource=handle, dtype=updates.dtype)
      present = tf.gather_nd(stack, places)
      other = tf.zeros_like(updates) if adds else present
      updates = select(call.pfor.mask, updates, other)
    return operation(ref=handle, indices=places, updates=updates)

  return convert


for _name in ("Update", "Add", "Sub", "Min", "Max"):
  converts(f"ResourceScatter{_name}", f"ResourceScatterNd{_name}")(
    _scattering(
      getattr(_raw, f"ResourceScatterNd{_name}"), _name in ("Add", "Sub")
    )
  )


@converts("ResourceStridedSliceAssign")
def _slice_assign(call: Call) -> Any:
  masks = {
    name: call.op.get_attr(name)
    for name in (
      *("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask"),
      "shrink_axis_mask",
    )
  }
  if not vectorizer.has_stack(call, 0):
    raise vectorizer.cannot_vectorize(call.op_type)
  handle, values = call.input(0)[0], stacked(call, 4)
  before = _raw.ReadVariableOp(resource=handle, dtype=values.dtype)
  bounds = call.inputs[1:4]
  if any(x.is_stacked for x in bounds):
    changed = tf.stack(
      [
        _raw.TensorStridedSliceUpdate(
          **_bounds([x.t[i] if x.is_stacked else x.t for x in bounds]),
          **masks,
          input=before[i],
          value=values[i],
        )
        for i in range(vectorizer.num_models(call))
      ]
    )
    return assign_stack(call, handle, changed)
  # A new first axis, which is taken whole.
  masks = {name: value << 1 for name, value in masks.items()}
  masks["begin_mask"] |= 1
  masks["end_mask"] |= 1
  changed = _raw.TensorStridedSliceUpdate(
    **_bounds(
      [
        tf.pad(x.t, [[1, 0]], constant_values=one)
        for x, one in zip(bounds, (0, 0, 1), strict=True)
      ]
    ),
    **masks,
    input=before,
    value=values,
  )
  return assign_stack(call, handle, changed)


def _bounds(tensors: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
  return dict(zip(("begin", "end", "strides"), tensors, strict=True))


@converts("RngReadAndSkip")
def _skip_random_numbers(call: Call) -> Any:
  """Returns the state of a tf.random.Generator, and moves it on."""
  # The state of the Philox algorithm has three words: the low word and the high
  # word of a counter, and a key. TensorFlow counts 256 for each number.
  handle, (delta, _, _) = call.input(0)[0], call.input(2)
  state = _raw.ReadVariableOp(resource=handle, dtype=tf.int64)
  if not vectorizer.has_stack(call, 0) or state.shape[-1] != 3:
    raise vectorizer.cannot_vectorize(call.op_type)
  low, high, key = tf.unstack(tf.bitcast(state, tf.uint64), axis=-1)
  next_low = low + delta * 256
  next_high = high + tf.cast(next_low < low, tf.uint64)  # Carry.
  moved = tf.stack([next_low, next_high, key], axis=-1)
  assign_stack(call, handle, tf.bitcast(moved, tf.int64))
  return [wrap(state, True)]


# Values that are marked.


@converts("Identity", forced=False)
def _identity(call: Call) -> Any:
  tensor, is_stacked, _ = call.input(0)
  attributes = call.op.node_def.attr
  if is_stacked and replica_context.SAME in attributes:
    return [wrap(tensor[0], False)]
  if is_stacked and replica_context.TAKEN_FROM in attributes:
    replicas = list(attributes[replica_context.TAKEN_FROM].list.i)
    return [wrap(tf.gather(tensor, replicas), True)]
  return [wrap(tf.identity(tensor), is_stacked)]
