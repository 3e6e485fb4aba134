"""How an engine adds numbers across replicas, grouped or not.

One file per engine. Only the files of this folder use internals of
tf.distribute and raw operations.
"""

import tensorflow as tf

from tf_cross_shard.collectives import base, mirrored, multi_worker, tpu


def for_strategy(strategy: tf.distribute.Strategy) -> base.Engine:
  """The engine for a strategy."""
  if isinstance(strategy, tf.distribute.MirroredStrategy):
    return mirrored.Mirrored(strategy)
  if tpu.is_tpu(strategy):
    return tpu.TPU(strategy)
  if strategy.num_replicas_in_sync == 1:
    return base.OneDevice(strategy)
  if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
    return multi_worker.MultiWorker(strategy)
  if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
    raise NotImplementedError(
      "ParameterServerStrategy has no synchronous replicas, so that there is"
      " nothing to all-reduce over. Use MirroredStrategy or"
      " MultiWorkerMirroredStrategy."
    )
  return base.AnyStrategy(strategy)
