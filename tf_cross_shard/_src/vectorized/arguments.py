"""Values that differ between replicas, as one tensor.

    stacked   [N, ...]    replica i has element i
    shared    [...]       each replica has all of it

Datasets return such values, `strategy.run` takes and returns them, and nothing
is split into N tensors in between. Code that asks for the values of a
`PerReplica`, as Keras does, gets the parts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, values

from tf_cross_shard._src.core import variables as variables_lib


class ReplicaValues(values.PerReplica):
  """A value for each replica, as one tensor."""

  def __init__(self, tensor: Any, count: int, is_stacked: bool = True) -> None:
    # Not the constructor of the base class, which sets `_values`.
    self.tensor = tensor
    self.count = count
    self.is_stacked = is_stacked
    self._parts: tuple[Any, ...] | None = None

  # What Keras' `train_on_batch` reads.

  @property
  def dtype(self) -> Any:
    return self.tensor.dtype

  @property
  def shape(self) -> tf.TensorShape:
    """The shape of each replica's value."""
    return self.tensor.shape[1:] if self.is_stacked else self.tensor.shape

  def __array__(self, *args: Any, **kwargs: Any) -> Any:
    """Raises the error of Keras' `fit`, which asks for arrays."""
    raise ValueError(
      f"{self.count} models have values of their own here, of shape"
      f" {self.shape}, which are no array. Pass dataset_per_model(...) to fit,"
      " evaluate and predict; elsewhere, experimental_local_results(value)"
      " returns an array of each model."
    )

  @property
  def _values(self) -> tuple[Any, ...]:
    """The replicas' values. TensorFlow reads this private name."""
    if not tf.executing_eagerly():
      return self._split()
    if self._parts is None:
      self._parts = self._split()
    return self._parts

  def _split(self) -> tuple[Any, ...]:
    if self.is_stacked:
      return tuple(tf.unstack(self.tensor, self.count))
    return (self.tensor,) * self.count

  @property
  def _type_spec(self) -> tf.TypeSpec:
    spec = tf.type_spec_from_value(self.tensor)
    return ReplicaValuesSpec(spec, self.count, self.is_stacked)


def per_model(values: Any) -> Any:
  """Marks values of which each model of a VectorizedStrategy receives its own.

  Use it in `dataset.map` after `batch`, or on an argument of `strategy.run`:
  for sample weights, for augmented copies, or for whole batches of each model.
  All other components of a dataset go to all models. `dataset_per_model` makes
  folds and bootstrap samples.

  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import VectorizedStrategy, per_model
  >>> x = np.ones([4, 1], "float32")
  >>> folds = np.array([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
  >>> data = tf.data.Dataset.from_tensor_slices((x, x, folds)).batch(4)
  >>> data = data.map(lambda x, y, w: (x, y, per_model(tf.transpose(w))))
  >>> strategy = VectorizedStrategy(2)
  >>> [(x, y, weights)] = strategy.experimental_distribute_dataset(data)
  >>> strategy.experimental_local_results(weights)[1].numpy().tolist()
  [1.0, 1.0, 0.0, 0.0]

  Args:
    values: `[n, ...]`, where n is the number of models: model i receives row i.
      A tensor, an array, or a structure of these.

  Returns:
    A `tf.distribute.DistributedValues`, in the structure of `values`.

  Raises:
    ValueError: If the number of rows is not known when the function is traced.
      If the strategy has another number of models, the error is raised where
      the dataset is distributed, or when `strategy.run` is called.
  """

  def mark(value: Any) -> ReplicaValues:
    tensor = tf.convert_to_tensor(value)
    if not tensor.shape.rank or tensor.shape[0] is None:
      raise ValueError(
        "`values` of per_model must have a known number of rows, one for each"
        f" model; got shape {tensor.shape}. Use tf.ensure_shape(values, [n,"
        " None, ...]), and tf.stack for a list."
      )
    return ReplicaValues(tensor, tensor.shape[0])

  return tf.nest.map_structure(mark, values)


def _refuse(value: ReplicaValues, *_: Any, **__: Any) -> Any:
  raise ValueError(
    f"Each of {value.count} models receives its own of these values, of"
    " dataset_per_model or per_model, but they were used outside of the models."
    " Create the model inside `with VectorizedStrategy(n).scope():`; instead of"
    " `class_weight`, pass sample weights to dataset_per_model."
  )


# Before TensorFlow's own function, which names a class that nobody has seen.
tf.register_tensor_conversion_function(ReplicaValues, _refuse, priority=0)


class ReplicaValuesSpec(tf.TypeSpec):
  """The type of `ReplicaValues`."""

  __slots__ = ["_count", "_is_stacked", "_spec"]

  def __init__(
    self, spec: tf.TypeSpec, count: int, is_stacked: bool = True
  ) -> None:
    self._spec, self._count, self._is_stacked = spec, count, is_stacked

  @property
  def value_type(self) -> type:
    return ReplicaValues

  def _serialize(self) -> tuple[Any, ...]:
    return self._spec, self._count, self._is_stacked

  @property
  def count(self) -> int:
    """The number of replicas."""
    return self._count

  @property
  def _component_specs(self) -> tf.TypeSpec:
    return self._spec

  def _to_components(self, value: Any) -> Any:
    return value.tensor

  def _from_components(self, components: Any) -> ReplicaValues:
    return ReplicaValues(components, self._count, self._is_stacked)

  # tf.data stores a sparse tensor as one tensor: as the type of the value does.

  @property
  def _flat_tensor_specs(self) -> Any:
    return self._spec._flat_tensor_specs  # noqa: SLF001

  def _to_tensor_list(self, value: Any) -> Any:
    return self._spec._to_tensor_list(value.tensor)  # noqa: SLF001

  def _from_tensor_list(self, tensors: Any) -> Any:
    return self._from_components(
      self._spec._from_tensor_list(tensors)  # noqa: SLF001
    )

  def _from_compatible_tensor_list(self, tensors: Any) -> Any:
    return self._from_components(
      self._spec._from_compatible_tensor_list(tensors)  # noqa: SLF001
    )

  # What tf.data calls to change which elements are together.

  def _batch(self, *args: Any) -> Any:
    raise ValueError(
      "`values` of per_model cannot be batched, unbatched or put in windows,"
      f" because their first axis is the models; got {self._spec}. Use"
      " per_model in a `map` after `batch`, or dataset_per_model."
    )

  _unbatch = _to_batched_tensor_list = _to_legacy_output_shapes = _batch

  @property
  def _value_specs(self) -> tuple[tf.TypeSpec, ...]:
    """The type of each replica's value. Keras reads this private name."""
    spec = self._spec
    if self._is_stacked:
      spec = tf.TensorSpec(spec.shape[1:], spec.dtype)
    return (spec,) * self._count


