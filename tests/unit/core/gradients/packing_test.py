"""Packing keeps every bit."""

import math
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard._src.core.gradients import packing

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
  """Returns the dtype, shape and bits of each tensor."""
  return [(t.dtype, t.shape.as_list(), t.numpy().tobytes()) for t in tensors]


@hypothesis.given(
  st.lists(specs, max_size=8),
  st.integers(1, 200),
  st.integers(0, 99),
  st.booleans(),
)
def test_unpack_reverses_pack(
  wanted: list[Any], bucket_bytes: int, seed: int, by_width: bool
) -> None:
  rng = np.random.default_rng(seed)
  tensors = [random_tensor(shape, dtype, rng) for shape, dtype in wanted]
  buffers, unpack = packing.pack(tensors, bucket_bytes, by_width)
  assert bits_of(unpack(buffers)) == bits_of(tensors)


def lengths(tensors: Sequence[tf.Tensor], bucket_bytes: int) -> list[int]:
  """Elements in each buffer."""
  buffers, _ = packing.pack(tensors, bucket_bytes)
  return [buffer.shape[0] for buffer in buffers]


@pytest.mark.parametrize(
  ("elements", "bucket_bytes", "buffers"),
  [
    ([2, 2, 2], 24, [6]),  # filled to the last byte
    ([2, 2, 2], 23, [4, 2]),
    ([2, 2, 2], 15, [2, 2, 2]),
    ([1, 4, 1], 16, [2, 4]),  # what fills a bucket travels alone
    ([1, 4, 1], 20, [5, 1]),
    (
      [10, packing.BUCKET_BYTES // 4, 10],
      None,
      [20, packing.BUCKET_BYTES // 4],
    ),
    ([], None, []),
  ],
)
def test_lengths_of_buffers(
  elements: list[int], bucket_bytes: int | None, buffers: list[int]
) -> None:
  given = [tf.zeros([n]) for n in elements]
  assert lengths(given, bucket_bytes or packing.BUCKET_BYTES) == buffers


def test_each_dtype_has_its_own_open_buffer() -> None:
  tensors = [tf.constant(x) for x in ([1, 2], [1.5], 3, 2.5)]
  buffers, unpack = packing.pack(tensors)
  assert [b.numpy().tolist() for b in buffers] == [[1, 2, 3], [1.5, 2.5]]
  # `unpack` unpacks its argument, not the buffers that were packed.
  doubled = unpack([2 * buffer for buffer in buffers])
  assert [t.numpy().tolist() for t in doubled] == [[2, 4], [3.0], 6, 5.0]
  with pytest.raises(ValueError, match="shorter"):
    unpack(buffers[:1])


def test_tensors_of_one_width_share_a_buffer_of_it() -> None:
  tensors = [tf.zeros(shape) for shape in ([2, 3], [3], [4, 3], [3, 2], [])]
  buffers, _ = packing.pack(tensors, by_width=True)
  assert [b.shape.as_list() for b in buffers] == [[6, 3], [4], [3, 2]]


@pytest.mark.parametrize(
  ("rows", "bucket_bytes"), [(0, 8), (5, 1), (5, 1 << 18)]
)
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
