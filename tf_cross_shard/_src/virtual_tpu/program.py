"""Compiles a replica's function, and runs it as N replicas of one program.

    fn, arguments ─ RunArguments ─▶ Cache ─▶ Program ─▶ results of N replicas
                                               │
                       traced once for each kind of arguments,
                       compiled once for each shape

After that, a call only passes arguments and the memory of variables.

Leaves of the arguments that are tensors or differ between replicas become
inputs of the program. All other leaves (numbers, flags, None, models) become
part of the program: a different value triggers a new compilation.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_utils

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.reduce import collective_ops
from tf_cross_shard._src.virtual_tpu import lowering, replica_variable, xla

PerReplica = tuple[tf.Tensor, ...]  # One tensor for each replica.
Shapes = Sequence[tf.TensorShape]  # One shape for each input.
_PROGRAMS: Final = "tf_cross_shard_programs"


class RunArguments:
  """The arguments of one call of `strategy.run`.

  Attributes:
    tensors: For each input of the program, one tensor for each replica.
    specs: For each input, the dtype and shape that a trace is created for.
    constants: The leaves that become part of the program.
  """

  def __init__(self, args: Any, kwargs: Any, num_replicas: int) -> None:
    self._num_replicas = num_replicas
    self._structure = (tuple(args), dict(kwargs or {}))
    leaves = tf.nest.flatten(self._structure)
    self._is_input = list(map(_is_input, leaves))
    inputs = itertools.compress(leaves, self._is_input)
    self.tensors = list(map(self._per_replica, inputs))
    self.specs = list(map(_spec, self.tensors))
    self.constants = [leaf for leaf in leaves if not _is_input(leaf)]

  def with_captured(self, traced: lowering.Traced) -> list[PerReplica]:
    """Returns all inputs: arguments, then tensors that the trace captured.

    Every replica receives the same captured tensors.
    """
    captured = [(tensor,) * self._num_replicas for tensor in traced.captured]
    return [*self.tensors, *captured]

  def bind(self, tensors: Sequence[tf.Tensor]) -> tuple[Any, Any]:
    """Puts one replica's tensors into the structure of args and kwargs."""
    inputs, is_input = iter(tensors), iter(self._is_input)
    return tf.nest.map_structure(
      lambda leaf: next(inputs) if next(is_input) else leaf, self._structure
    )

  def key(self) -> Any:
    """Returns a key that is equal for arguments of the same program."""
    containers = tf.nest.pack_sequence_as(self._structure, self._is_input)
    return (
      repr(containers),
      tuple((spec.dtype, tuple(spec.shape)) for spec in self.specs),
      tuple((type(leaf), _identity(leaf)) for leaf in self.constants),
    )

  def _per_replica(self, leaf: Any) -> PerReplica:
    """Returns one tensor for each replica."""
    if not isinstance(leaf, tf.distribute.DistributedValues):
      return (tf.convert_to_tensor(leaf),) * self._num_replicas
    if len(leaf.values) != self._num_replicas:
      raise ValueError(
        f"An argument of strategy.run has values for {len(leaf.values)}"
        f" replicas, but the strategy has {self._num_replicas}."
      )
    for value in leaf.values:
      _check_dense(value)
    return tuple(map(tf.convert_to_tensor, leaf.values))


class Replicas:
  """The devices of one strategy, and a lock that its programs share.

  Attributes:
    num_replicas: The number of replicas, one for each device.
    lock: Held while a program runs or the copies of a variable change.
  """

  def __init__(self, num_replicas: int) -> None:
    self.num_replicas = num_replicas
    self.lock = threading.RLock()
    self._client: xla.Client | None = None

  @property
  def client(self) -> xla.Client:
    """The devices, which are created when the first program runs."""
    with self.lock:
      if self._client is None:
        self._client = xla.Client(self.num_replicas)
      return self._client


