"""Converters of variables, and of exchanges between replicas.

A converter receives an operation of one replica's program, with its inputs
already converted, and adds operations that do the same for all replicas:

    read              the stack is the value, with its first axis
    assign, add, ...  the same operation on the stack
    all-reduce        a sum over the rows of a group

Inside a conditional, only some replicas take part: see `_Rewriter.mask`, and
pfor's `all_indices`, which holds the numbers of the rows that are there.
"""

import math
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.vectorized import (
  exchanges,
  replica_context,
  vectorizer,
)
from tf_cross_shard._src.vectorized.vectorizer import Call, converts, wrap

_raw: Final = tf.raw_ops


def rows(call: Call, i: int) -> tf.Tensor:
  """Returns input i with a row for each replica that takes part."""
  return vectorizer.with_rows(call, call.input(i))


def _is_part(call: Call) -> bool:
  """Returns whether only some of the replicas have a row here."""
  part: bool = call.pfor.all_indices_partitioned
  return part


def _mask(call: Call) -> Any:
  return getattr(call.pfor, "mask", None)


# Variables.


@converts("ReadVariableOp")
def _read(call: Call) -> Any:
  dtype = call.op.get_attr("dtype")
  value = _raw.ReadVariableOp(resource=call.input(0)[0], dtype=dtype)
  if not vectorizer.has_stack(call, 0):
    return [wrap(value, False)]  # A variable from outside the scope.
  shape = call.op.outputs[0].shape
  if _is_part(call):
    value = tf.gather(value, call.pfor.all_indices)
  else:
    rows_here = vectorizer.num_rows(call.pfor)
    known = rows_here if isinstance(rows_here, int) else None
    value.set_shape(tf.TensorShape([known]).concatenate(shape))
  return [wrap(value, True)]


@converts("VariableShape")
def _shape(call: Call) -> Any:
  out_type = call.op.get_attr("out_type")
  shape = _raw.VariableShape(input=call.input(0)[0], out_type=out_type)
  return [wrap(shape[1:] if vectorizer.has_stack(call, 0) else shape, False)]


@converts("VarIsInitializedOp")
def _is_initialized(call: Call) -> Any:
  return [wrap(_raw.VarIsInitializedOp(resource=call.input(0)[0]), False)]


def values_of(call: Call, i: int = 0) -> tf.Tensor:
  """Returns the variable of handle i, with a row for each replica here."""
  dtype = call.op.get_attr("dtype" if "dtype" in call.op.node_def.attr else "T")
  return _read_rows(call, call.input(i)[0], tf.as_dtype(dtype))


def _read_rows(call: Call, handle: tf.Tensor, dtype: Any) -> tf.Tensor:
  """Returns a variable with a row for each replica here."""
  value = _raw.ReadVariableOp(resource=handle, dtype=dtype)
  return tf.gather(value, call.pfor.all_indices) if _is_part(call) else value


@converts("ResourceGather")
def _gather(call: Call) -> Any:
  if not vectorizer.has_stack(call, 0):
    dtype = call.op.get_attr("dtype")
    table = _raw.ReadVariableOp(resource=call.input(0)[0], dtype=dtype)
    return [wrap(tf.gather(table, call.input(1)[0]), call.input(1).is_stacked)]
  indices, is_stacked, _ = call.input(1)
  if is_stacked:
    return [wrap(tf.gather(values_of(call), indices, batch_dims=1), True)]
  return [wrap(tf.gather(values_of(call), indices, axis=1), True)]


@converts("ResourceGatherNd")
def _gather_nd(call: Call) -> Any:
  if not vectorizer.has_stack(call, 0):
    raise vectorizer.cannot_vectorize(call.op_type)
  return [
    wrap(tf.gather_nd(values_of(call), rows(call, 1), batch_dims=1), True)
  ]


# For each kind of assignment: the operation on all rows of the stack, the
# operation on some rows, and what a replica that is not in the branch adds.
_ASSIGN: Final = {
  "": (_raw.AssignVariableOp, _raw.ResourceScatterUpdate, None),
  "Add": (_raw.AssignAddVariableOp, _raw.ResourceScatterAdd, tf.zeros_like),
  "Sub": (_raw.AssignSubVariableOp, _raw.ResourceScatterSub, tf.zeros_like),
}


