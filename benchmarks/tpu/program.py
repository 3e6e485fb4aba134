"""Compares our TPU programs with those of plain Keras and TensorFlow 1.

    python -m benchmarks.tpu.program --json=tpu_program.json
    python -m benchmarks.tpu.program --rounds=1 --topologies=v5e:4x2

Prints what the TPU compiler makes of a step, for 8 and 256 replicas:
collectives, bytes, memory and compile time. It needs no TPU, since libtpu
compiles ahead of time. The first command takes half an hour on two cores.

All contestants train the same models with Adam. "original" is TensorFlow 1's
tf.compat.v1.tpu.CrossShardOptimizer with a global step, which programs for TPUs
used to have. "original, no count" has no global step. Keras always counts
steps.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Before TensorFlow.

from collections.abc import Iterator, Sequence
from importlib import metadata

from absl import app, flags, logging

from benchmarks import timing
from benchmarks.tpu import compiling, models
from benchmarks.tpu import contestants as contestants_lib

_MODELS = flags.DEFINE_list("models", list(models.CASES), "Models to use.")
_TOPOLOGIES = flags.DEFINE_list(
  "topologies", ["v5e:4x2", "v5e:16x16"], "TPU slices to compile for."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 7, "How often to compile each case.", 1
)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")

# The goal: in each of these columns, ours is at most any of the others.
_COLUMNS = ("collectives", "wire_bytes", "argument_bytes", "temp_bytes")
_OTHERS = (
  contestants_lib.ORIGINAL,
  contestants_lib.BARE,
  contestants_lib.KERAS,
)


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


def main(argv: Sequence[str]) -> None:
  """Compiles the programs, prints tables and goals, and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  logging.set_verbosity(logging.ERROR)
  versions = {name: metadata.version(name) for name in ("jaxlib", "libtpu")}
  print(timing.machine() | versions)
  rows = measure_programs()
  missed = list(find_larger(rows))
  print("\nGoals missed:" if missed else "\nAll goals are met.")
  for line in missed:
    print(f"  {line}")
  if _JSON.value:
    results = {"versions": versions, "programs": rows, "missed": missed}
    timing.write_json(_JSON.value, results)


if __name__ == "__main__":
  app.run(main)
