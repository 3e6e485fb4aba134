"""The part of a strategy that is the same whenever one host feeds all replicas.

Datasets are read once, and what is read is shared out in the host's memory.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
  device_util,
  distribute_lib,
  distribute_utils,
)

from tf_cross_shard.virtual_tpu import inputs


class SingleHost(distribute_lib.StrategyExtendedV1):
  """Input for, and facts about, replicas in one process."""

  def __init__(
    self, strategy: tf.distribute.Strategy, num_replicas: int
  ) -> None:
    """Called by a strategy."""
    super().__init__(strategy)
    self._num_replicas = num_replicas
    self._host = device_util.canonicalize("/device:CPU:0")
    # TensorFlow then asks of datasets what a TPU asks.
    self._require_static_shapes = True

  # Input.

  def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
    return inputs.split(
      dataset, self._num_replicas_in_sync, _buffer_size(options)
    )

  def _distribute_datasets_from_function(
    self, dataset_fn: Callable[..., Any], options: Any
  ) -> Any:
    buffer_size = _buffer_size(options)
    count = self._num_replicas_in_sync
    with tf.device(self._host):
      dataset = dataset_fn(
        tf.distribute.InputContext(num_replicas_in_sync=count)
      )
    return inputs.deal(dataset, count, buffer_size)

  def _experimental_distribute_values_from_function(
    self, value_fn: Callable[..., Any]
  ) -> Any:
    count = self._num_replicas_in_sync
    contexts = [distribute_lib.ValueContext(i, count) for i in range(count)]
    return distribute_utils.regroup(
      tuple(value_fn(context) for context in contexts), always_wrap=True
    )

  # Facts.

  @property
  def _num_replicas_in_sync(self) -> int:
    return self._num_replicas

  @property
  def worker_devices(self) -> tuple[str, ...]:
    """The host, once per replica."""
    return (self._host,) * self._num_replicas_in_sync

  @property
  def parameter_devices(self) -> tuple[str, ...]:
    """The host."""
    return (self._host,)

  @property
  def experimental_between_graph(self) -> bool:
    """There is one program."""
    return False

  @property
  def experimental_should_init(self) -> bool:
    """There is one process."""
    return True

  @property
  def should_checkpoint(self) -> bool:
    """There is one process."""
    return True

  @property
  def should_save_summary(self) -> bool:
    """There is one process."""
    return True

  @property
  def _global_batch_size(self) -> bool:
    return True

  def _in_multi_worker_mode(self) -> bool:
    return False

  def _get_local_replica_id(self, replica_id: Any) -> Any:
    return replica_id

  def non_slot_devices(self, var_list: Any) -> str:
    """The host."""
    del var_list
    return self._host


def _buffer_size(options: Any) -> int:
  """How many steps' input is made ready in advance; sharding is for workers."""
  if options is None:
    return 1
  mode = options.experimental_replication_mode
  if mode == tf.distribute.InputReplicationMode.PER_REPLICA:
    raise NotImplementedError(
      "InputOptions.experimental_replication_mode is PER_REPLICA, which only"
      " MirroredStrategy has. Leave it at PER_WORKER: one host reads the"
      " dataset and shares it out."
    )
  return int(options.experimental_per_replica_buffer_size)
