#!/usr/bin/env bash
# Lint, types, then the tests; the arguments go to pytest.
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
# All of them two at a time: half of the time tests wait for other processes.
if (( $# == 0 )); then set -- --numprocesses=2; fi
"$python" -m pytest "$@"  # Fails (5) when there is no test at all.
