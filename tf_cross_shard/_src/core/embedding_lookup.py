"""Looks up rows of an embedding table without copying the table."""

from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import variables


def embedding_lookup(table: Any, ids: Any) -> tf.Tensor:
  """Returns rows of an embedding table, without copying the table.

  `keras.layers.Embedding` reads the whole table, and so do `tf.gather` and
  `tf.nn.embedding_lookup` under a strategy. Reading usually copies nothing. But
  if the optimizer updates only some rows, TensorFlow copies the whole table in
  every step. This function reads only the rows that `ids` asks for.

  >>> import tensorflow as tf
  >>> from tf_cross_shard.layers import embedding_lookup
  >>> embedding_lookup(tf.Variable([[1.0], [2.0], [3.0]]), [[2, 0]]).numpy()
  array([[[3.],
          [1.]]], dtype=float32)

  Args:
    table: A `tf.Variable` or a Keras variable of the shape `[rows, ...]`.
    ids: int32 or int64 of any shape, with values from 0 to `rows - 1`.

  Returns:
    The rows `table[ids]`, of the dtype of the table. The shape is
    `ids.shape + table.shape[1:]`.
  """
  native = variables.native(table)
  if isinstance(native, tf.Variable) and not (
    tf.distribute.in_cross_replica_context()
  ):
    # TensorFlow reads rows only of a plain variable, not of a distributed one.
    # Find the copy of this replica.
    strategy = tf.distribute.get_strategy()
    copies = strategy.experimental_local_results(native)
    own = (copy for copy in copies if copy.handle is native.handle)
    native = next(own, native)
  return tf.gather(native, ids)
