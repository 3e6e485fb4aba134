"""`tf.distribute.MirroredStrategy`: all replicas in one process.

On CPUs the fastest sum is the plain one: a merge call adds the members' buffers
and hands the sum to each of them. `CollectiveReduceV2` sums where no merge call
can be made, inside `tf.cond` or a `tf.function` nested in the replica function,
and on GPUs, where copying everything to one device is slow.

    replica 0 ──┐                      replica 2 ──┐
                ├─ add_n ─▶ group 0                ├─ add_n ─▶ group 1
    replica 1 ──┘                      replica 3 ──┘
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard.collectives import base, collective_ops, replica_isolation
from tf_cross_shard.gradients import packing

# `benchmarks/step_time.py --sweep`, 500 variables: reduction at 0.33 of Keras'
# time with 64 KiB, 0.68 with 256 KiB; 50 variables: no difference to 1 MiB.
_MERGE_BUCKET_BYTES: Final = 1 << 16


class Mirrored(base.Engine):
  """Sums over the devices of one process, grouped or not."""

  def __init__(
    self,
    strategy: tf.distribute.Strategy,
    groups: groups_lib.Groups,
    prefer_merge: bool | None = None,
  ) -> None:
    """Chooses merge calls or collectives; None means merge calls on CPUs."""
    super().__init__(strategy, groups)
    self._devices = tuple(strategy.extended.worker_devices)
    on_cpus = all("CPU" in device.upper() for device in self._devices)
    self._prefer_merge = on_cpus if prefer_merge is None else prefer_merge
    self._collectives = collective_ops.of_strategy(strategy)

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums over the group."""
    if self._merges_here():
      return self._merge(tensors, lambda parts, _: tf.add_n(parts))
    replica = self._replica()
    return self._collectives.run(
      collective_ops.ALL_REDUCE,
      tensors,
      self.groups,
      replica,
      self._devices[replica],
    )

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Joins over the group."""
    return self._merge(tensors, lambda parts, _: tf.concat(parts, axis=0))

  def reduce_scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Each member adds up its part in a merge call."""
    if not self._merges_here():
      if not collective_ops.keeps_order(self.groups):
        return super().reduce_scatter(tensors)
      replica = self._replica()
      return self._collectives.reduce_scatter(
        tensors, self.groups, replica, self._devices[replica]
      )
    by_member = self._merge(tensors, self._sum_parts)
    place = self.position()
    return [parts[place] for parts in by_member]

  def all_gather_parts(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Joins in a merge call."""
    if self._merges_here():
      return self.all_gather(parts)
    if not collective_ops.keeps_order(self.groups):
      return super().all_gather_parts(parts)
    replica = self._replica()
    return self._collectives.all_gather(
      parts, self.groups, replica, self._devices[replica]
    )

  def _sum_parts(self, copies: list[tf.Tensor], members: list[int]) -> Any:
    """The i-th part of the sum, on the i-th member's device."""
    part = copies[0].shape[0] // len(members)
    sums = []
    for i, member in enumerate(members):
      with tf.device(self._devices[member]):
        pieces = [tf.slice(copy, [i * part], [part]) for copy in copies]
        sums.append(_add_widened(pieces))
    return sums

  def all_reduce_narrow(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Adds in float32 where members sum in a merge call."""
    if not self._merges_here():
      return super().all_reduce_narrow(tensors)
    return self._merge(tensors, lambda parts, _: _add_widened(parts))

  @property
  def bucket_bytes(self) -> int | None:
    """Small ones: sums in merge calls need no copies."""
    return _MERGE_BUCKET_BYTES if self._merges_here() else super().bucket_bytes

  @property
  def keeps_rows(self) -> bool:
    """Rows of several members are joined in merge calls only."""
    return self.groups.group_size == 1 or collective_ops.can_merge()

  def _merges_here(self) -> bool:
    """Whether to sum in a merge call here."""
    # Eager replicas run one after the other, so that the first would hang in a
    # collective.
    return collective_ops.can_merge() and (
      self._prefer_merge or tf.executing_eagerly()
    )

  def _merge(
    self,
    tensors: Sequence[tf.Tensor],
    combine: Callable[[list[tf.Tensor], list[int]], Any],
  ) -> list[tf.Tensor]:
    """Combines each tensor over the members of each group, once per group."""

    def combine_groups(
      strategy: tf.distribute.Strategy, *distributed: Any
    ) -> list[list[tf.Tensor]]:
      copies = [
        _one_per_replica(strategy, value, len(self._devices))
        for value in distributed
      ]
      by_group = []
      for members in map(sorted, self.groups):
        with tf.device(self._devices[members[0]]):
          by_group.append(
            [
              combine([values[r] for r in members], members)
              for values in copies
            ]
          )
      return by_group

    # The result holds no per-replica values, so that every replica receives
    # the sums of all groups and takes those of its own.
    by_group = tf.distribute.get_replica_context().merge_call(
      combine_groups, args=tuple(tensors)
    )
    return list(by_group[self.groups.index_of(self._replica())])

  def _replica(self) -> int:
    """This replica's number, which MirroredStrategy always knows."""
    replica = replica_isolation.replica_id()
    assert replica is not None
    return replica


def _add_widened(parts: list[tf.Tensor]) -> tf.Tensor:
  """The sum, of half precision in float32."""
  if parts[0].dtype in packing.WIRE_DTYPES:
    parts = [tf.cast(part, tf.float32) for part in parts]
  return tf.add_n(parts)


def _one_per_replica(
  strategy: tf.distribute.Strategy, value: Any, num_replicas: int
) -> Sequence[tf.Tensor]:
  """The replicas' values, also of one that all replicas share."""
  values = strategy.experimental_local_results(value)
  return values if len(values) == num_replicas else values * num_replicas
