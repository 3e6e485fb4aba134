"""Functions on row-sparse gradients, which are `tf.IndexedSlices`.

indices [3, 0, 3]      values [[1.], [2.], [4.]]      one row per lookup
dense   [[2.], [0.], [0.], [5.], [0.]]                row 3: 1 + 4
"""

from typing import Any, Final

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tf_cross_shard._src.core.variables import Variable

# The attribute of a `tf.unique` whose positions only tell which rows to add up.
# VectorizedStrategy, whose tensors have static shapes, converts it without
# dropping an index.
MERGE: Final = "_merges_duplicates"


def merge_duplicates(slices: Any) -> Any:
  """Adds up rows that share an index, so that no index occurs twice."""
  if not isinstance(slices, tf.IndexedSlices):
    return slices
  rows = tf.convert_to_tensor(slices.indices)  # A tuple in Keras' own tests.
  # Optimizers that square gradients would add up the squares of the rows.
  # A single row needs no `tf.unique`, whose result XLA cannot use in every
  # operation. A second `tf.unique` would fail under XLA, because it would take
  # the padding of the first for rows.
  if rows.shape == [1] or _is_unique(rows):
    return slices
  # position[k] is the place in `indices` of the index of row k.
  indices, position = tf.unique(rows)
  if tf.is_symbolic_tensor(indices):
    mark = attr_value_pb2.AttrValue(b=True)
    indices.op._set_attr(MERGE, mark)  # noqa: SLF001  # There is no public way.
  values = tf.math.unsorted_segment_sum(
    slices.values, position, tf.shape(indices)[0]
  )
  return tf.IndexedSlices(values, indices, slices.dense_shape)


def _is_unique(indices: Any) -> bool:
  """Returns whether `indices` are a result of `tf.unique`."""
  while tf.is_symbolic_tensor(indices):
    if indices.op.type == "Unique":
      return bool(indices.value_index == 0)
    # A branch sees a captured tensor as a placeholder. Go on with the tensor
    # that it stands for, in the graph around the branch.
    captures = getattr(indices.graph, "captures", ())
    outside = (outer for outer, inner in captures if inner is indices)
    indices = next(outside, None)
  return False


def to_dense(slices: Any, variable: Variable) -> Any:
  """Returns the dense form of a row-sparse gradient; others unchanged."""
  if not isinstance(slices, tf.IndexedSlices):
    return slices
  dense = tf.math.unsorted_segment_sum(
    slices.values, slices.indices, variable.shape[0]
  )
  dense.set_shape(variable.shape)
  return dense


def cast(grad: Any, variable: Variable) -> Any:
  """Returns a gradient in the dtype of its variable, as Keras 3 casts it."""
  if grad is None:
    return None
  # tf_keras and kernels accept no other dtype, and would fail after they have
  # updated other variables. In mixed precision, tf_keras' variables have the
  # dtype of the computation, and their own as `true_dtype`.
  return tf.cast(grad, getattr(variable, "true_dtype", variable.dtype))


def times(grad: Any, factor: Any) -> Any:
  """Returns a gradient times a number; None for None."""
  if grad is None or (isinstance(factor, float) and factor == 1.0):
    return grad
  if isinstance(grad, tf.IndexedSlices):
    values = times(grad.values, factor)
    return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
  return grad * in_dtype(factor, grad.dtype)


def in_dtype(number: Any, dtype: tf.DType) -> Any:
  """Returns a number that can be combined with a tensor of a dtype."""
  if not isinstance(number, float):
    return tf.cast(number, dtype)
  # `tf.cast` would round a float to float32. PerModelSetting is a float, too.
  is_tensor = hasattr(number, "__tf_tensor__")
  return tf.convert_to_tensor(number, dtype) if is_tensor else number
