"""The engine of strategies that sum and gather by collective operations."""

from collections.abc import Sequence

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core.reduce import collective_ops, engine, isolation


class CollectiveEngine(engine.Engine):
  """An engine that sums and gathers by collective operations."""

  # The operations, which all optimizers of the strategy share.
  _collectives: collective_ops.CollectiveOps

  def __init__(
    self, strategy: tf.distribute.Strategy, groups: groups_lib.Groups
  ) -> None:
    super().__init__(strategy, groups)
    self._devices = tuple(strategy.extended.worker_devices)
    self._on_cpus = all("CPU" in device.upper() for device in self._devices)

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return self._collectives.run(
      collective_ops.ALL_REDUCE, tensors, *self._caller()
    )

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return self._collectives.join_rows(tensors, *self._caller())

  def reduce_scatter(self, row: tf.Tensor) -> tf.Tensor:
    if not collective_ops.keeps_order(self.groups):
      return super().reduce_scatter(row)
    return self._collectives.reduce_scatter(row, *self._caller())

  def all_gather_part(self, part: tf.Tensor) -> tf.Tensor:
    if not collective_ops.keeps_order(self.groups):
      return super().all_gather_part(part)
    return self._collectives.all_gather(part, *self._caller())

  def _caller(self) -> tuple[groups_lib.Groups, int, str]:
    """Returns the groups, and the number and device of the calling replica."""
    replica = isolation.replica_id()
    assert replica is not None  # These strategies know it while tracing.
    device = self._devices[replica - self.local_replicas.start]
    return self.groups, replica, device
