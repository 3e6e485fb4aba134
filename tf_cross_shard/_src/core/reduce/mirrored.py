"""The engine of `tf.distribute.MirroredStrategy`: one process, many devices.

Each replica is a thread. The threads trace the replica function one after the
other. `merge_call` runs one function with the values of all replicas:

    replica 0 ──┐                      replica 2 ──┐
                ├─ add_n ─▶ group 0                ├─ add_n ─▶ group 1
    replica 1 ──┘                      replica 3 ──┘
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import graphs
from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core.gradients import compression, packing
from tf_cross_shard._src.core.reduce import (
  collective_ops,
  isolation,
)
from tf_cross_shard._src.core.reduce import layout as layouts

# With 500 variables, a reduction needs 0.33 of Keras' time with buckets of 64
# KiB, and 0.68 with 256 KiB. With 50 variables, sizes up to 1 MiB make no
# difference.
_MERGE_BUCKET_BYTES: Final = 1 << 16


class Mirrored(collective_ops.CollectiveEngine):
  """Collectives within groups of the devices of one process."""

  def __init__(
    self,
    strategy: tf.distribute.Strategy,
    groups: groups_lib.Groups,
    prefer_merge: bool | None = None,
  ) -> None:
    """Takes whether to prefer merge calls; None prefers them on CPUs."""
    super().__init__(strategy, groups)
    # On CPUs, a merge call takes 0.32 of the time of `ctx.all_reduce` (50 MB in
    # 100 tensors, four devices). On GPUs, it would copy all buffers to one.
    self._prefer_merge = self._on_cpus if prefer_merge is None else prefer_merge
    self._collectives = collective_ops.of_strategy(strategy)
    self.method = (
      "add_n in a merge call, CollectiveReduceV2 inside tf.cond"
      if self._prefer_merge
      else "CollectiveReduceV2"
    )

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    if self._merges_here():
      return self._sum(tensors, tf.add_n)
    return super().all_reduce_sum(tensors)

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    # Use a merge call on GPUs, too: unlike a collective, it needs no padding.
    if not graphs.can_merge():
      return super().all_gather(tensors)
    return self._merge_each(tensors, lambda copies: tf.concat(copies, axis=0))

  def reduce_part(
    self, tensors: Sequence[tf.Tensor], layout: layouts.Layout
  ) -> tf.Tensor:
    """Sums each member's part on its own device, in a merge call."""
    if not self._merges_here():
      return super().reduce_part(tensors, layout)

    def combine(
      copies: list[list[tf.Tensor]], members: list[int]
    ) -> list[tf.Tensor]:
      def add_up(cut: layouts.Cut) -> tf.Tensor:
        # Read only these elements. copies[i][m]: tensor i of member m.
        return _add_widened([cut.of(copy) for copy in copies[cut.index]])

      is_half = tensors[0].dtype in compression.WIRE_DTYPES
      dtype = tf.float32 if is_half else tensors[0].dtype
      by_member = []
      for place, member in enumerate(members):
        with tf.device(self._devices[member]):
          by_member.append(layout.pack(place, add_up, dtype))
      return by_member

    return self._merge(tensors, combine)[self.position()]

  def gather_parts(
    self, part: tf.Tensor, layout: layouts.Layout, like: Sequence[Any]
  ) -> list[tf.Tensor]:
    if not self._merges_here():
      return super().gather_parts(part, layout, like)
    return self._merge(
      [part],
      lambda copies, _: packing.reshape_like(layout.join(copies[0]), like),
    )

  def all_gather_part(self, part: tf.Tensor) -> tf.Tensor:
    if self._merges_here():
      return self.all_gather([part])[0]
    return super().all_gather_part(part)

  def all_reduce_accumulate_f32(
    self, tensors: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    if not self._merges_here():
      return super().all_reduce_accumulate_f32(tensors)
    return self._sum(tensors, _add_widened)

  def _caller(self) -> collective_ops.Caller:
    """Returns the caller, or raises `ValueError` if a device is missing."""
    there = [device.name for device in tf.config.list_logical_devices()]
    absent = [d for d in self._devices if not d.endswith(tuple(there))]
    if absent:
      raise ValueError(
        f"The strategy's devices {absent} do not exist; there are {there}."
        " Create the strategy with"
        f" tf_cross_shard.local_strategy({len(self._devices)})."
      )
    return super()._caller()

  @property
  def bucket_bytes(self) -> int | None:
    return None if self._merges_here() else super().bucket_bytes

  def _merges_here(self) -> bool:
    # Eager replicas run one after the other: the first would wait in a
    # collective for replicas that do not run yet.
    return graphs.can_merge() and (self._prefer_merge or tf.executing_eagerly())

  def _sum(
    self,
    tensors: Sequence[tf.Tensor],
    add_up: Callable[[list[tf.Tensor]], tf.Tensor],
  ) -> list[tf.Tensor]:
    """Packs tensors of the same width into buffers, and sums these at once."""
    buffers, unpack = packing.pack(tensors, _MERGE_BUCKET_BYTES, by_width=True)
    return unpack(self._merge_each(buffers, add_up))

  def _merge_each(
    self,
    tensors: Sequence[tf.Tensor],
    combine: Callable[[list[tf.Tensor]], tf.Tensor],
  ) -> list[tf.Tensor]:
    """Combines the members' copies of each tensor, once for each group."""
    return self._merge(
      tensors, lambda copies, _: [combine(values) for values in copies]
    )

  def _merge(
    self,
    tensors: Sequence[tf.Tensor],
    combine: Callable[[list[list[tf.Tensor]], list[int]], list[tf.Tensor]],
  ) -> list[tf.Tensor]:
    """Combines the tensors of all members, once for each group."""

    def combine_groups(
      strategy: tf.distribute.Strategy, *distributed: Any
    ) -> list[list[tf.Tensor]]:
      copies = list(map(strategy.experimental_local_results, distributed))
      # All replicas may share one value.
      copies = [
        values if len(values) > 1 else values * len(self._devices)
        for values in copies
      ]
      by_group = []
      for members in map(sorted, self.groups):
        with tf.device(self._devices[members[0]]):
          of_group = [[values[r] for r in members] for values in copies]
          by_group.append(combine(of_group, members))
      return by_group

    # The result holds no per-replica values. Every replica therefore receives
    # the results of all groups, and selects the result of its own group.
    by_group = tf.distribute.get_replica_context().merge_call(
      combine_groups, args=tuple(tensors)
    )
    replica = isolation.replica_id()
    assert replica is not None  # This strategy knows it while tracing.
    return list(by_group[self.groups.index_of(replica)])


def _add_widened(parts: list[tf.Tensor]) -> tf.Tensor:
  if parts[0].dtype in compression.WIRE_DTYPES:
    parts = [tf.cast(part, tf.float32) for part in parts]
  return tf.add_n(parts)
