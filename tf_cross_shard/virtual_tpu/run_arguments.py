"""The arguments of `strategy.run` and its results, one value per replica.

Leaves of the arguments that are tensors or differ between replicas become
inputs of the program. All others (numbers, flags, None, models) are part of
it: another value is another program.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_utils

from tf_cross_shard import validation
from tf_cross_shard.virtual_tpu import lowering

PerReplica = tuple[tf.Tensor, ...]


class RunArguments:
  """The arguments of one call of `strategy.run`."""

  def __init__(self, args: Any, kwargs: Any, num_replicas: int) -> None:
    """Separates inputs of the program from parts of it."""
    self._num_replicas = num_replicas
    self._structure = (tuple(args), dict(kwargs or {}))
    self._leaves = tf.nest.flatten(self._structure)
    self._is_input = [_is_input(leaf) for leaf in self._leaves]
    self.tensors = [
      self._per_replica(leaf)
      for leaf, is_input in zip(self._leaves, self._is_input, strict=True)
      if is_input
    ]
    self.specs = [_spec(each) for each in self.tensors]
    # The arguments that are part of the program.
    self.constants = [
      leaf
      for leaf, is_input in zip(self._leaves, self._is_input, strict=True)
      if not is_input
    ]

  def to_all(self, tensor: tf.Tensor) -> PerReplica:
    """One tensor that every replica receives."""
    return (tensor,) * self._num_replicas

  def bind(self, tensors: Sequence[tf.Tensor]) -> tuple[Any, Any]:
    """One replica's arguments."""
    inputs = iter(tensors)
    leaves = [
      next(inputs) if is_input else leaf
      for leaf, is_input in zip(self._leaves, self._is_input, strict=True)
    ]
    bound: tuple[Any, Any] = tf.nest.pack_sequence_as(self._structure, leaves)
    return bound

  def key(self) -> Any:
    """Equal for arguments that one program serves."""
    containers = tf.nest.pack_sequence_as(self._structure, self._is_input)
    return (
      repr(containers),
      tuple((spec.dtype, tuple(spec.shape)) for spec in self.specs),
      tuple(
        (type(leaf), leaf)
        if isinstance(leaf, (bool, int, float, str, bytes, type(None)))
        else (type(leaf), id(leaf))
        for leaf in self.constants
      ),
    )

  def _per_replica(self, leaf: Any) -> PerReplica:
    """One tensor per replica."""
    if not isinstance(leaf, tf.distribute.DistributedValues):
      return self.to_all(tf.convert_to_tensor(leaf))
    if len(leaf.values) != self._num_replicas:
      raise ValueError(
        f"An argument of strategy.run has values for {len(leaf.values)}"
        f" replicas; the strategy has {self._num_replicas}."
      )
    for value in leaf.values:
      _check_dense(value)
    return tuple(map(tf.convert_to_tensor, leaf.values))


def check_results(results: Any, name: str) -> Any:
  """What a replica's function returned, as tensors."""

  def check(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.Operation):
      return None
    try:
      if isinstance(leaf, tf.IndexedSlices):
        shape = leaf.dense_shape
        return tf.IndexedSlices(
          tf.convert_to_tensor(leaf.values),
          tf.convert_to_tensor(leaf.indices),
          None if shape is None else tf.convert_to_tensor(shape),
        )
      if tf.is_tensor(leaf) and hasattr(leaf, "_type_spec"):
        return leaf if not isinstance(leaf, tf.Variable) else leaf.read_value()
      return tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
      raise TypeError(
        f"{name}, which strategy.run runs, must return tensors, numbers or"
        f" structures of them; it returned {leaf!r}."
      ) from error

  return tf.nest.map_structure(check, results)


def pack_results(structure: Any, outputs: Sequence[PerReplica]) -> Any:
  """The replicas' results, in the structure that the function returned."""
  flat = tf.nest.flatten(structure, expand_composites=True)
  if not outputs:
    return structure
  results = []
  for own in zip(*outputs, strict=True):
    tensors = iter(own)
    leaves = [None if leaf is None else next(tensors) for leaf in flat]
    results.append(
      tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)
    )
  return distribute_utils.regroup(tuple(results))


def _is_input(leaf: Any) -> bool:
  """Whether a leaf of the arguments is data rather than part of the program."""
  if validation.is_variable(leaf):
    return False
  if isinstance(leaf, tf.distribute.DistributedValues):
    return True
  _check_dense(leaf)
  return isinstance(leaf, (tf.Tensor, np.ndarray, np.generic))


def _check_dense(value: Any) -> None:
  """Raises an error for sparse and ragged tensors."""
  if tf.is_tensor(value) and not isinstance(value, (tf.Tensor, tf.Variable)):
    raise lowering.TPUCompileError(
      f"A TPU takes dense tensors only; got a {type(value).__name__}. Convert"
      " it outside `strategy.run`."
    )


def _spec(tensors: PerReplica) -> tf.TensorSpec:
  """The dtype and the part of the shape that all replicas' tensors share."""
  shape = tensors[0].shape
  for tensor in tensors[1:]:
    shape = shape.most_specific_compatible_shape(tensor.shape)
  return tf.TensorSpec(shape, tensors[0].dtype)
