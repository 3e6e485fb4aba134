#!/usr/bin/env python3
# ruff: noqa: E501
"""Breaks the code on purpose, and says how many tests go red.

    python tools/mutants.py              # every mutant
    python tools/mutants.py mean sum     # those whose names hold such a word

Each mutant is one text replaced in a copy of the project. Exits 1 if one
survives: no test that is named for it fails.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).absolute().parent.parent


class Mutant(NamedTuple):
  """What is broken where, and which test files have to notice."""

  file: str
  old: str | re.Pattern[str]
  new: str
  tests: str


_STEP = "unit/optimizer unit/tf_keras equivalence/equivalence"
_REDUCED = f"unit/reduction unit/mirrored {_STEP}"
_BUFFERS = "    sums = unpack(add_up(buffers, groups))"
_CLIP_AND_SUM = re.compile(
  r"grads = (clipping\.clip\(.*?\n    \))\n    return (reduction.*?\n    \))",
  re.DOTALL,
)

# fmt: off
MUTANTS = {
  "mean factor dropped": Mutant("gradients/loss_factor.py", "return copies / group_size if reduction == MEAN else float(copies)", "return float(copies)", f"unit/loss_factor {_STEP}"),
  "mean over all, not the group": Mutant("gradients/loss_factor.py", "copies / group_size", "copies / num_replicas", f"unit/loss_factor {_STEP}"),
  "the user's convention ignored": Mutant("gradients/loss_factor.py", "self.averaged_over or default", "default", f"unit/loss_factor {_STEP}"),
  "two groups swapped": Mutant("collectives/mirrored.py", "by_group[groups.index_of(self._replica())]", "by_group[groups.index_of(self._replica()) - 1]", _REDUCED),
  "reduced twice": Mutant("collectives/reduction.py", _BUFFERS, "    sums = unpack(add_up(add_up(buffers, groups), groups))", _REDUCED),
  "sum dropped": Mutant("collectives/reduction.py", "if not grads or groups.group_size == 1:", "if True:", _REDUCED),
  "rows not summed": Mutant("collectives/reduction.py", "if grads and groups.group_size > 1:", "if False:", _REDUCED),
  "Keras reduces again": Mutant("collectives/base.py", "return replica_isolation.isolate(self.strategy)", "return contextlib.nullcontext()", f"unit/replica_isolation {_STEP}"),
  "nonfinite step applied": Mutant("gradients/nonfinite.py", "tf.cond(is_finite, apply, lambda: None)", "apply()", "unit/nonfinite equivalence/interplay"),
  "nonfinite where one is, not all": Mutant("gradients/nonfinite.py", "tf.reduce_all(tf.math.is_finite(part))", "tf.reduce_any(tf.math.is_finite(part))", "unit/nonfinite equivalence/interplay"),
  "clipped after the sum": Mutant("optimizer.py", _CLIP_AND_SUM, r"grads = \2\n    return \1", "unit/optimizer unit/tf_keras"),
  "limit in another loss scale": Mutant("optimizer.py", "self._inner.scale_limit(limit) if limit", "limit if limit", "unit/optimizer unit/tf_keras"),
  "not narrowed": Mutant("gradients/packing.py", "and dtype.size > wire_dtype.size", "and False", "unit/packing unit/wire_dtype"),
  "not widened": Mutant("gradients/packing.py", "tensor if tensor.dtype == wide.dtype else tf.cast(tensor, wide.dtype)", "tensor", "unit/packing unit/wire_dtype"),
  "full bucket shared": Mutant("gradients/packing.py", "if size >= bucket_bytes:", "if size > bucket_bytes:", "unit/packing"),
  "bucket one byte too small": Mutant("gradients/packing.py", "filled + size > bucket_bytes", "filled + size >= bucket_bytes", "unit/packing"),
  "last buffer lost": Mutant("gradients/packing.py", "zip(buckets, reduced, strict=True)", "zip(buckets, reduced)", "unit/packing"),
  "half precision squared": Mutant("gradients/clipping.py", "if _dtype(grad) in (tf.float16, tf.bfloat16):", "if False:", "unit/clipping"),
  "clipped by row": Mutant("gradients/clipping.py", "    grad = indexed_slices.merge_duplicates(grad)", "    pass", "unit/clipping"),
  "infinity clipped away": Mutant("gradients/clipping.py", "  if keep_infinite:", "  if False:", "unit/clipping unit/nonfinite unit/optimizer"),
  "duplicates kept": Mutant("gradients/indexed_slices.py", "rows.shape == [1] or _is_unique(rows)", "True", "unit/indexed_slices unit/reduction"),
  "positions taken for rows": Mutant("gradients/indexed_slices.py", "bool(indices.value_index == 0)", "True", "unit/indexed_slices"),
  "row gradient unscaled": Mutant("gradients/indexed_slices.py", "values = times(grad.values, factor)", "values = grad.values", "unit/indexed_slices"),
  "duplicate replica let through": Mutant("groups.py", "if index[index_of_replica] >= 0:", "if index[index_of_replica] > 0:", "unit/groups"),
  "replica out of range": Mutant("groups.py", "if not 0 <= replica < total:", "if not 0 <= replica <= total:", "unit/groups"),
  "strided is contiguous": Mutant("groups.py", "reshape(group_size, -1).T", "reshape(-1, group_size)", "unit/groups"),
  "hosts between graphs": Mutant("groups.py", "return contiguous(num_replicas, len(devices))", "return strided(num_replicas, len(devices))", "unit/groups"),
  "seed not scaled": Mutant("gradients/compute.py", "seed = tf.cast(scale(seed), seed.dtype)", "scale(seed)", f"unit/compute {_STEP}"),
  "weights of another shape": Mutant("validation.py", "if not shape.is_compatible_with(expected):", "if False:", "unit/validation"),
  "old Keras accepted": Mutant("versions.py", "if found < OLDEST_KERAS:", "if False:", "unit/versions"),
}
# fmt: on


def count_red(mutant: Mutant) -> str:
  """Runs the tests of a mutant in a copy; returns pytest's last line."""
  with tempfile.TemporaryDirectory() as folder:
    copy = Path(folder, "copy")
    for name in ("tf_cross_shard", "tests", "benchmarks", "docs"):
      shutil.copytree(PROJECT / name, copy / name)
    for name in ("setup.cfg", "README.md"):
      shutil.copy(PROJECT / name, copy)
    file = copy / "tf_cross_shard" / mutant.file
    pattern, new = mutant.old, mutant.new
    if isinstance(pattern, str):
      pattern, new = re.compile(re.escape(pattern)), new.replace("\\", "\\\\")
    text, count = pattern.subn(new, file.read_text())
    assert count == 1, f"{mutant.file} has {count} times {mutant.old}"
    file.write_text(text)
    tests = [f"tests/{name}_test.py" for name in mutant.tests.split()]
    run = subprocess.run(
      [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
      cwd=copy,
      capture_output=True,
      text=True,
      check=False,
    )
  return run.stdout.strip().splitlines()[-1]


def main(words: list[str]) -> int:
  """Tries the mutants; returns 1 if one survives."""
  survived = 0
  for name, mutant in MUTANTS.items():
    if words and not any(word in name for word in words):
      continue
    outcome = count_red(mutant)
    is_red = re.search(r"\d+ (failed|error)", outcome)
    survived += not is_red
    print(
      f"{'red     ' if is_red else 'SURVIVED'} {name}: {outcome}", flush=True
    )
  return int(survived > 0)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
