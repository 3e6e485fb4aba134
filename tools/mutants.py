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


_CLIP_AND_SUM = re.compile(
  r"own = call.grads if call.is_reduced else self.clip\(call\)(.*?)"
  r"(self.update.reduce\(totals, call.variables, calls\))",
  re.DOTALL,
)
_CLIPPED_SUMS = (
  r"own = call.grads\1self.clip(dataclasses.replace(call, grads=\2))"
)

# fmt: off
MUTANTS = [
  # The factor of a loss.
  Mutant("mean factor dropped", "gradients/loss_factor.py", "return copies / group_size if reduction == MEAN else float(copies)", "return float(copies)", "unit/loss_factor"),
  Mutant("mean over all, not the group", "gradients/loss_factor.py", "copies / group_size", "copies / num_replicas", "unit/loss_factor"),
  Mutant("the user's convention ignored", "step/loss_convention.py", "taken = chosen or default", "taken = default", "unit/loss_convention"),
  Mutant("seed not scaled", "gradients/differentiation.py", "seed = tf.cast(scale(seed), seed.dtype)", "scale(seed)", "unit/differentiation unit/optimizer"),
  # Sums over groups.
  Mutant("two groups swapped", "collectives/mirrored.py", "by_group[self.groups.index_of(self._replica())]", "by_group[self.groups.index_of(self._replica()) - 1]", "unit/mirrored"),
  Mutant("reduced twice", "step/reduction.py", "sums = unpack(add_up(buffers[::-1])[::-1])", "sums = unpack(add_up(add_up(buffers)))", "unit/reduction"),
  Mutant("sum dropped", "step/reduction.py", "if not wide or engine.groups.group_size == 1:", "if True:", "unit/reduction"),
  Mutant("rows not summed", "step/reduction.py", "if grads and self._engine.groups.group_size > 1:", "if False:", "unit/reduction"),
  Mutant("wire scale kept", "step/reduction.py", "1.0 / scale", "1.0", "unit/wire_dtype unit/tf_keras"),
  Mutant("Keras reduces again", "collectives/base.py", "return replica_isolation.isolate(self.strategy)", "return contextlib.nullcontext()", "unit/replica_isolation"),
  Mutant("values summed, not averaged", "step/update.py", "mean = 1.0 / self._engine.groups.group_size", "mean = 1.0", "unit/reduction"),
  # Windows.
  Mutant("wrong divisor of a window", "step/accumulation.py", "return total / calls", "return total", "unit/accumulation"),
  Mutant("divided by the longest window", "step/accumulation.py", "return total / calls", "return total / self.steps", "unit/accumulation"),
  Mutant("windows go on for ever", "step/accumulation.py", "is_last = self._place() + 1 >= self._length", "is_last = tf.equal(self._place() + 1, self._length)", "unit/accumulation"),
  Mutant("noise of all windows alike", "step/noise_scale.py", "noise = calls.share * (own - mean)", "noise = (own - mean)", "unit/noise_scale unit/adaptive_accumulation"),
  Mutant("windows of the noisiest group", "callbacks/adaptive_accumulation.py", "statistics.median_low(", "statistics.median_high(", "unit/adaptive_accumulation"),
  Mutant("sums of a window kept", "step/accumulation.py", "variable.assign(tf.zeros_like(before))", "pass", "unit/accumulation"),
  Mutant("every call ends a window", "step/accumulation.py", "is_last = self._place() + 1 >= self._length", "is_last = tf.constant(True)", "unit/accumulation"),
  Mutant("calls of Keras counted once", "step/accumulation.py", "return noise_scale.Calls(summed=self.steps)", "return noise_scale.ONE_CALL", "unit/noise_scale"),
  Mutant("None ends a window without its sum", "step/accumulation.py", "key in self._added or _is_open(kept):", "False:", "unit/accumulation"),
  Mutant("None in all calls made zeros", "step/accumulation.py", "key in self._added or _is_open(kept):", "True:", "unit/accumulation"),
  Mutant("gradient that no end takes", "step/accumulation.py", "if key in self._left_out:", "if False:", "unit/accumulation"),
  Mutant("gradient of a window long ago", "step/accumulation.py", "self._added -= set(map(self._key, variables))", "pass", "unit/accumulation"),
  # Clipping.
  Mutant("clipped after the sum", "step/flow.py", _CLIP_AND_SUM, _CLIPPED_SUMS, "unit/reduction"),
  Mutant("limit in another loss scale", "step/flow.py", "self._inner.scale_limit(limit) if limit", "limit if limit", "unit/reduction"),
  Mutant("half precision squared", "gradients/clipping.py", "if _dtype(grad) in (tf.float16, tf.bfloat16):", "if False:", "unit/clipping"),
  Mutant("clipped by row", "gradients/clipping.py", "    grad = indexed_slices.merge_duplicates(grad)", "    pass", "unit/clipping"),
  Mutant("infinity clipped away", "gradients/clipping.py", "  if keep_infinite:", "  if False:", "unit/clipping"),
  Mutant("infinity not asked for", "step/flow.py", "keep_infinite=self.guard.may_skip", "keep_infinite=False", "unit/nonfinite"),
  # Steps that are not finite, and noise.
  Mutant("nonfinite step applied", "step/nonfinite.py", "tf.cond(is_finite, apply, lambda: None)", "apply()", "unit/nonfinite"),
  Mutant("nonfinite where all are, not one", "step/nonfinite.py", "tf.reduce_all(tf.math.is_finite(part))", "tf.reduce_any(tf.math.is_finite(part))", "unit/nonfinite"),
  Mutant("global step of a skipped step", "step/nonfinite.py", "return all_finite(sums) if self._inner.scales_dynamically else True", "return True", "unit/nonfinite"),
  Mutant("norms of members not averaged", "step/noise_scale.py", "of_members * (member**2 / n)", "of_members * member**2", "unit/noise_scale"),
  Mutant("noise in another loss scale", "step/noise_scale.py", "return self._inner.scale_limit(calls.summed)", "return calls.summed", "unit/noise_scale"),
  # Shards.
  Mutant("part of another member", "collectives/base.py", "return _pack(values, parts, place)", "return _pack(values, parts, place - 1)", "unit/sharded_update"),
  Mutant("sum of another member's part", "collectives/mirrored.py", "(tensors, combine)[self.position()]", "(tensors, combine)[self.position() - 1]", "unit/sharded_update"),
  Mutant("all rows in one", "step/flat_update.py", "if limit and rows[-1] and filled + size > limit:", "if False:", "unit/sharded_update"),
  Mutant("norm of one part", "step/sharded_update.py", "[total] = self._engine.all_reduce_sum([tf.add_n(squares)])", "total = tf.add_n(squares)", "unit/sharded_update"),
  Mutant("members skip apart", "step/sharded_update.py", "    if not self._may_skip:\n      return parts", "    return parts", "unit/nonfinite"),
  Mutant("constraint of a skipped step", "step/flat_update.py", "tf.where(is_step, constraint(value), value)", "constraint(value)", "unit/sharded_update"),
  Mutant("sums clipped twice", "step/sharded_update.py", "with update.without_clipping(last, *self._clipped):", "if True:", "unit/sharded_update"),
  Mutant("the first group's settings", "step/group_settings.py", "values[group] for name, values", "values[0] for name, values", "unit/group_settings"),
  Mutant("what int8 rounds away is lost", "callbacks/fragments.py", "[d + kept for d, kept in zip(found, self.kept, strict=True)]", "found", "unit/fragments"),
  Mutant("a late result is not mixed", "callbacks/fragments.py", "alpha * weight + (1.0 - alpha) * anchor if alpha else anchor", "anchor", "unit/fragments"),
  Mutant("fragments share their count of updates", "callbacks/fragments.py", "_shared_state(outer) if is_part else []", "[]", "unit/fragments"),
  Mutant("a late result of other weights", "callbacks/outer_optimizer.py", "self._sent.assign(tf.zeros_like(self._sent))", "pass", "unit/fragments"),
  Mutant("a NaN kept by int8", "callbacks/fragments.py", "variable.assign(tf.where(is_done, value, variable))", "variable.assign(value)", "unit/fragments"),
  Mutant("half of int8's numbers", "gradients/quantization.py", "divide_no_nan(largest, 127.0)", "divide_no_nan(largest, 63.0)", "unit/fragments"),
  Mutant("the worst trials go on", "callbacks/halving.py", "self.table.ranking[: self._rungs", "self.table.ranking[::-1][: self._rungs", "unit/trials"),
  Mutant("a trial goes on from another's state", "callbacks/halving.py", "self._state_path(n, rung - 1) for n in", "self._state_path(0, rung - 1) for n in", "unit/trials"),
  Mutant("groups keep the settings of the wave before", "callbacks/halving.py", "    group_files.restore(paths, self.copies(is_whole=True))\n    self._give()", "    group_files.restore(paths, self.copies(is_whole=True))", "unit/trials"),
  Mutant("the best goes on from the worst", "callbacks/population.py", "          source, target, self.model", "          target, source, self.model", "unit/population"),
  Mutant("the first member's slots", "step/sharded_state.py", "return parts[self._owner]", "return parts[0]", "unit/owner_update"),
  Mutant("owners that share nothing", "gradients/layout.py", "if cut.start == filled[cut.index]:", "if True:", "unit/owner_update"),
  Mutant("tables in shards", "step/sharded_update.py", "if self._tables.is_table(variable):", "if False:", "unit/row_update"),
  # Rows.
  Mutant("lazy rows touch all rows", "step/row_update.py", "      update_step(grad, variable, *rate)\n      return\n", "      pass\n    update_step(grad, variable, *rate)\n    return\n", "unit/row_update"),
  Mutant("rows that do not decay", "step/row_update.py", "if decays:", "if False:", "unit/row_update"),
  Mutant("momentum taken for exact", "step/row_update.py", 'getattr(last, "momentum", 0)\n    or getattr(last, "momentums", None)\n    or ', "", "unit/reduction"),
  Mutant("tables decay as a whole", "step/row_update.py", "self._inner.without_decay(tables)", "self._inner.without_decay([])", "unit/row_update"),
  Mutant("duplicates kept", "gradients/indexed_slices.py", "rows.shape == [1] or _is_unique(rows)", "True", "unit/indexed_slices"),
  Mutant("positions taken for rows", "gradients/indexed_slices.py", "bool(indices.value_index == 0)", "True", "unit/indexed_slices"),
  Mutant("row gradient unscaled", "gradients/indexed_slices.py", "values = times(grad.values, factor)", "values = grad.values", "unit/indexed_slices"),
  # Kernels.
  Mutant("update step of the user's lost", "inner_optimizer/libraries.py", "      vars(optimizer)[method] = before", "      pass", "unit/fused_update"),
  Mutant("powers of the step before", "inner_optimizer/fused_update.py", "tf.cast(count + 1, dtype)", "tf.cast(count, dtype)", "unit/fused_update"),
  # The wire.
  Mutant("not narrowed", "gradients/packing.py", "and dtype.size > wire_dtype.size", "and False", "unit/packing"),
  Mutant("not widened", "gradients/packing.py", "tensor if tensor.dtype == wide.dtype else tf.cast(tensor, wide.dtype)", "tensor", "unit/packing"),
  Mutant("what int8 leaves of gradients is lost", "step/int8_wire.py", "\n        + indexed_slices.times(tf.convert_to_tensor(residual), scale)", "", "unit/int8_wire"),
  Mutant("what the second phase leaves is lost", "step/int8_wire.py", "self._in_order(total - sums[self._engine.position()], left)", "self._in_order(tf.zeros_like(total), left)", "unit/int8_wire"),
  Mutant("one phase only", "step/int8_wire.py", "    words = self._engine.all_gather_part(quantization.encode(total))\n    sums = quantization.decode(tf.reshape(words, [members, -1]), part)", "    sums = tf.reshape(self._engine.all_gather_part(total), [members, part])", "unit/int8_wire"),
  Mutant("a NaN left by int8", "step/int8_wire.py", "tf.where(is_step, new, old)", "new", "unit/int8_wire"),
  Mutant("what is left in another loss scale", "step/int8_wire.py", "scale = 1.0 / self._inner.scale_limit(1.0)", "scale = 1.0", "unit/int8_wire"),
  Mutant("full bucket shared", "gradients/packing.py", "if size >= bucket_bytes:", "if size > bucket_bytes:", "unit/packing"),
  Mutant("bucket one byte too small", "gradients/packing.py", "filled + size > bucket_bytes", "filled + size >= bucket_bytes", "unit/packing"),
  Mutant("last buffer lost", "gradients/packing.py", "zip(buckets, joined, reduced, strict=True)", "zip(buckets, joined, reduced)", "unit/packing"),
  # Groups, and what is checked.
  Mutant("duplicate replica let through", "groups.py", "if times[i] > 1]", "if times[i] > 2]", "unit/groups"),
  Mutant("replica out of range", "groups.py", "if not 0 <= i < total]", "if not 0 <= i <= total]", "unit/groups"),
  Mutant("strided is contiguous", "groups.py", "reshape(group_size, -1).T", "reshape(-1, group_size)", "unit/groups"),
  Mutant("hosts between graphs", "groups.py", "return contiguous(num_replicas, len(devices))", "return strided(num_replicas, len(devices))", "unit/groups"),
  Mutant("weights of another shape", "validation.py", "if not shape.is_compatible_with(expected):", "if False:", "unit/validation"),
  Mutant("old Keras accepted", "versions.py", "if version.Version(number) < version.Version(oldest):", "if False:", "unit/versions"),
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
