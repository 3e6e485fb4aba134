"""How an engine adds numbers across replicas, grouped or not.

One file per engine. Only the files of this folder use internals of
tf.distribute and raw operations.
"""

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard.collectives import base, mirrored, multi_worker, tpu
from tf_cross_shard.collectives.tpu import is_tpu

__all__ = ["for_strategy", "is_tpu"]


def for_strategy(
  strategy: tf.distribute.Strategy, groups: groups_lib.Groups | None = None
) -> base.Engine:
  """Returns the engine of a strategy that sums in groups; None is one of all.

  Raises:
    NotImplementedError: If there is none for the strategy.
  """
  replicas = strategy.num_replicas_in_sync
  groups = groups or groups_lib.contiguous(replicas, replicas)
  if isinstance(strategy, tf.distribute.MirroredStrategy):
    return mirrored.Mirrored(strategy, groups)
  if is_tpu(strategy):
    return tpu.TPU(strategy, groups)
  if replicas == 1:
    return base.OneDevice(strategy, groups)
  if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
    return multi_worker.MultiWorker(strategy, groups)
  why = (
    "has no synchronous replicas, so that there is nothing to all-reduce over"
    if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
    else "is not known here"
  )
  raise NotImplementedError(
    f"{type(strategy).__name__} {why}. Use MirroredStrategy, TPUStrategy or"
    " MultiWorkerMirroredStrategy."
  )