class Program:
  """A traced function, and the programs compiled from it for each shape."""

  def __init__(self, traced: lowering.Traced, replicas: Replicas) -> None:
    self.traced = traced
    self.replicas = replicas
    self._lowered: dict[Any, lowering.Lowered] = {}
    self._executables: dict[Any, xla.Executable] = {}

  def lower(self, shapes: Shapes) -> lowering.Lowered:
    """Returns the XLA module for inputs of these shapes; lowers it once."""
    key = tuple(map(tuple, shapes))
    if key not in self._lowered:
      self._lowered[key] = lowering.lower(self.traced, shapes)
    return self._lowered[key]

  def compile(self, shapes: Shapes) -> xla.Executable:
    """Returns the executable for inputs of these shapes; compiles it once."""
    key = tuple(map(tuple, shapes))
    if key not in self._executables:
      lowered = self.lower(shapes)
      outputs = [
        (tuple(output.shape), output.dtype.as_numpy_dtype)
        for output in (*lowered.outputs, *lowered.updated)
      ]
      client = self.replicas.client
      self._executables[key] = client.compile(lowered.module, outputs)
    return self._executables[key]

  def __call__(self, *arguments: PerReplica) -> list[PerReplica]:
    """Runs one step on all replicas, and updates the variables.

    Takes one tuple of the replicas' tensors for each input, and returns one for
    each output.
    """
    for argument in arguments:
      _check_alike("dtype", [tensor.dtype.name for tensor in argument])
      _check_alike("shape", [tuple(tensor.shape) for tensor in argument])
    with self.replicas.lock:
      shapes = [x[0].shape for x in arguments]
      lowered, executable = self.lower(shapes), self.compile(shapes)
      client = self.replicas.client
      # Copy all inputs first: after the program has received the memory of a
      # variable, an error would lose the variable's value.
      put = [
        client.put([replica_variable.host_view(x) for x in argument])
        for argument in arguments
      ]
      # The order of the program's inputs: arguments, then captures, where
      # variables are among the captures.
      num_arguments = len(put) - len(self.traced.captured)
      captured = iter(put[num_arguments:])
      captures = [
        capture.take() if lowering.is_variable(capture) else next(captured)
        for capture in self.traced.captures
      ]
      results = executable(put[:num_arguments] + captures)
      # The program returns its outputs, then the new values of variables.
      num_outputs = len(lowered.outputs)
      for variable, copies in zip(
        lowered.updated, results[num_outputs:], strict=True
      ):
        variable.replace(copies)
      return [
        tuple(
          tf.constant(np.array(xla.to_numpy(buffers, i)), spec.dtype)
          for i in range(client.num_replicas)
        )
        for buffers, spec in zip(results, lowered.outputs, strict=False)
      ]

  def as_operation(self, arguments: Sequence[PerReplica]) -> list[PerReplica]:
    """Adds an operation that runs a step to the graph being built."""
    count, results = self.replicas.num_replicas, self.traced.function.outputs
    shapes = [tensors[0].shape for tensors in arguments]
    if all(shape.is_fully_defined() for shape in shapes):
      with tf.init_scope():
        if tf.executing_eagerly():
          # Lower now, so that an error about the step comes while it is traced.
          self.lower(shapes)

    # TensorFlow keeps the function of a py_function until the process ends. The
    # program must live only as long as the graph, which keeps a reference;
    # the py_function has a weak reference.
    _keep_with_graph(self)
    program = weakref.ref(self)

    def by_replica(flat: Sequence[tf.Tensor], number: int) -> list[PerReplica]:
      return [tuple(flat[i * count : (i + 1) * count]) for i in range(number)]

    def run(*flat: tf.Tensor) -> list[tf.Tensor]:
      this = program()
      assert this is not None
      outputs = this(*by_replica(flat, len(arguments)))
      return list(itertools.chain(*outputs))

    # Pass the variables as inputs, so that TensorFlow keeps the order of this
    # operation and others that read or assign the variables.
    handles = [variable.raw_handle for variable in self.traced.variables]
    flat = tf.py_function(
      run,
      [*itertools.chain(*arguments), *handles],
      [result.dtype for result in results for _ in range(count)],
    )
    outputs = by_replica(flat, len(results))
    for result, tensors in zip(results, outputs, strict=True):
      for tensor in tensors:
        tensor.set_shape(result.shape)
    return outputs


