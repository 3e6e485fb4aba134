"""Compiles the contestants' steps with the TPU compiler.

Each thread of the compiler leaves its own heap behind, 270 MB for every
residual network that is compiled. Each model is therefore compiled in its own
process, whose threads share few heaps.
"""

import hashlib
import multiprocessing
import os
import re
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.tpu import contestants as contestants_lib
from benchmarks.tpu import models
from tf_cross_shard import virtual_tpu

_HEAPS = {"MALLOC_ARENA_MAX": "2"}  # The C library reads it when it starts.
_TITLES = (
  "collectives",
  "wire bytes",
  "arguments",
  "temporaries",
  "compile s",
  "to plain Keras",
  "program",
)
_LINE = "{:<26}{:>11}{:>11}{:>11}{:>12}{:>10}{:>19}{:>9}"

Row = dict[str, Any]


def measure(topology: str, model: str, rounds: int) -> list[Row]:
  """Compiles one model's steps for one TPU slice, in its own process.

  Args:
    topology: The slice, such as "v5e:4x2".
    model: A key of `models.CASES`.
    rounds: How often to compile each step.

  Returns:
    One row for each contestant.
  """
  os.environ.update(_HEAPS)
  spawn = multiprocessing.get_context("spawn")
  with futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
    return pool.submit(_compile, topology, model, rounds).result()


def show(rows: list[Row]) -> None:
  """Prints the result of `measure` as a table.

  Args:
    rows: The rows of one model and slice.
  """
  title = f"{rows[0]['model']}, {rows[0]['replicas']} replicas"
  print("\n" + _LINE.format(title, *_TITLES))
  for row in rows:
    ratios = row["compile_ratios"][contestants_lib.KERAS]
    cells = (
      f"  {row['case']}",
      row["collectives"],
      f"{row['wire_bytes']:,}",
      f"{row['argument_bytes']:,}",
      f"{row['temp_bytes']:,}",
      f"{row['compile_seconds']:.2f}",
      "{:.2f} [{:.2f}, {:.2f}]".format(*ratios),
      "same" if row["same_as_keras"] else "another",
    )
    print(_LINE.format(*cells), flush=True)


def _compile(topology: str, model: str, rounds: int) -> list[Row]:
  """Compiles the contestants' steps in turns."""
  num_replicas = len(virtual_tpu.coordinates(topology))
  strategy = virtual_tpu.VirtualTPUStrategy(num_replicas)
  case = models.CASES[model]
  contestants = [
    contestants_lib.make(name, strategy, case) for name in contestants_lib.NAMES
  ]
  reports: dict[str, virtual_tpu.Report] = {}
  seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
  # The first compilation of a process takes longer and is not counted.
  for each in [contestants[0], *contestants * rounds]:
    report = virtual_tpu.compile_for(
      topology, each.step, case.specs, strategy=strategy
    )
    reports[each.name] = report
    seconds[each.name].append(report.compile_seconds)
  taken = {
    name: 1e3 * np.array(each[-rounds:]) for name, each in seconds.items()
  }
  return [
    {
      "model": model,
      "topology": topology,
      "replicas": num_replicas,
      **_describe(reports[row.case], reports[contestants_lib.KERAS]),
      "case": row.case,
      "compile_seconds": row.milliseconds / 1e3,
      "compile_rounds": seconds[row.case][-rounds:],
      "compile_ratios": row.ratios,
    }
    for row in timing.compare(topology, taken, list(taken))
  ]


def _describe(
  report: virtual_tpu.Report, keras: virtual_tpu.Report
) -> Mapping[str, Any]:
  """Returns the figures of a program, and whether it equals plain Keras'."""
  return {
    "collectives": len(report.collectives),
    "wire_bytes": report.wire_bytes,
    "argument_bytes": report.argument_bytes,
    "output_bytes": report.output_bytes,
    "temp_bytes": report.temp_bytes,
    "flops": report.flops,
    "program": _digest(report),
    "same_as_keras": _digest(report) == _digest(keras),
  }


def _digest(report: virtual_tpu.Report) -> str:
  """Returns a hash of a program's instructions.

  It leaves out the name of the module, and the metadata that says which lines
  of Python the instructions come from.
  """
  text = re.sub(r", metadata=\{[^{}]*\}", "", report.hlo_text)
  text = re.sub(r"^HloModule [^,]*", "", text)
  return hashlib.sha256(text.encode()).hexdigest()[:16]
