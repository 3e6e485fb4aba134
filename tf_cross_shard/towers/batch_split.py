"""Nests of tensors cut into parts for towers along axis 0, and joined."""

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def split(argument: str, tree: Any, count: int) -> list[Any]:
  """Cuts every tensor of a nest into equal parts along axis 0."""
  if _is_table(tree):
    tree = _as_tensor(argument, tree)
  leaves = tf.nest.flatten(tree)
  parts = [_split_leaf(argument, leaf, count) for leaf in leaves]
  return [
    tf.nest.pack_sequence_as(tree, [part[i] for part in parts])
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
  for tower, tree in enumerate(trees):
    try:
      tf.nest.assert_same_structure(*map(_without_none, (trees[0], tree)))
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"`{what}` must have the same structure in every tower; tower 0"
        f" returned {_kinds(trees[0])}, tower {tower} {_kinds(tree)}. Return"
        " the same keys whatever part of the batch model_fn gets."
      ) from error
  columns = zip(*map(tf.nest.flatten, trees), strict=True)
  joined = [_join_leaves(what, column) for column in columns]
  return tf.nest.pack_sequence_as(trees[0], joined)


def _is_table(tree: Any) -> bool:
  """Whether a list is one of numbers or texts: a tensor, not a nest."""
  plain = (numbers.Number, np.generic, str, bytes)
  leaves = tf.nest.flatten(tree) if isinstance(tree, list) else []
  return bool(leaves) and all(isinstance(leaf, plain) for leaf in leaves)


def _as_tensor(argument: str, value: Any) -> tf.Tensor:
  """A value as a tensor."""
  try:
    return tf.convert_to_tensor(value)
  except (TypeError, ValueError) as error:
    raise TypeError(
      f"`{argument}` must hold tensors, arrays or nests of them; got {value!r}."
      " Convert it to a tensor whose axis 0 is the batch."
    ) from error


def _split_leaf(argument: str, leaf: Any, count: int) -> Sequence[Any]:
  """The parts of one tensor."""
  if leaf is None:
    return [None] * count
  if not isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
    leaf = _as_tensor(argument, leaf)
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
    rows = _even(leaf.nrows(), count) // count
    return [leaf[i * rows : (i + 1) * rows] for i in range(count)]
  if isinstance(leaf, tf.SparseTensor):
    rows = _even(leaf.dense_shape[0], count)
    shape = tf.concat([rows[tf.newaxis], leaf.dense_shape[1:]], axis=0)
    leaf = tf.SparseTensor(leaf.indices, leaf.values, shape)
    return list(tf.sparse.split(leaf, count, axis=0))
  if length is None:
    with tf.control_dependencies([_even(tf.shape(leaf)[0], count)]):
      leaf = tf.identity(leaf)
  return list(tf.split(leaf, count, axis=0))


def _length(leaf: Any) -> int | None:
  """The length of axis 0, where it is known."""
  if leaf.shape.rank is not None and leaf.shape[0] is not None:
    return int(leaf.shape[0])
  is_ragged = isinstance(leaf, tf.RaggedTensor)
  static = tf.get_static_value(leaf.nrows()) if is_ragged else None
  return None if static is None else int(static)


def _even(rows: tf.Tensor, count: int) -> tf.Tensor:
  """The number of rows, once it is known to divide: they would be cut off."""
  checks = [
    tf.debugging.assert_equal(
      rows % count,
      tf.constant(0, rows.dtype),
      f"axis 0 must divide into {count} towers",
    ),
    tf.debugging.assert_positive(rows, "axis 0 must not be empty"),
  ]
  with tf.control_dependencies([each for each in checks if each is not None]):
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


def _without_none(tree: Any) -> Any:
  """A nest in which None differs from a tensor, not only in value."""
  leaves = [() if leaf is None else 0 for leaf in tf.nest.flatten(tree)]
  return tf.nest.pack_sequence_as(tree, leaves)


def _kinds(tree: Any) -> Any:
  """A nest as an error shows it."""
  return tf.nest.map_structure(lambda leaf: type(leaf).__name__, tree)
