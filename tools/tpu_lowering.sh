#!/usr/bin/env bash
# Compares, in TensorFlow's own build for TPUs, the operation that TPUs are given
# with the one that the virtual TPU is given: both must lower to the same HLO.
#
# tensorflow-tpu shares its files with the other builds of TensorFlow and aborts
# beside a newer libtpu, so it lives in .venv-tpu, without libtpu. Where there
# is no such build (it exists for Linux on x86-64), this says so and succeeds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=2.20.0
python=.venv-tpu/bin/python
stamp=.venv-tpu/installed_$version

say() { echo "[tpu_lowering] $*" >&2; }

install() {
  local pip=("$python" -m pip --quiet --disable-pip-version-check install)
  "${PYTHON:-python3}" -m venv .venv-tpu || return
  "${pip[@]}" "pip>=24.1" || return
  "${pip[@]}" --no-deps "tensorflow-tpu==$version" || return
  local requirements
  requirements=$("$python" - <<'EOF'
from importlib import metadata
for line in metadata.requires("tensorflow-tpu"):
  if "extra ==" not in line and not line.startswith("libtpu"):
    print(line)
print("etils[epath]>=1.9.1")  # This package imports it.
EOF
  ) || return
  "${pip[@]}" --no-warn-conflicts -r <(printf '%s\n' "$requirements") || return
  touch "$stamp"
}

if [[ ! -e $stamp ]]; then
  say "installing tensorflow-tpu $version into .venv-tpu (once)"
  rm -rf .venv-tpu
  if ! install; then
    rm -rf .venv-tpu
    say "tensorflow-tpu $version cannot be installed here: NOT CHECKED"
    exit 0
  fi
fi
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
PYTHONPATH=. "$python" tools/tpu_lowering.py
