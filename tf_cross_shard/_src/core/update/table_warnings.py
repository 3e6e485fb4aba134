"""Warnings about embedding tables whose row updates are slower than needed.

An update by rows of a table of W elements costs as much as the rows in the
batch. Two mistakes make each step cost as much as all W elements again. They do
not change the results, so you would not notice them:

- The gradient of the table is dense. Then all rows are updated.
- Something reads the whole table. Then TensorFlow copies it.
"""

from typing import Any, Final

import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import variables as variables_lib

# Smaller tables cost so little that their users need no warning.
LARGE: Final = 1_000_000

_DENSE: Final = (
  "`lazy_rows` is set, but the gradient of %s is dense, so every step updates"
  " all of its rows. Look up rows with tf_cross_shard.layers.Embedding, and do"
  " not use the whole table in the loss."
)
_COMPILED: Final = (
  "`lazy_rows` is set, but XLA compiles the step, so every step updates all"
  " rows of %s. Pass jit_compile=False to compile() or tf.function()."
)
_READ: Final = (
  "`lazy_rows` is set, but the training step reads all of %s, so TensorFlow"
  " copies the table in every step. Use tf_cross_shard.layers.Embedding, or"
  " layers.embedding_lookup in a layer of your own."
)


class TableWarnings:
  """Warns once about each large table that row updates do not speed up."""

  def __init__(self) -> None:
    self._warned: set[str] = set()

  def check(self, table: Any, grad: Any, is_compiled: bool) -> None:
    """Warns if the step that is being traced costs as much as the whole table.

    Call it before the update, which may read the table itself.
    """
    path = variables_lib.path_of(table)
    if path in self._warned or table.shape.num_elements() < LARGE:
      return
    if is_compiled:
      self._warn(_COMPILED, path)
    elif not isinstance(grad, tf.IndexedSlices):
      self._warn(_DENSE, path)
    elif _is_read_whole(variables_lib.native(table)):
      self._warn(_READ, path)

  def _warn(self, text: str, path: str) -> None:
    self._warned.add(path)
    logging.warning(text, path)


def _is_read_whole(table: tf.Variable) -> bool:
  """Returns whether the function that is being traced has read the whole table.

  This searches the graph, and decides only whether a warning is logged.
  """
  if tf.executing_eagerly():
    return False
  graph = tf.compat.v1.get_default_graph()
  captures = getattr(graph, "captures", ())
  handles = [inner for outer, inner in captures if outer is table.handle]
  return any(
    operation.type == "ReadVariableOp" and operation.inputs[0] is handle
    for handle in handles
    for operation in handle.consumers()
  )
