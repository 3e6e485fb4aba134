"""A dataset cut into the replicas' parts, and read by one iterator.

    split:  [B, ...]  --map-->  PerReplica of N parts [B / N, ...]
    deal:   N elements in turn  --window, map-->  PerReplica of these N

tf.data can carry `PerReplica`, so cutting is a stage of the dataset, and
tf.data's own iterators return what replicas receive. TensorFlow's
DistributedDataset makes one more iterator for each replica; deleting those has
taken minutes.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.distribute import distribute_utils, input_lib
from tensorflow.python.util import nest


class _Spec(tf.TypeSpec):
  """The type of a `SplitDataset`, by that of the dataset in it."""

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
  """A dataset of what the replicas receive, made by `split` or `deal`.

  It derives from TensorFlow's class because Keras looks for that name. Of its
  methods it uses only `reduce`, which a loop in a tf.function becomes.
  """

  def __init__(self, plain: tf.data.Dataset) -> None:
    self.plain = plain

  @property
  def _type_spec(self) -> tf.TypeSpec:
    # One trace of a tf.function serves all datasets of a type.
    return _Spec(tf.type_spec_from_value(self.plain))

  @property
  def element_spec(self) -> Any:
    """The type of an element, with one value per replica."""
    return self.plain.element_spec

  @property
  def cardinality(self) -> Any:
    """The number of steps, or tf.data's number for infinite and unknown."""
    if tf.executing_eagerly():
      return self.plain.cardinality().numpy()
    return tf.data.UNKNOWN_CARDINALITY

  def __iter__(self) -> Any:
    return iter(self.plain)


def split(
  dataset: tf.data.Dataset, num_replicas: int, options: Any = None
) -> SplitDataset:
  """Cuts each global batch into the replicas' parts.

  Of B rows each of the N replicas receives B // N, in order, and the first
  B % N replicas one more. Each batch is cut by itself, so that a smaller one at
  the end is shared evenly too, if it can be.
  """
  _check(dataset, 1 if num_replicas > 1 else 0)

  def cut(tensor: Any) -> Any:
    if tensor is None:
      return (None,)
    rows = tensor.shape[0]
    rows = tf.shape(tensor)[0] if rows is None else rows
    above = range(num_replicas - 1, -1, -1)
    return tf.split(tensor, [(rows + i) // num_replicas for i in above])

  @tf.autograph.experimental.do_not_convert
  def parts(*element: Any) -> Any:
    # Packed anew: tf.data hands over a tuple as so many arguments.
    leaves = [_per_replica(*cut(leaf)) for leaf in tf.nest.flatten(element)]
    return tf.nest.pack_sequence_as(dataset.element_spec, leaves)

  plain = dataset if num_replicas == 1 else dataset.map(parts)
  return SplitDataset(plain.prefetch(_buffer_size(options)))


def deal(
  dataset: tf.data.Dataset, num_replicas: int, options: Any = None
) -> SplitDataset:
  """Gives the replicas one element each, in turn.

  A last round that does not reach all replicas is left out: one program runs
  all of them or none.
  """
  _check(dataset, 0)

  @tf.autograph.experimental.do_not_convert
  def parts(*windows: Any) -> Any:
    # One by one, because `batch` would require that all have one shape.
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
  """One of each replica's parts; None if they are None."""
  if parts[0] is None:
    return None
  return distribute_utils.regroup(parts, always_wrap=True)


def _check(dataset: Any, least_rank: int) -> None:
  """Raises an error for what TPUs do not take, and what has no rows to cut."""
  for path, spec in nest.flatten_with_joined_string_paths(dataset.element_spec):
    where = f"The dataset's component {path!r}" if path else "The dataset"
    if isinstance(spec, structure.NoneTensorSpec):
      continue
    if not isinstance(spec, tf.TensorSpec):
      raise ValueError(
        f"{where} is a {type(spec).__name__}; a TPU takes dense tensors only."
        " Convert it in dataset.map, by tf.sparse.to_dense or"
        " tf.RaggedTensor.to_tensor."
      )
    if spec.shape.rank is not None and spec.shape.rank < least_rank:
      raise ValueError(
        f"{where} has no rows to share among the replicas: {spec}. Batch the"
        " dataset by the global batch size: dataset.batch(global_batch_size)."
      )


def _buffer_size(options: tf.distribute.InputOptions | None) -> int:
  """How many steps' elements are prefetched."""
  if options is None:
    return 1
  mode = options.experimental_replication_mode
  if mode == tf.distribute.InputReplicationMode.PER_REPLICA:
    raise NotImplementedError(
      "InputOptions.experimental_replication_mode is PER_REPLICA, which only"
      " MirroredStrategy has. Leave it at PER_WORKER: one host reads the"
      " dataset."
    )
  return int(options.experimental_per_replica_buffer_size)
