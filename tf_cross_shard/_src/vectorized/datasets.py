"""Distributes a dataset over replicas, as stacked tensors.

    split   one batch [B, ...]     ───────────▶  [B, ...], split in the program
    deal    N elements [b, ...]    ─ batch ───▶  [N, b, ...]
    share   one batch [B, ...]     ───────────▶  [B, ...], for every replica

An element is a `ReplicaValues`, which tf.data can carry. So one iterator of
tf.data returns what all replicas receive, and no operation is added to the
dataset: to trace and to start them would cost each epoch some 15 milliseconds.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.distribute import input_lib
from tensorflow.python.util import nest

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
  """A dataset of `ReplicaValues`.

  It derives from TensorFlow's class because Keras looks for the name of that
  class. It inherits only `reduce`, which TensorFlow calls for a loop over the
  dataset in a tf.function.
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


def split(
  dataset: tf.data.Dataset, count: int, options: Any = None
) -> StackedDataset:
  """Splits each global batch of dense tensors into a part for each replica.

  Replica i gets the i-th of N equal parts.

  Raises:
    ValueError: If a component of the dataset is not dense or has no rows, or if
      its elements are not batches.
    NotImplementedError: If `options` asks for one iterator per replica.
  """
  _check(dataset, least_rank=1)
  rows = [
    spec.shape[0]
    for spec in tf.nest.flatten(dataset.element_spec)
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0]
  ]
  if len(set(rows)) > 1 and any(n % count for n in rows):
    raise ValueError(
      f"The components of the dataset have {rows} rows, which {count} replicas"
      " cannot share equally: its elements are not batches of examples. Batch"
      " the dataset with the global batch size:"
      " dataset.batch(global_batch_size)."
    )
  return _of_replicas(dataset, count, arguments.Layout.BATCH, options)


def deal(
  dataset: tf.data.Dataset, count: int, options: Any = None
) -> StackedDataset:
  """Distributes elements: each replica gets one element in every step.

  The dataset is already batched for one replica. If the last elements do not
  suffice for all replicas, they are dropped: one program runs all replicas.

  Raises:
    ValueError: If a component of the dataset is not dense.
    NotImplementedError: If `options` asks for one iterator per replica.
  """
  _check(dataset, least_rank=0)
  batched = dataset.batch(count, drop_remainder=True)
  return _of_replicas(batched, count, arguments.Layout.ROWS, options)


def share(
  dataset: tf.data.Dataset, count: int, options: Any = None
) -> StackedDataset:
  """Gives every replica all elements, without copying them."""
  return _of_replicas(dataset, count, arguments.Layout.SHARED, options)


def _of_replicas(
  dataset: tf.data.Dataset,
  count: int,
  layout: arguments.Layout,
  options: Any,
) -> StackedDataset:
  """Returns the same dataset, with elements of another type."""
  dataset = dataset.prefetch(_buffer_size(options))
  spec = tf.nest.map_structure(
    lambda leaf: (
      arguments.ReplicaValuesSpec(leaf, count, layout)
      if not isinstance(leaf, structure.NoneTensorSpec)
      else leaf
    ),
    dataset.element_spec,
  )
  variant = tf.data.experimental.to_variant(dataset)
  changed = tf.data.experimental.from_variant(variant, spec)
  # Keep the Python functions that the dataset calls.
  changed.source = dataset
  return StackedDataset(changed)


def _check(dataset: Any, least_rank: int) -> None:
  """Raises an error if a component is not dense or its rank is too low."""
  for path, spec in nest.flatten_with_joined_string_paths(dataset.element_spec):
    where = f"The dataset's component {path!r}" if path else "The dataset"
    if isinstance(spec, structure.NoneTensorSpec):
      continue
    if not isinstance(spec, tf.TensorSpec):
      raise ValueError(
        f"{where} is a {type(spec).__name__}; replicas of one program take"
        " dense tensors only. Convert it in dataset.map with"
        " tf.sparse.to_dense or tf.RaggedTensor.to_tensor."
      )
    if spec.shape.rank is not None and spec.shape.rank < least_rank:
      raise ValueError(
        f"{where} has no rows to split among the replicas: {spec}. Batch the"
        " dataset with the global batch size: dataset.batch(global_batch_size)."
      )


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
