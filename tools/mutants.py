#!/usr/bin/env python3
# ruff: noqa: E501
"""Breaks the code on purpose, and tells which breaks no test notices.

    python tools/mutants.py              # every mutant
    python tools/mutants.py rows core/   # those whose line holds such a word
    python tools/mutants.py --check      # only whether the patterns are there

Each mutant replaces one pattern in a copy of the project, and runs the tests
named beside it. A test may go if all of these still fail: exits with 1 if the
tests of a mutant pass or do not run, or if its pattern is not there once.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).absolute().parent.parent

# The file in tf_cross_shard/_src, tests in tests/unit, the pattern, what replaces it.
# fmt: off
MUTANTS = [
  # The factor of a loss.
  ("core/loss_factor.py", "core/loss_convention", "return copies / group_size if reduction == MEAN else", "return"),
  ("core/loss_convention.py", "core/loss_convention", "taken = chosen or default", "taken = default"),
  ("core/gradients/differentiate.py", "core/gradients/differentiate core/optimizer", "seed = tf.cast(scale(seed), seed.dtype)", "scale(seed)"),
  # Sums over groups.
  ("core/reduce/mirrored.py", "core/reduce/mirrored", "by_group[self.groups.index_of(replica)]", "by_group[self.groups.index_of(replica) - 1]"),
  ("core/reduce/gradient_reducer.py", "core/reduce/gradient_reducer", "sums = unpack(add_up(buffers[::-1])[::-1])", "sums = unpack(add_up(add_up(buffers)))"),
  ("core/reduce/gradient_reducer.py", "core/reduce/gradient_reducer", "self._sum_sparse([grads[i] for i in rows])", "[grads[i] for i in rows]"),
  ("core/reduce/gradient_reducer.py", "core/reduce/gradient_reducer core/tf_keras/classes", "1.0 / scale", "1.0"),
  ("core/reduce/engine.py", "core/reduce/isolation core/reduce/engine", "return isolation.isolate(self.strategy)", "return contextlib.nullcontext()"),
  ("core/gradients/compression.py", "core/gradients/compression", "tensor if tensor.dtype == wide.dtype else tf.cast(tensor, wide.dtype)", "tensor"),
  ("core/gradients/packing.py", "core/gradients/packing", "zip(buckets, joined, reduced, strict=True)", "zip(buckets, joined, reduced)"),
  ("core/groups.py", "core/groups", "if times[i] > 1]", "if times[i] > 2]"),
  ("core/validation.py", "core/validation", "if not shape.is_compatible_with(expected):", "if False:"),
  # Windows.
  ("core/accumulation.py", "core/accumulation", "(before + grad) / tf.cast(calls, before.dtype)", "before + grad"),
  ("core/accumulation.py", "core/accumulation", "+ 1 >= self._steps", "+ 1 == self._steps"),
  ("core/accumulation.py", "core/accumulation", "stored.assign(tf.zeros_like(before))", "pass"),
  # Clipping, and steps that are not finite.
  ("core/pipeline.py", "core/reduce/gradient_reducer", "name: self.wrapped.scale_limit(limit)}", "name: limit}"),
  ("core/pipeline.py", "core/update/nonfinite", "keep_infinite=self.guard.may_skip", "keep_infinite=False"),
  ("core/pipeline.py", "core/update/nonfinite", "          is_finite,\n", "          True,\n"),
  ("core/pipeline.py", "core/update/nonfinite", "clipping.all_finite(sums) if self.guard.may_skip else True", "True"),
  ("core/gradients/clipping.py", "core/gradients/clipping", "if _dtype(grad) in (tf.float16, tf.bfloat16)", "if False"),
  ("core/gradients/clipping.py", "core/gradients/clipping", "if sums_rows else grads", "if False else grads"),
  ("core/gradients/clipping.py", "core/update/nonfinite", "tf.reduce_all(tf.math.is_finite(part))", "tf.reduce_any(tf.math.is_finite(part))"),
  # Shards.
  ("core/reduce/engine.py", "core/update/sharded", "        place, lambda cut", "        place - 1, lambda cut"),
  ("core/reduce/mirrored.py", "core/update/sharded", "(tensors, combine)[self.position()]", "(tensors, combine)[self.position() - 1]"),
  ("core/update/sharded.py", "core/update/nonfinite", "    if self.guard.may_skip:\n", "    if False:\n"),
  ("core/update/sharded.py", "core/update/rows", "if self.tables.is_table(variable):", "if False:"),
  ("core/update/sharded.py", "core/update/sharded", "tf.where(constrains, constraint(value), value)", "constraint(value)"),
  # Rows.
  ("core/update/rows.py", "core/update/rows", "      update_step(grad, variable, *rate)\n      return\n", "      pass\n    update_step(grad, variable, *rate)\n    return\n"),
  ("core/update/rows.py", "core/update/rows", "if decays:", "if False:"),
  ("core/update/rows.py", "core/update/rows", "self._wrapped.without_decay(tables)", "self._wrapped.without_decay([])"),
  ("core/gradients/row_sparse.py", "core/gradients/row_sparse", "rows.shape == [1] or _is_unique(rows)", "True"),
  # Kernels, and numbers by model.
  ("core/wrapped/fused.py", "core/wrapped/fused", "optimizer.iterations) + 1", "optimizer.iterations)"),
  ("core/wrapped/overriding.py", "core/wrapped/fused", "        present[name] = before[name]", "        pass"),
  ("core/per_model/settings.py", "core/per_model/settings", "tf.gather(number.as_tensor(), group)", "tf.gather(number.as_tensor(), 0)"),
  # Satellites.
  ("vectorized/vectorizer.py", "vectorized/control_flow", "return tf.where(tf.reshape(mask, [-1, *ones]), values, others)", "return values"),
  ("islands/outer_optimizer.py", "islands/outer_optimizer", "tf.where(is_finite, anchor, weight)", "anchor"),
  ("towers/gradient_collector.py", "towers/gradient_collector towers/tower_optimizer", "1.0 / count if reduction == loss_factor.MEAN else 1.0", "1.0"),
  ("fit/per_model_early_stopping.py", "fit/per_model_early_stopping", "(wait >= self.patience)", "(wait > self.patience)"),
  ("models/archive.py", "models/archive", "os.fsync(file.fileno())", "pass"),
  ("backup/backup_files.py", "backup/backup", "self._backups()[:-keep]", "self._backups()[: 1 - keep]"),
  ("multi_worker/even_batches.py", "multi_worker/even_batches", "batches = dataset.repeat()", "batches = dataset"),
  ("migration/checkpoints.py", "migration/checkpoints", "_factor_of_momentum(base_optimizer, step)", "1.0"),
]
# fmt: on


def mutated(file: Path, pattern: str, replacement: str) -> str:
  """The file's text with the break; empty if the pattern is not there once."""
  text = file.read_text(encoding="utf-8") if file.exists() else ""
  return text.replace(pattern, replacement) if text.count(pattern) == 1 else ""


