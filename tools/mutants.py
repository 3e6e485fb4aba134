#!/usr/bin/env python3
# ruff: noqa: E501
"""Breaks the code on purpose, and tells which breaks no test notices.

    python tools/mutants.py              # every mutant
    python tools/mutants.py mean sum     # those whose names hold such a word
    python tools/mutants.py --check      # only whether the patterns are there

Each mutant replaces one pattern in a copy of the project, and runs the tests
named beside it until one fails. Exits 1 if no test fails, if the tests take
too long, or if a pattern or a test file is gone.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).absolute().parent.parent


class Mutant(NamedTuple):
  """What is broken where, and which test files have to notice."""

  name: str
  file: str  # Below tf_cross_shard.
  pattern: str | re.Pattern[str]  # Must match once.
  replacement: str
  tests: str  # Below tests, without "_test.py".

  def paths(self) -> list[str]:
    """The test files."""
    return [f"tests/{name}_test.py" for name in self.tests.split()]

  def mutated(self) -> str:
    """The file's text with the break; an empty text if the pattern is gone."""
    file = PROJECT / "tf_cross_shard" / self.file
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if isinstance(self.pattern, str):
      count, new = text.count(self.pattern), text.replace(*self[2:4])
    else:
      new, count = self.pattern.subn(self.replacement, text)
    return new if count == 1 else ""

  def is_stale(self) -> bool:
    """Whether the pattern or a test file is gone."""
    return not (
      self.mutated() and all((PROJECT / path).exists() for path in self.paths())
    )


_STEP = "unit/optimizer unit/tf_keras equivalence/equivalence"
_REDUCED = f"unit/reduction unit/mirrored {_STEP}"
_BUFFERS = "    sums = unpack(add_up(buffers, groups))"
_CLIP_AND_SUM = re.compile(
  r"grads = (clipping\.clip\(.*?\n    \))\n    return (reduction.*?\n    \))",
  re.DOTALL,
)

# fmt: off
MUTANTS = [
  Mutant("mean factor dropped", "gradients/loss_factor.py", "return copies / group_size if reduction == MEAN else float(copies)", "return float(copies)", f"unit/loss_factor {_STEP}"),
  Mutant("mean over all, not the group", "gradients/loss_factor.py", "copies / group_size", "copies / num_replicas", f"unit/loss_factor {_STEP}"),
  Mutant("the user's convention ignored", "gradients/loss_factor.py", "self.averaged_over or default", "default", f"unit/loss_factor {_STEP}"),
  Mutant("two groups swapped", "collectives/mirrored.py", "by_group[groups.index_of(self._replica())]", "by_group[groups.index_of(self._replica()) - 1]", _REDUCED),
  Mutant("reduced twice", "step/reduction.py", _BUFFERS, "    sums = unpack(add_up(add_up(buffers, groups), groups))", _REDUCED),
  Mutant("sum dropped", "step/reduction.py", "if not grads or groups.group_size == 1:", "if True:", _REDUCED),
  Mutant("rows not summed", "step/reduction.py", "if grads and groups.group_size > 1:", "if False:", _REDUCED),
  Mutant("Keras reduces again", "collectives/base.py", "return replica_isolation.isolate(self.strategy)", "return contextlib.nullcontext()", f"unit/replica_isolation {_STEP}"),
  Mutant("nonfinite step applied", "step/nonfinite.py", "tf.cond(is_finite, apply, lambda: None)", "apply()", "unit/nonfinite equivalence/interplay"),
  Mutant("nonfinite where one is, not all", "step/nonfinite.py", "tf.reduce_all(tf.math.is_finite(part))", "tf.reduce_any(tf.math.is_finite(part))", "unit/nonfinite equivalence/interplay"),
  Mutant("clipped after the sum", "optimizer.py", _CLIP_AND_SUM, r"grads = \2\n    return \1", "unit/optimizer unit/tf_keras"),
  Mutant("limit in another loss scale", "optimizer.py", "self._inner.scale_limit(limit) if limit", "limit if limit", "unit/optimizer unit/tf_keras"),
  Mutant("not narrowed", "gradients/packing.py", "and dtype.size > wire_dtype.size", "and False", "unit/packing unit/wire_dtype"),
  Mutant("not widened", "gradients/packing.py", "tensor if tensor.dtype == wide.dtype else tf.cast(tensor, wide.dtype)", "tensor", "unit/packing unit/wire_dtype"),
  Mutant("full bucket shared", "gradients/packing.py", "if size >= bucket_bytes:", "if size > bucket_bytes:", "unit/packing"),
  Mutant("bucket one byte too small", "gradients/packing.py", "filled + size > bucket_bytes", "filled + size >= bucket_bytes", "unit/packing"),
  Mutant("last buffer lost", "gradients/packing.py", "zip(buckets, reduced, strict=True)", "zip(buckets, reduced)", "unit/packing"),
  Mutant("half precision squared", "gradients/clipping.py", "if _dtype(grad) in (tf.float16, tf.bfloat16):", "if False:", "unit/clipping"),
  Mutant("clipped by row", "gradients/clipping.py", "    grad = indexed_slices.merge_duplicates(grad)", "    pass", "unit/clipping"),
  Mutant("infinity clipped away", "gradients/clipping.py", "  if keep_infinite:", "  if False:", "unit/clipping unit/nonfinite unit/optimizer"),
  Mutant("duplicates kept", "gradients/indexed_slices.py", "rows.shape == [1] or _is_unique(rows)", "True", "unit/indexed_slices unit/reduction"),
  Mutant("positions taken for rows", "gradients/indexed_slices.py", "bool(indices.value_index == 0)", "True", "unit/indexed_slices"),
  Mutant("row gradient unscaled", "gradients/indexed_slices.py", "values = times(grad.values, factor)", "values = grad.values", "unit/indexed_slices"),
  Mutant("duplicate replica let through", "groups.py", "if index[index_of_replica] >= 0:", "if index[index_of_replica] > 0:", "unit/groups"),
  Mutant("replica out of range", "groups.py", "if not 0 <= replica < total:", "if not 0 <= replica <= total:", "unit/groups"),
  Mutant("strided is contiguous", "groups.py", "reshape(group_size, -1).T", "reshape(-1, group_size)", "unit/groups"),
  Mutant("hosts between graphs", "groups.py", "return contiguous(num_replicas, len(devices))", "return strided(num_replicas, len(devices))", "unit/groups"),
  Mutant("seed not scaled", "gradients/differentiation.py", "seed = tf.cast(scale(seed), seed.dtype)", "scale(seed)", f"unit/differentiation {_STEP}"),
  Mutant("weights of another shape", "validation.py", "if not shape.is_compatible_with(expected):", "if False:", "unit/validation"),
  Mutant("old Keras accepted", "versions.py", "if _is_older(found, OLDEST_KERAS):", "if False:", "unit/versions"),
]
# fmt: on


