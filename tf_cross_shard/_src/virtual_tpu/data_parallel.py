"""Data-parallel replicas on one device: batches are split, gradients exchanged.

split           one batch [N * b, ...]  ─ map ───▶  [N, b, ...]
batch_elements  N elements [b, ...]     ─ batch ─▶  [N, b, ...]
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.util import nest

from tf_cross_shard._src.vectorized import arguments, datasets, extended
from tf_cross_shard._src.virtual_tpu import exchanges


class DataParallelExtended(extended.ModelsExtended):
  """The methods of a strategy that shares each batch among its replicas."""

  are_models = False
  _context_class = exchanges.DataParallelContext
  _advice = extended.OF_SCOPES

  @property
  def _num_replicas_in_sync(self) -> int:
    return self.num_copies

  # Input.

  def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
    return split(dataset, self.num_copies, options)

  def _distribute_datasets_from_function(
    self, dataset_fn: Callable[..., Any], options: Any
  ) -> Any:
    context = tf.distribute.InputContext(num_replicas_in_sync=self.num_copies)
    return batch_elements(dataset_fn(context), self.num_copies, options)

  # Exchanges.

  cross_replica_sum = staticmethod(exchanges.cross_replica_sum)
  all_to_all = staticmethod(exchanges.all_to_all)
  first_of_group = staticmethod(exchanges.first_of_group)

  def _replica_ctx_all_reduce(
    self, reduce_op: Any, value: Any, options: Any = None
  ) -> Any:
    del options
    return [
      self._combine_here(reduce_op, tensor) for tensor in tf.nest.flatten(value)
    ]

  def _combine_here(self, operation: Any, value: Any) -> Any:
    everyone = [list(range(self.num_copies))]
    total = exchanges.cross_replica_sum(tf.convert_to_tensor(value), everyone)
    is_mean = operation == tf.distribute.ReduceOp.MEAN
    return total / self.num_copies if is_mean else total


def split(
  dataset: tf.data.Dataset, count: int, options: Any
) -> datasets.StackedDataset:
  """Gives replica i the i-th of N equal parts of each global batch."""
  _check(dataset, count)
  spec = dataset.element_spec

  def in_parts(*element: Any) -> Any:
    leaves = [
      x
      if x is None
      else tf.reshape(x, [count, x.shape[0] // count, *x.shape[1:]])
      for x in tf.nest.flatten(element)
    ]
    return tf.nest.pack_sequence_as(spec, leaves)

  return _stacked(dataset.map(in_parts), count, options)


def batch_elements(
  dataset: tf.data.Dataset, count: int, options: Any
) -> datasets.StackedDataset:
  """Gives each replica one element in every step; drops the last few."""
  _check(dataset)
  return _stacked(dataset.batch(count, drop_remainder=True), count, options)


def _stacked(
  dataset: tf.data.Dataset, count: int, options: Any
) -> datasets.StackedDataset:
  return datasets.retyped(
    dataset, lambda leaf: arguments.ReplicaValuesSpec(leaf, count), options
  )


def _check(dataset: tf.data.Dataset, count: int | None = None) -> None:
  """Raises an error unless replicas get dense tensors of one known shape."""
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
    if not spec.shape.is_fully_defined():
      raise ValueError(
        f"{where} has the shape {spec.shape}, but batches of a TPU have one"
        " known shape. Use dataset.batch(size, drop_remainder=True) or, with"
        " arrays, a batch_size that divides the number of examples."
      )
    if count and (not spec.shape.rank or spec.shape[0] % count):
      raise ValueError(
        f"{where} has the shape {spec.shape}, which {count} replicas cannot"
        " share equally. Batch the dataset with a multiple of the number of"
        " replicas: dataset.batch(global_batch_size, drop_remainder=True)."
      )
