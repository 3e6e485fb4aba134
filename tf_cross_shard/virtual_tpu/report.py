"""What the TPU compiler says of a program."""

import collections
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from tf_cross_shard.virtual_tpu import hlo, xla


@dataclasses.dataclass(frozen=True)
class Report:
  """One replica's program, compiled for a TPU slice.

  Attributes:
    topology: The slice, such as "v5e:4x2".
    device_kind: The maker's name of its devices.
    num_replicas: Replicas, one per device.
    coordinates: Of each replica's device: x, y, z, core on the chip.
    collectives: Every operation in which replicas exchange data, once where
      it stands in the program, in loops too.
    wire_bytes: What each replica hands to collectives in one step, in bytes.
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
    lines = [
      f"{self.topology}: {self.num_replicas} replicas on {self.device_kind}",
      "",
      *_table(self.collectives, self.num_replicas),
      "",
    ]
    facts = {
      "collectives": f"{len(self.collectives)}",
      "wire bytes": f"{self.wire_bytes:,}",
      "argument bytes": f"{self.argument_bytes:,}",
      "output bytes": f"{self.output_bytes:,}",
      "temporary bytes": f"{self.temp_bytes:,}",
      "flops": f"{self.flops:,.0f}",
      "compile seconds": f"{self.compile_seconds:.2f}",
    }
    width = max(map(len, facts.values()))
    lines += [f"{key:17}{value:>{width}}" for key, value in facts.items()]
    return "\n".join(lines)

  def to_json(self) -> str:
    """All but the program's text, as JSON."""
    fields = dataclasses.asdict(self)
    del fields["hlo_text"]
    return json.dumps(fields)


def make(where: xla.Topology, compiled: xla.Compiled) -> Report:
  """The report on a compiled program.

  Args:
    where: What it was compiled for.
    compiled: What the compiler answered.

  Returns:
    The report.
  """
  num_replicas = len(where.devices)
  found = hlo.Module(compiled.module).collectives(num_replicas)
  memory = compiled.memory
  return Report(
    topology=where.name,
    device_kind=where.kind,
    num_replicas=num_replicas,
    coordinates=where.coordinates,
    collectives=tuple(found),
    wire_bytes=sum(each.bytes for each in found),
    argument_bytes=int(memory.argument_size_in_bytes),
    output_bytes=int(memory.output_size_in_bytes),
    temp_bytes=int(memory.temp_size_in_bytes),
    flops=float(compiled.cost.get("flops", 0.0)),
    compile_seconds=compiled.seconds,
    hlo_text=compiled.text,
  )


def _table(found: Sequence[hlo.Collective], num_replicas: int) -> list[str]:
  """One line per collective, under a heading."""
  if not found:
    return ["No collective: replicas exchange nothing."]
  rows = [("collective", "dtype", "bytes", "operands", "groups")]
  for each in found:
    rows.append(
      (
        each.kind,
        each.dtype,
        f"{each.bytes:,}",
        _operands(each.shapes),
        _groups(each.groups, num_replicas),
      )
    )
  widths = [max(len(row[i]) for row in rows) for i in range(5)]
  return [
    "  ".join(
      cell.rjust(width) if i == 2 else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  ]


def _operands(shapes: Sequence[tuple[int, ...]]) -> str:
  """How many arrays, and the commonest shapes."""
  counted: Any = collections.Counter(shapes)
  parts = [
    f"{count} x {list(shape)}" for shape, count in counted.most_common(2)
  ]
  more = len(counted) - len(parts)
  return ", ".join(parts) + (f", {more} more" if more else "")


def _groups(groups: Sequence[Sequence[int]], num_replicas: int) -> str:
  """Number and size of the groups, and the first of them."""
  if len(groups) == 1 and len(groups[0]) == num_replicas:
    return f"all {num_replicas}"
  first = list(groups[0])
  shown = str(first) if len(first) <= 8 else f"[{first[0]}, {first[1]}, ...]"
  return f"{len(groups)} of {len(first)}: {shown}, ..."
