"""The part of a strategy that is the same whenever one host feeds all replicas.

Datasets are split by TensorFlow's own code, with the host's memory as the
place of every replica's share.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
  device_util,
  distribute_lib,
  distribute_utils,
  input_lib,
  input_util,
)


class SingleHost(distribute_lib.StrategyExtendedV1):
  """Input for, and facts about, replicas in one process."""

  def __init__(
    self, strategy: tf.distribute.Strategy, num_replicas: int
  ) -> None:
    """Called by a strategy.

    Args:
      strategy: The strategy that this belongs to.
      num_replicas: How many replicas.
    """
    super().__init__(strategy)
    self._num_replicas = num_replicas
    self._host = device_util.canonicalize("/device:CPU:0")
    # TensorFlow then asks of datasets what a TPU asks.
    self._require_static_shapes = True

  # Input.

  def _input_workers(self) -> input_lib.InputWorkers:
    # The host feeds all replicas from its own memory.
    fed = (self._host,) * self._num_replicas_in_sync
    return input_lib.InputWorkers([(self._host, fed)])

  def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
    return input_util.get_distributed_dataset(
      dataset,
      self._input_workers(),
      self._container_strategy(),
      num_replicas_in_sync=self._num_replicas_in_sync,
      options=options,
    )

  def _distribute_datasets_from_function(
    self, dataset_fn: Callable[..., Any], options: Any
  ) -> Any:
    context = tf.distribute.InputContext(
      num_replicas_in_sync=self._num_replicas_in_sync
    )
    return input_util.get_distributed_datasets_from_function(
      dataset_fn,
      self._input_workers(),
      [context],
      self._container_strategy(),
      options=options,
    )

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
    """The host.

    Args:
      var_list: Variables.

    Returns:
      The host's name.
    """
    del var_list
    return self._host
