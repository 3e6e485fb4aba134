"""How an engine adds numbers across replicas, grouped or not.

One file per way of distributing; these are the only files that name
tf.distribute internals or raw operations.
"""

import tensorflow as tf

from tf_cross_shard.collectives import (
  base,
  mirrored,
  multi_worker,
  one_device,
  tpu,
)


def for_strategy(strategy: tf.distribute.Strategy) -> base.Engine:
  """The engine for a strategy.

  >>> type(for_strategy(tf.distribute.get_strategy())).__name__
  'OneDevice'

  Args:
    strategy: Any strategy, the default one included.

  Returns:
    An engine whose methods are called in the replica context.

  Raises:
    NotImplementedError: If the strategy has no synchronous replicas.
  """
  if isinstance(strategy, tf.distribute.MirroredStrategy):
    return mirrored.Mirrored(strategy)
  if tpu.is_tpu(strategy):
    return tpu.TPU(strategy)
  if strategy.num_replicas_in_sync == 1:
    return one_device.OneDevice(strategy)
  if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
    return multi_worker.MultiWorker(strategy)
  if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
    raise NotImplementedError(
      "ParameterServerStrategy has no synchronous replicas, so that there is"
      " nothing to all-reduce over. Use MirroredStrategy or"
      " MultiWorkerMirroredStrategy."
    )
  return base.AnyStrategy(strategy)