def copy_project(folder: Path) -> None:
  """Copies what the tests need."""
  ignore = shutil.ignore_patterns("__pycache__")
  for name in ("tf_cross_shard", "tests", "benchmarks", "docs"):
    shutil.copytree(PROJECT / name, folder / name, ignore=ignore)
  for name in ("setup.cfg", "README.md"):
    shutil.copy(PROJECT / name, folder)


def try_mutant(mutant: Mutant, folder: Path, limit: float) -> tuple[str, str]:
  """Runs the tests of a mutant; returns the verdict and pytest's last line."""
  file = folder / "tf_cross_shard" / mutant.file
  original = file.read_text(encoding="utf-8")
  file.write_text(mutant.mutated(), encoding="utf-8")
  command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
  try:
    run = subprocess.run(
      [*command, *mutant.paths()],
      cwd=folder,
      # Python would take bytecode of the same second and size for this file's.
      env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
      check=False,
      timeout=limit,
    )
  except subprocess.TimeoutExpired:
    return "TOO LONG", f"more than {limit:.0f} s"
  finally:
    file.write_text(original, encoding="utf-8")
  lines = run.stdout.strip().splitlines() or ["no output"]
  if run.returncode == 1:  # Others than 1: nothing was tested.
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "red", (failed or lines)[-1]
  return ("SURVIVED" if run.returncode == 0 else "NOT RUN"), lines[-1]


def main() -> int:
  """Tries the mutants; returns 1 unless all of them are red."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("words", nargs="*", help="parts of names; default: all")
  parser.add_argument("--check", action="store_true", help="run no test")
  parser.add_argument(
    "--limit", type=float, default=600, help="seconds for each mutant"
  )
  options = parser.parse_args()
  chosen = [
    mutant
    for mutant in MUTANTS
    if not options.words or any(word in mutant.name for word in options.words)
  ]
  stale = [mutant for mutant in chosen if mutant.is_stale()]
  for mutant in stale:
    print(f"STALE    {mutant.name}: see {mutant.file} and {mutant.tests}")
  print(f"{len(stale)} of {len(chosen)} mutants are stale", flush=True)
  if options.check:
    return int(bool(stale) or not chosen)
  rows = [("STALE", mutant.name, 0.0, mutant.file) for mutant in stale]
  with tempfile.TemporaryDirectory() as folder:
    copy_project(Path(folder))
    for mutant in chosen:
      if mutant in stale:
        continue
      start = time.monotonic()
      verdict, line = try_mutant(mutant, Path(folder), options.limit)
      rows.append((verdict, mutant.name, time.monotonic() - start, line))
      print(f"{verdict:9}{mutant.name}", flush=True)
  print()
  for verdict, name, seconds, line in rows:
    print(f"{verdict:9}{name:36}{seconds:5.0f} s  {line}")
  red = [row for row in rows if row[0] == "red"]
  print(f"{len(red)} of {len(rows)} red")
  return int(not rows or len(red) < len(rows))


if __name__ == "__main__":
  sys.exit(main())