def assign_rows(
  call: Call, handle: tf.Tensor, values: tf.Tensor, kind: str = ""
) -> tf.Operation:
  """Assigns, adds or subtracts a value for each replica that takes part."""
  whole, part, outside = _ASSIGN[kind]
  if _mask(call) is not None:
    other = (
      outside(values) if outside else _read_rows(call, handle, values.dtype)
    )
    values = vectorizer.select(_mask(call), values, other)
  if _is_part(call):
    indices = call.pfor.all_indices
    return part(resource=handle, indices=indices, updates=values)
  return whole(resource=handle, value=values)


def _assigning(kind: str) -> Any:
  """Returns a converter of an assignment."""
  whole = _ASSIGN[kind][0]

  def convert(call: Call) -> Any:
    if not vectorizer.has_stack(call, 0):
      return _assign_outside(call, whole)
    return assign_rows(call, call.input(0)[0], rows(call, 1), kind)

  return convert


def _assign_outside(call: Call, operation: Any) -> Any:
  """Assigns to a variable that was created outside the scope, once."""
  value, is_stacked, _ = call.input(1)
  if operation is _raw.AssignVariableOp:
    if is_stacked:
      raise ValueError(
        "Replicas assign different values to a variable that was created"
        " outside of the strategy's scope, so there is one value for all"
        " replicas. Create the variable inside `with strategy.scope():`."
      )
    if _is_part(call) or _mask(call) is not None:
      raise vectorizer.cannot_vectorize(
        f"{call.op_type}, on a variable from outside of the strategy's scope"
        " and in a conditional that replicas do not share,"
      )
  else:  # Every replica adds its own value.
    value = rows(call, 1)
    if _mask(call) is not None:
      value = vectorizer.select(_mask(call), value, tf.zeros_like(value))
    value = tf.reduce_sum(value, axis=0)
  return operation(resource=call.input(0)[0], value=value)


for _kind in _ASSIGN:
  converts(f"Assign{_kind}VariableOp")(_assigning(_kind))


def _scattering(operation: Any, adds: bool) -> Any:
  """Returns a converter of a scatter operation on rows of the variable.

  `operation` takes pairs: the replica's number, and the row.
  """

  def convert(call: Call) -> Any:
    if not vectorizer.has_stack(call, 0):
      raise vectorizer.cannot_vectorize(call.op_type)
    handle, indices = call.input(0)[0], rows(call, 1)
    if not call.op_type.startswith("ResourceScatterNd"):
      indices = indices[..., tf.newaxis]
    numbers = tf.reshape(
      tf.cast(call.pfor.all_indices, indices.dtype),
      [-1, *[1] * (indices.shape.rank - 1)],
    )
    numbers = tf.broadcast_to(numbers, tf.shape(indices[..., :1]))
    places = tf.concat([numbers, indices], axis=-1)
    updates = rows(call, 2)
    if updates.shape.rank == 1:  # One number for all rows.
      updates = tf.reshape(updates, [-1, *[1] * (indices.shape.rank - 2)])
      updates = tf.broadcast_to(updates, tf.shape(indices)[:-1])
    if _mask(call) is not None:
      stack = _raw.ReadVariableOp(resource=handle, dtype=updates.dtype)
      present = tf.gather_nd(stack, places)
      other = tf.zeros_like(updates) if adds else present
      updates = vectorizer.select(_mask(call), updates, other)
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
  if not vectorizer.has_stack(call, 0) or _is_part(call):
    raise vectorizer.cannot_vectorize(call.op_type)
  # A new first axis, which is taken whole.
  begin, end, strides = (
    tf.concat([[one], call.unstacked_input(i)], axis=0)
    for i, one in ((1, 0), (2, 0), (3, 1))
  )
  masks = {name: value << 1 for name, value in masks.items()}
  masks["begin_mask"] |= 1
  masks["end_mask"] |= 1
  values = values_of(call)
  changed = _raw.TensorStridedSliceUpdate(
    input=values,
    begin=begin,
    end=end,
    strides=strides,
    value=rows(call, 4),
    **masks,
  )
  if _mask(call) is not None:
    changed = vectorizer.select(_mask(call), changed, values)
  return _raw.AssignVariableOp(resource=call.input(0)[0], value=changed)


