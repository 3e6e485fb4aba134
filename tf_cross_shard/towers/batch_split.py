"""Nests of tensors cut into parts for towers along axis 0, and joined."""

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.util import nest


def split(argument: str, tree: Any, count: int) -> list[Any]:
  """Cuts every tensor of a nest into equal parts along axis 0."""
  # A list of numbers or texts is a tensor, not a nest.
  outline = nest.get_traverse_shallow_structure(
    lambda each: not _is_table(each), tree
  )
  parts = [
    _split_leaf(argument, leaf, count)
    for leaf in nest.flatten_up_to(outline, tree)
  ]
  return [
    tf.nest.pack_sequence_as(outline, [part[i] for part in parts])
    for i in range(count)
  ]


def check_alike(features: Any, labels: Any) -> None:
  """Checks that features and labels are as many, where each is one tensor.

  Parts of them may fit where the whole does not: of shapes [4, 1] and [2, 1]
  two towers get [2, 1] and [1, 1], which broadcasts.
  """
  lengths = [
    None if leaf is None else _length(leaf)
    for leaf in tf.nest.flatten([features, labels])
  ]
  if len(lengths) == 2 and None not in lengths and lengths[0] != lengths[1]:
    raise ValueError(
      "`labels` must be as many as `features`; a tower gets"
      f" {lengths[0]} features and {lengths[1]} labels. Batch them together."
    )


def concatenate(what: str, trees: Sequence[Any]) -> Any:
  """Joins nests of tensors along axis 0, in order."""
  kinds = [
    tf.nest.map_structure(lambda x: "None" if x is None else "tensor", tree)
    for tree in trees
  ]
  for tower, kind in enumerate(kinds):
    if kind != kinds[0]:
      raise ValueError(
        f"`{what}` must have the same structure in every tower; tower 0"
        f" returned {kinds[0]}, tower {tower} {kind}. Return the same keys"
        " whatever part of the batch model_fn gets."
      )
  columns = zip(*map(tf.nest.flatten, trees), strict=True)
  joined = [_join_leaves(what, column) for column in columns]
  return tf.nest.pack_sequence_as(trees[0], joined)


def _is_table(tree: Any) -> bool:
  """Whether this is a list of numbers or texts, or of such lists."""
  plain = (numbers.Number, np.generic, str, bytes)
  return (
    isinstance(tree, list)
    and bool(tree)
    and all(isinstance(each, plain) or _is_table(each) for each in tree)
  )


def _split_leaf(argument: str, leaf: Any, count: int) -> Sequence[Any]:
  """The parts of one tensor."""
  if leaf is None:
    return [None] * count
  if not isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
    leaf = tf.convert_to_tensor(leaf)
  if leaf.shape.rank == 0:
    raise ValueError(
      f"`{argument}` must hold tensors with the batch in axis 0; got a scalar:"
      f" {leaf!r}. Give what is no part of the batch in `params`."
    )
  length = _length(leaf)
  if length is not None and (length % count or not length):
    raise ValueError(
      f"`{argument}` must divide into {count} towers; axis 0 has length"
      f" {length}, of {type(leaf).__name__} with shape {leaf.shape}. Change the"
      " batch size (drop_remainder=True in tf.data), or give fewer devices."
    )
  if isinstance(leaf, tf.RaggedTensor):
    rows = _checked(leaf.nrows(), count) // count
    return [leaf[i * rows : (i + 1) * rows] for i in range(count)]
  if isinstance(leaf, tf.SparseTensor):
    rows = _checked(leaf.dense_shape[0], count)
    shape = tf.concat([rows[tf.newaxis], leaf.dense_shape[1:]], axis=0)
    leaf = tf.SparseTensor(leaf.indices, leaf.values, shape)
    return list(tf.sparse.split(leaf, count, axis=0))
  if length is None:
    with tf.control_dependencies([_checked(tf.shape(leaf)[0], count)]):
      leaf = tf.identity(leaf)
  return list(tf.split(leaf, count, axis=0))


def _length(leaf: Any) -> int | None:
  """The length of axis 0, where it is known."""
  if leaf.shape.rank is not None and leaf.shape[0] is not None:
    return int(leaf.shape[0])
  is_ragged = isinstance(leaf, tf.RaggedTensor)
  static = tf.get_static_value(leaf.nrows()) if is_ragged else None
  return None if static is None else int(static)


def _checked(rows: tf.Tensor, count: int) -> tf.Tensor:
  """The number of rows, once it is known to divide: they would be cut off."""
  good = tf.logical_and(rows > 0, tf.equal(rows % count, 0))
  words = f"axis 0 must divide into {count} towers, and not be empty; rows:"
  with tf.control_dependencies([tf.debugging.Assert(good, [words, rows])]):
    return tf.identity(rows)


def _join_leaves(what: str, parts: Sequence[Any]) -> Any:
  """The parts of one tensor, joined."""
  if parts[0] is None:
    return None
  if isinstance(parts[0], tf.SparseTensor):
    return tf.sparse.concat(0, list(parts))  # It makes a generator of a tuple.
  if not isinstance(parts[0], tf.RaggedTensor):
    parts = [tf.convert_to_tensor(part) for part in parts]
  if parts[0].shape.rank == 0:
    raise ValueError(
      f"`{what}` must hold tensors with the batch in axis 0; got a scalar:"
      f" {parts[0]!r}. Give one value per example, or give it in `metrics`."
    )
  return tf.concat(parts, axis=0)
