"""`ShardedEmbedding` for Keras 3."""

# ruff: noqa: E402  # Versions are checked first.

from typing import Any

from tf_cross_shard._src.core.internals import forwarding, versions

versions.check_keras3()

import keras

from tf_cross_shard._src.tables import layer


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@forwarding.documented
class ShardedEmbedding(layer.ShardedTable, keras.layers.Layer):
  """An embedding table whose rows are divided among the members of a group.

  >>> import tensorflow as tf
  >>> layer = ShardedEmbedding(1000, 2, embeddings_initializer="ones")
  >>> layer(tf.constant([[3, 7]])).shape
  TensorShape([1, 2, 2])
  """

  _keras = keras

  @property
  def embeddings(self) -> Any:
    """The variable whose copies are the parts of the table."""
    return self._embeddings

  def _make_table(self, shape: tuple[int, int]) -> None:
    """Creates the variable of zeros, under the name of Keras' `Embedding`."""
    self._embeddings = self.add_weight(
      shape=shape, initializer="zeros", autocast=False, name="embeddings"
    )

  def compute_output_spec(self, inputs: Any, **_: Any) -> Any:
    """Returns the shape and dtype of the rows."""
    is_ragged = getattr(inputs, "ragged", False) and self.combiner is None
    shape = self.compute_output_shape(inputs.shape)
    return keras.KerasTensor(shape, self.compute_dtype, ragged=is_ragged)
