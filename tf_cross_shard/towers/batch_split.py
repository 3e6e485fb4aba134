"""Nests of tensors cut into parts for towers along axis 0, and joined."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def split(argument: str, tree: Any, count: int) -> list[Any]:
  """Cuts every tensor of a nest into equal parts along axis 0."""
  columns = [
    _split_leaf(argument, leaf, count) for leaf in tf.nest.flatten(tree)
  ]
  return [
    tf.nest.pack_sequence_as(tree, [column[i] for column in columns])
    for i in range(count)
  ]


def check_alike(features: Any, labels: Any) -> None:
  """Checks that features and labels are as many, where each is one tensor.

  Parts of them may fit where the whole does not: of shapes [4, 1] and [2, 1]
  two towers get [2, 1] and [1, 1], which broadcasts.
  """
  leaves = tf.nest.flatten([features, labels])
  lengths = {x.shape[:1].num_elements() for x in leaves if x is not None}
  if len(leaves) == len(lengths) == 2 and None not in lengths:
    raise ValueError(
      "`labels` must be as many as `features`; a tower gets labels of shape"
      f" {leaves[1].shape} and features of {leaves[0].shape}. Batch them"
      " together."
    )


def concatenate(trees: Sequence[Any]) -> Any:
  """Joins nests of tensors, of one structure, along axis 0 in order."""
  return tf.nest.map_structure(lambda *parts: _join_leaves(parts), *trees)


def _split_leaf(argument: str, leaf: Any, count: int) -> Sequence[Any]:
  """Cuts one tensor."""
  if leaf is None:
    return [None] * count
  if not isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
    leaf = tf.convert_to_tensor(leaf)
  length = leaf.shape[:1].num_elements() if leaf.shape.rank != 0 else 0
  if length is None:
    length = _checked_length(leaf, count)
  elif length % count or not length:
    raise ValueError(
      f"`{argument}` must divide into {count} towers; axis 0 has length"
      f" {length}, of {type(leaf).__name__} with shape {leaf.shape}. Change the"
      " batch size (drop_remainder=True in tf.data), give fewer devices, or"
      " give what is no part of the batch in `params`."
    )
  rows = length // count
  if not isinstance(leaf, tf.SparseTensor):
    return [leaf[i * rows : (i + 1) * rows] for i in range(count)]
  inner = leaf.dense_shape[1:]
  size = tf.concat([[rows], inner], axis=0)
  starts = [
    tf.concat([[i * rows], tf.zeros_like(inner)], axis=0) for i in range(count)
  ]
  return [tf.sparse.slice(leaf, start, size) for start in starts]


def _checked_length(leaf: Any, count: int) -> tf.Tensor:
  """The length of axis 0 at run time, where rows must not be cut off."""
  is_sparse = isinstance(leaf, tf.SparseTensor)
  length = (leaf.dense_shape if is_sparse else tf.shape(leaf, tf.int64))[0]
  good = tf.logical_and(length > 0, tf.equal(length % count, 0))
  words = f"axis 0 must divide into {count} towers, and not be empty; rows:"
  with tf.control_dependencies([tf.debugging.Assert(good, [words, length])]):
    return tf.identity(length)


def _join_leaves(parts: Sequence[Any]) -> Any:
  """Joins the parts of one tensor."""
  if all(part is None for part in parts):
    return None
  if isinstance(parts[0], tf.SparseTensor):
    return tf.sparse.concat(0, list(parts))  # It makes a generator of a tuple.
  return tf.concat(parts, axis=0)
