"""A replica's function, ready to run as N replicas of one XLA program.

It is traced once for each kind of arguments, and compiled once for each shape;
then every call only hands over arguments and the variables' memory.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard.virtual_tpu import (
  lowering,
  replica_variable,
  run_arguments,
  xla,
)

PerReplica = run_arguments.PerReplica
Recorder = Callable[["Program", run_arguments.RunArguments], Any]
_PROGRAMS: Final = "tf_cross_shard_programs"
_recording = threading.local()


class Replicas:
  """The devices of one strategy, and the lock that its programs share."""

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


class Program:
  """A traced function of the replicas, and its compiled forms by shape."""

  def __init__(self, traced: lowering.Traced, replicas: Replicas) -> None:
    """Keeps the graph; compiles nothing yet."""
    self.traced = traced
    self.replicas = replicas
    self._compiled: dict[Any, tuple[lowering.Lowered, xla.Executable]] = {}

  def compile(self, shapes: Sequence[tf.TensorShape]) -> Any:
    """The compiled form for arguments of these shapes; compiles it once."""
    key = tuple(tuple(shape) for shape in shapes)
    if key not in self._compiled:
      lowered = lowering.lower(self.traced, shapes)
      outputs = [
        (tuple(each.shape), each.dtype.as_numpy_dtype)
        for each in (*lowered.outputs, *lowered.updated)
      ]
      executable = self.replicas.client.compile(lowered.module, outputs)
      self._compiled[key] = lowered, executable
    return self._compiled[key]

  def __call__(self, *arguments: PerReplica) -> list[PerReplica]:
    """Runs one step on all replicas."""
    for argument in arguments:
      _check_alike("dtype", [each.dtype.name for each in argument])
      _check_alike("shape", [tuple(each.shape) for each in argument])
    with self.replicas.lock:
      lowered, executable = self.compile([each[0].shape for each in arguments])
      client = self.replicas.client
      # All is in place before the first variable's memory is handed over.
      put = [
        client.put([np.asarray(tensor._numpy()) for tensor in each])
        for each in arguments
      ]
      num_arguments = len(put) - len(self.traced.captured)
      captured = iter(put[num_arguments:])
      captures = [
        each.take()
        if isinstance(each, replica_variable.ReplicaVariable)
        else next(captured)
        for each in self.traced.captures
      ]
      results = executable(put[:num_arguments] + captures)
      num_outputs = len(lowered.outputs)
      for variable, copies in zip(
        lowered.updated, results[num_outputs:], strict=True
      ):
        variable.replace(copies)
      return [
        tuple(
          tf.constant(np.array(buffers.to_numpy(i)), spec.dtype)
          for i in range(client.num_replicas)
        )
        for buffers, spec in zip(results, lowered.outputs, strict=False)
      ]

  def as_operation(
    self, arguments: Sequence[PerReplica], compile_now: bool = True
  ) -> list[PerReplica]:
    """Adds an operation that runs a step to the function being built."""
    count, results = self.replicas.num_replicas, self.traced.function.outputs
    shapes = [each[0].shape for each in arguments]
    if compile_now and all(shape.is_fully_defined() for shape in shapes):
      with tf.init_scope():
        if tf.executing_eagerly():
          self.compile(shapes)

    # TensorFlow keeps what a py_function calls as long as the process lives.
    # The program shall live only as long as the function being built.
    _keep_with_graph(self)
    program = weakref.ref(self)

    def run(*flat: tf.Tensor) -> list[tf.Tensor]:
      this = program()
      assert this is not None
      given = [flat[i * count : (i + 1) * count] for i in range(len(arguments))]
      return [each for output in this(*given) for each in output]

    # The variables are inputs so that whatever reads or assigns them before or
    # after stays before or after.
    flat = tf.py_function(
      run,
      [x for each in arguments for x in each]
      + [variable.raw_handle for variable in self.traced.variables],
      [each.dtype for each in results for _ in range(count)],
    )
    outputs = []
    for i, result in enumerate(results):
      outputs.append(tuple(flat[i * count : (i + 1) * count]))
      for tensor in outputs[-1]:
        tensor.set_shape(result.shape)
    return outputs


class Cache:
  """Programs by function and arguments.

  Functions are told apart by identity, not by `==`. One that is gone takes its
  programs with it.
  """

  def __init__(self) -> None:
    # The first of each pair keeps the owner, or a reference that clears up.
    self._by_owner: dict[int, tuple[Any, dict[Any, Any]]] = {}

  def get(
    self,
    fn: Callable[..., Any],
    arguments: run_arguments.RunArguments,
    make: Callable[[], Any],
  ) -> Any:
    """The program for a call, made if there is none."""
    owner, method = _owner(fn)
    address, key = id(owner), (method, arguments.key())
    _, programs = self._by_owner.get(address, (None, {}))
    if key not in programs:
      # The constants are kept because the key has only their addresses.
      programs[key] = make(), arguments.constants
      by_owner = self._by_owner
      try:
        kept: Any = weakref.ref(owner, lambda _: by_owner.pop(address, None))
      except TypeError:  # With __slots__ it lives as long as the strategy.
        kept = owner
      by_owner[address] = kept, programs
    return programs[key][0]


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
  """Passes `recorder` the programs that this thread adds to functions.

  They are not compiled then.
  """
  _recording.recorder = recorder
  try:
    yield
  finally:
    _recording.recorder = None


def recorder() -> Recorder | None:
  """The recorder of this thread's programs, if any."""
  return getattr(_recording, "recorder", None)


def _owner(fn: Callable[..., Any]) -> tuple[Any, Any]:
  """The object whose programs these are, and the method's function if any.

  A bound method is made anew each time that it is looked up.
  """
  owner = getattr(fn, "__self__", None)
  inner = getattr(fn, "__func__", None)
  return (fn, None) if owner is None or inner is None else (owner, inner)


def _keep_with_graph(program: Program) -> None:
  """Lets a program live as long as the function that is being built."""
  graph = tf.compat.v1.get_default_graph()
  # Of functions within functions the outermost is sure to stay.
  while isinstance(getattr(graph, "outer_graph", None), type(graph)):
    graph = graph.outer_graph
  if not hasattr(graph, _PROGRAMS):
    setattr(graph, _PROGRAMS, [])
  getattr(graph, _PROGRAMS).append(program)


def _check_alike(what: str, found: Sequence[Any]) -> None:
  """Raises an error unless all replicas' arguments have one dtype or shape."""
  if len(set(found)) > 1:
    raise ValueError(
      "All replicas run one program, so their arguments must have the same"
      f" {what}; got {list(found)}. Cast them, or use drop_remainder=True and a"
      " batch size that the number of replicas divides."
    )