def run(folder: Path, tests: str) -> str:
  """Runs tests in a copy of the project; "found" if one of them failed."""
  names = [f"tests/unit/{name}_test.py" for name in tests.split()]
  options = ["-qx", "-m", "", "-p", "no:cacheprovider"]
  try:
    status = subprocess.run(
      [sys.executable, "-m", "pytest", *options, *names],
      cwd=folder,
      # Bytecode of the same second and size would be taken for this file's.
      env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "."},
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      timeout=900,
    ).returncode
  except subprocess.TimeoutExpired:
    return "TOO LONG"
  return {0: "SURVIVED", 1: "found"}.get(status, "NOT RUN")


def main(words: list[str]) -> int:
  """Tries the mutants; returns 1 unless a test finds each of them."""
  only_checks = "--check" in words
  words = [word for word in words if word != "--check"]
  missed = 0
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name, "project")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
    shutil.copytree(PROJECT, folder, ignore=ignored)
    for place, tests, pattern, replacement in MUTANTS:
      if words and not any(word in f"{place} {pattern}" for word in words):
        continue
      file = folder / "tf_cross_shard/_src" / place
      text, verdict = mutated(file, pattern, replacement), "STALE"
      if text and only_checks:
        continue
      if text:
        original = file.read_text(encoding="utf-8")
        file.write_text(text, encoding="utf-8")
        verdict = run(folder, tests)
        file.write_text(original, encoding="utf-8")
      missed += verdict != "found"
      shown = " ".join(pattern.split())[:60]
      print(f"{verdict:9}{place:34}{shown}", flush=True)
  print(f"{missed} not found")
  return min(missed, 1)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
