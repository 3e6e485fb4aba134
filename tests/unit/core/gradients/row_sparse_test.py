"""Rows that share an index add up, as a NumPy scatter-add says."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard._src.core.gradients import row_sparse

ROWS = 6  # of every variable here


@st.composite
def row_slices(draw: st.DrawFn) -> tf.IndexedSlices:
  """Slices of whole numbers, whose sums are exact in any order."""
  indices = draw(st.lists(st.integers(0, ROWS - 1), max_size=12))
  inner = draw(st.lists(st.integers(1, 3), max_size=2))
  rng = np.random.default_rng(draw(st.integers(0, 99)))
  values = rng.integers(-50, 50, size=[len(indices), *inner])
  dtype = draw(st.sampled_from([tf.float16, tf.float32, tf.float64]))
  return tf.IndexedSlices(
    tf.constant(values, dtype, [len(indices), *inner]),
    tf.constant(indices, draw(st.sampled_from([tf.int32, tf.int64]))),
    tf.constant([ROWS, *inner]),
  )


def scatter_add(slices: tf.IndexedSlices) -> np.ndarray:
  """The dense value, by NumPy."""
  dense = np.zeros([ROWS, *slices.values.shape[1:]], np.float64)
  np.add.at(dense, slices.indices.numpy(), slices.values.numpy())
  return dense


def variable_for(slices: tf.IndexedSlices) -> tf.Variable:
  """A variable that the slices may be a gradient of."""
  shape = [ROWS, *slices.values.shape[1:]]
  return tf.Variable(tf.zeros(shape, slices.values.dtype))


@hypothesis.given(row_slices())
def test_merged_slices_have_the_same_dense_value(
  slices: tf.IndexedSlices,
) -> None:
  merged = row_sparse.merge_duplicates(slices)
  assert isinstance(merged, tf.IndexedSlices)
  np.testing.assert_array_equal(scatter_add(merged), scatter_add(slices))
  assert merged.dtype == slices.dtype
  assert merged.indices.dtype == slices.indices.dtype
  assert merged.dense_shape is slices.dense_shape
  first_seen = list(dict.fromkeys(slices.indices.numpy().tolist()))
  assert merged.indices.numpy().tolist() == first_seen
  assert merged.values.shape == [len(first_seen), *slices.values.shape[1:]]


@hypothesis.given(row_slices())
def test_to_dense_is_a_scatter_add(slices: tf.IndexedSlices) -> None:
  variable = variable_for(slices)
  dense = row_sparse.to_dense(slices, variable)
  np.testing.assert_array_equal(dense.numpy(), scatter_add(slices))
  assert dense.dtype == slices.dtype
  assert dense.shape == variable.shape


def test_the_gradient_of_a_gather_has_a_static_shape() -> None:
  """The shape is static even if the number of rows is unknown in the graph."""
  table = tf.Variable(tf.zeros([ROWS, 2]))
  shapes = []

  @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
  def dense_gradient(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(tf.gather(table, ids))
    slices = tape.gradient(loss, table)
    assert isinstance(slices, tf.IndexedSlices)
    merged = row_sparse.merge_duplicates(slices)
    dense = row_sparse.to_dense(slices, table)
    shapes.extend([merged.values.shape, dense.shape])
    return row_sparse.to_dense(merged, table), dense

  merged, dense = dense_gradient(tf.constant([4, 0, 4, 4]))
  assert dense.numpy().tolist() == merged.numpy().tolist()
  assert dense.numpy()[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0, 3.0, 0.0]
  assert [shape.as_list() for shape in shapes] == [[None, 2], [ROWS, 2]]


@pytest.mark.parametrize("is_branch", [False, True])
@pytest.mark.parametrize("rows", [[2], [3, 3, 1, 3, 1, 3]], ids=str)
def test_compiled_rows_are_merged_once(
  rows: list[int], is_branch: bool
) -> None:
  """XLA loses rows where they are merged a second time."""
  values = np.arange(1.0, 2 * len(rows) + 1).reshape(-1, 2)
  slices = tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(rows))
  table = tf.Variable(tf.zeros([ROWS, 2]))

  @tf.function(jit_compile=True)
  def merge(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    merged = row_sparse.merge_duplicates(tf.IndexedSlices(values, indices))

    def write() -> tf.Tensor:
      again = row_sparse.merge_duplicates(row_sparse.times(merged, 2.0))
      table.scatter_update(again)
      return row_sparse.to_dense(again, table)

    if is_branch:
      return tf.cond(values[0, 0] > 0.0, write, lambda: tf.zeros([ROWS, 2]))
    return write()

  dense = merge(slices.values, slices.indices)
  np.testing.assert_array_equal(dense, 2.0 * scatter_add(slices))
  np.testing.assert_array_equal(table, 2.0 * scatter_add(slices))


def test_only_the_first_output_of_unique_counts_as_merged() -> None:
  @tf.function
  def merge(ids: tf.Tensor) -> tf.IndexedSlices:
    # The other one is each row's position, which has duplicates.
    positions = tf.IndexedSlices(tf.ones([3, 1]), tf.unique(ids)[1])
    return row_sparse.merge_duplicates(positions)

  merged = merge(tf.constant([4, 4, 1]))
  assert merged.values.numpy().tolist() == [[2.0], [1.0]]


def test_indices_need_be_no_tensor() -> None:
  merged = row_sparse.merge_duplicates(
    tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), (2, 0, 2))
  )
  assert merged.indices.numpy().tolist() == [2, 0]
  assert merged.values.numpy().tolist() == [[5.0], [2.0]]
  assert merged.dense_shape is None


def test_times() -> None:
  rows = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]))
  assert row_sparse.times(rows, 0.5).values.numpy().tolist() == [[1.0]]
  whole = tf.constant([3.0], tf.float64)
  tripled = row_sparse.times(whole, tf.constant(3.0))
  assert tripled.numpy().tolist() == [9.0]
  wide = row_sparse.times(tf.constant(1.0, tf.float64), 1 / 3)
  assert float(wide) == 1 / 3
  assert row_sparse.times(whole, 1.0) is whole
  assert row_sparse.times(None, 0.5) is None
