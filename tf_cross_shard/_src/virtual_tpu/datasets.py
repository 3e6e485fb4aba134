"""Distributes a dataset over the replicas of the virtual TPU.

    split:  one batch [B, ...]   --map-->           N parts [B / N, ...]
    deal:   N elements           --window, map-->   N parts, one element each

The N parts are one `PerReplica` value. tf.data can carry such values, so
splitting is a stage of the dataset, and one iterator of tf.data returns what
all replicas receive. TensorFlow's DistributedDataset would create one more
iterator for each replica, and deleting those iterators has taken minutes.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.distribute import distribute_utils, input_lib
from tensorflow.python.util import nest


class _Spec(tf.TypeSpec):
  """The type of a `SplitDataset`, given the type of the dataset in it."""

  __slots__ = ["_plain"]

  def __init__(self, plain: tf.TypeSpec) -> None:
    self._plain = plain

  @property
  def value_type(self) -> type:
    return SplitDataset

  def _serialize(self) -> tuple[tf.TypeSpec]:
    return (self._plain,)

  @property
  def _component_specs(self) -> tuple[tf.TypeSpec]:
    return (self._plain,)

  def _to_components(self, value: Any) -> tuple[Any]:
    return (value.plain,)

  def _from_components(self, components: Any) -> Any:
    return SplitDataset(*components)


class SplitDataset(input_lib.DistributedDataset):
  """A dataset whose elements are PerReplica values; see `split` and `deal`.

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
    """The type of an element, with one value for each replica."""
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
  dataset: tf.data.Dataset, num_replicas: int, options: Any = None
) -> SplitDataset:
  """Splits each global batch of dense tensors into one part for each replica.

  Of B rows, each of the N replicas receives B // N rows in order, and the first
  B % N replicas receive one more row each. Each batch is split separately, so
  that a smaller last batch is also split as evenly as possible.

  Raises:
    ValueError: If a component of the dataset is not dense or has no rows.
    NotImplementedError: If `options` asks for one iterator per replica.
  """
  _check(dataset, 1 if num_replicas > 1 else 0)

  def cut(tensor: Any) -> Any:
    if tensor is None:
      return (None,)
    rows = tensor.shape[0]
    rows = tf.shape(tensor)[0] if rows is None else rows
    # Replica r receives (rows + N - 1 - r) // N rows.
    offsets = range(num_replicas - 1, -1, -1)
    return tf.split(tensor, [(rows + i) // num_replicas for i in offsets])

  @tf.autograph.experimental.do_not_convert
  def parts(*element: Any) -> Any:
    # tf.data passes a tuple as several arguments: restore its structure.
    leaves = [_per_replica(*cut(leaf)) for leaf in tf.nest.flatten(element)]
    return tf.nest.pack_sequence_as(dataset.element_spec, leaves)

  plain = dataset if num_replicas == 1 else dataset.map(parts)
  return SplitDataset(plain.prefetch(_buffer_size(options)))


def deal(
  dataset: tf.data.Dataset, num_replicas: int, options: Any = None
) -> SplitDataset:
  """Distributes elements: each replica gets one element in every step.

  The dataset is already batched for one replica. If the last elements do not
  suffice for all replicas, they are dropped: one program runs all replicas.

  Raises:
    ValueError: If a component of the dataset is not dense.
    NotImplementedError: If `options` asks for one iterator per replica.
  """
  _check(dataset, 0)

  @tf.autograph.experimental.do_not_convert
  def parts(*windows: Any) -> Any:
    # Take the elements one by one: `batch` would require equal shapes.
    window = tf.data.Dataset.zip(tuple(tf.nest.flatten(windows)))
    elements = [
      window.skip(i).take(1).get_single_element() for i in range(num_replicas)
    ]
    leaves = list(map(_per_replica, *elements))
    return tf.nest.pack_sequence_as(dataset.element_spec, leaves)

  plain = dataset
  if num_replicas > 1:
    plain = dataset.window(num_replicas, drop_remainder=True).map(parts)
  return SplitDataset(plain.prefetch(_buffer_size(options)))


def _per_replica(*parts: Any) -> Any:
  """Joins the replicas' parts to one PerReplica value, or None."""
  if parts[0] is None:
    return None
  return distribute_utils.regroup(parts, always_wrap=True)


def _check(dataset: Any, least_rank: int) -> None:
  """Raises an error if a component is not dense or its rank is too low."""
  for path, spec in nest.flatten_with_joined_string_paths(dataset.element_spec):
    where = f"The dataset's component {path!r}" if path else "The dataset"
    if isinstance(spec, structure.NoneTensorSpec):
      continue
    if not isinstance(spec, tf.TensorSpec):
      raise ValueError(
        f"{where} is a {type(spec).__name__}; a TPU takes dense tensors only."
        " Convert it in dataset.map with tf.sparse.to_dense or"
        " tf.RaggedTensor.to_tensor."
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
