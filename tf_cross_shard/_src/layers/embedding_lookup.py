"""Looks up rows of an embedding table without copying the table."""

import abc
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
  if isinstance(native, tf.distribute.DistributedValues) and not (
    tf.distribute.in_cross_replica_context()
  ):
    # TensorFlow reads rows only of a plain variable, not of a distributed one.
    # Find the copy of this replica.
    strategy = tf.distribute.get_strategy()
    copies = strategy.experimental_local_results(native)
    mine = (copy for copy in copies if copy.handle is native.handle)
    native = next(mine, native)
  return tf.gather(native, ids)


# `layers.Embedding` of each Keras derives from this class and then from Keras'
# layer, which has the weights, masks and configuration.
class RowLookup(abc.ABC):
  """Keras' `Embedding` layer, except that it reads only the rows of the batch.

  The arguments, outputs, masks and files are those of Keras' layer, and you can
  load the weights of either layer into the other. Keras' layer reads the whole
  table. That is free until an optimizer updates the table by rows, as
  `CrossShardOptimizer(..., lazy_rows=True)` does: then TensorFlow copies the
  table in every step.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, layers
  >>> model = tf.keras.Sequential(
  ...   [tf.keras.Input((2,), dtype="int32"), layers.Embedding(1000, 4)]
  ... )
  >>> optimizer = CrossShardOptimizer("adam", lazy_rows=True)
  >>> model.compile(optimizer, "mse")

  Inputs that are sparse tensors, and tables that are quantized or have LoRA
  weights, go through Keras' layer, which reads the whole table.

  Args:
    *args: The arguments of Keras' `Embedding`.
    **kwargs: The keyword arguments of Keras' `Embedding`.
  """

  compute_dtype: Any  # As the layers of Keras 3 and tf_keras have it.

  def call(self, inputs: Any) -> Any:
    """Returns the rows of the ids, in the compute dtype of the layer."""
    if not self._can_read_rows(inputs):
      return super().call(inputs)  # type: ignore[misc]  # of Keras' layer
    if inputs.dtype not in (tf.int32, tf.int64):
      inputs = tf.cast(inputs, tf.int32)
    rows = tf.ragged.map_flat_values(self._look_up, inputs)
    return tf.cast(rows, self.compute_dtype)

  @abc.abstractmethod
  def _can_read_rows(self, ids: Any) -> bool:
    """Returns whether the layer can look up ids without the whole table."""

  @abc.abstractmethod
  def _look_up(self, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of ids, which are int32 or int64."""
