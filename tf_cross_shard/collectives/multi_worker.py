"""`tf.distribute.MultiWorkerMirroredStrategy`: replicas in many processes.

All replicas of a group sum in `CollectiveReduceV2`, whichever process they are
in. A collective that only some of them enter hangs, and so workers compare what
they are about to do before they do it for the first time.

    worker 0, replica 0 ──┐                  worker 2, replica 2 ──┐
                          ├─ ring ─ group 0                        ├─ group 1
    worker 1, replica 1 ──┘                  worker 3, replica 3 ──┘
"""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard.collectives import base, collective_ops, replica_isolation
from tf_cross_shard.coordination import agreement
from tf_cross_shard.gradients import packing

# `benchmarks/multi_worker.py --sweep`: of 50 MB, 8 MiB buckets on four chains
# take 0.84 of Keras' time; 2 to 16 MiB on two chains or more are as good, one
# chain 0.9 to 1.16, buckets of 1 MiB no less than Keras.
_BUCKET_BYTES: Final = 8 << 20
_CHAINS: Final = 4


class MultiWorker(base.Engine):
  """Sums over the replicas of several processes, grouped or not."""

  def __init__(
    self, strategy: tf.distribute.Strategy, groups: groups_lib.Groups
  ) -> None:
    super().__init__(strategy, groups)
    self._devices = tuple(strategy.extended.worker_devices)
    cluster = strategy.cluster_resolver.cluster_spec()
    asked = strategy.extended._communication_options.implementation.value
    self._collectives = collective_ops.of_strategy(
      strategy,
      # Not the addresses: a worker may know itself by another one.
      identity=repr([task[:2] for task in agreement.tasks(cluster)]),
      chains=_CHAINS,
      is_serial=len(self._devices) > 1,
      asked=asked.lower(),
    )
    self._workers = agreement.of_strategy(strategy)
    self._agreed: set[tuple[str, ...]] = set()
    self._lock = threading.Lock()

  @property
  def replicas_here(self) -> range:
    """As many replicas as this process has devices."""
    first = self._first_here()
    return range(first, first + len(self._devices))

  def beside(self) -> base.Engine:
    """Has keys of its own; on GPUs, NCCL would have to order two threads."""
    if any("CPU" not in device.upper() for device in self._devices):
      return self
    other = copy.copy(self)
    other._collectives = self._collectives.beside()
    return other

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums over the group."""
    return self._run(collective_ops.ALL_REDUCE, tensors)

  def all_reduce_narrow(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sends half precision and adds in float32, where groups are not large.

    The ring adds in the dtype that it sends, and so rounds at each member. With
    two members that is once, like a sum in float32. Three and more share the
    work:

        part k of all members ─ all-to-all ─▶ member k adds ─ gather ─▶ all
    """
    if not 2 < self.groups.group_size <= collective_ops.MAX_ALL_TO_ALL:
      return self.all_reduce_sum(tensors)
    return [
      self._sum_of_parts(tensor)
      if tensor.dtype in packing.WIRE_DTYPES
      else self.all_reduce_sum([tensor])[0]
      for tensor in tensors
    ]

  def _sum_of_parts(self, tensor: tf.Tensor) -> tf.Tensor:
    """Each member adds up one part of the tensor for all."""
    members = self.groups.group_size
    flat = tf.reshape(tensor, [-1])
    size = flat.shape.num_elements()
    fits = size is not None and size % members == 0  # saves two copies
    if not fits:
      flat = tf.pad(flat, [[0, -tf.size(flat) % members]])
    rows = tf.reshape(flat, [members, -1])
    [parts] = self._run(collective_ops.ALL_TO_ALL, [rows])
    part = tf.reduce_sum(tf.cast(parts, tf.float32), axis=0)
    words = collective_ops.as_words(tf.cast(part, tensor.dtype))
    [joined] = self._run(collective_ops.ALL_GATHER, [words])
    whole = collective_ops.from_words(joined, tensor)
    if not fits:
      whole = whole[: tf.size(tensor)]
    return tf.reshape(whole, tf.shape(tensor))

  @property
  def bucket_bytes(self) -> int | None:
    """Larger than within one process: each costs a call to other processes."""
    return _BUCKET_BYTES

  @property
  def row_bytes(self) -> int | None:
    """The same: several travel at once, and the last layers' begin early."""
    return _BUCKET_BYTES

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Joins over the group; the first dimension may differ between replicas."""
    return self._collectives.join_rows(tensors, self.groups, *self._place())

  def reduce_scatter(self, row: tf.Tensor) -> tf.Tensor:
    """Each member adds up its part."""
    if not collective_ops.keeps_order(self.groups):
      return super().reduce_scatter(row)
    return self._collectives.reduce_scatter(row, self.groups, *self._place())

  def all_gather_part(self, part: tf.Tensor) -> tf.Tensor:
    """Joins parts, which have one shape on all members."""
    if not collective_ops.keeps_order(self.groups):
      return super().all_gather_part(part)
    return self._collectives.all_gather(part, self.groups, *self._place())

  def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
    """Gives row i to the i-th member."""
    return self._run(collective_ops.ALL_TO_ALL, [rows])[0]

  @property
  def can_exchange(self) -> bool:
    """Whether members have the order of their numbers."""
    return collective_ops.keeps_order(self.groups)

  def agree(
    self,
    topic: str,
    lines: Callable[[], Sequence[str]],
    state: Callable[[], Sequence[str]] = list,
  ) -> None:
    """Compares with the other workers what this one has not compared yet."""
    if self._workers is None:
      return
    with self._lock:  # The other replicas of this process do the same.
      known = (topic, *lines())
      if known in self._agreed:
        return
      with tf.init_scope():
        agreement.agree(self._workers, topic, [*known[1:], *state()])
      self._agreed.add(known)

  def all_or_nothing(self, sums: Sequence[Any]) -> Any:
    """Waits for all sums: a worker may be lost before the last of them."""
    return tf.control_dependencies(
      [
        total.values if isinstance(total, tf.IndexedSlices) else total
        for total in sums
        if total is not None
      ]
    )

  def updates_here(self, variable: Any) -> bool:
    """Each process has its own variable where it is made outside the scope."""
    return super().updates_here(variable) or (
      replica_isolation.replica_id() == self._first_here()
      and not base.is_copied(variable)
    )

  def _run(self, name: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Runs a collective for the calling replica."""
    return self._collectives.run(name, tensors, self.groups, *self._place())

  def _place(self) -> tuple[int, str]:
    """The calling replica and its device."""
    replica = replica_isolation.replica_id()
    assert replica is not None  # A strategy of processes always knows it.
    return replica, self._devices[replica - self._first_here()]

  def _first_here(self) -> int:
    """The first replica of this process."""
    index: int = self.strategy.extended._id_in_cluster
    return index * len(self._devices)
