"""Runs test files, slow tests included: the main program of tests in Bazel.

    python tests/run_file.py tests/unit/core/groups_test.py

Arguments are those of pytest, which fails if it finds no test.
"""

import sys

import pytest

if __name__ == "__main__":
  if len(sys.argv) == 1:
    raise SystemExit("Give the files to run.")
  raise SystemExit(pytest.main(["-q", "-m", "", *sys.argv[1:]]))
