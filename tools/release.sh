#!/usr/bin/env bash
# Builds the sdist and the wheel into dist/, and tries them as a user would.
#
#   bash tools/release.sh
#
# The wheel is made of the sdist, and twine checks both. Then the wheel is
# installed with TensorFlow into an empty environment, where README's programs
# run in a folder without the sources. Nothing is uploaded. PYTHON chooses the
# interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

say() { echo "[release] $*" >&2; }

version=$(sed -n 's/^version = //p' setup.cfg)
grep -qx "version: $version" CITATION.cff && grep -q "^## \[$version\]" CHANGELOG.md || {
  say "CITATION.cff or CHANGELOG.md has another version than setup.cfg's $version"
  exit 1
}
ensure_environment release
python=$PWD/.venv/bin/python
rm -rf build dist
"$python" -m build --outdir dist .
"$python" -m twine check --strict dist/*

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Each program: a diff with its changes made, or Python with the blocks after it
# that import nothing.
"$python" - "$scratch" <<'EOF'
import pathlib, re, sys

programs = []
text = pathlib.Path("README.md").read_text(encoding="utf-8")
for kind, block in re.findall(r"(?s)```(diff|python)\n(.*?)```", text):
  if kind == "diff":
    block = re.sub("(?m)^[+ ]", "", re.sub("(?m)^-.*\n", "", block))
  if re.search("(?m)^(import|from) ", block):
    programs.append(block)
  else:
    programs[-1] += block
for i, program in enumerate(programs):
  pathlib.Path(sys.argv[1], f"program_{i}.py").write_text(program)
EOF

unset PYTHONPATH PYTHONHOME TF_CONFIG KERAS_BACKEND TF_USE_LEGACY_KERAS
export PIP_USER=0 TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
"$python" -m venv "$scratch/venv"
pip=("$scratch/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install "pip>=24.1"
wheel=dist/tf_cross_shard-$version-py3-none-any.whl
say "installing $wheel with TensorFlow into an empty environment"
"${pip[@]}" install "$wheel[cpu]"
"${pip[@]}" check
cd "$scratch"  # Where no sources are.
[[ $(venv/bin/tf-cross-shard --version) == *" $version"* ]]
venv/bin/tf-cross-shard doctor
for program in program_*.py; do
  say "README's $program"
  venv/bin/python "$program"
done
say "$wheel works"
