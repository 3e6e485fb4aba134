"""How arguments reach the replicas, and results come back.

Leaves of the arguments that are tensors or differ between replicas become
inputs of the program. All others (numbers, flags, None, models) are part of
it: another value is another program.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_utils

from tf_cross_shard import validation
from tf_cross_shard.virtual_tpu import lowering, runtime

Recorder = Callable[["runtime.Program", "Call"], Any]
_recording = threading.local()


class Call:
  """The arguments of one call of `strategy.run`."""

  def __init__(self, args: Any, kwargs: Any, num_replicas: int) -> None:
    """Sorts arguments into inputs of the program and parts of it."""
    self._num_replicas = num_replicas
    self._structure = (tuple(args), dict(kwargs or {}))
    self._leaves = tf.nest.flatten(self._structure)
    self._is_input = [_is_input(leaf) for leaf in self._leaves]
    inputs = [
      leaf
      for leaf, is_input in zip(self._leaves, self._is_input, strict=True)
      if is_input
    ]
    self.tensors = [self._per_replica(leaf) for leaf in inputs]
    self.specs = [_spec(each) for each in self.tensors]

  def to_all(self, tensor: tf.Tensor) -> "runtime.PerReplica":
    """One tensor that every replica receives."""
    return (tensor,) * self._num_replicas

  def bind(self, tensors: Sequence[tf.Tensor]) -> tuple[Any, Any]:
    """One replica's arguments."""
    given = iter(tensors)
    leaves = [
      next(given) if is_input else leaf
      for leaf, is_input in zip(self._leaves, self._is_input, strict=True)
    ]
    bound: tuple[Any, Any] = tf.nest.pack_sequence_as(self._structure, leaves)
    return bound

  def key(self) -> Any:
    """Equal for calls that one program serves."""
    specs = iter(self.specs)
    described: list[Any] = []
    for leaf, is_input in zip(self._leaves, self._is_input, strict=True):
      if is_input:
        spec = next(specs)
        described.append((spec.dtype, tuple(spec.shape)))
      elif isinstance(leaf, (bool, int, float, str, bytes, type(None))):
        described.append((type(leaf), leaf))
      else:
        described.append((type(leaf), id(leaf)))
    return tuple(described), _structure_key(self._structure)

  def without_tensors(self) -> list[Any]:
    """The arguments that are part of the program."""
    return [
      leaf
      for leaf, is_input in zip(self._leaves, self._is_input, strict=True)
      if not is_input
    ]

  def _per_replica(self, leaf: Any) -> "runtime.PerReplica":
    """One tensor per replica."""
    if not isinstance(leaf, tf.distribute.DistributedValues):
      return self.to_all(tf.convert_to_tensor(leaf))
    if len(leaf.values) != self._num_replicas:
      raise ValueError(
        f"An argument of strategy.run has values for {len(leaf.values)}"
        f" replicas; the strategy has {self._num_replicas}."
      )
    for value in leaf.values:
      if tf.is_tensor(value) and not isinstance(value, tf.Tensor):
        raise lowering.TPUCompileError(
          f"A TPU takes dense tensors only; got a {type(value).__name__}."
          " Convert it outside `strategy.run`."
        )
    return tuple(map(tf.convert_to_tensor, leaf.values))


class Cache:
  """Programs by function and arguments.

  Functions are told apart by identity, not by `==`. One that is gone takes its
  programs with it.
  """

  def __init__(self) -> None:
    """An empty cache."""
    # The first of each pair keeps the owner, or a reference that clears up.
    self._by_owner: dict[int, tuple[Any, dict[Any, Any]]] = {}

  def get(self, fn: Callable[..., Any], call: Call) -> Any:
    """Finds a program."""
    owner, rest = _owner(fn)
    _, programs = self._by_owner.get(id(owner), (None, {}))
    traced, _ = programs.get((rest, call.key()), (None, None))
    return traced

  def add(self, fn: Callable[..., Any], call: Call, traced: Any) -> None:
    """Keeps a program as long as its function lives."""
    owner, rest = _owner(fn)
    key = id(owner)
    if key not in self._by_owner:
      by_owner = self._by_owner
      try:
        kept: Any = weakref.ref(owner, lambda _: by_owner.pop(key, None))
      except TypeError:  # With __slots__ it lives as long as the strategy.
        kept = owner
      self._by_owner[key] = kept, {}
    # The call keeps the objects among its arguments, of which the key has no
    # more than their addresses.
    self._by_owner[key][1][rest, call.key()] = traced, call.without_tensors()


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
  """Shows `recorder` the programs that this thread puts into functions.

  They are not compiled then.
  """
  _recording.recorder = recorder
  try:
    yield
  finally:
    _recording.recorder = None


def recorder() -> Recorder | None:
  """Who is shown this thread's programs."""
  return getattr(_recording, "recorder", None)


def check_outputs(outputs: Any, name: str) -> Any:
  """What a replica's function returned, in a form that a program can answer."""

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

  return tf.nest.map_structure(check, outputs)


def pack(structure: Any, outputs: Sequence["runtime.PerReplica"]) -> Any:
  """The replicas' results, in the structure that the function returned."""
  flat = tf.nest.flatten(structure, expand_composites=True)
  if not outputs:
    return structure
  results = []
  for replica in range(len(outputs[0])):
    own = iter([each[replica] for each in outputs])
    leaves = [None if leaf is None else next(own) for leaf in flat]
    results.append(
      tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)
    )
  return distribute_utils.regroup(tuple(results))


def _is_input(leaf: Any) -> bool:
  """Whether a leaf of the arguments is data rather than part of the program."""
  if validation.is_variable(leaf):
    return False
  if tf.is_tensor(leaf) and not isinstance(leaf, tf.Tensor):
    if isinstance(leaf, tf.distribute.DistributedValues):
      return True
    raise lowering.TPUCompileError(
      f"A TPU takes dense tensors only; got a {type(leaf).__name__}. Convert"
      " it outside `strategy.run`."
    )
  return isinstance(
    leaf,
    (tf.Tensor, np.ndarray, np.generic, tf.distribute.DistributedValues),
  )


def _spec(tensors: "runtime.PerReplica") -> tf.TensorSpec:
  """What all replicas' tensors have in common."""
  shape = tensors[0].shape
  for tensor in tensors[1:]:
    shape = shape.most_specific_compatible_shape(tensor.shape)
  return tf.TensorSpec(shape, tensors[0].dtype)


def _structure_key(structure: Any) -> Any:
  """A hashable picture of nested containers."""
  if isinstance(structure, dict):
    return tuple((k, _structure_key(v)) for k, v in sorted(structure.items()))
  if isinstance(structure, (list, tuple)):
    return (type(structure).__name__, *map(_structure_key, structure))
  return None


def _owner(fn: Callable[..., Any]) -> tuple[Any, Any]:
  """Whose life ends that of a function's programs, and the function within.

  A bound method is made anew each time that it is looked up.
  """
  owner = getattr(fn, "__self__", None)
  inner = getattr(fn, "__func__", None)
  return (fn, None) if owner is None or inner is None else (owner, inner)
