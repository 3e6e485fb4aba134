"""All-reduce, reduce-scatter and all-gather within groups of replicas.

`tf.distribute` can only sum over all replicas of a strategy:

    strategy                   engine       all-reduce within a group
    ─────────────────────────────────────────────────────────────────────────
    none, OneDevice,           OneDevice    nothing to do
      others with one replica
    Mirrored, on CPUs          Mirrored     merge_call, then add_n per group
    Mirrored, eagerly          Mirrored     merge_call, then add_n per group
    Mirrored, on GPUs          Mirrored     CollectiveReduceV2
    Mirrored, inside tf.cond   Mirrored     CollectiveReduceV2
    MultiWorkerMirrored        MultiWorker  CollectiveReduceV2
    TPUStrategy                OneProgram   CrossReplicaSum(group_assignment)
    VirtualTPUStrategy         OneProgram   its program's `cross_replica_sum`
    VectorizedStrategy         Models       nothing to do
    any other                  NotImplementedError

A sharded update also needs the two halves of an all-reduce:

               merge_call          collective_ops           OneProgram
    ─────────────────────────────────────────────────────────────────────────
    reduce-    each member sums    CollectiveAllToAllV2,    XlaReduceScatter
      scatter    its own part        then a local sum
    all-       concat of the       CollectiveGatherV2       AllToAll of
      gather     members' parts                               repeated parts
"""

from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core.reduce import (
  engine,
  mirrored,
  multi_worker,
  one_program,
)

__all__ = ["for_strategy"]


def for_strategy(
  strategy: tf.distribute.Strategy, groups: groups_lib.Groups | None = None
) -> engine.Engine:
  """Returns the engine that sums within groups under a strategy."""
  # Without engines, gradients in rows of a `[num_groups, ...]` buffer could be
  # summed by `ctx.all_reduce`. That takes 2.1 to 2.6 times as long (two groups
  # on CPUs, TensorFlow 2.21), and the buffer grows with the number of groups.
  groups = groups or groups_lib.default_groups(strategy)
  # Test this before the number of replicas: MirroredStrategy makes merge calls
  # even on one device, and its replica must be isolated from them.
  if isinstance(strategy, tf.distribute.MirroredStrategy):
    return mirrored.Mirrored(strategy, groups)
  program = single_program.of_strategy(strategy)
  if program is not None:
    kind: Any = (
      one_program.Models if program.are_models else one_program.OneProgram
    )
    return kind(strategy, groups, program)
  if strategy.num_replicas_in_sync == 1:
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
