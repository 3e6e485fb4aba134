"""The layers of this package for tf_keras (Keras 2)."""

# ruff: noqa: E402  # Versions are checked first.

import random
from typing import Any

from tf_cross_shard._src.catalogue import documented
from tf_cross_shard._src.core import versions

versions.check_tf_keras()

import tensorflow as tf
import tf_keras as keras

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

  def _calculate_mean_and_var(
    self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None
  ) -> Any:
    """Overrides Keras' method: returns moments over the group's examples."""
    return self._group_moments(inputs, reduction_axes, keep_dims, mask)

  def _support_zero_size_input(self) -> bool:
    """Returns False: the group may have examples when this replica has none."""
    return False


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@documented
class Embedding(embedding_lookup.RowLookup, keras.layers.Embedding):
  """Keras' `Embedding`, except that it reads only the rows of the batch."""

  def _can_read_rows(self, ids: Any) -> bool:
    is_plain = not self.sparse and not self._use_one_hot_matmul
    return is_plain and isinstance(ids, tf.Tensor | tf.RaggedTensor)

  def _look_up(self, ids: tf.Tensor) -> tf.Tensor:
    return embedding_lookup.embedding_lookup(self.embeddings, ids)


@keras.saving.register_keras_serializable(package="tf_cross_shard")
@documented
class TunableDropout(tunable_dropout.TunableDropoutBase, keras.layers.Dropout):
  """Dropout whose rate is a weight."""

  _no_autocast = "experimental_autocast"

  def build(self, input_shape: Any) -> None:
    """Creates the state of the random numbers, as Keras 3 has it."""
    seed = random.randint(1, 10**9) if self.seed is None else self.seed
    self._seeds = self.add_weight(
      "seed_generator_state",
      shape=(2,),
      dtype="int64",
      initializer=lambda *_, **__: tf.constant([seed, 0], tf.int64),
      trainable=False,
      aggregation=tf.VariableAggregation.NONE,  # Each replica has its own.
    )
    super().build(input_shape)

  def _next_seed(self) -> tf.Tensor:
    seed = tf.identity(self._seeds)
    self._seeds.assign_add(tf.constant([0, 1], tf.int64))
    return seed
