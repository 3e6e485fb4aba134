"""Splits a batch among towers, and joins the results of all towers again.

batch [n * rows, ...]  --split-->  n parts [rows, ...]  --concatenate-->
"""

import numbers
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf
from tensorflow.python.util import nest

_PLAIN: Final = (numbers.Number, np.generic, str, bytes)
_SPARSE: Final = tf.compat.v1.SparseTensorValue


def split(argument: str, tree: Any, count: int) -> list[Any]:
  """Splits every tensor of a nest into `count` equal parts along axis 0."""
  # As in TensorFlow 1, a list of numbers is a tensor; to `tf.nest`, it and a
  # sparse value are nests. An empty list is a nest without tensors.
  outline = nest.get_traverse_shallow_structure(
    lambda part: not (isinstance(part, _SPARSE) or (_is_table(part) and part)),
    tree,
  )
  columns = [
    _split_leaf(argument, leaf, count)
    for leaf in nest.flatten_up_to(outline, tree)
  ]
  return [
    tf.nest.pack_sequence_as(outline, [column[i] for column in columns])
    for i in range(count)
  ]


def concatenate(trees: Sequence[Any]) -> Any:
  """Joins nests of the same structure tensor by tensor along axis 0."""
  return tf.nest.map_structure(_join_leaves, *trees)


def _is_table(rows: Any) -> bool:
  """Returns whether this is a list of numbers or texts, or of such lists."""
  return isinstance(rows, list) and all(
    isinstance(row, _PLAIN) or _is_table(row) for row in rows
  )


def _split_leaf(argument: str, leaf: Any, count: int) -> Sequence[Any]:
  if leaf is None:
    return [None] * count
  if isinstance(leaf, _SPARSE):
    leaf = tf.SparseTensor.from_value(leaf)
  if not isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
    leaf = tf.convert_to_tensor(leaf)
  # The number of rows: 0 for a scalar, None if only the running program
  # knows it.
  length = leaf.shape[:1].num_elements() if leaf.shape.rank != 0 else 0
  if length is None:
    length = _checked_length(leaf, count)
  elif length % count or not length:
    raise ValueError(
      f"The first axis of `{argument}` must be divisible by the number of"
      f" towers, {count}; got {type(leaf).__name__} with shape {leaf.shape}."
      " Change the batch size (drop_remainder=True in tf.data), pass fewer"
      " devices, or pass what is not part of the batch in `params`."
    )
  rows = length // count
  if not isinstance(leaf, tf.SparseTensor):
    return [leaf[i * rows : (i + 1) * rows] for i in range(count)]
  # A sparse tensor is cut by the start and the size of a box: all of the inner
  # dimensions, and `rows` rows of axis 0.
  wrapped = leaf.dense_shape[1:]
  size = tf.concat([[rows], wrapped], axis=0)
  starts = [
    tf.concat([[i * rows], tf.zeros_like(wrapped)], axis=0)
    for i in range(count)
  ]
  return [tf.sparse.slice(leaf, start, size) for start in starts]


def _checked_length(leaf: Any, count: int) -> tf.Tensor:
  """Returns the length of axis 0, which the program checks when it runs."""
  is_sparse = isinstance(leaf, tf.SparseTensor)
  length = (leaf.dense_shape if is_sparse else tf.shape(leaf, tf.int64))[0]
  good = tf.logical_and(length > 0, tf.equal(length % count, 0))
  words = f"axis 0 must divide into {count} towers, and not be empty; rows:"
  with tf.control_dependencies([tf.debugging.Assert(good, [words, length])]):
    return tf.identity(length)


def _join_leaves(*parts: Any) -> Any:
  if all(part is None for part in parts):
    return None
  if isinstance(parts[0], tf.SparseTensor):
    # Pass a list, because tf.sparse.concat consumes a tuple like a generator.
    return tf.sparse.concat(0, list(parts))
  return tf.concat(parts, axis=0)
