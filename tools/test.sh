#!/usr/bin/env bash
# Lint, types, then the tests of every day. Arguments go to pytest, and with any
# the slow ones run too: with `-n 2` all do, as in tools/bazel_test.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

ensure_environment cpu examples test tf-keras tpu-compiler virtual-tpu
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
python=.venv/bin/python

"$python" -m ruff check --quiet .
"$python" -m ruff format --check --quiet .
"$python" -m mypy tf_cross_shard
"$python" tools/update_build.py --check
# Two at a time: half of the time tests wait for other processes. Slow ones show
# once more, elsewhere or in all combinations, what others show every day.
if (( $# == 0 )); then set -- --numprocesses=2 -m "not slow"; fi
"$python" -m pytest "$@"  # Fails (5) when there is no test at all.
