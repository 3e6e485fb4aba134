"""Gives every replica all elements of a dataset.

An element is a `ReplicaValues`, which tf.data can carry. To trace and start one
more operation of the dataset would cost each epoch some 15 milliseconds.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.distribute import input_lib

from tf_cross_shard._src.vectorized import arguments


class _Spec(tf.TypeSpec):
  """The type of a `StackedDataset`, given the type of the dataset in it."""

  __slots__ = ["_plain"]

  def __init__(self, plain: tf.TypeSpec) -> None:
    self._plain = plain

  @property
  def value_type(self) -> type:
    return StackedDataset

  def _serialize(self) -> tuple[tf.TypeSpec]:
    return (self._plain,)

  @property
  def _component_specs(self) -> tuple[tf.TypeSpec]:
    return (self._plain,)

  def _to_components(self, value: Any) -> tuple[Any]:
    return (value.plain,)

  def _from_components(self, components: Any) -> Any:
    return StackedDataset(*components)


class StackedDataset(input_lib.DistributedDataset):
  """A dataset of `ReplicaValues`, by its class a DistributedDataset to Keras.

  It inherits only `reduce`, for loops over it in a tf.function.
  """

  def __init__(self, plain: tf.data.Dataset) -> None:
    self.plain = plain

  @property
  def _type_spec(self) -> tf.TypeSpec:
    # One trace of a tf.function serves all datasets of a type.
    return _Spec(tf.type_spec_from_value(self.plain))

  @property
  def element_spec(self) -> Any:
    """The type of an element."""
    return self.plain.element_spec

  @property
  def cardinality(self) -> Any:
    """The number of steps, or tf.data's constant for infinite or unknown."""
    if tf.executing_eagerly():
      return self.plain.cardinality().numpy()
    return tf.data.UNKNOWN_CARDINALITY

  def __iter__(self) -> Any:
    return iter(self.plain)


def share(
  dataset: tf.data.Dataset, count: int, options: Any = None
) -> StackedDataset:
  """Gives every replica all elements; of `per_model`, its own row."""

  def spec_of(leaf: tf.TypeSpec) -> tf.TypeSpec:
    if not isinstance(leaf, arguments.ReplicaValuesSpec):
      return arguments.ReplicaValuesSpec(leaf, count, is_stacked=False)
    if leaf.count != count:
      raise ValueError(
        f"dataset_per_model or per_model got values of {leaf.count} models, but"
        f" the strategy has {count}. Give each model its own."
      )
    return leaf

  return retyped(dataset, spec_of, options)


def retyped(
  dataset: tf.data.Dataset,
  spec_of: Callable[[tf.TypeSpec], tf.TypeSpec],
  options: tf.distribute.InputOptions | None,
) -> StackedDataset:
  """Returns the same dataset, with elements of another type."""
  dataset = dataset.prefetch(_buffer_size(options))
  spec = tf.nest.map_structure(
    lambda leaf: (
      leaf if isinstance(leaf, structure.NoneTensorSpec) else spec_of(leaf)
    ),
    dataset.element_spec,
  )
  variant = tf.data.experimental.to_variant(dataset)
  changed = tf.data.experimental.from_variant(variant, spec)
  # Keep the Python functions that the dataset calls.
  changed.source = dataset
  return StackedDataset(changed)


def _buffer_size(options: tf.distribute.InputOptions | None) -> int:
  """Returns the number of steps to prefetch; checks the options."""
  if options is None:
    return 1
  mode = options.experimental_replication_mode
  if mode == tf.distribute.InputReplicationMode.PER_REPLICA:
    raise NotImplementedError(
      "InputOptions.experimental_replication_mode is PER_REPLICA, which only"
      " MirroredStrategy supports. Use PER_WORKER, the default: one host reads"
      " the dataset."
    )
  return int(options.experimental_per_replica_buffer_size)
