"""The real TPU compiler, on a step that no TPU has run, and its report.

step --trace--> program --lower--> XLA module --libtpu--> report
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard.virtual_tpu import hlo, program, xla
from tf_cross_shard.virtual_tpu import strategy as strategy_lib


@dataclasses.dataclass(frozen=True)
class Report:
  """One replica's program, compiled for a TPU slice.

  Attributes:
    topology: The slice, such as "v5e:4x2".
    device_kind: The maker's name of its devices.
    num_replicas: Replicas, one per device.
    coordinates: Of each replica's device: x, y, z, core on the chip.
    collectives: Every operation in which replicas exchange data. One inside a
      loop is listed once.
    wire_bytes: What each replica passes to collectives in one step, in bytes.
    argument_bytes: Arguments and variables, per replica.
    output_bytes: Outputs and new variables, per replica.
    temp_bytes: Memory for intermediate values, per replica.
    flops: The compiler's count of floating point operations, per replica and
      step.
    compile_seconds: How long the compiler took here.
    hlo_text: The compiled program.
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
    """The report as a table."""
    facts = {
      "collectives": f"{len(self.collectives)}",
      "wire bytes": f"{self.wire_bytes:,}",
      "argument bytes": f"{self.argument_bytes:,}",
      "output bytes": f"{self.output_bytes:,}",
      "temporary bytes": f"{self.temp_bytes:,}",
      "flops": f"{self.flops:,.0f}",
      "compile seconds": f"{self.compile_seconds:.2f}",
    }
    return "\n".join(
      [
        f"{self.topology}: {self.num_replicas} replicas on {self.device_kind}",
        "",
        *_table(self.collectives, self.num_replicas),
        "",
        *_align(list(facts.items()), right=1),
      ]
    )

  def to_json(self) -> str:
    """All but the program's text, as JSON.

    Returns:
      An object with the attributes as keys.
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
  """Compiles a step for a TPU slice; needs libtpu but no TPU.

  Nothing is run and no variable changes.

  >>> def step(x):
  ...   context = tf.distribute.get_replica_context()
  ...   return context.all_reduce("SUM", x)
  >>> report = compile_for("v5e:2x2", step, [tf.TensorSpec([8, 64])])
  >>> report.collectives[0].kind, report.collectives[0].groups
  ('all-reduce', ((0, 1, 2, 3),))
  >>> report.wire_bytes  # 8 x 64 numbers of 4 bytes
  2048

  Args:
    topology: Generation and chips in each direction, such as "v5e:4x2".
    fn: The function that `strategy.run` receives, or one that calls
      `strategy.run` once.
    args: Its arguments: tensors, arrays or `tf.TensorSpec`, of the shapes
      that one replica sees, or structures of these; a Keras model's
      `train_step` takes one pair.
    strategy: Whose variables `fn` uses. None means the strategy whose scope
      this is called in, the one that `fn` calls `run` of, or a new one.
    num_replicas: If given, checked against the topology.

  Returns:
    The compiler's report; printing it gives a table.

  Raises:
    ValueError: If there is no such topology, if its number of devices is not
      the number of replicas, or if `fn` does not call `strategy.run` exactly
      once.
    ImportError: If libtpu or jaxlib is missing or of an untested version.
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
  step = _trace(fn, args, strategy)
  _check_size(where, "fn", step.replicas.num_replicas)
  inputs = step.traced.function.inputs
  shapes = [x.shape for x in inputs if x.dtype != tf.resource]
  for shape in shapes:
    if not shape.is_fully_defined():
      raise ValueError(
        "`args` must have known shapes, for a TPU program is compiled for one"
        f" shape; got {shape}. Give for example tf.TensorSpec([8, 64])."
      )
  executable, seconds = xla.compile_for_tpu(step.lower(shapes).module, where)
  [module] = executable.hlo_modules()
  memory = executable.get_compiled_memory_stats()
  optimized = hlo.Module(module.as_serialized_hlo_module_proto())
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
    hlo_text=module.to_string(),
  )


def _trace(
  fn: Callable[..., Any],
  args: Sequence[Any],
  strategy: strategy_lib.VirtualTPUStrategy,
) -> program.Program:
  """The one program that a step runs, without running it."""
  specs = [
    tf.TensorSpec(arg.shape, arg.dtype)
    if isinstance(arg, (tf.Tensor, np.ndarray))
    else arg
    for arg in args
  ]
  # A tf.function that was traced before would not call `run` again.
  fn = getattr(fn, "python_function", fn)
  on_host = tf.function(lambda *tensors: fn(*tensors))
  on_replicas = tf.function(lambda *tensors: strategy.run(fn, tensors))
  try:
    traced = on_replicas.get_concrete_function(*specs)
  except strategy_lib.NestedRunError:
    traced = on_host.get_concrete_function(*specs)
  programs = program.programs_of(traced.graph)
  if len(programs) != 1:
    raise ValueError(
      "`fn` must be one step: the function that strategy.run receives, or one"
      f" that calls strategy.run once; it called it {len(programs)} times."
    )
  return programs[0]


def _check_size(where: xla.Topology, name: str, count: int) -> None:
  """Raises an error unless each replica has a device and no device is idle."""
  size = len(where.devices)
  if count != size:
    raise ValueError(
      f"`topology` {where.name!r} has {size} devices, one per replica; `{name}`"
      f" has {count} replicas. Choose a topology of {count} devices, or make"
      f" everything under VirtualTPUStrategy({size})."
    )


def _table(
  collectives: Sequence[hlo.Collective], num_replicas: int
) -> list[str]:
  """One line per collective, under a heading."""
  if not collectives:
    return ["No collective: replicas exchange nothing."]
  rows = [("collective", "dtype", "bytes", "operands", "groups")]
  for x in collectives:
    operands, groups = _operands(x.shapes), _groups(x.groups, num_replicas)
    rows.append((x.kind, x.dtype, f"{x.bytes:,}", operands, groups))
  return _align(rows, right=2)


def _align(rows: Sequence[Sequence[str]], right: int) -> list[str]:
  """Lines of aligned columns, of which the one numbered `right` ends so."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    "  ".join(
      cell.rjust(width) if i == right else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  ]


def _operands(shapes: Sequence[tuple[int, ...]]) -> str:
  """The commonest shapes and how many arrays have them."""
  counted: Any = collections.Counter(shapes)
  parts = [f"{n} x {list(shape)}" for shape, n in counted.most_common(2)]
  more = len(counted) - len(parts)
  return ", ".join(parts) + (f", {more} more" if more else "")


def _groups(groups: Sequence[Sequence[int]], num_replicas: int) -> str:
  """Number and size of the groups, and the first of them."""
  if len(groups) == 1 and len(groups[0]) == num_replicas:
    return f"all {num_replicas}"
  first = list(groups[0])
  shown = str(first) if len(first) <= 8 else f"[{first[0]}, {first[1]}, ...]"
  return f"{len(groups)} of {len(first)}: {shown}, ..."
