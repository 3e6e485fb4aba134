"""Row-sparse gradients: pure functions on `tf.IndexedSlices`."""

from typing import Any

import tensorflow as tf


def merge_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
  """Adds up rows that share an index, so that no index occurs twice.

  The dense value is the same before and after. It matters because optimizers
  that square gradients (Adam, RMSprop, ...) would square each of several rows
  of one index on its own: the sum of squares, not the square of the sum.

  >>> twice = tf.IndexedSlices(
  ...   values=tf.constant([[1.0], [2.0], [4.0]]),
  ...   indices=tf.constant([3, 0, 3]),
  ...   dense_shape=tf.constant([5, 1]),
  ... )
  >>> merged = merge_duplicates(twice)
  >>> merged.indices.numpy().tolist(), merged.values.numpy().tolist()
  ([3, 0], [[5.0], [2.0]])

  Merged slices are returned as they are, also in branches and after their
  values were changed. XLA (`tf.function(jit_compile=True)`) would take its own
  padding for rows if `tf.unique` were called twice.
  """
  rows = tf.convert_to_tensor(slices.indices)  # Keras' tests have tuples.
  # One row is unique; XLA cannot compile every operation after `tf.unique`.
  if rows.shape == [1] or _is_unique(rows):
    return slices
  indices, position = tf.unique(rows)
  values = tf.math.unsorted_segment_sum(
    slices.values, position, tf.shape(indices)[0]
  )
  return tf.IndexedSlices(values, indices, slices.dense_shape)


def _is_unique(indices: Any) -> bool:
  """Whether `indices` are a result of `tf.unique`, here or further out."""
  while tf.is_symbolic_tensor(indices):
    if indices.op.type == "Unique":
      return bool(indices.value_index == 0)
    # A branch receives tensors from outside as arguments.
    captures = getattr(indices.graph, "captures", ())
    outside = (outer for outer, inner in captures if inner is indices)
    indices = next(outside, None)
  return False


def to_dense(slices: Any, variable: Any) -> Any:
  """The dense gradient, of the shape of `variable`; others as they are.

  >>> slices = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]))
  >>> to_dense(slices, tf.Variable([[0.0], [0.0]])).numpy().tolist()
  [[0.0], [2.0]]
  """
  if not isinstance(slices, tf.IndexedSlices):
    return slices
  dense = tf.math.unsorted_segment_sum(
    slices.values, slices.indices, variable.shape[0]
  )
  dense.set_shape(variable.shape)
  return dense


def cast(grad: Any, variable: Any) -> Any:
  """A gradient in the dtype of its variable, as Keras 3 itself casts it.

  tf_keras, and TensorFlow 1's kernels, would fail on another dtype after other
  variables were already updated.

  >>> cast(tf.constant(1.0, tf.float64), tf.Variable(2.0)).dtype.name
  'float32'
  """
  if grad is None:
    return None
  # Under mixed precision `dtype` is the dtype of the computation.
  return tf.cast(grad, getattr(variable, "true_dtype", variable.dtype))


def times(grad: Any, factor: Any) -> Any:
  """A gradient times a number.

  >>> float(times(tf.constant(3.0), 0.5))
  1.5
  """
  if grad is None or (isinstance(factor, float) and factor == 1.0):
    return grad
  if isinstance(grad, tf.IndexedSlices):
    values = times(grad.values, factor)
    return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
  return grad * in_dtype(factor, grad.dtype)


def in_dtype(number: Any, dtype: tf.DType) -> Any:
  """A number as it may be combined with a tensor of a dtype.

  Python's stay what they are: tf.cast would round them to float32 first.

  >>> in_dtype(0.1, tf.float64), in_dtype(tf.constant(0.5), tf.float64).dtype
  (0.1, tf.float64)
  """
  return number if isinstance(number, float) else tf.cast(number, dtype)