class Cache:
  """Keeps the programs of a strategy by function and arguments.

  Functions are compared by identity, not by `==`. When a function is deleted,
  its programs are deleted too.
  """

  def __init__(self) -> None:
    # Maps the id of a function to a weak reference, which deletes the entry,
    # and to the function's programs by key.
    self._by_owner: dict[int, tuple[Any, dict[Any, Any]]] = {}

  def get(
    self,
    fn: Callable[..., Any],
    arguments: RunArguments,
    make: Callable[[], Any],
  ) -> Any:
    """Returns the program for a call; calls `make` if there is none."""
    # Python creates a new bound method at each lookup. The object that it is
    # bound to owns the programs, and the function is part of the key.
    method = getattr(fn, "__func__", None)
    owner: Any = fn if method is None else getattr(fn, "__self__", fn)
    address, key = id(owner), (method, arguments.key())
    _, programs = self._by_owner.get(address, (None, {}))
    if key not in programs:
      # Keep the constants, so that Python does not reuse their ids, which are
      # in the key.
      programs[key] = make(), arguments.constants
      by_owner = self._by_owner
      kept = weakref.ref(owner, lambda _: by_owner.pop(address, None))
      by_owner[address] = kept, programs
    return programs[key][0]


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


def pack_results(structure: Any, outputs: Sequence[PerReplica]) -> Any:
  """Puts the replicas' results into the structure that the function returned.

  Each leaf becomes one PerReplica value.
  """
  if not outputs:
    return structure

  def pack(*tensors: tf.Tensor) -> Any:
    own = iter(tensors)
    return tf.nest.map_structure(
      lambda leaf: None if leaf is None else next(own),
      structure,
      expand_composites=True,
    )

  return distribute_utils.regroup(tuple(map(pack, *outputs)))


def programs_of(graph: tf.Graph) -> list[Program]:
  """Returns the programs that operations of a graph or its functions run."""
  return getattr(graph, _PROGRAMS, [])


def _is_input(leaf: Any) -> bool:
  """Returns whether a leaf of the arguments is an input of the program."""
  if variables_lib.is_variable(leaf):
    return False
  if isinstance(leaf, tf.distribute.DistributedValues):
    return True
  _check_dense(leaf)
  return isinstance(leaf, (tf.Tensor, np.ndarray, np.generic))


def _identity(leaf: Any) -> Any:
  """Returns a key that is equal for leaves that make the same program."""
  # Compare texts of numbers: 0.0 == -0.0, and NaN is not equal to itself.
  plain = isinstance(leaf, (int, float, complex, str, bytes, type(None)))
  return repr(leaf) if plain else id(leaf)


def _check_dense(value: Any) -> None:
  """Raises an error if a value is a sparse or ragged tensor."""
  if tf.is_tensor(value) and not isinstance(value, (tf.Tensor, tf.Variable)):
    raise lowering.TPUCompileError(
      f"A TPU takes dense tensors only; got a {type(value).__name__}. Convert"
      " it outside `strategy.run`."
    )


def _spec(tensors: PerReplica) -> tf.TensorSpec:
  """Returns the dtype, and the part of the shape that all replicas share."""
  shape = tensors[0].shape
  for tensor in tensors[1:]:
    shape = shape.most_specific_compatible_shape(tensor.shape)
  return tf.TensorSpec(shape, tensors[0].dtype)


def _keep_with_graph(program: Program) -> None:
  """Keeps a program alive as long as the function that is being built."""
  # Functions may be nested. The outermost one lives as long as any of them.
  graph = collective_ops.outermost_function()
  setattr(graph, _PROGRAMS, [*programs_of(graph), program])


def _check_alike(name: str, values: Sequence[Any]) -> None:
  """Raises an error unless all replicas' arguments have one dtype or shape."""
  if len(set(values)) > 1:
    raise ValueError(
      "All replicas run one program, so their arguments must have the same"
      f" {name}; got {list(values)}. Cast them, or use drop_remainder=True and"
      " a batch size that the number of replicas divides."
    )
