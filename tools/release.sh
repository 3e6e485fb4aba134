#!/usr/bin/env bash
# Builds the sdist and the wheel into dist/, and tries them as a user would.
#
#   bash tools/release.sh
#
# The wheel is made of the sdist, both are checked with twine, and the wheel is
# installed with TensorFlow into an empty environment, where the first program
# of README runs. Nothing is uploaded. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

say() { echo "[release] $*" >&2; }

# Prints README's first diff with its changes made, which is a program.
first_program() {
  sed -n '/^```diff$/,/^```$/p' README.md | sed '1d; /^```$/,$d; /^-/d; s/^[+ ]//'
}

version=$(sed -n 's/^version = //p' setup.cfg)
if ! grep -qx "version: $version" CITATION.cff; then
  say "CITATION.cff has another version than setup.cfg's $version"
  exit 1
fi
ensure_environment release
python=.venv/bin/python
rm -rf build dist
"$python" -m build --outdir dist .
"$python" -m twine check --strict dist/*

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
first_program >"$scratch/program.py"
grep -q CrossShardOptimizer "$scratch/program.py"
unset PYTHONPATH PYTHONHOME TF_CONFIG KERAS_BACKEND TF_USE_LEGACY_KERAS
export PIP_USER=0 TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
"$python" -m venv "$scratch/venv"
pip=("$scratch/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install "pip>=24.1"
wheels=(dist/*.whl)
say "installing ${wheels[0]} with TensorFlow into an empty environment"
"${pip[@]}" install "${wheels[0]}[cpu]"
"${pip[@]}" check
cd "$scratch"  # Where no sources are.
venv/bin/tf-cross-shard --version
venv/bin/tf-cross-shard doctor
venv/bin/python program.py
say "${wheels[0]} works"
