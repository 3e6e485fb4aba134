"""Compiles a training step with the real TPU compiler. No TPU is needed.

step --trace--> program --lower--> XLA module --libtpu--> Report
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.vectorized import strategy as vectorized
from tf_cross_shard._src.virtual_tpu import hlo, lowering, xla
from tf_cross_shard._src.virtual_tpu import strategy as strategy_lib


@dataclasses.dataclass(frozen=True)
class Report:
  """The TPU compiler's report on one step, which `print` shows in lines.

  All bytes and operations are counted per replica.

  Attributes:
    topology: The TPU slice, such as "v5e:4x2".
    device_kind: The compiler's name of the devices, such as "TPU v5 lite".
    num_replicas: The number of replicas, one for each device.
    coordinates: For the device of each replica: x, y, z, and the core on the
      chip.
    collectives: Every operation in which replicas exchange data. A collective
      inside a loop is listed once.
    wire_bytes: The size of the data that each replica passes to collectives in
      one step.
    argument_bytes: The size of arguments and variables.
    output_bytes: The size of outputs and new values of variables.
    temp_bytes: The memory for intermediate values.
    flops: The compiler's estimate of floating point operations in one step.
    compile_seconds: The time that the compiler took on this machine.
    hlo_text: The compiled program as text.
  """

  topology: str
  device_kind: str
  num_replicas: int
  coordinates: tuple[tuple[int, ...], ...]
  collectives: tuple[hlo.Collective, ...]
  wire_bytes: int
  argument_bytes: int
  output_bytes: int
  temp_bytes: int
  flops: float
  compile_seconds: float
  hlo_text: str = dataclasses.field(repr=False)

  def __str__(self) -> str:
    names = ["wire_bytes", "argument_bytes", "output_bytes", "temp_bytes"]
    return "\n".join(
      [
        f"{self.topology}: {self.num_replicas} replicas on {self.device_kind}",
        *(
          f"{x.kind} of {x.dtype}: {x.bytes:,} bytes in {len(x.shapes)} arrays,"
          f" within {len(x.groups)} groups of {len(x.groups[0])}"
          for x in self.collectives
        ),
        *(
          f"{name.replace('_', ' ')}: {getattr(self, name):,.0f}"
          for name in [*names, "flops"]
        ),
        f"compile seconds: {self.compile_seconds:.2f}",
      ]
    )

  def to_json(self) -> str:
    """Converts the report to JSON.

    Returns:
      A JSON object with all attributes but `hlo_text`.
    """
    fields = dataclasses.asdict(self)
    del fields["hlo_text"]
    return json.dumps(fields)


def compile_for(
  topology: str,
  fn: Callable[..., Any],
  args: Sequence[Any] = (),
  *,
  strategy: strategy_lib.VirtualTPUStrategy | None = None,
  num_replicas: int | None = None,
) -> Report:
  """Compiles a step for a TPU slice with the real TPU compiler.

  This needs libtpu but no TPU. Nothing is run, and no variable changes.

  >>> import tensorflow as tf
  >>> from tf_cross_shard.virtual_tpu import compile_for
  >>> def step(x):
  ...   context = tf.distribute.get_replica_context()
  ...   return context.all_reduce("SUM", x)
  >>> report = compile_for("v5e:2x2", step, [tf.TensorSpec([8, 64])])
  >>> report.collectives[0].kind, report.collectives[0].groups
  ('all-reduce', ((0, 1, 2, 3),))
  >>> report.wire_bytes  # 8 x 64 numbers of 4 bytes
  2048

  Args:
    topology: The TPU generation and the number of chips in each direction,
      such as "v5e:4x2".
    fn: The function that you would pass to `strategy.run`, or a function that
      calls `strategy.run` once.
    args: The arguments of `fn`: tensors, arrays or `tf.TensorSpec` with the
      shapes that one replica sees, or structures of these. The `train_step` of
      a Keras model takes one argument, the pair (x, y).
    strategy: The strategy whose variables `fn` uses. None (the default) means
      the strategy of the current scope, the strategy whose `run` `fn` calls, or
      a new strategy.
    num_replicas: If given, it must be the number of devices in the topology.

  Returns:
    The report of the compiler.

  Raises:
    ValueError: If the topology is unknown, if its number of devices is not the
      number of replicas, if a shape in `args` is not known, or if `fn` does not
      call `strategy.run` exactly once.
    ImportError: If jax, jaxlib or libtpu is missing or has an untested version.
    TPUCompileError: If a TPU cannot run the step.
  """
  where = xla.topology(topology)
  if strategy is None:
    virtual = strategy_lib.VirtualTPUStrategy
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, virtual):
      strategy = virtual(num_replicas or len(where.devices))
  if num_replicas is not None:
    _check_size(where, "num_replicas", num_replicas)
  _check_size(where, "strategy", strategy.num_replicas_in_sync)
  step, count = _trace(fn, args, strategy)
  _check_size(where, "fn", count)
  if not step.has_known_shapes:
    raise ValueError(
      "`args` must have known shapes, because a TPU program is compiled for"
      f" one shape; got {step.shapes}. Pass for example tf.TensorSpec([8, 64])."
    )
  module = step.lower().portable()
  executable, seconds = xla.compile_for_tpu(module, where)
  [compiled] = executable.hlo_modules()
  memory = executable.get_compiled_memory_stats()
  optimized = hlo.Module(compiled.as_serialized_hlo_module_proto())
  collectives = optimized.collectives(len(where.devices))
  return Report(
    topology=where.name,
    device_kind=where.kind,
    num_replicas=len(where.devices),
    coordinates=where.coordinates,
    collectives=tuple(collectives),
    wire_bytes=sum(collective.bytes for collective in collectives),
    argument_bytes=int(memory.argument_size_in_bytes),
    output_bytes=int(memory.output_size_in_bytes),
    temp_bytes=int(memory.temp_size_in_bytes),
    flops=float((executable.cost_analysis() or {}).get("flops", 0.0)),
    compile_seconds=seconds,
    hlo_text=compiled.to_string(),
  )


def _trace(
  fn: Callable[..., Any],
  args: Sequence[Any],
  strategy: strategy_lib.VirtualTPUStrategy,
) -> tuple[lowering.Program, int]:
  """Returns the program that a step would run, and its number of replicas."""
  # Take the Python function of a tf.function: after an earlier trace, the
  # tf.function would not call `run` again.
  fn = getattr(fn, "python_function", fn)
  specs = [
    tf.TensorSpec(arg.shape, arg.dtype)
    if isinstance(arg, (tf.Tensor, np.ndarray))
    else arg
    for arg in args
  ]

  # One replica's arguments have no first axis: pass them as values that all
  # replicas have.
  def on_replicas(*tensors: Any) -> Any:
    return strategy.run(fn, tensors)

  # First assume that `fn` is a replica's function. If `fn` calls `run` itself,
  # tracing raises a NestedRunError.
  with strategy_lib.recording() as programs:
    try:
      tf.function(on_replicas).get_concrete_function(*specs)
    except vectorized.NestedRunError:
      programs.clear()
      tf.function(lambda *x: fn(*x)).get_concrete_function(*specs)
  if len(programs) != 1:
    raise ValueError(
      "`fn` must be one step: the function that strategy.run receives, or one"
      f" that calls strategy.run once; `fn` called it {len(programs)} times."
    )
  return programs[0]


def _check_size(where: xla.Topology, name: str, count: int) -> None:
  size = len(where.devices)
  if count != size:
    raise ValueError(
      f"`topology` {where.name!r} has {size} devices, so it needs {size}"
      f" replicas; `{name}` has {count} replicas. Choose a topology of {count}"
      f" devices, or create all variables under VirtualTPUStrategy({size})."
    )
