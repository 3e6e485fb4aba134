#!/usr/bin/env bash
# Lint, types, layers, then all tests but the slow ones. Arguments go to pytest;
# with arguments, slow tests run too: `-n 2` runs all tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

ensure_environment cpu examples test tf-keras tpu-compiler
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
# Two at a time: half of the time, tests wait for other processes. .ci/run runs
# the slow tests, too.
if (( $# == 0 )); then set -- --numprocesses=2 -m "not slow"; fi
"$python" -m pytest "$@"  # Fails (5) when there is no test at all.
