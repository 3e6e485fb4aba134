"""Packing and unpacking gives every bit back, in few buffers."""

import math
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard.gradients import packing

DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32)

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
specs = st.tuples(shapes, st.sampled_from(DTYPES))


def random_tensor(
  shape: tuple[int, ...], dtype: tf.DType, rng: np.random.Generator
) -> tf.Tensor:
  """A tensor of random bits: NaNs, infinities and subnormals among them."""
  size = math.prod(shape) * dtype.size
  bits = np.frombuffer(rng.bytes(size), np.uint8)
  array = bits.view(dtype.as_numpy_dtype).reshape(shape)
  return tf.constant(array, dtype)


def bits_of(tensors: Sequence[tf.Tensor]) -> list[tuple[Any, ...]]:
  """All that can be told apart about each tensor."""
  return [(t.dtype, t.shape.as_list(), t.numpy().tobytes()) for t in tensors]


@hypothesis.given(
  st.lists(specs, max_size=8), st.integers(1, 200), st.integers(0, 99)
)
def test_every_bit_comes_back(
  wanted: list[Any], bucket_bytes: int, seed: int
) -> None:
  rng = np.random.default_rng(seed)
  tensors = [random_tensor(shape, dtype, rng) for shape, dtype in wanted]
  buffers, unpack = packing.pack(tensors, bucket_bytes)
  assert bits_of(unpack(buffers)) == bits_of(tensors)


@hypothesis.given(st.lists(specs, max_size=12), st.integers(1, 200))
def test_buffers_are_flat_full_and_no_larger_than_a_bucket(
  wanted: list[Any], bucket_bytes: int
) -> None:
  # Each tensor's elements are its number, which tells who is in a buffer.
  tensors = [
    tf.cast(tf.fill(shape, i + 1), dtype)
    for i, (shape, dtype) in enumerate(wanted)
  ]
  buffers, _ = packing.pack(tensors, bucket_bytes)
  assert all(buffer.shape.rank == 1 for buffer in buffers)
  for dtype in DTYPES:
    there = [b for b in buffers if b.dtype == dtype]
    sizes = [t.shape.num_elements() for t in tensors if t.dtype == dtype]
    assert sum(b.shape[0] for b in there) == sum(sizes)
    members = [set(b.numpy().astype(int)) for b in there]
    assert sum(map(len, members)) == sum(size > 0 for size in sizes)
    small_bytes = []
    for buffer, of in zip(there, members, strict=True):
      buffer_bytes = buffer.shape[0] * dtype.size
      if len(of) > 1:
        assert buffer_bytes <= bucket_bytes
      if buffer_bytes < bucket_bytes:
        small_bytes.append(buffer_bytes)
    # Greedy, in order: what is in two neighbours would not fit into one, so
    # that more than half of the buckets' room is used.
    assert len(small_bytes) <= 1 + 2 * (sum(sizes) * dtype.size / bucket_bytes)


def lengths(tensors: Sequence[tf.Tensor], bucket_bytes: int) -> list[int]:
  """Elements in each buffer."""
  buffers, _ = packing.pack(tensors, bucket_bytes)
  return [buffer.shape[0] for buffer in buffers]


def test_a_bucket_is_filled_to_the_last_byte() -> None:
  three = [tf.zeros([2]), tf.zeros([2]), tf.zeros([2])]  # 8 bytes each
  assert lengths(three, 24) == [6]
  assert lengths(three, 23) == [4, 2]
  assert lengths(three, 16) == [4, 2]
  assert lengths(three, 15) == [2, 2, 2]


def test_a_tensor_that_fills_a_bucket_travels_alone() -> None:
  tensors = [tf.zeros([1]), tf.zeros([4]), tf.zeros([1])]
  assert lengths(tensors, 16) == [2, 4]
  assert lengths(tensors, 17) == [1, 4, 1]
  assert lengths(tensors, 20) == [5, 1]
  assert lengths(tensors, 24) == [6]


def test_the_default_bucket_joins_small_tensors_only() -> None:
  small, large = tf.zeros([10]), tf.zeros([packing.BUCKET_BYTES // 4])
  buffers, unpack = packing.pack([small, large, small])
  assert [b.shape[0] for b in buffers] == [20, packing.BUCKET_BYTES // 4]
  assert [t.shape.as_list() for t in unpack(buffers)] == [
    [10],
    [packing.BUCKET_BYTES // 4],
    [10],
  ]


def test_dtypes_do_not_share_a_buffer_nor_close_each_others() -> None:
  tensors = [
    tf.constant([1, 2]),
    tf.constant([1.5]),
    tf.constant(3),
    tf.constant(2.5),
  ]
  buffers, _ = packing.pack(tensors)
  assert [b.numpy().tolist() for b in buffers] == [[1, 2, 3], [1.5, 2.5]]


def test_no_tensors_make_no_buffers() -> None:
  buffers, unpack = packing.pack([])
  assert buffers == []
  assert unpack([]) == []


def test_what_is_unpacked_is_what_is_given_not_what_was_packed() -> None:
  a, b = tf.constant([[1.0], [2.0]]), tf.constant(3.0)
  buffers, unpack = packing.pack([a, b])
  doubled = unpack([2 * buffer for buffer in buffers])
  assert [t.numpy().tolist() for t in doubled] == [[[2.0], [4.0]], 6.0]


def test_a_missing_buffer_is_an_error() -> None:
  buffers, unpack = packing.pack([tf.constant(1.0), tf.constant(2)])
  with pytest.raises(ValueError, match="shorter"):
    unpack(buffers[:1])


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_needs_a_byte(bucket_bytes: int) -> None:
  with pytest.raises(ValueError, match="`bucket_bytes` must be positive") as e:
    packing.pack([tf.constant(1.0)], bucket_bytes)
  assert str(e.value).endswith(f"got {bucket_bytes}.")


@pytest.mark.parametrize("bucket_bytes", [1, 8, 1 << 18])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_shapes_known_only_when_the_program_runs(
  rows: int, bucket_bytes: int
) -> None:
  seen = []

  @tf.function(
    input_signature=[
      tf.TensorSpec([None, 2], tf.float32),
      tf.TensorSpec(None, tf.float32),
      tf.TensorSpec([3], tf.float32),
      tf.TensorSpec([None], tf.float64),
    ]
  )
  def there_and_back(*tensors: tf.Tensor) -> list[tf.Tensor]:
    buffers, unpack = packing.pack(tensors, bucket_bytes)
    result = unpack(buffers)
    seen.append([buffer.shape.rank for buffer in buffers])
    seen.append([t.shape for t in result])
    seen.append([t.shape for t in tensors])
    return result

  tensors = [
    tf.random.normal([rows, 2]),
    tf.random.normal([2, rows, 1]),
    tf.random.normal([3]),
    tf.random.normal([rows], dtype=tf.float64),
  ]
  assert bits_of(there_and_back(*tensors)) == bits_of(tensors)
  ranks, after, before = seen
  assert set(ranks) == {1}
  # Static shapes are as well known as before, which optimizers rely on.
  assert [str(shape) for shape in after] == [str(shape) for shape in before]


def test_unknown_shapes_share_a_buffer_with_known_ones() -> None:
  @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([2])])
  def joined(a: tf.Tensor, b: tf.Tensor) -> list[tf.Tensor]:
    return packing.pack([a, b])[0]

  [buffer] = joined(tf.constant([1.0, 2.0, 3.0]), tf.constant([4.0, 5.0]))
  assert buffer.numpy().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
