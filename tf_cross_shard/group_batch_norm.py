"""Batch normalization over the examples of a group.

Keras' `BatchNormalization(synchronized=True)` sums over all replicas, so that
groups that are to be trained apart normalize with each other's examples.

    replica 0 ──┐                          replica 2 ──┐
                ├─ sum, count ─▶ mean                  ├─ sum, count ─▶ mean
    replica 1 ──┘  ▶ squares ─▶ variance   replica 3 ──┘  ▶ squares ─▶ variance
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import collectives, settings
from tf_cross_shard import groups as groups_lib
from tf_cross_shard.step import reduction


class GroupBatchNorm:
  """Makes a Keras' BatchNormalization one whose moments are the group's.

  With `x_i` the examples of all members of the replica's group, `n` in number,

      mean = sum(x_i) / n        variance = sum((x_i - mean)**2) / n

  Gradients flow through both sums, so that outputs, gradients and moving
  statistics are those of plain Keras on the group's concatenated batch. Where a
  group has no example at all, the moving statistics are taken. One replica, and
  the cross-replica context, have no group: there it is Keras' layer.
  """

  def __init__(
    self, group_assignment: Any, axis: Any = -1, **kwargs: Any
  ) -> None:
    """Makes the layer.

    Args:
      group_assignment: Which replicas share statistics; give it what the
        CrossShardOptimizer has, as `optimizer.groups`. None is one group of all
        replicas.
      axis: As in Keras' BatchNormalization, the axis of the features.
      **kwargs: Its other arguments but `synchronized`, which is True.

    Raises:
      ValueError: If `group_assignment` is malformed.
      TypeError: If there is no such argument.
    """
    groups = settings.as_groups(group_assignment)
    super().__init__(  # type: ignore[call-arg]  # of Keras' layer
      axis=axis, synchronized=True, **kwargs
    )
    self._groups = groups

  @property
  def group_assignment(self) -> list[list[int]] | None:
    """The groups as lists of replica ids; None for one group of all."""
    return None if self._groups is None else self._groups.to_lists()

  def get_config(self) -> dict[str, Any]:
    """Everything the constructor needs, in serializable form."""
    config = super().get_config()  # type: ignore[misc]  # of Keras' layer
    config.pop("synchronized", None)
    return {**config, "group_assignment": self.group_assignment}

  def _group_moments(
    self, inputs: tf.Tensor, axes: Sequence[int], keepdims: bool, mask: Any
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance over the group; `mask` lacks the last axis."""
    if mask is not None:
      mask = tf.cast(mask, tf.bool)[..., tf.newaxis]
      inputs = tf.where(mask, inputs, 0)
    total = tf.reduce_sum(inputs, axes, keepdims=True)
    if mask is None:
      share = tf.size(inputs, tf.int64) // tf.size(total, tf.int64)
      count = tf.cast(share, inputs.dtype)
    else:
      ones = tf.broadcast_to(tf.cast(mask, inputs.dtype), tf.shape(inputs))
      count = tf.reduce_sum(ones, axes, keepdims=True)
    total, count = self._sum(total, count)
    mean = tf.math.divide_no_nan(total, count)
    # In two passes, as Keras does on one replica: mean(x**2) - mean(x)**2 has
    # no correct digit where the mean is much larger than the deviation. No
    # gradient through this mean: over the whole group it is zero.
    squares = tf.math.squared_difference(inputs, tf.stop_gradient(mean))
    if mask is not None:
      squares = tf.where(mask, squares, 0)
    [total] = self._sum(tf.reduce_sum(squares, axes, keepdims=True))
    variance = tf.math.divide_no_nan(total, count)
    moments = []
    for moment, moving in (
      (mean, self.moving_mean),  # type: ignore[attr-defined]  # Keras' layer
      (variance, self.moving_variance),  # type: ignore[attr-defined]
    ):
      moving = tf.cast(tf.reshape(moving, tf.shape(moment)), moment.dtype)
      moment = tf.where(count > 0, moment, moving)
      moments.append(moment if keepdims else tf.squeeze(moment, axes))
    return moments[0], moments[1]

  def _sum(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """Sums over the group; so does the gradient."""
    if tf.distribute.in_cross_replica_context():
      return list(tensors)
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
      return list(tensors)
    groups = self._groups and groups_lib.Groups(self._groups, replicas)
    engine = collectives.for_strategy(strategy, groups)

    @tf.custom_gradient
    def add_up(*tensors: tf.Tensor) -> Any:
      sums, _ = reduction.Wire(engine).sum(tensors)
      return sums, lambda *upstream: self._sum(*upstream)

    sums: list[tf.Tensor] = add_up(*tensors)
    return sums
