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
  """One way to break the code, and the test files that have to notice."""

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


_CLIP_AND_SUM = re.compile(
  r"call.is_reduced\s+else self._scale_and_clip\(call\)"
  r"(.*?)(self.update.reduce\(grads, call.variables\))",
  re.DOTALL,
)
_CLIPPED_SUMS = (
  r"True else call.grads\1"
  r"self._scale_and_clip(dataclasses.replace(call, grads=\2))"
)
_LIMITS_OFF = """    with overriding.overriding(
      self.wrapped.base_optimizer, **dict.fromkeys(_NORMS)
    ):
"""
_HAS_MOMENTUM = """
    getattr(optimizer, "momentum", 0)
    or getattr(optimizer, "momentums", None)
    or """

# fmt: off
MUTANTS = [
  # The factor of a loss.
  Mutant("the loss is not divided by the group size", "_src/core/loss_factor.py", "return copies / group_size if reduction == MEAN else float(copies)", "return float(copies)", "unit/core/loss_convention"),
  Mutant("the loss is averaged over all replicas, not over the group", "_src/core/loss_factor.py", "copies / group_size", "copies / num_replicas", "unit/core/loss_convention"),
  Mutant("loss_averaged_over is ignored", "_src/core/loss_convention.py", "taken = chosen or default", "taken = default", "unit/core/loss_convention"),
  Mutant("the gradient seed is not scaled", "_src/core/gradients/differentiate.py", "seed = tf.cast(scale(seed), seed.dtype)", "scale(seed)", "unit/core/gradients/differentiate unit/core/optimizer"),
  # Sums over groups.
  Mutant("a replica receives another group's sum", "_src/core/reduce/mirrored.py", "by_group[self.groups.index_of(replica)]", "by_group[self.groups.index_of(replica) - 1]", "unit/core/reduce/mirrored"),
  Mutant("gradients are summed twice", "_src/core/reduce/gradient_reducer.py", "sums = unpack(add_up(buffers[::-1])[::-1])", "sums = unpack(add_up(add_up(buffers)))", "unit/core/reduce/gradient_reducer"),
  Mutant("dense gradients are not summed", "_src/core/reduce/gradient_reducer.py", "if not wide or engine.groups.group_size == 1:", "if True:", "unit/core/reduce/gradient_reducer"),
  Mutant("row-sparse gradients are not summed", "_src/core/reduce/gradient_reducer.py", "of_rows = self._sum_sparse([grads[i] for i in rows])", "of_rows = [grads[i] for i in rows]", "unit/core/reduce/gradient_reducer"),
  Mutant("sums are not divided by the wire scale", "_src/core/reduce/gradient_reducer.py", "1.0 / scale", "1.0", "unit/core/reduce/gradient_reducer unit/core/tf_keras/classes"),
  Mutant("Keras sums over all replicas again", "_src/core/reduce/engine.py", "return isolation.isolate(self.strategy)", "return contextlib.nullcontext()", "unit/core/reduce/isolation unit/core/reduce/engine unit/core/optimizer"),
  # Windows.
  Mutant("accumulation applies the sum, not the mean", "_src/core/accumulation.py", "means.append((before + grad) / tf.cast(calls, before.dtype))", "means.append(before + grad)", "unit/core/accumulation"),
  Mutant("accumulation divides a restored window by the new length", "_src/core/accumulation.py", "tf.cast(calls, before.dtype)", "self._steps", "unit/core/accumulation"),
  Mutant("a restored window that is too long never ends", "_src/core/accumulation.py", "+ 1 >= self._steps", "+ 1 == self._steps", "unit/core/accumulation"),
  Mutant("accumulated sums are not reset", "_src/core/accumulation.py", "stored.assign(tf.zeros_like(before))", "pass", "unit/core/accumulation"),
  Mutant("every call makes a step in spite of accumulation", "_src/core/accumulation.py", "+ 1 >= self._steps", "+ 1 > 0", "unit/core/accumulation"),
  Mutant("None in all calls of a window becomes zeros", "_src/core/accumulation.py", "means.append(None)", "means.append(tf.zeros(variable.shape))", "unit/core/accumulation"),
  Mutant("a gradient that is None in some calls is accepted", "_src/core/accumulation.py", "if has_gradient != self._have_gradients.get(_key(variable), has_gradient):", "if False:", "unit/core/accumulation"),
  # Clipping.
  Mutant("gradients are clipped after the sum", "_src/core/pipeline.py", _CLIP_AND_SUM, _CLIPPED_SUMS, "unit/core/reduce/gradient_reducer"),
  Mutant("clipping limits ignore the loss scale", "_src/core/pipeline.py", "name: self.wrapped.scale_limit(limit)}", "name: limit}", "unit/core/reduce/gradient_reducer"),
  Mutant("norms of half-precision gradients overflow", "_src/core/gradients/clipping.py", "if _dtype(grad) in (tf.float16, tf.bfloat16)", "if False", "unit/core/gradients/clipping"),
  Mutant("duplicate rows are clipped before they are added up", "_src/core/gradients/clipping.py", "if sums_rows else grads", "if False else grads", "unit/core/gradients/clipping"),
  Mutant("clipping hides infinities", "_src/core/gradients/clipping.py", "  if keep_infinite:", "  if False:", "unit/core/gradients/clipping"),
  Mutant("a step does not ask clipping to keep infinities", "_src/core/pipeline.py", "keep_infinite=self.guard.may_skip", "keep_infinite=False", "unit/core/nonfinite"),
  # Steps that are not finite, are skipped.
  Mutant("a step that is not finite is applied", "_src/core/pipeline.py", "          is_finite,\n", "          True,\n", "unit/core/nonfinite"),
  Mutant("one finite element makes a gradient finite", "_src/core/gradients/clipping.py", "tf.reduce_all(tf.math.is_finite(part))", "tf.reduce_any(tf.math.is_finite(part))", "unit/core/nonfinite"),
  Mutant("the global step counts a skipped step", "_src/core/pipeline.py", "clipping.all_finite(sums) if self.guard.may_skip else True", "True", "unit/core/nonfinite"),
  # Shards.
  Mutant("a member takes another member's part of values", "_src/core/reduce/engine.py", "        place, lambda cut", "        place - 1, lambda cut", "unit/core/update/sharded"),
  Mutant("a member receives the sum of another member's part", "_src/core/reduce/mirrored.py", "(tensors, combine)[self.position()]", "(tensors, combine)[self.position() - 1]", "unit/core/update/sharded"),
  Mutant("all weights share one bucket", "_src/core/update/sharded.py", "if limit and buckets[-1] and filled + size > limit:", "if False:", "unit/core/update/sharded"),
  Mutant("each member decides alone whether to skip a step", "_src/core/update/sharded.py", "    if self.guard.may_skip:\n", "    if False:\n", "unit/core/nonfinite"),
  Mutant("a skipped step applies constraints", "_src/core/update/sharded.py", "tf.where(constrains, constraint(value), value)", "constraint(value)", "unit/core/update/sharded"),
  Mutant("Keras clips sums that are clipped already", "_src/core/update/sharded.py", _LIMITS_OFF, "    if True:\n", "unit/core/update/sharded"),
  Mutant("all groups use the first group's settings", "_src/core/group_settings.py", "tf.gather(number.as_tensor(), group)", "tf.gather(number.as_tensor(), 0)", "unit/core/group_settings"),
  # Islands.
  Mutant("an outer step does not change the groups' weights", "_src/islands/outer_optimizer.py", "weight.assign(tf.where(is_finite, anchor, weight))", "pass", "unit/islands/outer_optimizer"),
  Mutant("an outer step that is not finite moves the weights", "_src/islands/outer_optimizer.py", "tf.where(is_finite, anchor, weight)", "anchor", "unit/islands/outer_optimizer"),
  Mutant("an outer optimizer's anchor ignores weights set from outside", "_src/islands/outer_optimizer.py", "copies.write(anchor, copies.here(weight))", "pass", "unit/islands/outer_optimizer"),
  Mutant("outer rounds count the warm-up steps", "_src/islands/outer_optimizer.py", "is_due = before // self._every < now // self._every", "is_due = steps_before // self._every < steps // self._every", "unit/islands/outer_optimizer"),
  Mutant("embedding tables are sharded", "_src/core/update/sharded.py", "if self.tables.is_table(variable):", "if False:", "unit/core/update/rows"),
  # Rows.
  Mutant("lazy rows update all rows", "_src/core/update/rows.py", "      update_step(grad, variable, *rate)\n      return\n", "      pass\n    update_step(grad, variable, *rate)\n    return\n", "unit/core/update/rows"),
  Mutant("rows that occur have no weight decay", "_src/core/update/rows.py", "if decays:", "if False:", "unit/core/update/rows"),
  Mutant("SGD with momentum is updated by rows without lazy_rows", "_src/core/update/rows.py", _HAS_MOMENTUM, "\n    ", "unit/core/reduce/gradient_reducer"),
  Mutant("weight decay changes rows that do not occur", "_src/core/update/rows.py", "self._wrapped.without_decay(tables)", "self._wrapped.without_decay([])", "unit/core/update/rows"),
  Mutant("rows of equal indices are not added up", "_src/core/gradients/row_sparse.py", "rows.shape == [1] or _is_unique(rows)", "True", "unit/core/gradients/row_sparse"),
  Mutant("tf.unique's positions count as unique rows", "_src/core/gradients/row_sparse.py", "bool(indices.value_index == 0)", "True", "unit/core/gradients/row_sparse"),
  Mutant("row-sparse gradients are not scaled", "_src/core/gradients/row_sparse.py", "values = times(grad.values, factor)", "values = grad.values", "unit/core/gradients/row_sparse"),
  # Kernels.
  Mutant("an overridden attribute is not restored", "_src/core/wrapped/overriding.py", "        present[name] = before[name]", "        pass", "unit/core/wrapped/fused"),
  Mutant("kernels use beta powers of the previous step", "_src/core/wrapped/fused.py", "optimizer.iterations) + 1", "optimizer.iterations)", "unit/core/wrapped/fused"),
  # The wire.
  Mutant("gradients travel in their own dtype, not in wire_dtype", "_src/core/gradients/compression.py", "and dtype.size > wire_dtype.size", "and False", "unit/core/gradients/compression"),
  Mutant("sums keep the wire dtype", "_src/core/gradients/compression.py", "tensor if tensor.dtype == wide.dtype else tf.cast(tensor, wide.dtype)", "tensor", "unit/core/gradients/compression"),
  Mutant("a tensor as large as a bucket shares a bucket", "_src/core/gradients/packing.py", "if size >= bucket_bytes:", "if size > bucket_bytes:", "unit/core/gradients/packing"),
  Mutant("a tensor that just fits starts a new bucket", "_src/core/gradients/packing.py", "filled + size > bucket_bytes", "filled + size >= bucket_bytes", "unit/core/gradients/packing"),
  Mutant("a missing buffer is not noticed", "_src/core/gradients/packing.py", "zip(buckets, joined, reduced, strict=True)", "zip(buckets, joined, reduced)", "unit/core/gradients/packing"),
  # Groups, and what is checked.
  Mutant("a replica may be in a group twice", "_src/core/groups.py", "if times[i] > 1]", "if times[i] > 2]", "unit/core/groups"),
  Mutant("replica numbers may be one too large", "_src/core/groups.py", "if not 0 <= i < total]", "if not 0 <= i <= total]", "unit/core/groups"),
  Mutant("strided groups are contiguous", "_src/core/groups.py", "reshape(group_size, -1).T", "reshape(-1, group_size)", "unit/core/groups"),
  Mutant("groups of hosts are strided, not contiguous", "_src/core/groups.py", "return contiguous(num_replicas, len(devices))", "return strided(num_replicas, len(devices))", "unit/core/groups"),
  Mutant("a gradient of another shape than its variable is accepted", "_src/core/validation.py", "if not shape.is_compatible_with(expected):", "if False:", "unit/core/validation"),
  Mutant("old versions are accepted", "_src/core/versions.py", "if version.Version(number) < version.Version(oldest):", "if False:", "unit/core/versions"),
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
    print(f"{verdict:9}{name:60}{seconds:5.0f} s  {line}")
  red = [row for row in rows if row[0] == "red"]
  print(f"{len(red)} of {len(rows)} red")
  return int(not rows or len(red) < len(rows))


if __name__ == "__main__":
  sys.exit(main())
