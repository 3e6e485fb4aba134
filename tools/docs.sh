#!/usr/bin/env bash
# Makes the site of README.md and docs/ in build/docs; a warning is an error.
# Where there is Node.js, asks its search ten questions. Arguments go to Sphinx.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

ensure_environment cpu docs
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-3}"
.venv/bin/python -m sphinx --quiet --fail-on-warning --keep-going -c docs "$@" \
  . build/docs
if command -v node >/dev/null; then
  node tools/docs_search.js build/docs
else
  echo "[docs] no node: the search of the site was not tried"
fi
echo "[docs] open build/docs/index.html"
