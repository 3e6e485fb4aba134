"""Values that differ between replicas, as one tensor.

    layout    tensor      replica i has
    ROWS      [N, ...]    row i
    BATCH     [B, ...]    the i-th of N parts, of ceil(B / N) examples each
    SHARED    [...]       all of it

Datasets return such values, `strategy.run` takes and returns them, and nothing
is split into N tensors in between. Code that asks for the values of a
`PerReplica`, as Keras does, gets the parts. If N does not divide B, the last
parts have fewer examples, as under other strategies.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, values

from tf_cross_shard._src.core import variables as variables_lib


class Layout(enum.Enum):
  """How a tensor stores the values of all replicas."""

  ROWS = "rows"
  BATCH = "batch"
  SHARED = "shared"


class ReplicaValues(values.PerReplica):
  """A value for each replica, as one tensor."""

  def __init__(self, tensor: Any, count: int, layout: Layout) -> None:
    # Not the constructor of the base class, which sets `_values`.
    self.tensor = tensor
    self.count = count
    self.layout = layout
    self._parts: tuple[Any, ...] | None = None

  @property
  def _values(self) -> tuple[Any, ...]:
    """The replicas' values. TensorFlow reads this private name."""
    if not tf.executing_eagerly():
      return self._split()
    if self._parts is None:
      self._parts = self._split()
    return self._parts

  def _split(self) -> tuple[Any, ...]:
    if self.layout == Layout.SHARED:
      return (self.tensor,) * self.count
    if self.layout == Layout.ROWS:
      return tuple(tf.unstack(self.tensor, self.count))
    size = examples_of_replica(num_examples(self.tensor), self.count)
    return tuple(
      self.tensor[i * size : (i + 1) * size] for i in range(self.count)
    )

  def equal_parts(self) -> tuple[Any, ...]:
    """Returns the replicas' values, all of one shape: see `stack_batch`."""
    if self.layout != Layout.BATCH:
      return self._values
    return tuple(tf.unstack(stack_batch(self.tensor, self.count), self.count))

  @property
  def _type_spec(self) -> tf.TypeSpec:
    spec = tf.type_spec_from_value(self.tensor)
    return ReplicaValuesSpec(spec, self.count, self.layout)


class ReplicaValuesSpec(tf.TypeSpec):
  """The type of `ReplicaValues`."""

  __slots__ = ["_count", "_layout", "_spec"]

  def __init__(
    self, spec: tf.TypeSpec, count: int, layout: Layout | str
  ) -> None:
    self._spec, self._count, self._layout = spec, count, Layout(layout)

  @property
  def value_type(self) -> type:
    return ReplicaValues

  def _serialize(self) -> tuple[Any, ...]:
    return self._spec, self._count, self._layout.value

  @property
  def _component_specs(self) -> tf.TypeSpec:
    return self._spec

  def _to_components(self, value: Any) -> Any:
    return value.tensor

  def _from_components(self, components: Any) -> ReplicaValues:
    return ReplicaValues(components, self._count, self._layout)

  @property
  def _value_specs(self) -> tuple[tf.TypeSpec, ...]:
    """The type of each replica's value. Keras reads this private name."""
    spec = self._spec
    if self._layout == Layout.ROWS:
      spec = tf.TensorSpec(spec.shape[1:], spec.dtype)
    elif self._layout == Layout.BATCH:
      size = spec.shape[0]
      is_equal = size is not None and size % self._count == 0
      each = size // self._count if is_equal else None
      spec = tf.TensorSpec([each, *spec.shape[1:]], spec.dtype)
    return (spec,) * self._count


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


class Arguments:
  """The arguments of one call of `strategy.run`.

  Leaves that differ between replicas become inputs of the replica's program.
  All other leaves are the same for all replicas; the program captures them.

  Attributes:
    stacks: For each input of the program, a tensor with a first axis.
    shared: The leaves that are the same for all replicas.
    batches: The batches that N is not known to divide, by the place of their
      stack in `stacks`.
  """

  def __init__(self, args: Any, kwargs: Any, count: int) -> None:
    self._structure = (tuple(args), dict(kwargs or {}))
    self._count = count
    self.stacks: list[tf.Tensor] = []
    self.shared: list[Any] = []
    self.batches: dict[int, tf.Tensor] = {}
    # For each leaf, how to find it among one replica's tensors.
    leaves = tf.nest.flatten(self._structure)
    self._leaves = [self._reader(leaf) for leaf in leaves]

  @property
  def specs(self) -> list[tf.TensorSpec]:
    """For each input, the dtype and shape that one replica receives."""
    specs = [tf.TensorSpec(x.shape[1:], x.dtype) for x in self.stacks]
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

  def layout_of(self, output: tf.Tensor) -> Layout:
    """Returns BATCH if an output of the program has a row for each example.

    Such an output, as of `predict`, has an unknown size, because the inputs in
    `batches` have.
    """
    if not self.batches or not output.shape.rank:
      return Layout.ROWS
    return Layout.ROWS if output.shape[0] is not None else Layout.BATCH

  def without_filling(self, stack: tf.Tensor) -> tf.Tensor:
    """Joins the parts of all replicas, and drops repeated examples.

    Args:
      stack: An output with the layout BATCH: `[N, ceil(B / N), ...]`, or
        `[1, B, ...]` if replica 0 had all examples.
    """
    rows, each, *others = tf.unstack(tf.shape(stack), stack.shape.rank)
    is_filled = each == examples_of_replica(self.size, self._count)
    size = tf.where(is_filled, self.size, rows * each)
    return tf.reshape(stack, tf.stack([rows * each, *others]))[:size]

  def bind(self, tensors: Sequence[tf.Tensor]) -> tuple[Any, Any]:
    """Puts one replica's tensors into the structure of args and kwargs."""
    inputs = iter(tensors)
    leaves = [read(inputs) for read in self._leaves]
    bound: tuple[Any, Any] = tf.nest.pack_sequence_as(self._structure, leaves)
    return bound

  def _reader(self, leaf: Any) -> Callable[[Iterator[tf.Tensor]], Any]:
    """Adds the inputs of a leaf; returns a function that makes the leaf."""
    if isinstance(leaf, ReplicaValues) and leaf.count == self._count:
      if leaf.layout == Layout.SHARED:
        return lambda inputs: leaf.tensor
      if leaf.layout == Layout.ROWS:
        self.stacks.append(leaf.tensor)
        return next
      if not is_divisible(leaf.tensor, self._count):
        self.batches[len(self.stacks)] = leaf.tensor
      self.stacks.append(stack_batch(leaf.tensor, self._count))
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
