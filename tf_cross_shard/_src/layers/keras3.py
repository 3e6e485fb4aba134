"""The layers of this package for Keras 3."""

# ruff: noqa: E402  # Versions are checked first.

from typing import Any

from tf_cross_shard._src.catalogue import documented
from tf_cross_shard._src.core import versions

versions.check_keras3()

import keras
import tensorflow as tf

from tf_cross_shard._src.layers import (
  embedding_lookup,
  group_batch_norm,
  tunable_dropout,
)


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@documented
class SyncBatchNormalization(
  group_batch_norm.GroupBatchNorm, keras.layers.BatchNormalization
):
  """Batch normalization over the examples of a group."""

  def _moments(self, inputs: Any, mask: Any) -> Any:
    """Overrides Keras' method: returns moments over the group's examples."""
    return self._group_moments(inputs, self._reduction_axes, False, mask)


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@documented
class Embedding(embedding_lookup.RowLookup, keras.layers.Embedding):
  """Keras' `Embedding`, except that it reads only the rows of the batch."""

  def _can_read_rows(self, ids: Any) -> bool:
    is_plain = self.quantization_mode is None and not self.lora_enabled
    return is_plain and isinstance(ids, tf.Tensor | tf.RaggedTensor)

  def _look_up(self, ids: tf.Tensor) -> tf.Tensor:
    ids = tf.where(ids < 0, ids + self.input_dim, ids)
    return embedding_lookup.embedding_lookup(self._embeddings, ids)


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@documented
class TunableDropout(tunable_dropout.TunableDropoutBase, keras.layers.Dropout):
  """Dropout whose rate is a weight."""

  _no_autocast = "autocast"

  def _next_seed(self) -> tf.Tensor:
    return tf.cast(self.seed_generator.next(), tf.int32)
