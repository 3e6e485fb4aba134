"""All-reduce, reduce-scatter and all-gather within groups of replicas.

`tf.distribute` can only sum over all replicas of a strategy. Each engine in
this folder sums within groups, under one kind of strategy:

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
    VectorizedStrategy, split  OneProgram   its program's `cross_replica_sum`
      batches
    VectorizedStrategy         Models       nothing to do
    any other                  NotImplementedError

A sharded update also needs the two halves of an all-reduce:

               merge_call          collective_ops           OneProgram
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

The core uses internals of tf.distribute and raw collective operations in this
folder, and in two other files: `single_program` has the collectives of a TPU
program, and `tf_keras/adapter.py` asks for which replica Keras updates.
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

__all__ = ["default_groups", "for_strategy"]


def default_groups(strategy: tf.distribute.Strategy) -> groups_lib.Groups:
  """Returns the groups without `group_assignment`: one group of all replicas.

  Where replicas are models, each model is a group.
  """
  copies = single_program.num_copies(strategy)
  if single_program.are_models(strategy):
    return groups_lib.singletons(copies)
  return groups_lib.contiguous(copies, copies)


def for_strategy(
  strategy: tf.distribute.Strategy, groups: groups_lib.Groups | None = None
) -> engine.Engine:
  """Returns the engine that sums within groups under a strategy.

  Without `groups`, it is for the `default_groups`.

  Raises:
    NotImplementedError: If no engine supports the strategy.
  """
  groups = groups or default_groups(strategy)
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
