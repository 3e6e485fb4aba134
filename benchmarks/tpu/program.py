"""Compares our TPU programs with those of plain Keras and TensorFlow 1.

    python -m benchmarks.tpu.program --json=tpu_program.json
    python -m benchmarks.tpu.program --parts=programs --rounds=1

It needs no TPU, since libtpu compiles ahead of time. The first command takes
half an hour on two cores, most of it in the compiler; the second one takes five
minutes.

    tracing     time to trace a step, and to trace apply_gradients() alone
    programs    the program that the TPU compiler makes of a step, for 8 and 256
                replicas: collectives, bytes, memory and compile time
    runtime     steps per second on the virtual TPU, and whether the variables
                stay in the memory of the replicas

All contestants train the same models with Adam. "original" is TensorFlow 1's
tf.compat.v1.tpu.CrossShardOptimizer with a global step, which programs for TPUs
used to have. "original, no count" has no global step. Keras always counts
steps.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Before TensorFlow.

from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from absl import app, flags, logging

from benchmarks import timing
from benchmarks.tpu import compiling, models, runtime, tracing
from benchmarks.tpu import contestants as contestants_lib
from tf_cross_shard import virtual_tpu

_PARTS = flags.DEFINE_list(
  "parts", ["tracing", "programs", "runtime"], "Parts to measure."
)
_MODELS = flags.DEFINE_list("models", list(models.CASES), "Models to use.")
_TOPOLOGIES = flags.DEFINE_list(
  "topologies", ["v5e:4x2", "v5e:16x16"], "TPU slices to compile for."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 7, "How often to compile each case.", 1
)
_TRACES = flags.DEFINE_integer("traces", 15, "How often to trace each case.", 1)
_REPLICAS = flags.DEFINE_integer(
  "replicas", 8, "Replicas of tracing and runtime.", 1
)
_STEPS = flags.DEFINE_integer("steps", 100, "Steps of a turn of runtime.", 1)
_TURNS = flags.DEFINE_integer("turns", 15, "Turns of each case in runtime.", 1)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")

_TRACED = (
  contestants_lib.ORIGINAL,
  contestants_lib.KERAS,
  contestants_lib.OURS,
  contestants_lib.GROUPED,
)
# The goal: in each of these columns, ours is at most any of the others.
_COLUMNS = ("collectives", "wire_bytes", "argument_bytes", "temp_bytes")
_OTHERS = (
  contestants_lib.ORIGINAL,
  contestants_lib.BARE,
  contestants_lib.KERAS,
)
# The goal for the time to trace our step, as a ratio to plain Keras.
_MOST_TRACING = 1.1


def measure_programs() -> list[compiling.Row]:
  """Compiles every model for every TPU slice; prints a table for each."""
  results = []
  for topology in _TOPOLOGIES.value:
    for model in _MODELS.value:
      rows = compiling.measure(topology, model, _ROUNDS.value)
      compiling.show(rows)
      results += rows
  return results


def find_larger(rows: Sequence[compiling.Row]) -> Iterator[str]:
  """Yields a line for each column in which ours exceeds another contestant.

  Compile times are compared only if the programs differ: equal programs take
  equally long, whatever was measured. Our compile time exceeds another one if
  it does so in every round.

  Args:
    rows: The result of `measure_programs`.

  Yields:
    The model, the column and both values, in words.
  """
  found = {(row["topology"], row["model"], row["case"]): row for row in rows}
  for (topology, model, case), ours in found.items():
    if case != contestants_lib.OURS:
      continue
    where = f"{model}, {ours['replicas']} replicas"
    for name in _OTHERS:
      other = found[topology, model, name]
      for column in _COLUMNS:
        if ours[column] > other[column]:
          yield f"{where}: {column} {ours[column]:,}; {name} {other[column]:,}"
      if ours["program"] != other["program"] and all(
        mine > theirs
        for mine, theirs in zip(
          ours["compile_rounds"], other["compile_rounds"], strict=True
        )
      ):
        median = ours["compile_ratios"][name][0]
        yield f"{where}: compile seconds {median:.2f} of {name}, in all rounds"


def find_slower(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
  """Yields a line for each part in which tracing ours exceeds the goal.

  Args:
    rows: The result of `tracing.measure`.

  Yields:
    The part and the ratio to plain Keras, in words.
  """
  for row in rows:
    ratio = row["ratios"][contestants_lib.KERAS][0]
    if row["case"] == contestants_lib.OURS and ratio > _MOST_TRACING:
      yield f"{row['part']}: {ratio:.2f} of plain Keras"


def find_moved(states: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
  """Yields a line for each contestant whose variables leave device memory.

  Args:
    states: By contestant, the result of `runtime.check_state`.

  Yields:
    The contestant and the result, in words.
  """
  for name, state in states.items():
    if not runtime.is_on_device(state):
      yield f"{name}: the state is not on the device between steps: {state}"


def main(argv: Sequence[str]) -> None:
  """Measures all parts, prints tables and goals, and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  # Hide our warning about gradients of no loss: the part tracing applies such
  # gradients on purpose.
  logging.set_verbosity(logging.ERROR)
  versions = {name: metadata.version(name) for name in ("jaxlib", "libtpu")}
  print(timing.machine() | versions)
  strategy = virtual_tpu.VirtualTPUStrategy(_REPLICAS.value)
  cases = [models.CASES[name] for name in _MODELS.value]
  results: dict[str, Any] = {"versions": versions}
  missed: list[str] = []
  # Tracing comes first, so that the first trace of this process is measured.
  if "tracing" in _PARTS.value:
    rows = tracing.measure(strategy, _TRACED, cases, _TRACES.value)
    results["tracing"] = rows
    missed += find_slower(rows)
  if "programs" in _PARTS.value:
    results["programs"] = measure_programs()
    missed += find_larger(results["programs"])
  if "runtime" in _PARTS.value:
    results["runtime"] = runtime.measure(
      strategy, _TRACED, _STEPS.value, _TURNS.value
    )
    missed += find_moved(results["runtime"]["state"])
  print("\nGoals missed:" if missed else "\nAll goals are met.")
  for line in missed:
    print(f"  {line}")
  if _JSON.value:
    own = flags.FLAGS.get_key_flags_for_module(argv[0])
    results["flags"] = {flag.name: flag.value for flag in own}
    timing.write_json(_JSON.value, {**results, "missed": missed})


if __name__ == "__main__":
  app.run(main)
