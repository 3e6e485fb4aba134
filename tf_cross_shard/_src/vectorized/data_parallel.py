"""Data-parallel replicas on one device: batches are split, gradients exchanged.

They stand for the replicas of several devices, or of a TPU:

    split           one batch [B, ...]   ─────────▶  [B, ...], split inside
    batch_elements  N elements [b, ...]  ─ batch ─▶  [N, b, ...]

All replicas run one program, so they have equally many examples. If N does not
divide a batch, a training step repeats the first examples, and says so. A step
that changes only metrics runs once, on the whole batch.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python.data.util import structure
from tensorflow.python.util import nest

from tf_cross_shard._src.vectorized import (
  arguments,
  datasets,
  exchanges,
  extended,
  replica_context,
  vectorizer,
)


class BatchValues(arguments.ReplicaValues):
  """A batch `[B, ...]`, of which replica i has the i-th of N parts.

  A part has ceil(B / N) examples. If N does not divide B, the last parts have
  fewer, as under other strategies.
  """

  def __init__(self, tensor: Any, count: int) -> None:
    super().__init__(tensor, count, arguments.Layout.STACKED)

  def _split(self) -> tuple[Any, ...]:
    size = examples_of_replica(num_examples(self.tensor), self.count)
    return tuple(
      self.tensor[i * size : (i + 1) * size] for i in range(self.count)
    )

  @property
  def _type_spec(self) -> tf.TypeSpec:
    return BatchValuesSpec(tf.type_spec_from_value(self.tensor), self.count)


class BatchValuesSpec(arguments.ReplicaValuesSpec):
  """The type of `BatchValues`."""

  __slots__: list[str] = []

  def __init__(self, spec: tf.TypeSpec, count: int) -> None:
    super().__init__(spec, count, arguments.Layout.STACKED)

  @property
  def value_type(self) -> type:
    return BatchValues

  def _serialize(self) -> tuple[Any, ...]:
    return self._spec, self._count

  def _from_components(self, components: Any) -> BatchValues:
    return BatchValues(components, self._count)

  @property
  def _value_specs(self) -> tuple[tf.TypeSpec, ...]:
    size, *others = self._spec.shape
    is_equal = size is not None and size % self._count == 0
    each = size // self._count if is_equal else None
    spec = tf.TensorSpec([each, *others], self._spec.dtype)
    return (spec,) * self._count


class Arguments(arguments.Arguments):
  """The arguments of one call of `strategy.run`, with batches that are split.

  Attributes:
    batches: The batches that N is not known to divide, by the place of their
      stack in `stacks`.
  """

  def __init__(self, args: Any, kwargs: Any, count: int) -> None:
    self.batches: dict[int, tf.Tensor] = {}
    super().__init__(args, kwargs, count)

  @property
  def specs(self) -> list[tf.TensorSpec]:
    specs = super().specs
    for i in self.batches:
      specs[i] = tf.TensorSpec([None, *specs[i].shape[1:]], specs[i].dtype)
    return specs

  @property
  def size(self) -> Any:
    """The number of examples in `batches`; an int if it is known."""
    return num_examples(next(iter(self.batches.values())))

  def of_first_replica(self) -> list[tf.Tensor]:
    """Returns inputs with which replica 0 alone sees all examples."""
    return [
      self.batches[i][tf.newaxis] if i in self.batches else stack[:1]
      for i, stack in enumerate(self.stacks)
    ]

  def has_examples(self, output: tf.Tensor) -> bool:
    """Returns whether an output of the program has a row for each example.

    Such an output, as of `predict`, has an unknown size, because the inputs in
    `batches` have.
    """
    return bool(self.batches and output.shape.rank and output.shape[0] is None)

  def without_padding(self, stack: tf.Tensor) -> tf.Tensor:
    """Joins the parts of all replicas, and drops repeated examples.

    Args:
      stack: An output with a row for each example: `[N, ceil(B / N), ...]`, or
        `[1, B, ...]` if replica 0 had all examples.
    """
    rows, each, *others = tf.unstack(tf.shape(stack), stack.shape.rank)
    is_filled = each == examples_of_replica(self.size, self._count)
    size = tf.where(is_filled, self.size, rows * each)
    return tf.reshape(stack, tf.stack([rows * each, *others]))[:size]

  def _reader(self, leaf: Any) -> Callable[[Iterator[tf.Tensor]], Any]:
    if not isinstance(leaf, BatchValues) or leaf.count != self._count:
      return super()._reader(leaf)
    if not is_divisible(leaf.tensor, self._count):
      self.batches[len(self.stacks)] = leaf.tensor
    self.stacks.append(stack_batch(leaf.tensor, self._count))
    return next


def num_examples(tensor: tf.Tensor) -> Any:
  """Returns the batch size: an int if it is known, and otherwise a tensor."""
  size = tensor.shape[0]
  return tf.shape(tensor)[0] if size is None else size


def examples_of_replica(size: Any, count: int) -> Any:
  """Returns how many examples a replica gets: ceil(size / count)."""
  return -(-size // count)


def is_divisible(batch: tf.Tensor, count: int) -> bool:
  """Returns whether all replicas are known to get equally many examples."""
  size = num_examples(batch)
  return isinstance(size, int) and size % count == 0


def stack_batch(batch: tf.Tensor, count: int) -> tf.Tensor:
  """Returns `[N, ceil(B / N), ...]` of a batch `[B, ...]`.

  If N does not divide B, the first examples are repeated at the end, because
  all replicas run one program and so have equally many examples.
  """
  size = num_examples(batch)
  each = examples_of_replica(size, count)
  if not is_divisible(batch, count):
    missing = tf.gather(batch, tf.range(each * count - size) % size)
    batch = tf.concat([batch, missing], axis=0)
  shape = tf.concat([[count, each], tf.shape(batch)[1:]], axis=0)
  stack = tf.reshape(batch, shape)
  known = each if isinstance(size, int) else None
  stack.set_shape([count, known, *batch.shape[1:]])
  return stack


class DataParallelExtended(extended.ModelsExtended):
  """The methods of a strategy that shares each batch among its replicas."""

  are_models = False
  _context_class = exchanges.DataParallelContext
  _advice = extended.OF_SCOPES

  def __init__(self, strategy: tf.distribute.Strategy, num_copies: int) -> None:
    super().__init__(strategy, num_copies)
    self._has_warned_of_padding = False

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

  def _arguments(self, args: Any, kwargs: Any) -> Arguments:
    return Arguments(args, kwargs, self.num_copies)

  # Results.

  def _outputs(
    self, function: Any, given: Any, variables: dict[int, Any]
  ) -> Sequence[arguments.ReplicaValues]:
    metrics = {key for key, x in variables.items() if x.may_change_on_one}
    run = functools.partial(self._vectorize, function, variables)
    if given.batches and vectorizer.only_changes(function, metrics):
      return self._evaluate(function, given, run)
    if given.batches:
      self._warn_of_padding(given.size)
    outputs = zip(
      function.outputs,
      vectorizer.reads_combined_values(function),
      run(given.stacks),
      strict=True,
    )

    def as_value(output: tf.Tensor, reads: bool, x: Any) -> Any:
      if x.is_stacked and given.has_examples(output):
        return BatchValues(given.without_padding(x.t), self.num_copies)
      if reads and not x.is_stacked:
        return arguments.CombinedValue(x.t, self.num_copies)
      return self._values(x)

    return list(itertools.starmap(as_value, outputs))

  def _evaluate(
    self, function: Any, given: Arguments, run: Callable[..., list[Any]]
  ) -> list[arguments.ReplicaValues]:
    """Runs a program that changes only metrics, on a batch of any size.

    If the replicas do not divide the batch, replica 0 evaluates all of it: the
    host reads the sum of the replicas' metrics. Then there is one result.
    """
    has_examples = list(map(given.has_examples, function.outputs))
    reads = vectorizer.reads_combined_values(function)
    are_combined: list[bool] = []

    def merged(outputs: list[Any], count: int) -> list[tf.Tensor]:
      are_combined[:] = [
        not x.is_stacked and is_read
        for x, is_read in zip(outputs, reads, strict=True)
      ]

      def as_tensor(x: Any, is_batch: bool, is_combined: bool) -> Any:
        if is_batch:
          return given.without_padding(x.t if x.is_stacked else x.t[tf.newaxis])
        return x.t if is_combined else vectorizer.with_count(x, count)

      return list(map(as_tensor, outputs, has_examples, are_combined))

    def run_on_all() -> list[tf.Tensor]:
      return merged(run(given.stacks), self.num_copies)

    def run_on_first() -> list[tf.Tensor]:
      return merged(run(given.of_first_replica(), replicas=[0]), 1)

    is_divisible = given.size % self.num_copies == 0
    if tf.is_tensor(is_divisible):
      tensors = tf.cond(is_divisible, run_on_all, run_on_first)
    else:
      tensors = run_on_first()

    def as_value(tensor: tf.Tensor, is_batch: bool, is_combined: bool) -> Any:
      if is_batch:
        return BatchValues(tensor, self.num_copies)
      if is_combined:
        return arguments.CombinedValue(tensor, self.num_copies)
      layout = arguments.Layout.STACKED
      return arguments.ReplicaValues(tensor, self.num_copies, layout)

    return list(map(as_value, tensors, has_examples, are_combined))

  def _warn_of_padding(self, size: Any) -> None:
    """Warns once that training repeats examples: see `stack_batch`."""
    if isinstance(size, int):
      self._warn_of_size(size)
      return
    # The size is known when the step runs.
    tf.cond(
      size % self.num_copies == 0,
      lambda: 0,
      lambda: tf.py_function(self._warn_of_size, [size], tf.int32),
    )

  def _warn_of_size(self, size: Any) -> int:
    if not self._has_warned_of_padding:
      self._has_warned_of_padding = True
      logging.warning(
        "A batch has %d examples, which %d replicas cannot share equally, so"
        " the training step repeats the first %d examples of the batch. Choose"
        " a batch size that is a multiple of the number of replicas, or"
        " drop_remainder=True.",
        *(size, self.num_copies, -int(size) % self.num_copies),
      )
    return 0

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

  def combine(
    self, operation: tf.distribute.ReduceOp, value: Any, axis: Any = None
  ) -> Any:
    is_here = replica_context.in_replica_program()
    if isinstance(value, BatchValues) and axis is None and not is_here:
      return _combine_batch(operation, value)
    return super().combine(operation, value, axis)


def _combine_batch(
  operation: tf.distribute.ReduceOp, batch: BatchValues
) -> tf.Tensor:
  """Returns the sum or mean over the replicas, for each place in their parts.

  If N does not divide the batch, the last places count the replicas that have
  an example there. Keras averages a batch in each `fit`, for its shape.
  """
  stack = stack_batch(batch.tensor, batch.count)
  if stack.dtype in (tf.bool, tf.string):
    return stack[0]
  size = num_examples(batch.tensor)
  each = examples_of_replica(size, batch.count)
  places = tf.reshape(tf.range(batch.count * each), [batch.count, each])
  is_given = tf.cast(places < size, stack.dtype)
  is_given = tf.reshape(
    is_given, [batch.count, each, *[1] * (stack.shape.rank - 2)]
  )
  total = tf.reduce_sum(stack * is_given, axis=0)
  if operation == tf.distribute.ReduceOp.SUM:
    return total
  return total / tf.reduce_sum(is_given, axis=0)


def split(
  dataset: tf.data.Dataset, count: int, options: Any = None
) -> datasets.StackedDataset:
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
  return datasets.retyped(
    dataset, lambda leaf: BatchValuesSpec(leaf, count), options
  )


def batch_elements(
  dataset: tf.data.Dataset, count: int, options: Any = None
) -> datasets.StackedDataset:
  """Distributes elements: each replica gets one element in every step.

  The dataset is already batched for one replica. If the last elements do not
  suffice for all replicas, they are dropped: one program runs all replicas.

  Raises:
    ValueError: If a component of the dataset is not dense.
    NotImplementedError: If `options` asks for one iterator per replica.
  """
  _check(dataset, least_rank=0)
  batched = dataset.batch(count, drop_remainder=True)
  return datasets.retyped(
    batched,
    lambda leaf: arguments.ReplicaValuesSpec(
      leaf, count, arguments.Layout.STACKED
    ),
    options,
  )


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
