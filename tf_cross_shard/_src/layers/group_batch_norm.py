"""Batch normalization with statistics over the examples of a group.

replica 0 ──┐                          replica 2 ──┐
            ├─ sum, count ─▶ mean                  ├─ sum, count ─▶ mean
replica 1 ──┘  ▶ squares ─▶ variance   replica 3 ──┘  ▶ squares ─▶ variance
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import reduce, settings, single_program
from tf_cross_shard._src.core.reduce import gradient_reducer


# The layers for Keras 3 and tf_keras derive from this class, then from the
# layer of their Keras.
class GroupBatchNorm:
  """Batch normalization with the mean and variance of the replica's group.

  With `x_i` the `n` examples of all members of the group,

      mean = sum(x_i) / n        variance = sum((x_i - mean)**2) / n

  Gradients flow through both sums. Outputs, gradients and moving statistics
  therefore equal those of plain Keras on the group's concatenated batch. A
  group without any example uses the moving statistics. With one replica, and in
  the cross-replica context, the layer behaves like Keras' layer.

  >>> from tf_cross_shard import layers
  >>> layer = layers.SyncBatchNormalization([[0, 1], [2, 3]], momentum=0.9)
  >>> layer.group_assignment
  [[0, 1], [2, 3]]
  """

  def __init__(
    self, group_assignment: Any, axis: Any = -1, **kwargs: Any
  ) -> None:
    """Creates the layer.

    Args:
      group_assignment: The groups of replicas that share statistics. Pass the
        groups of the optimizer, `optimizer.groups`. None means one group of all
        replicas.
      axis: The axis of the features, as in Keras' BatchNormalization.
      **kwargs: Other arguments of Keras' BatchNormalization, except
        `synchronized`, which is True.

    Raises:
      ValueError: If `group_assignment` is malformed.
      TypeError: If Keras' layer has no such argument.
    """
    groups = settings.as_groups(group_assignment)
    super().__init__(  # type: ignore[call-arg]  # of Keras' layer
      axis=axis, synchronized=True, **kwargs
    )
    self._groups = groups

  @property
  def group_assignment(self) -> list[list[int]] | None:
    """The groups as lists of replica ids, or None for one group of all."""
    return None if self._groups is None else self._groups.to_lists()

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments of the constructor in serializable form."""
    config = super().get_config()  # type: ignore[misc]  # of Keras' layer
    config.pop("synchronized", None)
    return {**config, "group_assignment": self.group_assignment}

  def _group_moments(
    self, inputs: tf.Tensor, axes: Sequence[int], keepdims: bool, mask: Any
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean and variance over the group's examples."""
    # Pass 1: sums and counts over the group, then the mean. The mask is
    # `[batch, ...]` without the last axis.
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
    # Pass 2: squared differences from the mean, then the variance. Keras does
    # the same on one replica. The one-pass formula mean(x**2) - mean(x)**2 has
    # no correct digit where the mean is much larger than the deviation.
    # No gradient needs to flow through this mean: the sum over the group,
    # -2 * sum(x_i - mean), is zero.
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
      # A group without examples has no mean and variance: use the moving ones.
      moving = tf.cast(tf.reshape(moving, tf.shape(moment)), moment.dtype)
      moment = tf.where(count > 0, moment, moving)
      moments.append(moment if keepdims else tf.squeeze(moment, axes))
    return moments[0], moments[1]

  def _sum(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """Sums tensors over the group; their gradients are summed, too."""
    if tf.distribute.in_cross_replica_context():
      return list(tensors)
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1:
      return list(tensors)
    copies = single_program.num_copies(strategy)
    groups = self._groups and groups_lib.Groups(self._groups, copies)
    engine = reduce.for_strategy(strategy, groups)

    @tf.custom_gradient
    def add_up(*tensors: tf.Tensor) -> Any:
      sums = gradient_reducer.GradientReducer(engine).reduce(tensors)
      return sums, lambda *upstream: self._sum(*upstream)

    return add_up(*tensors)
