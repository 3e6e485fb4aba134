"""Measures how long it takes to trace a step, with and without AutoGraph.

AutoGraph is on by default. It rewrites the Python code that a tf.function
calls, except for code of Keras and TensorFlow and functions that opt out.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf

from benchmarks import timing
from benchmarks.tpu import contestants as contestants_lib
from benchmarks.tpu import models
from tf_cross_shard import virtual_tpu
from tf_cross_shard._src.virtual_tpu import program

# The parts: name; whether to trace the whole step or apply_gradients() alone;
# whether AutoGraph is on.
_PARTS = (
  ("step", True, True),
  ("apply", False, True),
  ("step, no AutoGraph", True, False),
  ("apply, no AutoGraph", False, False),
)


def measure(
  strategy: virtual_tpu.VirtualTPUStrategy,
  names: Sequence[str],
  cases: Sequence[models.Case],
  rounds: int,
) -> list[dict[str, Any]]:
  """Traces the contestants' steps in turns.

  Args:
    strategy: The strategy with the replicas.
    names: The contestants. Plain Keras is the baseline.
    cases: The kinds of models.
    rounds: How often to trace each step.

  Returns:
    Rows with the time for each variable and, for the first part of all, the
    time of the first trace in this process.
  """
  results: list[dict[str, Any]] = []
  for case in cases:
    contestants = [contestants_lib.make(name, strategy, case) for name in names]
    count = contestants[0].num_variables
    for part, is_whole, autograph in _PARTS:
      traces = {
        each.name: functools.partial(
          _trace,
          strategy,
          each.step if is_whole else each.apply_step,
          case.specs if is_whole else (),
          autograph,
        )
        for each in contestants
      }
      first = {} if results else _time_each(traces)
      rows = timing.compare(
        f"trace {part}, {case.name}",
        timing.interleave(traces, rounds),
        [contestants_lib.KERAS],
      )
      timing.show(rows)
      _show("first time in this process, s", first)
      each_variable = {row.case: row.milliseconds / count for row in rows}
      _show(f"{count} variables, ms for each", each_variable)
      results += [
        {
          **vars(row),
          "variables": count,
          "milliseconds_per_variable": each_variable[row.case],
          "first_seconds": first.get(row.case),
        }
        for row in rows
      ]
  return results


def _trace(
  strategy: virtual_tpu.VirtualTPUStrategy,
  step: Callable[..., Any],
  specs: Sequence[tf.TensorSpec],
  autograph: bool,
) -> None:
  """Traces a replica's step again, without compiling it."""
  train_step = tf.function(
    lambda *given: strategy.run(step, given), autograph=autograph
  )
  with mock.patch.object(program.Program, "lower"):
    train_step.get_concrete_function(*specs)


def _time_each(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
  """Returns the seconds of one call of each function, in order."""
  taken = {}
  for name, function in functions.items():
    start = time.perf_counter()
    function()
    taken[name] = time.perf_counter() - start
  return taken


def _show(title: str, figures: dict[str, float]) -> None:
  """Prints one line with the figures of all contestants."""
  if figures:
    cells = "; ".join(f"{name} {value:.2f}" for name, value in figures.items())
    print(f"  {title}: {cells}", flush=True)
