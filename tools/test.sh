#!/usr/bin/env bash
# Lint, types, layers, then the tests of every day. Arguments go to pytest, and
# with any, the slow and nightly ones run too: `-n 2` runs all of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

ensure_environment cpu examples test tf-keras tpu-compiler virtual-tpu
installation=$SECONDS
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
python=.venv/bin/python

say_time() {
  local status=$? seconds=$((SECONDS - installation))
  echo "[test] exit status $status, after $((seconds / 60)) min" \
    "$((seconds % 60)) s, and $installation s of installation"
}
trap say_time EXIT

"$python" -m ruff check --quiet .
"$python" -m ruff format --check --quiet .
"$python" -m mypy
.venv/bin/lint-imports --no-cache
# Two at a time: half of the time, tests wait for other processes. Slow tests
# repeat at length what others show. tools/bazel_test.sh runs them.
if (( $# == 0 )); then set -- --numprocesses=2 -m "not slow and not nightly"; fi
"$python" -m pytest "$@"  # Fails (5) when there is no test at all.
