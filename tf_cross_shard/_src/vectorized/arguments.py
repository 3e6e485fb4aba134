"""Values that differ between replicas, as one tensor with a first axis.

    ReplicaValues         tensor [N, ...]     replica i has row i
                          tensor [...]        all replicas have the same value

Datasets return such values, `strategy.run` takes and returns them, and nothing
is split into N tensors in between. Code that asks for the values of a
`PerReplica`, as Keras does, gets the rows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, values

from tf_cross_shard._src.core import variables as variables_lib


class ReplicaValues(values.PerReplica):
  """A value for each replica: the rows of a tensor, or one shared tensor."""

  def __init__(self, tensor: Any, count: int, is_stacked: bool) -> None:
    # Not the constructor of the base class, which sets `_values`.
    self.tensor = tensor
    self.count = count
    self.is_stacked = is_stacked
    self._rows: tuple[Any, ...] | None = None

  @property
  def _values(self) -> tuple[Any, ...]:
    """The replicas' values. TensorFlow reads this private name."""
    if not self.is_stacked:
      return (self.tensor,) * self.count
    if not tf.executing_eagerly():
      return tuple(tf.unstack(self.tensor, self.count))
    if self._rows is None:
      self._rows = tuple(tf.unstack(self.tensor, self.count))
    return self._rows

  @property
  def _type_spec(self) -> tf.TypeSpec:
    spec = tf.type_spec_from_value(self.tensor)
    return ReplicaValuesSpec(spec, self.count, self.is_stacked)


class ReplicaValuesSpec(tf.TypeSpec):
  """The type of `ReplicaValues`."""

  __slots__ = ["_count", "_is_stacked", "_spec"]

  def __init__(self, spec: tf.TypeSpec, count: int, is_stacked: bool) -> None:
    self._spec, self._count, self._is_stacked = spec, count, is_stacked

  @property
  def value_type(self) -> type:
    return ReplicaValues

  def _serialize(self) -> tuple[Any, ...]:
    return self._spec, self._count, self._is_stacked

  @property
  def _component_specs(self) -> tf.TypeSpec:
    return self._spec

  def _to_components(self, value: Any) -> Any:
    return value.tensor

  def _from_components(self, components: Any) -> ReplicaValues:
    return ReplicaValues(components, self._count, self._is_stacked)

  @property
  def _value_specs(self) -> tuple[tf.TypeSpec, ...]:
    """The type of each replica's value. Keras reads this private name."""
    spec = self._spec
    if self._is_stacked:
      spec = tf.TensorSpec(spec.shape[1:], spec.dtype)
    return (spec,) * self._count


class Arguments:
  """The arguments of one call of `strategy.run`.

  Leaves that differ between replicas become inputs of the replica's program.
  All other leaves are the same for all replicas; the program captures them.

  Attributes:
    stacks: For each input of the program, a tensor with a first axis.
    shared: The leaves that are the same for all replicas.
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
        return lambda inputs: leaf.tensor
      self.stacks.append(leaf.tensor)
      return next
    if not isinstance(leaf, tf.distribute.DistributedValues) or isinstance(
      leaf, tf.Variable
    ):
      self.shared.append(leaf)
      return lambda inputs: leaf
    if len(leaf.values) != self._count:
      raise ValueError(
        f"An argument of strategy.run has values for {len(leaf.values)}"
        f" replicas, but the strategy has {self._count}."
      )
    first = leaf.values[0]
    # Sparse tensors and other composite tensors consist of several tensors.
    parts = [tf.nest.flatten(v, expand_composites=True) for v in leaf.values]
    self.stacks += [_stack(part) for part in zip(*parts, strict=True)]

    def make(inputs: Iterator[tf.Tensor]) -> Any:
      own = [next(inputs) for _ in parts[0]]
      return tf.nest.pack_sequence_as(first, own, expand_composites=True)

    return make


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
  """Converts the results of a replica's function to tensors.

  None and operations become None.
  """

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
      tf.nest.pack_sequence_as(leaf, own, expand_composites=True)
      for own in zip(*parts, strict=True)
    ]
    return distribute_utils.regroup(tuple(made), always_wrap=True)

  return tf.nest.map_structure(pack, structure)