@converts("RngReadAndSkip")
def _skip_random_numbers(call: Call) -> Any:
  """Returns the state of a tf.random.Generator, and moves it on.

  The state of the Philox algorithm has three words: the low word and the high
  word of a counter, and a key. TensorFlow counts 256 for each number.
  """
  handle, (delta, _, _) = call.input(0)[0], call.input(2)
  state = _raw.ReadVariableOp(resource=handle, dtype=tf.int64)
  if (
    not vectorizer.has_stack(call, 0) or _is_part(call) or state.shape[-1] != 3
  ):
    raise vectorizer.cannot_vectorize(call.op_type)
  low, high, key = tf.unstack(tf.bitcast(state, tf.uint64), axis=-1)
  next_low = low + delta * 256
  next_high = high + tf.cast(next_low < low, tf.uint64)  # Carry.
  moved = tf.stack([next_low, next_high, key], axis=-1)
  assign_rows(call, handle, tf.bitcast(moved, tf.int64))
  return [wrap(state, True)]


# Exchanges between replicas.


class _Groups:
  """The groups of an exchange.

  Attributes:
    assignment: `[groups, size]`: the members of each group.
    group_of: `[N]`: the group of each replica.
    position: `[N]`: the place of each replica in its group.
  """

  def __init__(self, call: Call) -> None:
    if _is_part(call):
      raise NotImplementedError(
        "Replicas exchange values inside a conditional that only some of them"
        " enter. Move the exchange out of it."
      )
    self.assignment = np.asarray(tf.get_static_value(call.op.inputs[1]))
    self.size = self.assignment.shape[1]
    self.group_of = np.zeros(self.assignment.size, np.int32)
    self.position = np.zeros(self.assignment.size, np.int32)
    for group, members in enumerate(self.assignment):
      self.group_of[members] = group
      self.position[members] = np.arange(self.size)

  def sums(self, rows: tf.Tensor) -> tf.Tensor:
    """Returns the sum of each group's rows, `[groups, ...]`."""
    dtype = rows.dtype
    # As the other engines do: add half precision in float32.
    if dtype in (tf.bfloat16, tf.float16):
      rows = tf.cast(rows, tf.float32)
    members = [tf.gather(rows, self.assignment[:, i]) for i in range(self.size)]
    return tf.cast(tf.add_n(members), dtype)


@converts("XlaReplicaId")
def _replica_id(call: Call) -> Any:
  return [wrap(tf.cast(call.pfor.all_indices, call.op.outputs[0].dtype), True)]


@converts("XlaAllReduce")
def _all_reduce(call: Call) -> Any:
  if exchanges.ALL_TO_ALL in call.op.name:
    return _all_to_all(call)
  groups, (value, is_stacked, _) = _Groups(call), call.input(0)
  if not is_stacked:
    return [wrap(value * tf.cast(groups.size, value.dtype), False)]
  if groups.size == 1:
    return [wrap(value, True)]
  sums = groups.sums(value)
  if len(groups.assignment) == 1:
    return [wrap(sums[0], False)]
  return [wrap(tf.gather(sums, groups.group_of), True)]


@converts("XlaReduceScatter")
def _reduce_scatter(call: Call) -> Any:
  groups, own = _Groups(call), rows(call, 0)
  parts = tf.reshape(
    groups.sums(own), [len(groups.assignment), groups.size, -1]
  )
  places = np.stack([groups.group_of, groups.position], 1)
  return [wrap(tf.gather_nd(parts, places), True)]


def _all_to_all(call: Call) -> Any:
  groups, own = _Groups(call), rows(call, 0)
  shape = tf.shape(own)
  # slices[r, i] is what replica r sends to member i of its group.
  slices = tf.reshape(
    own, tf.concat([[groups.assignment.size, groups.size, -1], shape[2:]], 0)
  )
  senders = groups.assignment[groups.group_of]  # [N, size]
  receiver = np.broadcast_to(groups.position[:, np.newaxis], senders.shape)
  received = tf.gather_nd(slices, np.stack([senders, receiver], -1))
  return [wrap(tf.reshape(received, shape), True)]


