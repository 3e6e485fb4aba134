#!/usr/bin/env bash
# Compares, in TensorFlow's own build for TPUs, the operation that TPUs are given
# with the one that the virtual TPU is given: both must lower to the same HLO.
#
# tensorflow-tpu shares its files with the other builds of TensorFlow and aborts
# beside a newer libtpu, so it lives in .venv-tpu, without libtpu. Where there
# is no such build (it exists for Linux on x86-64), this says so and succeeds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
version=2.20.0
python=.venv-tpu/bin/python

install_apart() {
  "$@" --no-deps "tensorflow-tpu==$version" || return
  local requirements
  requirements=$("$python" - <<'EOF'
from importlib import metadata
for line in metadata.requires("tensorflow-tpu"):
  if "extra ==" not in line and not line.startswith("libtpu"):
    print(line)
print("etils[epath]>=1.9.1")  # This package imports it.
EOF
  ) || return
  "$@" --no-warn-conflicts -r <(printf '%s\n' "$requirements")
}

ensure_apart .venv-tpu "$version" "tensorflow-tpu $version"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
PYTHONPATH=. "$python" tools/tpu_lowering.py
