"""The engine of `tf.distribute.MultiWorkerMirroredStrategy`: many processes.

worker 0, replica 0 ──┐                  worker 2, replica 2 ──┐
                      ├─ ring ─ group 0                        ├─ group 1
worker 1, replica 1 ──┘                  worker 3, replica 3 ──┘
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard._src.core.gradients import compression
from tf_cross_shard._src.core.reduce import (
  collective_ops,
  engine,
  isolation,
)
from tf_cross_shard._src.core.variables import Gradient, Variable

# With 50 MB of gradients, buckets of 8 MiB on four chains need 0.84 of Keras'
# time. Buckets of 2 to 16 MiB on two chains or more are as fast. One chain
# needs 0.9 to 1.16 of Keras' time; buckets of 1 MiB are as slow as Keras.
_BUCKET_BYTES: Final = 8 << 20
_CHAINS: Final = 4


class MultiWorker(collective_ops.CollectiveEngine):
  """Collectives within groups of the replicas of several processes."""

  # Several buckets are sent at the same time, and the buckets of the last
  # layers are sent while the backward pass still computes the gradients of the
  # first layers.
  scatter_bytes = _BUCKET_BYTES

  def __init__(
    self, strategy: tf.distribute.Strategy, groups: groups_lib.Groups
  ) -> None:
    super().__init__(strategy, groups)
    cluster = strategy.cluster_resolver.cluster_spec()
    # No public member says which implementation the user chose.
    options = strategy.extended._communication_options  # noqa: SLF001
    hint = options.implementation.value.lower()
    self._collectives = collective_ops.of_strategy(
      strategy,
      # Leave out the addresses: a worker may know itself by a different address
      # than the other workers do.
      identity=repr([task[:2] for task in workers_lib.tasks(cluster)]),
      # GPUs may start the kernels of two chains in different orders, and then
      # wait for each other forever.
      chains=_CHAINS if self._on_cpus else 1,
      is_serial=len(self._devices) > 1,
      hint=hint,
    )
    self.method = f"CollectiveReduceV2 ({hint})"
    self._workers = workers_lib.of_strategy(strategy)
    # What was compared. The variables are kept, so that no other variable gets
    # the id of one of them.
    self._agreed: dict[tuple[Any, ...], Sequence[Any]] = {}
    self._lock = threading.Lock()

  @property
  def local_replicas(self) -> range:
    # `_id_in_cluster` also counts a chief. `task_id` of the cluster resolver
    # does not.
    index: int = self.strategy.extended._id_in_cluster  # noqa: SLF001
    first = index * len(self._devices)
    return range(first, first + len(self._devices))

  def all_reduce_accumulate_f32(
    self, tensors: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    """Sums tensors; groups of 3 to 11 members add half precision in float32.

    part k of all members ─ all-to-all ─▶ member k adds ─ gather ─▶ all
    """
    # The ring adds in the dtype that it sends, and rounds at each member: over
    # four members, a bfloat16 sum has an error of 3.2e-3, in float32 1.7e-3.
    if not 2 < self.groups.group_size <= collective_ops.MAX_ALL_TO_ALL:
      return self.all_reduce_sum(tensors)
    return [
      self._sum_of_parts(tensor)
      if tensor.dtype in compression.WIRE_DTYPES
      else self.all_reduce_sum([tensor])[0]
      for tensor in tensors
    ]

  def _sum_of_parts(self, tensor: tf.Tensor) -> tf.Tensor:
    """Sums a half-precision tensor; each member adds up one part of it."""
    members = self.groups.group_size
    flat = tf.reshape(tensor, [-1])
    size = flat.shape.num_elements()
    # If no padding is needed, skip the padding and the slice: two copies.
    fits = size is not None and size % members == 0
    if not fits:
      flat = tf.pad(flat, [[0, -tf.size(flat) % members]])
    caller = self._caller()
    part = self._collectives.reduce_scatter(flat, caller)
    whole = self._collectives.all_gather(part, caller)
    if not fits:
      whole = whole[: tf.size(tensor)]
    return tf.reshape(whole, tf.shape(tensor))

  @property
  def bucket_bytes(self) -> int | None:
    return _BUCKET_BYTES

  def compare_workers(
    self,
    topic: str,
    variables: Sequence[Variable],
    grads: Sequence[Gradient],
    lines: Callable[[], Sequence[str]],
  ) -> None:
    if self._workers is None:
      return
    gradient_lines = workers_lib.gradient_lines(grads)
    key = (topic, *map(id, variables), *gradient_lines)
    with self._lock:  # All replicas of this process call this method.
      if key in self._agreed:
        return
      variable_lines = workers_lib.variable_lines(variables)
      with tf.init_scope():
        all_lines = [*lines(), *variable_lines, *gradient_lines]
        workers_lib.compare_workers(self._workers, topic, all_lines)
      self._agreed[key] = variables

  def after_all_sums(self, sums: Sequence[Any]) -> Any:
    """Makes updates wait for all sums."""
    # If a worker is lost between two sums, no update may be half applied.
    return tf.control_dependencies(
      [
        total.values if isinstance(total, tf.IndexedSlices) else total
        for total in sums
        if total is not None
      ]
    )

  def should_update(self, variable: Variable) -> bool:
    # A variable from outside the strategy's scope exists once in each process.
    return super().should_update(variable) or (
      isolation.replica_id() == self.local_replicas.start
      and not engine.is_copied(variable)
    )