class Arguments:
  """The arguments of one call of `strategy.run`.

  Leaves that differ between replicas are inputs of the replica's program, each
  with its stack in `stacks`. The program captures all others: `shared`.
  """

  def __init__(self, args: Any, kwargs: Any, count: int) -> None:
    self._structure = (tuple(args), dict(kwargs or {}))
    self._count = count
    self.stacks: list[tf.Tensor] = []
    self.shared: list[Any] = []
    # For each leaf, how to find it among one replica's tensors.
    leaves = tf.nest.flatten(self._structure)
    self._leaves = [self._reader(leaf) for leaf in leaves]

  @property
  def specs(self) -> list[tf.TensorSpec]:
    """For each input, the dtype and shape that one replica receives."""
    return [tf.TensorSpec(x.shape[1:], x.dtype) for x in self.stacks]

  def bind(self, tensors: Sequence[tf.Tensor]) -> tuple[Any, Any]:
    """Puts one replica's tensors into the structure of args and kwargs."""
    inputs = iter(tensors)
    leaves = [read(inputs) for read in self._leaves]
    bound: tuple[Any, Any] = tf.nest.pack_sequence_as(self._structure, leaves)
    return bound

  def _reader(self, leaf: Any) -> Callable[[Iterator[tf.Tensor]], Any]:
    """Adds the inputs of a leaf; returns a function that makes the leaf."""
    if isinstance(leaf, ReplicaValues) and leaf.count == self._count:
      if not leaf.is_stacked:
        return lambda inputs: _captured(leaf.tensor)
      self.stacks.append(leaf.tensor)
      return next
    if not isinstance(leaf, tf.distribute.DistributedValues) or isinstance(
      leaf, tf.Variable
    ):
      self.shared.append(leaf)
      return lambda inputs: _captured(leaf)
    if len(leaf.values) != self._count:
      raise ValueError(
        f"An argument of strategy.run has values for {len(leaf.values)}"
        f" replicas, but the strategy has {self._count}. Pass a value for each."
      )
    first = leaf.values[0]
    # Sparse tensors and other composite tensors consist of several tensors.
    parts = [tf.nest.flatten(v, expand_composites=True) for v in leaf.values]
    self.stacks += [_stack(part) for part in zip(*parts, strict=True)]

    def make(inputs: Iterator[tf.Tensor]) -> Any:
      leaves = [next(inputs) for _ in parts[0]]
      return tf.nest.pack_sequence_as(first, leaves, expand_composites=True)

    return make


def _captured(value: Any) -> Any:
  """Returns a value with tensors of the graph that is being built."""
  # Layers and bijectors keep results by tensor. The tensors of the first trace
  # would return in the second.
  if variables_lib.is_variable(value):
    return value
  graph = tf.compat.v1.get_default_graph()
  return tf.nest.map_structure(
    lambda x: graph.capture(x) if tf.is_symbolic_tensor(x) else x,
    value,
    expand_composites=True,
  )


def _stack(parts: Sequence[Any]) -> tf.Tensor:
  """Stacks the replicas' values of one argument."""
  tensors = [tf.convert_to_tensor(part) for part in parts]
  for name, given in (
    ("dtype", [tensor.dtype.name for tensor in tensors]),
    ("shape", [tuple(tensor.shape) for tensor in tensors]),
  ):
    if len(set(given)) > 1:
      raise ValueError(
        "All replicas run one program, so their arguments must have the same"
        f" {name}; got {given}. Cast them, or use drop_remainder=True and a"
        " batch size that the number of replicas divides."
      )
  return tf.stack(tensors)


def as_results(results: Any) -> Any:
  """Converts what a replica returns to tensors; None and operations to None."""

  def convert(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.Operation):
      return None
    if tf.is_tensor(leaf) and not variables_lib.is_variable(leaf):
      return leaf  # IndexedSlices and other composite tensors.
    return tf.convert_to_tensor(leaf)

  return tf.nest.map_structure(convert, results)


def pack_results(structure: Any, outputs: Sequence[ReplicaValues]) -> Any:
  """Puts results into the structure that the replica's function returned."""
  remaining = iter(outputs)

  def pack(leaf: Any) -> Any:
    if leaf is None:
      return None
    if isinstance(leaf, tf.Tensor):
      return next(remaining)
    # A composite tensor: one for each replica.
    parts = [
      next(remaining).values
      for _ in tf.nest.flatten(leaf, expand_composites=True)
    ]
    made = [
      tf.nest.pack_sequence_as(leaf, leaves, expand_composites=True)
      for leaves in zip(*parts, strict=True)
    ]
    return distribute_utils.regroup(tuple(made), always_wrap=True)

  return tf.nest.map_structure(pack, structure)
