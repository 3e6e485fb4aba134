"""What a TPU is given to run: CrossShardOptimizer's programs against others'.

    python -m benchmarks.tpu.program --json=tpu_program.json
    python -m benchmarks.tpu.program --parts=programs --rounds=1

Needs no TPU: libtpu compiles ahead of time. The first takes half an hour on two
cores, most of it in the compiler; the second five minutes.

    tracing     time to trace a step, and to trace apply_gradients() alone
    programs    what the TPU compiler makes of a step, for 8 and 256 replicas
    runtime     steps per second of the virtual TPU, and where its state is

All contestants train the same models by Adam. "original" is TensorFlow 1's
tf.compat.v1.tpu.CrossShardOptimizer with a global step, as programs for TPUs
had; Keras counts steps in any case. "original, no count" has none.
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
  "parts", ["tracing", "programs", "runtime"], "What to measure."
)
_MODELS = flags.DEFINE_list("models", list(models.CASES), "To compile.")
_TOPOLOGIES = flags.DEFINE_list(
  "topologies", ["v5e:4x2", "v5e:16x16"], "TPU slices to compile for."
)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Compilations of each case.", 1)
_TRACES = flags.DEFINE_integer("traces", 15, "Tracings of each case.", 1)
_REPLICAS = flags.DEFINE_integer("replicas", 8, "That trace and run.", 1)
_STEPS = flags.DEFINE_integer("steps", 100, "Steps of each turn.", 1)
_TURNS = flags.DEFINE_integer("turns", 15, "Turns of each contestant.", 1)
_JSON = flags.DEFINE_string("json", None, "File to write the figures to.")

_TRACED = (
  contestants_lib.ORIGINAL,
  contestants_lib.KERAS,
  contestants_lib.OURS,
  contestants_lib.GROUPED,
)
# In each of them ours is to be no more than any of the others.
_COLUMNS = ("collectives", "wire_bytes", "argument_bytes", "temp_bytes")
_OTHERS = (
  contestants_lib.ORIGINAL,
  contestants_lib.BARE,
  contestants_lib.KERAS,
)
_MOST_TRACING = 1.1


def measure_programs() -> list[compiling.Row]:
  """Compiles every model for every slice, and prints as it goes."""
  results = []
  for topology in _TOPOLOGIES.value:
    for model in _MODELS.value:
      rows = compiling.measure(topology, model, _ROUNDS.value)
      compiling.show(rows)
      results += rows
  return results


def find_larger(rows: Sequence[compiling.Row]) -> Iterator[str]:
  """Says in which columns ours is more than another.

  Compile times of the same program are the same, whatever was measured. Those
  of others are more if they are in every round.

  Args:
    rows: What `measure_programs` answered.

  Yields:
    A line for each.
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
  """Says where ours takes longer to be traced than it may.

  Args:
    rows: What `tracing.measure` answered.

  Yields:
    A line for each.
  """
  for row in rows:
    ratio = row["ratios"][contestants_lib.KERAS][0]
    if row["case"] == contestants_lib.OURS and ratio > _MOST_TRACING:
      yield f"{row['part']}: {ratio:.2f} of plain Keras"


def find_moved(states: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
  """Says whose variables leave the replicas' memory between steps.

  Args:
    states: By contestant, what `runtime.check_state` answered.

  Yields:
    A line for each.
  """
  for name, state in states.items():
    if not runtime.is_on_device(state):
      yield f"{name}: the state is not on the device between steps: {state}"


def main(argv: Sequence[str]) -> None:
  """Measures, prints and writes."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  logging.set_verbosity(logging.ERROR)  # Gradients of no loss are warned of.
  versions = {name: metadata.version(name) for name in ("jaxlib", "libtpu")}
  print(timing.machine() | versions)
  strategy = virtual_tpu.VirtualTPUStrategy(_REPLICAS.value)
  cases = [models.CASES[name] for name in _MODELS.value]
  results: dict[str, Any] = {"versions": versions}
  missed: list[str] = []
  if "tracing" in _PARTS.value:  # First, to see what the first time takes.
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
  print("\nTargets missed:" if missed else "\nAll targets reached.")
  for line in missed:
    print(f"  {line}")
  if _JSON.value:
    own = flags.FLAGS.get_key_flags_for_module(argv[0])
    results["flags"] = {flag.name: flag.value for flag in own}
    timing.write_json(_JSON.value, {**results, "missed": missed})


if __name__ == "__main__":
  app.run(main)
