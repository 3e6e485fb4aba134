"""A replica's function, ready to run as N replicas of one XLA program.

Once per kind of arguments it is traced, and once per shape compiled; then
every call only hands over arguments and the variables' memory.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard.virtual_tpu import lowering, variables, xla

PerReplica = tuple[tf.Tensor, ...]
_PROGRAMS: Final = "tf_cross_shard_programs"


class Program:
  """A traced function of the replicas, and its compiled forms by shape."""

  def __init__(self, traced: lowering.Traced, replicas: "Replicas") -> None:
    """Keeps the graph; compiles nothing yet."""
    self.traced = traced
    self.replicas = replicas
    self._compiled: dict[Any, tuple[lowering.Lowered, xla.Executable]] = {}

  def lower(self, shapes: Sequence[tf.TensorShape]) -> lowering.Lowered:
    """The XLA module for arguments of these shapes."""
    return lowering.lower(self.traced, shapes)

  def compile(self, shapes: Sequence[tf.TensorShape]) -> Any:
    """Compiles for arguments of these shapes, unless that was done before."""
    key = tuple(tuple(shape) for shape in shapes)
    if key not in self._compiled:
      lowered = self.lower(shapes)
      outputs = [
        (tuple(spec.shape), spec.dtype.as_numpy_dtype)
        for spec in lowered.outputs
      ] + [
        (tuple(variable.shape), variable.dtype.as_numpy_dtype)
        for variable in lowered.updated
      ]
      client = self.replicas.client
      executable = client.compile(lowered.module, outputs)
      self._compiled[key] = lowered, executable
    return self._compiled[key]

  def __call__(self, *arguments: PerReplica) -> list[PerReplica]:
    """Runs one step on all replicas."""
    for argument in arguments:
      _check_shapes(argument)
    with self.replicas.lock:
      lowered, executable = self.compile([each[0].shape for each in arguments])
      client = self.replicas.client
      # All is in place before the first variable's memory is handed over.
      put = [client.put(list(map(_as_array, each))) for each in arguments]
      num_arguments = len(put) - len(self.traced.captured)
      captured = iter(put[num_arguments:])
      captures = [
        each.take(client)
        if isinstance(each, variables.ReplicaVariable)
        else next(captured)
        for each in self.traced.captures
      ]
      results = executable(put[:num_arguments] + captures)
      num_outputs = len(lowered.outputs)
      for variable, copies in zip(
        lowered.updated, results[num_outputs:], strict=True
      ):
        variable.replace(copies)
      count = client.num_replicas
      return [
        tuple(
          tf.constant(np.array(buffers.to_numpy(i)), spec.dtype)
          for i in range(count)
        )
        for buffers, spec in zip(results, lowered.outputs, strict=False)
      ]

  def as_operation(
    self, arguments: Sequence[PerReplica], compile_now: bool = True
  ) -> list[PerReplica]:
    """Puts an operation that runs a step into the function being built."""
    count, num_arguments = self.replicas.num_replicas, len(arguments)
    used, specs = self.traced.variables, self.traced.output_specs
    shapes = [each[0].shape for each in arguments]
    if compile_now and all(shape.is_fully_defined() for shape in shapes):
      with tf.init_scope():
        if tf.executing_eagerly():
          self.compile(shapes)

    # TensorFlow keeps what it calls as long as this process lives. The program
    # is to live as long as the function being built.
    _keep_with_graph(self)
    program = weakref.ref(self)

    def run(*flat: tf.Tensor) -> list[tf.Tensor]:
      given = [
        tuple(flat[i * count : (i + 1) * count]) for i in range(num_arguments)
      ]
      this = program()
      assert this is not None
      return [each for output in this(*given) for each in output]

    # The variables are among the inputs for the sake of order: what reads or
    # assigns one before or after stays before or after.
    flat = tf.py_function(
      run,
      [x for each in arguments for x in each] + [v.raw_handle for v in used],
      [spec.dtype for spec in specs for _ in range(count)],
    )
    outputs = []
    for i, spec in enumerate(specs):
      parts = flat[i * count : (i + 1) * count]
      for part in parts:
        part.set_shape(spec.shape)
      outputs.append(tuple(parts))
    return outputs


class Replicas:
  """What the programs of one strategy share."""

  def __init__(self, num_replicas: int) -> None:
    """Makes no device before a program runs."""
    self.num_replicas = num_replicas
    self.lock = threading.RLock()
    self._client: xla.Client | None = None

  @property
  def client(self) -> xla.Client:
    """The devices."""
    with self.lock:
      if self._client is None:
        self._client = xla.Client(self.num_replicas)
      return self._client


def _keep_with_graph(program: Program) -> None:
  """Lets a program live as long as the function that is being built."""
  graph = tf.compat.v1.get_default_graph()
  # Of functions within functions the outermost is sure to stay.
  while isinstance(getattr(graph, "outer_graph", None), type(graph)):
    graph = graph.outer_graph
  if not hasattr(graph, _PROGRAMS):
    setattr(graph, _PROGRAMS, [])
  getattr(graph, _PROGRAMS).append(program)


def _as_array(tensor: tf.Tensor) -> np.ndarray:
  """A view of an eager tensor's elements."""
  return np.asarray(tensor._numpy())


def _check_shapes(argument: PerReplica) -> None:
  """Raises an error unless all replicas' arguments are of one kind."""
  dtypes = [each.dtype.name for each in argument]
  if len(set(dtypes)) > 1:
    raise ValueError(
      "All replicas run one program, so their arguments must have the same"
      f" dtype; got {dtypes}. Cast them first."
    )
  shapes = [tuple(each.shape) for each in argument]
  if len(set(shapes)) > 1:
    raise ValueError(
      "All replicas run one program, so their arguments must have the same"
      f" shape; got {shapes}. Batch with drop_remainder=True, and a batch size"
      " that the number of replicas divides."
    )
