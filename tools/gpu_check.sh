#!/usr/bin/env bash
# Compares training on GPUs with plain Keras, and prints a table for
# docs/limits.md. Takes at most ten minutes, and needs no network:
#
#   pip wheel -w wheels '.[tensorflow]' 'tensorflow[and-cuda]'  # with a network
#   bash tools/gpu_check.sh wheels
#
# Installs the wheels of the folder into an empty environment. Without a folder,
# uses .venv. Without a GPU it runs on CPUs, in one minute. Exit status 1 if a
# row of the table failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
if (( $# )); then
  wheels=$(realpath "$1")
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  "${PYTHON:-python3}" -m venv "$scratch"
  python=$scratch/bin/python
  extras=""  # TensorFlow's CUDA libraries, if the folder has them.
  if compgen -G "$wheels/nvidia_*.whl" >/dev/null; then extras="[and-cuda]"; fi
  tensorflow=$(ls "$wheels" | sed -nE 's/^(tensorflow(_cpu)?)-[0-9].*/\1/p' | head -n 1)
  "$python" -m pip --quiet --disable-pip-version-check install --no-index \
    --find-links "$wheels" tf-cross-shard "${tensorflow:-tensorflow}$extras" keras
else
  source tools/environment.sh
  ensure_environment tensorflow
  export PYTHONPATH=$PWD
fi
export TF_FORCE_GPU_ALLOW_GROWTH=true
timeout 600 "$python" tools/gpu_check.py
