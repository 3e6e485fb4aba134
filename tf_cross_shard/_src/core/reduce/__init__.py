"""All-reduce, reduce-scatter and all-gather within groups of replicas.

`tf.distribute` can only sum over all replicas of a strategy. Each engine in
this folder sums within groups, under one kind of strategy:

    strategy                   engine       all-reduce within a group
    ─────────────────────────────────────────────────────────────────────────
    none, OneDevice,           OneDevice    nothing to do
      others with one replica
    Mirrored, on CPUs          Mirrored     merge_call, then add_n per group
    Mirrored, eagerly          Mirrored     merge_call, then add_n per group
    Mirrored, on GPUs          Mirrored     CollectiveReduceV2 (NCCL)
    Mirrored, inside tf.cond   Mirrored     CollectiveReduceV2 (ring or NCCL)
    MultiWorkerMirrored        MultiWorker  CollectiveReduceV2 (ring or NCCL)
    TPUStrategy                TPU          CrossReplicaSum(group_assignment)
    VirtualTPUStrategy         TPU          its `extended.cross_replica_sum`
    VectorizedStrategy         TPU          its `extended.cross_replica_sum`
    any other                  NotImplementedError

A sharded update also needs the two halves of an all-reduce:

               merge_call          collective_ops           TPU
    ─────────────────────────────────────────────────────────────────────────
    reduce-    each member sums    CollectiveAllToAllV2,    XlaReduceScatter
      scatter    its own part        then a local sum
    all-       concat of the       CollectiveGatherV2       AllToAll of
      gather     members' parts                               repeated parts

With more than ten replicas (`collective_ops.keeps_order`), each half is an
all-reduce of a whole buffer: see `engine.Engine`.

We rejected an alternative without engines: each replica puts its gradients into
its group's row of a `[num_groups, ...]` buffer, and `ctx.all_reduce` sums that
buffer over all replicas. It took 2.1 to 2.6 times as long as `ctx.all_reduce`
of the gradients alone (two groups on CPUs, TensorFlow 2.21), and the buffer
grows with the number of groups.

Within the core, only the files of this folder use internals of tf.distribute
and raw collective operations.
"""

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core.reduce import (
  engine,
  mirrored,
  multi_worker,
  one_program,
)
from tf_cross_shard._src.core.reduce.one_program import runs_one_program

__all__ = ["for_strategy", "runs_one_program"]


def for_strategy(
  strategy: tf.distribute.Strategy, groups: groups_lib.Groups | None = None
) -> engine.Engine:
  """Returns the engine that sums within groups under a strategy.

  Without `groups`, all replicas form one group.

  Raises:
    NotImplementedError: If no engine supports the strategy.
  """
  replicas = strategy.num_replicas_in_sync
  groups = groups or groups_lib.contiguous(replicas, replicas)
  # Test this before the number of replicas: MirroredStrategy makes merge calls
  # even on one device, and its replica must be isolated from them.
  if isinstance(strategy, tf.distribute.MirroredStrategy):
    return mirrored.Mirrored(strategy, groups)
  if runs_one_program(strategy):
    return one_program.OneProgram(strategy, groups)
  if replicas == 1:
    return engine.OneDevice(strategy, groups)
  if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
    return multi_worker.MultiWorker(strategy, groups)
  why = (
    "has no synchronous replicas, so there is nothing to all-reduce over"
    if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
    else "is not known to tf_cross_shard"
  )
  raise NotImplementedError(
    f"{type(strategy).__name__} {why}. Use MirroredStrategy, TPUStrategy,"
    " MultiWorkerMirroredStrategy or VectorizedStrategy."
  )
