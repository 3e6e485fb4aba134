"""One replica: no strategy, or `tf.distribute.OneDeviceStrategy`."""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard.collectives import base


class OneDevice(base.Engine):
  """The sum over one replica is its own value."""

  def all_reduce_sum(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """The tensors themselves."""
    del groups
    return list(tensors)

  def all_gather(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """The tensors themselves."""
    del groups
    return list(tensors)

  def alone(self) -> contextlib.AbstractContextManager[None]:
    """Nothing to arrange where a merge call is a plain call anyway."""
    if isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy):
      return super().alone()
    return contextlib.nullcontext()
