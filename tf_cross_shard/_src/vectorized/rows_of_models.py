"""A dataset in which each model of a VectorizedStrategy sees its own examples.

rows       [n, length]        model i sees the examples rows[i]
one slice  [n, batch]         of which `tf.gather` makes a batch
a leaf     [n, batch, ...]    from data that are in memory once
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.data.util import nest

from tf_cross_shard._src.core import validation
from tf_cross_shard._src.vectorized import arguments


def dataset_per_model(
  data: Any,
  batch_size: int,
  *,
  rows: Sequence[Any] | None = None,
  shuffle: int | None = None,
) -> tf.data.Dataset:
  """Makes a dataset in which each model sees its own examples.

  Use it with a VectorizedStrategy, in `fit`, `evaluate` and `validation_data`:
  for folds, bootstrap samples, and an order or sample weights for each model.
  Rows that a model does not see change nothing in it, not even the moving
  averages of batch normalization.

  >>> import numpy as np
  >>> import tf_cross_shard
  >>> x = np.arange(4.0)
  >>> fold = np.array([0, 1, 0, 1])
  >>> data = tf_cross_shard.dataset_per_model(
  ...   (x, 2 * x),
  ...   batch_size=2,
  ...   rows=[np.flatnonzero(fold != i) for i in (0, 1)],
  ... )
  >>> strategy = tf_cross_shard.VectorizedStrategy(2)
  >>> [(x, y)] = strategy.experimental_distribute_dataset(data)
  >>> [part.numpy().tolist() for part in strategy.experimental_local_results(y)]
  [[2.0, 6.0], [0.0, 4.0]]

  `dataset.map(lambda x, y: (x.values[i], y.values[i]))` is the dataset of model
  i alone, for a `fit` without a strategy. If you shuffle, note that Keras 3's
  `fit` under a strategy reads one batch before the first epoch, which counts as
  an iteration: call `next(iter(dataset))` before the other `fit`.

  Args:
    data: Arrays `[examples, ...]`: one, or a tuple or dictionary of them. An
      array `per_model(values)`, `[n, examples, ...]`, differs between models.
      Floating-point arrays are cast to Keras' `floatx`, as in `fit`.
    batch_size: The number of examples of each model in a batch. The last batch
      may have fewer.
    rows: n arrays of integers, or `[n, length]`: model i sees the examples
      `rows[i]`, in this order. Longer arrays are cut to the shortest one, with
      a warning. None, the default: every model sees all examples.
    shuffle: A seed: each model sees its rows in an order of its own, and in
      another order in each iteration over the dataset. Iteration k, from 0, has
      the order `np.random.default_rng([shuffle, k]).permuted(rows, axis=1)`. A
      new dataset, and so a new process, begins with k = 0. None, the default:
      no shuffling.

  Returns:
    A `tf.data.Dataset` with the structure of `data`, and values
    `[n, batch, ...]` of which each model receives its own.

  Raises:
    ValueError: If `rows` are not integers from 0 to examples - 1, if numbers of
      examples or of models differ or are not known, or if `batch_size` is less
      than 1. If the strategy has another number of models, the error is raised
      where the dataset is distributed.
  """
  batch_size = validation.check_integer(
    "batch_size", batch_size, "Pass, for example, 32."
  )
  if shuffle is not None:
    remedy = "Pass a seed, for example 0."
    shuffle = validation.check_integer("shuffle", shuffle, remedy, least=0)
  rows = None if rows is None else list(rows)
  with tf.device("CPU"):  # Where tf.data gathers.
    data = nest.map_structure(_as_leaf, data)
  count, examples = _sizes(data, rows)
  if rows is not None:
    order = _as_matrix(rows, examples)
  elif shuffle is not None:
    order = np.tile(np.arange(examples), [count, 1])
  else:  # Batches that all models share.
    order = np.arange(examples)
  starts = tf.data.Dataset.range(0, order.shape[-1], batch_size)

  def gather(leaf: Any, index: tf.Tensor) -> arguments.ReplicaValues:
    if isinstance(leaf, arguments.ReplicaValues):
      batch = tf.gather(leaf.tensor, index, axis=1, batch_dims=order.ndim - 1)
      return arguments.per_model(batch)
    batch = tf.gather(leaf, index)
    if order.ndim == 1:
      return arguments.ReplicaValues(batch, count, is_stacked=False)
    return arguments.per_model(batch)

  def batches(order: tf.Tensor) -> tf.data.Dataset:
    def take(start: tf.Tensor) -> Any:
      index = order[..., start : start + batch_size]
      return nest.map_structure(lambda leaf: gather(leaf, index), data)

    return starts.map(take)

  if shuffle is None:
    return batches(tf.constant(order))
  iterations = itertools.count()

  def shuffled(_: tf.Tensor) -> tf.data.Dataset:
    # By NumPy, since tf.data's random numbers depend on the global seed, too.
    def draw() -> Any:
      rng = np.random.default_rng([shuffle, next(iterations)])
      return rng.permuted(order, axis=1)

    drawn = tf.numpy_function(draw, [], tf.int64)
    return batches(tf.ensure_shape(drawn, order.shape))

  dataset = tf.data.Dataset.range(1).flat_map(shuffled)
  steps = starts.cardinality()
  return dataset.apply(tf.data.experimental.assert_cardinality(steps))


def _as_leaf(leaf: Any) -> Any:
  is_own = isinstance(leaf, arguments.ReplicaValues)
  tensor = tf.convert_to_tensor(leaf.tensor if is_own else leaf)
  if tensor.dtype.is_floating:
    tensor = tf.cast(tensor, tf.keras.backend.floatx())
  return arguments.per_model(tensor) if is_own else tensor


def _sizes(data: Any, rows: Sequence[Any] | None) -> tuple[int, int]:
  """Returns the numbers of models and of examples."""
  models = set() if rows is None else {len(rows)}
  examples = set()
  for leaf in nest.flatten(data):
    if isinstance(leaf, arguments.ReplicaValues):
      models.add(leaf.count)
      shape = leaf.tensor.shape[1:]
    else:
      shape = leaf.shape
    examples.add(shape[0] if shape.rank else 0)
  if len(examples) != 1 or 0 in examples:
    raise ValueError(
      "All arrays in `data` must have the same number of examples, at least 1;"
      f" got {sorted(examples)}. Pass arrays [examples, ...], and to per_model"
      " arrays [n, examples, ...]."
    )
  if len(models) != 1 or 0 in models:
    raise ValueError(
      "`rows` and per_model in `data` must be for one number of models; got"
      f" {sorted(models) or 'neither'}. If all models see the same examples,"
      " pass rows=[range(examples)] * n."
    )
  return models.pop(), examples.pop()


def _as_matrix(rows: Sequence[Any], examples: int) -> Any:
  """Returns `[n, length]`; warns of rows that are left out."""
  arrays = []
  for i, given in enumerate(rows):
    if isinstance(given, tuple) and any(map(np.ndim, given)):
      raise ValueError(
        f"`rows[{i}]` must be a list of integers; got a tuple of"
        f" {len(given)} arrays. scikit-learn's `split` yields (training rows,"
        " validation rows): pass rows=[train for train, _ in splits]."
      )
    numbers = np.asarray(given)
    arrays.append(numbers)
    if numbers.ndim != 1 or not numbers.size or numbers.dtype.kind not in "iu":
      is_mask = numbers.dtype.kind == "b"
      remedy = "np.flatnonzero(mask)" if is_mask else "one list for each model"
      raise ValueError(
        f"`rows[{i}]` must be a list of integers, at least one; got shape"
        f" {numbers.shape} and dtype {numbers.dtype}. Pass {remedy}."
      )
    for j in np.flatnonzero((numbers < 0) | (numbers >= examples)):
      raise ValueError(
        f"`rows[{i}][{j}]`, of model {i}, must be from 0 to {examples - 1}; got"
        f" {numbers[j]}. Rows are numbers of examples in `data`."
      )
  length = min(map(len, arrays))
  left_out = sum(map(len, arrays)) - len(arrays) * length
  if left_out:
    logging.warning(
      "`rows` of dataset_per_model are not equally long. Every model sees %d"
      " rows, as many as the shortest array has; %d in total are left out. A"
      " fit of its own would see them: give all models equally many rows.",
      *(length, left_out),
    )
  return np.stack([numbers[:length] for numbers in arrays]).astype("int64")