@converts("Identity", forced=False)
def _identity(call: Call) -> Any:
  tensor, is_stacked, _ = call.input(0)
  attributes = call.op.node_def.attr
  if is_stacked and replica_context.SAME in attributes:
    return [wrap(tensor[0], False)]
  if is_stacked and exchanges.TAKEN_FROM in attributes:
    taken_from = list(attributes[exchanges.TAKEN_FROM].list.i)
    return [wrap(tf.gather(tensor, taken_from), True)]
  return [wrap(tf.identity(tensor), is_stacked)]


# Lists of tensors. pfor loses the shape of elements that is not known when the
# graph is built, and then fails.


@converts("TensorListFromTensor")
def _list_from_tensor(call: Call) -> Any:
  tensor, is_stacked, _ = call.input(0)
  if is_stacked:  # [N, length, ...]: each element of the list has N rows.
    others = range(2, tensor.shape.rank)
    tensor = tf.transpose(tensor, [1, 0, *others])
  made = _raw.TensorListFromTensor(
    tensor=tensor, element_shape=tf.shape(tensor)[1:]
  )
  return [wrap(made, is_stacked)]


@converts("TensorListElementShape")
def _element_shape(call: Call) -> Any:
  handle, is_stacked, _ = call.input(0)
  dtype = call.get_attr("shape_type")
  shape = _raw.TensorListElementShape(input_handle=handle, shape_type=dtype)
  if not is_stacked:
    return [wrap(shape, False)]
  rank = call.op.outputs[0].shape.num_elements() or 0
  # A scalar means that nothing is known.
  unknown = -tf.ones([rank], dtype)
  known = tf.reshape(shape, [-1])[1:]
  return [
    wrap(tf.cond(tf.rank(shape) > 0, lambda: known, lambda: unknown), False)
  ]


@converts("Unique", forced=False)
def _unique(call: Call) -> Any:
  """Adds up rows of the same index, with as many rows as before.

  Replicas may have different numbers of distinct indices. So the first of equal
  indices gets the sum of their rows, and the others get zeros.
  """
  indices, is_stacked, _ = call.input(0)
  if not is_stacked or row_sparse.MERGE not in call.op.name:
    return vectorizer.in_loop(call)
  order = tf.argsort(indices, stable=True)
  in_order = tf.gather(indices, order, batch_dims=1)
  places = tf.searchsorted(in_order, indices)
  first = tf.gather(order, places, batch_dims=1)
  position = tf.cast(first, call.op.outputs[1].dtype)
  return [wrap(indices, True), wrap(position, True)]


# Functions that processors compute for several numbers at once.

# A multiple of the numbers in any processor's vector.
_LANES: Final = 64


@converts(
  *("Cos", "Exp", "Expm1", "Log", "Log1p", "Pow", "Rsqrt", "Sigmoid"),
  *("Sin", "Sqrt", "Tanh"),
  forced=False,
)
def _transcendental(call: Call) -> Any:
  """Computes a learning rate, a power, ... with the same bits on all replicas.

  The numbers at the end of a tensor that fill no vector are computed in another
  way, with other last bits. Then the last replicas of a group would drift away
  from the others. So the tensor is padded to whole vectors, unless it depends
  on a replica's own examples. Other than scalars, optimizers compute powers and
  roots of slots. TensorFlow replaces a division by a root by Rsqrt, unless
  something is between them, as it is here.
  """
  is_of_slots = call.op_type in ("Pow", "Rsqrt", "Sqrt")
  is_scalar = call.op.outputs[0].shape.rank == 0
  if vectorizer.is_own(call) or not (is_scalar or is_of_slots):
    return vectorizer.convert_by_pfor(call)
  return _in_whole_vectors(call)


@converts("Maximum", "Minimum", forced=False)
def _extreme(call: Call) -> Any:
  """Limits a tensor; a limit of 0, as in Ftrl, decides the sign of zeros."""
  limits = map(tf.get_static_value, call.op.inputs)
  if any(limit is not None and not np.any(limit) for limit in limits):
    return _in_whole_vectors(call)
  return vectorizer.convert_by_pfor(call)


