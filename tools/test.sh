#!/usr/bin/env bash
# Lint, types, then the tests; the arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

ensure_environment cpu examples test tpu-compiler virtual-tpu
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
python=.venv/bin/python

"$python" -m ruff check --quiet .
"$python" -m ruff format --check --quiet .
"$python" -m mypy tf_cross_shard
"$python" tools/update_build.py --check
"$python" -m pytest "$@"  # Fails (5) when there is no test at all.
