"""Keras layers that know of groups, and the lookup of rows.

`SyncBatchNormalization` is a layer of what `tf.keras` is;
`tf_cross_shard.keras3` and `tf_cross_shard.tf_keras` have one each.

>>> layer = SyncBatchNormalization([[0, 1], [2, 3]])
>>> layer.group_assignment  # replica 2 shares statistics with replica 3 only
[[0, 1], [2, 3]]
"""

from typing import Any

import tensorflow as tf

from tf_cross_shard import variables, versions

if versions.uses_tf_keras():
  from tf_cross_shard.tf_keras import SyncBatchNormalization
else:
  from tf_cross_shard.keras3 import SyncBatchNormalization

__all__ = ["SyncBatchNormalization", "embedding_lookup"]


def embedding_lookup(table: Any, ids: Any) -> tf.Tensor:
  """Returns rows of a table, without a copy of the table.

  `keras.layers.Embedding` reads the whole table, and so do `tf.gather` and
  `tf.nn.embedding_lookup` under a strategy. TensorFlow shares what is read, but
  of a variable that is updated by rows it makes a copy, in every step.

  >>> embedding_lookup(tf.Variable([[1.0], [2.0], [3.0]]), [[2, 0]]).numpy()
  array([[[3.],
          [1.]]], dtype=float32)

  Args:
    table: A `tf.Variable` or a Keras variable, [rows, ...].
    ids: int32 or int64, of any shape; each is at least 0 and below `rows`.

  Returns:
    `table[ids]`, ids.shape + table.shape[1:], of the table's dtype.
  """
  native = variables.native(table)
  if isinstance(native, tf.Variable) and not (
    tf.distribute.in_cross_replica_context()
  ):
    # TensorFlow has no rows of a distributed variable, only of a copy.
    strategy = tf.distribute.get_strategy()
    copies = strategy.experimental_local_results(native)
    own = (copy for copy in copies if copy.handle is native.handle)
    native = next(own, native)
  return tf.gather(native, ids)


def __dir__() -> list[str]:
  """Returns the public names."""
  return sorted(__all__)
