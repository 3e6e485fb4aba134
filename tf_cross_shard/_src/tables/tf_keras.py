"""`ShardedEmbedding` for tf_keras (Keras 2)."""

# ruff: noqa: E402  # Versions are checked first.

from typing import Any

from tf_cross_shard._src.core.internals import forwarding, versions

versions.check_tf_keras()

import tf_keras as keras

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

  def __init__(self, *args: Any, **kwargs: Any) -> None:
    """Creates the layer, which does not cast its inputs."""
    super().__init__(*args, autocast=False, **kwargs)

  def _make_table(self, shape: tuple[int, int]) -> None:
    """Creates the variable of zeros."""
    self.embeddings = self.add_weight(
      "embeddings", shape, initializer="zeros", experimental_autocast=False
    )
