"""Gradients on the wire: narrow, in few buffers, and back.

    narrow -> pack -> all-reduce -> unpack -> widen

A collective costs a fixed time per buffer, so small tensors travel together.
A tensor that alone fills a bucket travels alone: joining it to others would
copy it twice and save nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

# For collectives: smaller buffers pay the fixed cost too often, larger ones
# gain nothing. An engine may choose another size.
BUCKET_BYTES: Final = 4 << 20

Unpack = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


def pack(
  tensors: Sequence[tf.Tensor], bucket_bytes: int = BUCKET_BYTES
) -> tuple[list[tf.Tensor], Unpack]:
  """Joins `tensors` into flat buffers of one dtype each.

  Returns the buffers, of one dimension, and the function that turns buffers of
  the same lengths back into tensors of the original shapes and order. A buffer
  is closed when it holds `bucket_bytes`.

  >>> a, b = tf.constant([[1.0, 2.0]]), tf.constant(3.0)
  >>> buffers, unpack = pack([a, b])
  >>> [buffer.numpy().tolist() for buffer in buffers]
  [[1.0, 2.0, 3.0]]
  >>> [tensor.shape.as_list() for tensor in unpack(buffers)]
  [[1, 2], []]
  """
  buckets = _assign_buckets(tensors, bucket_bytes)
  buffers = [_join([tensors[i] for i in bucket]) for bucket in buckets]

  def unpack(reduced: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    parts: list[Any] = [None] * len(tensors)
    for bucket, buffer in zip(buckets, reduced, strict=True):
      for i, part in zip(
        bucket, _cut(buffer, [tensors[i] for i in bucket]), strict=True
      ):
        parts[i] = part
    return parts

  return buffers, unpack


def _assign_buckets(
  tensors: Sequence[tf.Tensor], bucket_bytes: int
) -> list[list[int]]:
  """The positions of the tensors that travel together, bucket by bucket."""
  buckets: list[list[int]] = []
  open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
  for i, tensor in enumerate(tensors):
    size = (tensor.shape.num_elements() or 0) * tensor.dtype.size
    if size >= bucket_bytes:
      buckets.append([i])
      continue
    bucket, filled = open_buckets.get(tensor.dtype, ([], 0))
    if not bucket or filled + size > bucket_bytes:
      bucket, filled = [], 0
      buckets.append(bucket)
    bucket.append(i)
    open_buckets[tensor.dtype] = (bucket, filled + size)
  return buckets


def _join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  """The elements of all tensors in one dimension."""
  if len(tensors) == 1:
    return tf.reshape(tensors[0], [-1])
  return tf.concat(flatten(tensors), axis=0)


def _cut(buffer: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
  """The parts of `buffer` in the shapes of `like`."""
  if len(like) == 1:
    return reshape_like([buffer], like)
  sizes = [
    tf.size(tensor)
    if tensor.shape.num_elements() is None
    else tensor.shape.num_elements()
    for tensor in like
  ]
  return reshape_like(tf.split(buffer, sizes), like)


def flatten(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
  """Returns tensors in one dimension."""
  # One constant for all: with thousands of tensors, operations take time.
  shape = tf.constant([-1])
  return [
    tensor if tensor.shape.rank == 1 else tf.reshape(tensor, shape)
    for tensor in tensors
  ]


def reshape_like(
  parts: Sequence[tf.Tensor], like: Sequence[Any]
) -> list[tf.Tensor]:
  """Returns `parts` in the shapes of `like`, static where these are known."""
  # One constant for each shape that occurs.
  constant = functools.cache(tf.constant)
  shaped = []
  for part, tensor in zip(parts, like, strict=True):
    if tensor.shape.is_fully_defined():
      if part.shape != tensor.shape:
        part = tf.reshape(part, constant(tuple(tensor.shape), tf.int32))
    else:
      part = tf.reshape(part, tf.shape(tensor))
      part.set_shape(tensor.shape)
    shaped.append(part)
  return shaped


# Half precision, of which engines make sums: each replica rounds once before
# the sum; the engine rounds the sum at least once more. bfloat16 keeps the
# range of float32 with 8 bits of precision; float16 has 11 bits and overflows
# beyond 65,504.
WIRE_DTYPES: Final = (tf.bfloat16, tf.float16)


def as_wire_dtype(wire_dtype: Any) -> tf.DType | None:
  """The dtype that `wire_dtype` names.

  >>> as_wire_dtype("bfloat16").name
  'bfloat16'
  >>> as_wire_dtype(None)
  """
  if wire_dtype is None:
    return None
  try:
    dtype = tf.as_dtype(wire_dtype)
  except TypeError:
    dtype = None
  kinds = (*WIRE_DTYPES, tf.int8)
  if dtype not in kinds:
    names = ", ".join(f'"{known.name}"' for known in kinds)
    raise ValueError(
      f"`wire_dtype` must be one of {names} or None; got {wire_dtype!r}. Leave"
      " it None for exact sums."
    )
  return dtype


def narrow(
  tensors: Sequence[tf.Tensor], dtype: tf.DType | None
) -> list[tf.Tensor]:
  """Rounds wider floating tensors to `dtype`; leaves others as they are.

  >>> [narrowed] = narrow([tf.constant([1.0, 1.0001])], tf.bfloat16)
  >>> narrowed.dtype.name, tf.cast(narrowed, tf.float32).numpy().tolist()
  ('bfloat16', [1.0, 1.0])
  """
  return [
    tf.cast(tensor, dtype) if _is_wider(tensor.dtype, dtype) else tensor
    for tensor in tensors
  ]


def widen(
  tensors: Sequence[tf.Tensor], like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Gives tensors that were narrowed their dtypes back.

  >>> [wide] = widen([tf.constant([1.5], tf.bfloat16)], [tf.constant([0.0])])
  >>> wide.dtype.name
  'float32'
  """
  return [
    tensor if tensor.dtype == wide.dtype else tf.cast(tensor, wide.dtype)
    for tensor, wide in zip(tensors, like, strict=True)
  ]


def _is_wider(dtype: tf.DType, wire_dtype: tf.DType | None) -> bool:
  """Whether anything is saved by narrowing."""
  return (
    wire_dtype is not None
    and dtype.is_floating
    and dtype.size > wire_dtype.size
  )
