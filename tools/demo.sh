#!/usr/bin/env bash
# Trains 16 models on real data in one `fit`; see examples/digits.py, which also
# gets the arguments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

ensure_environment cpu examples
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
exec .venv/bin/python examples/digits.py "$@"
