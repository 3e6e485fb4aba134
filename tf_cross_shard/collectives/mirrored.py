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
from tf_cross_shard.gradients import layout, packing

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
    # Who gives a strategy one of these does not want NCCL.
    is_plain = isinstance(
      strategy.extended._cross_device_ops,
      (
        tf.distribute.HierarchicalCopyAllReduce,
        tf.distribute.ReductionToOneDevice,
      ),
    )
    asked = collective_ops.RING if is_plain else collective_ops.AUTO
    self._collective_ops = collective_ops.of_strategy(strategy, asked=asked)

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums over the group."""
    if self._merges_here():
      return self._sum(tensors, tf.add_n)
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
    if not collective_ops.can_merge():
      replica = self._replica()
      device = self._devices[replica]
      return self._collectives.join_rows(tensors, self.groups, replica, device)
    return self._merge_each(tensors, lambda copies: tf.concat(copies, axis=0))

  def reduce_part(
    self, tensors: Sequence[tf.Tensor], parts: layout.Layout
  ) -> tf.Tensor:
    """Each member adds up its part in a merge call, and reads no other."""
    if not self._merges_here():
      return super().reduce_part(tensors, parts)

    def combine(
      copies: list[list[tf.Tensor]], members: list[int]
    ) -> list[tf.Tensor]:
      def add_up(cut: layout.Cut) -> tf.Tensor:
        return _add_widened([cut.of(copy) for copy in copies[cut.index]])

      is_half = tensors[0].dtype in packing.WIRE_DTYPES
      dtype = tf.float32 if is_half else tensors[0].dtype
      by_member = []
      for place, member in enumerate(members):
        with tf.device(self._devices[member]):
          by_member.append(parts.pack(place, add_up, dtype))
      return by_member

    return self._merge(tensors, combine)[self.position()]

  def gather_parts(
    self, part: tf.Tensor, parts: layout.Layout, like: Sequence[Any]
  ) -> list[tf.Tensor]:
    """Takes the tensors out of all members' parts in a merge call."""
    if not self._merges_here():
      return super().gather_parts(part, parts, like)
    return self._merge(
      [part],
      lambda copies, _: packing.reshape_like(parts.join(copies[0]), like),
    )

  def reduce_scatter(self, row: tf.Tensor) -> tf.Tensor:
    """Each member adds up its part."""
    if not collective_ops.keeps_order(self.groups):
      return super().reduce_scatter(row)
    replica = self._replica()
    return self._collectives.reduce_scatter(
      row, self.groups, replica, self._devices[replica]
    )

  def all_gather_part(self, part: tf.Tensor) -> tf.Tensor:
    """Joins parts, which have one shape on all members."""
    if self._merges_here():
      return self.all_gather([part])[0]
    if not collective_ops.keeps_order(self.groups):
      return super().all_gather_part(part)
    replica = self._replica()
    return self._collectives.all_gather(
      part, self.groups, replica, self._devices[replica]
    )

  def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
    """Takes the rows for each member out of all in a merge call."""
    if self._merges_here():

      def combine(
        copies: list[list[tf.Tensor]], members: list[int]
      ) -> list[tf.Tensor]:
        [of_members] = copies
        return [
          tf.stack([copy[place] for copy in of_members])
          for place in range(len(members))
        ]

      return self._merge([rows], combine)[self.position()]
    if not collective_ops.keeps_order(self.groups):
      return super().all_to_all(rows)
    replica = self._replica()
    device = self._devices[replica]
    [received] = self._collectives.run(
      collective_ops.ALL_TO_ALL, [rows], self.groups, replica, device
    )
    return received

  def all_reduce_narrow(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Adds in float32 where members sum in a merge call."""
    if not self._merges_here():
      return super().all_reduce_narrow(tensors)
    return self._sum(tensors, _add_widened)

  @property
  def _collectives(self) -> Any:
    """The collectives; an error where replicas would wait for ever.

    Devices that are not there are one to TensorFlow, which runs the replicas of
    a branch one after the other.
    """
    there = [device.name for device in tf.config.list_logical_devices()]
    absent = [d for d in self._devices if not d.endswith(tuple(there))]
    if absent:
      raise ValueError(
        f"The strategy's devices {absent} are not there; there are {there}."
        " Before the strategy is made, call"
        " tf.config.set_logical_device_configuration with a"
        f" LogicalDeviceConfiguration for each of the {len(self._devices)}."
      )
    return self._collective_ops

  @property
  def bucket_bytes(self) -> int | None:
    """None where sums in merge calls pack by themselves."""
    return None if self._merges_here() else super().bucket_bytes

  def _merges_here(self) -> bool:
    """Whether to sum in a merge call here."""
    # Eager replicas run one after the other, so that the first would hang in a
    # collective.
    return collective_ops.can_merge() and (
      self._prefer_merge or tf.executing_eagerly()
    )

  def _sum(
    self,
    tensors: Sequence[tf.Tensor],
    add_up: Callable[[list[tf.Tensor]], tf.Tensor],
  ) -> list[tf.Tensor]:
    """Sums in a merge call, in buffers that take no reshaping."""
    buffers, unpack = packing.pack(tensors, _MERGE_BUCKET_BYTES, by_width=True)
    return unpack(self._merge_each(buffers, add_up))

  def _merge_each(
    self,
    tensors: Sequence[tf.Tensor],
    combine: Callable[[list[tf.Tensor]], tf.Tensor],
  ) -> list[tf.Tensor]:
    """Combines each tensor over the members of each group, once per group."""
    return self._merge(
      tensors, lambda copies, _: [combine(values) for values in copies]
    )

  def _merge(
    self,
    tensors: Sequence[tf.Tensor],
    combine: Callable[[list[list[tf.Tensor]], list[int]], list[tf.Tensor]],
  ) -> list[tf.Tensor]:
    """Combines what members have, once per group.

    Args:
      tensors: Of this replica.
      combine: Is handed the members' copies of each tensor, and the members.
    """

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
          of_group = [[values[r] for r in members] for values in copies]
          by_group.append(combine(of_group, members))
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