def _in_whole_vectors(call: Call) -> Any:
  """Computes an operation of scalars, and of tensors of one known shape."""
  rank = call.op.outputs[0].shape.rank
  shapes = [x.shape for x in call.op.inputs if x.shape.rank != 0]
  if rank is None or not all(
    x.is_fully_defined() and x == shapes[0] for x in shapes
  ):
    return vectorizer.convert_by_pfor(call)
  inputs = [rows(call, i) for i in range(call.num_inputs)]
  shape = tf.shape(max(inputs, key=lambda x: x.shape.rank))
  same_shape = []
  for x in inputs:  # Scalars of replicas get the rank of the other input.
    ones = [1] * (rank + 1 - x.shape.rank)
    x = tf.reshape(x, tf.concat([tf.shape(x), ones], axis=0))
    same_shape.append(tf.broadcast_to(x, shape))
  return [wrap(in_lanes(call.op_type, *same_shape), True)]


@converts("Mean", "Sum", forced=False)
def _sum_of_rows(call: Call) -> Any:
  """Reduces the rows of a weight, as Adafactor and norm constraints do.

  For these sums, too, the last columns may be added up in another order, unless
  they fill whole vectors. So the reduced axes become the last, along which each
  sum is computed alike. That is slower, up to five times.
  """
  shape, axes = call.op.inputs[0].shape, tf.get_static_value(call.op.inputs[1])
  is_known = axes is not None and shape.is_fully_defined()
  if vectorizer.is_own(call) or not is_known:
    return vectorizer.convert_by_pfor(call)
  reduced = sorted(np.ravel(axes) % max(shape.rank, 1))
  columns = math.prod(shape[max(reduced, default=-1) + 1 :])
  if not reduced or columns == 1 or columns % _LANES == 0:
    return vectorizer.convert_by_pfor(call)
  kept = [i for i in range(shape.rank) if i not in reduced]
  order = [0, *(i + 1 for i in kept), *(i + 1 for i in reduced)]
  value = getattr(_raw, call.op_type)(
    input=tf.transpose(rows(call, 0), order),
    axis=[*range(1 + len(kept), 1 + shape.rank)],
  )
  if call.op.get_attr("keep_dims"):
    value = tf.reshape(value, [-1, *call.op.outputs[0].shape])
  return [wrap(value, True)]


def in_lanes(name: str, *inputs: tf.Tensor) -> tf.Tensor:
  """Applies an elementwise operation to whole vectors of the processor."""
  operation, known = getattr(_raw, name), inputs[0].shape.num_elements()
  if known is not None and known % _LANES == 0:
    return operation(**dict(zip("xy", inputs, strict=False)))
  shape, size = tf.shape(inputs[0]), tf.size(inputs[0])
  padded = [
    tf.pad(tf.reshape(x, [-1]), [[0, -size % _LANES]], constant_values=1)
    for x in inputs
  ]
  value = operation(**dict(zip("xy", padded, strict=False)))
  return tf.reshape(value[:size], shape)


# Operations that pfor converts wrongly, or does not know.


@converts("PadV2", forced=False)
def _pad(call: Call) -> Any:
  """Pads with a value. pfor's own converter pads with zeros."""
  value = call.input(2)
  if call.input(1).is_stacked or value.is_stacked:
    return vectorizer.in_loop(call)
  paddings = tf.pad(call.unstacked_input(1), [[1, 0], [0, 0]])
  padded = _raw.PadV2(
    input=rows(call, 0), paddings=paddings, constant_values=value.t
  )
  return [wrap(padded, True)]


@converts("Bitcast")
def _bitcast(call: Call) -> Any:
  tensor, is_stacked, _ = call.input(0)
  return [wrap(tf.bitcast(tensor, call.op.outputs[0].dtype), is_stacked)]


@converts("L2Loss")
def _l2_loss(call: Call) -> Any:
  tensor, is_stacked, _ = call.input(0)
  if not is_stacked:
    return [wrap(tf.nn.l2_loss(tensor), False)]
  axes = list(range(1, tensor.shape.rank))
  return [wrap(tf.reduce_sum(tensor * tensor, axes) / 2, True)]
