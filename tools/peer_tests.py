"""Runs tf_keras' own tests of MirroredStrategy with data-parallel replicas.

    python tools/peer_tests.py clone
    python tools/peer_tests.py clone keras_metrics checkpointing

The tests are not in tf_keras' wheel, nor in its source distribution on PyPI, so
you need a clone of the version that is installed. Each test runs with
MirroredStrategy on two logical CPUs, and with `VectorizedStrategy(2,
split_batches=True)`. Prints the tests that pass with the first one only, and
why. `CANNOT_PASS` lists the reasons that are known. Takes an hour; with words,
only files whose path contains one of them run.

Exits with 1 if a test fails for another reason. Some tests need the packages
portpicker and tensorboard, and fail with both strategies without them.
"""

import argparse
import collections
import pathlib
import re
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parent.parent))

from tests.support import peer_runs

# Files with tests of other strategies.
_OF_OTHERS = re.compile(r"multi_worker|mwms|parameter_server|_pss?_|dtensor")
# Files with tests that ask for strategies by name.
_BY_NAME = re.compile(r"strategy_combinations|distribute\.combinations")
# Modules of tests, which the wheel lacks, too.
_HELPERS = ("integration_test/preprocessing_test_utils.py",)
_OPTIONS = (
  # Replicas on one device have no variables in graphs of TensorFlow 1, and say
  # so.
  *("-k", "not mode_graph"),
  *("--timeout=60", "--timeout-method=signal"),
)
# Parts of the names of tests that cannot pass, or of their errors, and why.
CANNOT_PASS = {
  "in a graph of TensorFlow 1": "a test in eager mode that creates a graph",
  "A SavedModel has one value of each variable": (
    "replica_state.load_group makes a model that can be exported"
  ),
  "cannot load a SavedModel inside of its scope": (
    "load it outside of the scope, and copy the weights"
  ),
  "optimizer._distributed_apply(": (
    "calls a private method of TensorFlow 1 with variables that replicas return"
  ),
  "inner_variable=MirroredVariable": "asks for the name of a class",
  "Cannot batch tensors with different shapes": (
    "gives replicas batches of different sizes; they run one program"
  ),
  "make_input_fn_iterator": "asks for an iterator of TensorFlow 1",
  "Mixed precision is not supported with": (
    "tf_keras' LossScaleOptimizer refuses strategies that it does not know"
  ),
  "ctl_tutorial_test": (
    "trains on a batch of one example, which is repeated, so it counts twice"
  ),
}


def main() -> int:
  """Runs the tests; returns 1 if one fails for a reason that is not listed."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("clone", type=pathlib.Path, help="a clone of tf-keras")
  parser.add_argument("words", nargs="*", help="parts of paths of files")
  options = parser.parse_args()
  counts = collections.Counter[str]()
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    for file in _copy(options.clone / "tf_keras", folder):
      path = str(file.relative_to(folder))
      if not options.words or any(word in path for word in options.words):
        counts += _compare(file, folder)
  print(f"[peer_tests] {dict(counts)}")
  return min(counts["unlisted"], 1)


def _copy(source: pathlib.Path, folder: pathlib.Path) -> list[pathlib.Path]:
  """Copies tf_keras' tests into a folder, and returns the paths of the copies.

  The copies import from `tf_keras.src`, where the installed package has its
  modules.
  """
  found = []
  for file in sorted(source.rglob("*.py")):
    path, text = str(file.relative_to(source)), file.read_text()
    is_test = path.endswith("_test.py") and _BY_NAME.search(text)
    if _OF_OTHERS.search(path) or not (is_test or path in _HELPERS):
      continue
    copy = folder / path
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(
      re.sub(
        r"^(\s*(?:from|import) tf_keras)(?=[. ])(?!\.(?:src|protobuf)\b)",
        r"\1.src",
        text,
        flags=re.M,
      )
    )
    if is_test:
      found.append(copy)
  return found


def _compare(
  file: pathlib.Path, folder: pathlib.Path
) -> collections.Counter[str]:
  """Runs a file with both strategies; prints what passes with one only."""
  passed = {}
  for strategy in ("mirrored", "vectorized"):
    tests = peer_runs.run(
      [file],
      folder,
      strategy,
      [f"--peer-folder={folder}", *_OPTIONS],
      {"TF_USE_LEGACY_KERAS": "1"},
    )
    passed[strategy] = {
      name for name, test in tests.items() if test["outcome"] == "passed"
    }
  counts = collections.Counter(
    run=len(tests),
    mirrored=len(passed["mirrored"]),
    vectorized=len(passed["vectorized"]),
  )
  print(f"[peer_tests] {file.relative_to(folder)}: {dict(counts)}", flush=True)
  for name in sorted(passed["mirrored"] - passed["vectorized"]):
    error = tests.get(name, {}).get("error", "The process was killed.")
    reasons = [CANNOT_PASS[x] for x in CANNOT_PASS if x in f"{name} {error}"]
    print(f"  {name}: {(*reasons, error[-1500:])[0]}", flush=True)
    counts["listed" if reasons else "unlisted"] += 1
  return counts


if __name__ == "__main__":
  sys.exit(main())
