#!/usr/bin/env bash
# Makes the site of README.md and docs/ in build/docs; a warning is an error.
# Asks its search ten questions with Node.js, which only CI must have. Arguments
# go to Sphinx.
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
  echo "[docs] no node: the search of the site was not tried" >&2
  [[ -z ${CI:-} ]]
fi
echo "[docs] open build/docs/index.html"
