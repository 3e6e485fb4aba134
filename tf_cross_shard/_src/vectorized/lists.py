"""Converters of lists of tensors, of which TensorArrays are made.

A stacked list has elements of the shape `[N, ...]`. pfor loses their shape,
which XLA needs, and cannot write where each model writes elsewhere.
"""

from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.ops import list_ops, resource_variable_ops

from tf_cross_shard._src.vectorized import vectorizer
from tf_cross_shard._src.vectorized.vectorizer import (
  Call,
  converts,
  select,
  stacked,
  wrap,
)

_raw: Final = tf.raw_ops


def _with_axis(call: Call, shape: tf.Tensor) -> tf.Tensor:
  """Returns the shape of elements, with an axis of models for tensors."""
  if _dtype(call) == tf.variant:
    return shape
  static = tf.get_static_value(shape)
  if static is not None:
    known = static.ndim > 0
    count = vectorizer.num_models(call)
    return tf.constant([count, *static] if known else -1, shape.dtype)
  if shape.shape.rank != 1:
    return tf.constant(-1, shape.dtype)
  count = tf.constant([vectorizer.num_models(call)], shape.dtype)
  return tf.concat([count, shape], axis=0)


def _by_source(call: Call, elements: tf.Tensor) -> tf.Tensor:
  """Gives each model the entry of the model that it reads from."""
  source = call.pfor.source
  if source is None or elements.dtype == tf.variant:
    return elements
  return tf.gather(elements, source)


def _dtype(call: Call) -> Any:
  return call.get_attr("element_dtype")


@converts("TensorListReserve")
def _reserve(call: Call) -> Any:
  shape = _with_axis(call, call.unstacked_input(0))
  length = call.unstacked_input(1)
  return [wrap(list_ops.tensor_list_reserve(shape, length, _dtype(call)), True)]


@converts("TensorListFromTensor", forced=False)
def _from_tensor(call: Call) -> Any:
  tensor = stacked(call, 0)  # [N, length, ...]
  tensor = tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])
  shape = tf.shape(tensor)[1:]
  return [wrap(list_ops.tensor_list_from_tensor(tensor, shape), True)]


@converts("TensorListElementShape", forced=False)
def _element_shape(call: Call) -> Any:
  dtype = call.get_attr("shape_type")
  data = resource_variable_ops.get_eager_safe_handle_data(call.op.inputs[0])
  known = tf.TensorShape(data.shape_and_type[0].shape if data.is_set else None)
  if known.is_fully_defined():
    return [wrap(tf.constant(known.as_list(), dtype), False)]
  handle = call.input(0).t
  shape = _raw.TensorListElementShape(input_handle=handle, shape_type=dtype)
  if known.rank is not None:
    return [wrap(shape[1:], False)]
  rank = call.op.outputs[0].shape.num_elements() or 0
  # A scalar means that nothing is known.
  unknown = -tf.ones([rank], dtype)
  rest = tf.reshape(shape, [-1])[1:]
  shape = tf.cond(tf.rank(shape) > 0, lambda: rest, lambda: unknown)
  return [wrap(shape, False)]


@converts("TensorListLength", forced=False)
def _length(call: Call) -> Any:
  return [wrap(list_ops.tensor_list_length(call.input(0).t), False)]


@converts("TensorListResize", forced=False)
def _resize(call: Call) -> Any:
  handle, size = stacked(call, 0), call.unstacked_input(1)
  return [wrap(list_ops.tensor_list_resize(handle, size), True)]


@converts("TensorListGetItem", forced=False)
def _get(call: Call) -> Any:
  (handle, is_list, _), (index, differs, _) = call.inputs[:2]
  shape, dtype = call.unstacked_input(2), _dtype(call)

  def get(i: tf.Tensor) -> tf.Tensor:
    element_shape = _with_axis(call, shape) if is_list else shape
    return list_ops.tensor_list_get_item(handle, i, dtype, element_shape)

  if not differs:
    return [wrap(_by_source(call, get(index)), True)]
  if not is_list:
    models = range(vectorizer.num_models(call))
    return [wrap(tf.stack([get(index[i]) for i in models]), True)]
  result = _for_each_index(
    index,
    tf.not_equal(index, index[0]),
    lambda i, which, x: select(which, _by_source(call, get(i)), x),
    _by_source(call, get(index[0])),
  )
  return [wrap(result, True)]


@converts("TensorListSetItem", forced=False)
def _set(call: Call) -> Any:
  handle, item, (index, differs, _) = (
    *(stacked(call, 0), stacked(call, 2)),
    call.input(1),
  )
  mask = call.pfor.mask
  can_grow = call.get_attr("resize_if_index_out_of_bounds")
  if not differs and mask is None:
    made = list_ops.tensor_list_set_item(handle, index, item, can_grow)
    return [wrap(made, True)]
  count = vectorizer.num_models(call)
  mask = tf.fill([count], True) if mask is None else mask
  indices = stacked(call, 1)
  if can_grow:
    handle = _grow(call, handle, indices, mask)

  def set_item(i: tf.Tensor, which: tf.Tensor, handle: tf.Tensor) -> tf.Tensor:
    # An element that was not written is 0.
    before = list_ops.tensor_list_get_item(
      handle, i, item.dtype, tf.shape(item)
    )
    before.set_shape(item.shape)
    after = select(which, item, before)
    return list_ops.tensor_list_set_item(handle, i, after)

  return [wrap(_for_each_index(indices, mask, set_item, handle), True)]


def _grow(
  call: Call, handle: tf.Tensor, indices: tf.Tensor, mask: tf.Tensor
) -> tf.Tensor:
  """Makes a list as long as needed; an error, if other models' are not."""
  length = list_ops.tensor_list_length(handle)
  needed = tf.reduce_max(tf.where(mask, indices, -1)) + 1
  fits = tf.reduce_all(tf.equal(tf.where(mask, indices, -1), needed - 1))
  message = (
    f"{call.op_type} ({call.op.name}) would give the replicas TensorArrays of"
    " different sizes, which a vectorized program cannot have. Create the"
    " TensorArray with its largest size. The indices are:"
  )
  with vectorizer.check(fits | (needed <= length), message, indices):
    return list_ops.tensor_list_resize(handle, tf.maximum(length, needed))


def _for_each_index(
  indices: tf.Tensor,
  pending: tf.Tensor,
  step: Callable[..., tf.Tensor],
  first: tf.Tensor,
) -> tf.Tensor:
  """Calls `step(index, mask of its models, result)` for each distinct index."""

  def body(pending: tf.Tensor, result: tf.Tensor) -> tuple[Any, Any]:
    index = indices[tf.argmax(pending)]
    which = pending & tf.equal(indices, index)
    return pending & ~which, step(index, which, result)

  result: tf.Tensor = tf.while_loop(
    lambda pending, _: tf.reduce_any(pending), body, [pending, first]
  )[1]
  return result


@converts("TensorListPushBack", forced=False)
def _push(call: Call) -> Any:
  handle, tensor = stacked(call, 0), stacked(call, 1)
  return [wrap(list_ops.tensor_list_push_back(handle, tensor), True)]


@converts("TensorListPopBack", forced=False)
def _pop(call: Call) -> Any:
  shape = _with_axis(call, call.unstacked_input(1))
  handle, tensor = _raw.TensorListPopBack(
    input_handle=call.input(0).t,
    element_shape=shape,
    element_dtype=_dtype(call),
  )
  count = vectorizer.num_models(call)
  element = _by_source(call, tensor)
  popped = vectorizer.wrap_stacked(call.op.outputs[1], element, count)
  return [wrap(handle, True), popped]


@converts("TensorListStack", forced=False)
def _stack(call: Call) -> Any:
  stack = _raw.TensorListStack(
    input_handle=call.input(0).t,
    element_shape=_with_axis(call, call.unstacked_input(1)),
    element_dtype=_dtype(call),
    num_elements=call.get_attr("num_elements"),
  )
  rank = stack.shape.rank
  if rank is None:
    rank = call.op.outputs[0].shape.rank
    if rank is None:
      return vectorizer.convert_by_pfor(call)
    rank += 1
  order = [1, 0, *range(2, rank)]
  return [wrap(_by_source(call, tf.transpose(stack, order)), True)]


@converts("TensorListScatterIntoExistingList", forced=False)
def _scatter(call: Call) -> Any:
  if call.pfor.mask is not None:
    raise vectorizer.cannot_vectorize(
      f"{call.op_type}, in a conditional or loop that not all replicas enter,"
    )
  return vectorizer.convert_by_pfor(call)
