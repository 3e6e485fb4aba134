#!/usr/bin/env bash
# Trains models of other libraries, such as keras-hub, Sonnet and DeepXDE, with
# this package: tests/equivalence/strangers_test.py.
#
#   bash tools/strangers.sh
#   bash tools/strangers.sh -k Sonnet    # Arguments go to pytest.
#
# The libraries live in .venv-strangers (3 GB): keras-hub requires tensorflow-text,
# which requires the full build of TensorFlow, whose files would overwrite those
# of tensorflow-cpu. If they cannot be installed here, this says so and succeeds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv-strangers/bin/python
# The versions of TensorFlow and Keras that the libraries were tested with.
requirements=$("${PYTHON:-python3}" - <<'EOF'
import configparser
config = configparser.ConfigParser(interpolation=None)
config.read("setup.cfg")
extras, options = config["options.extras_require"], config["options"]
print("tensorflow==2.21.0", "keras==3.15.1", sep="\n")
print(options["install_requires"], extras["strangers"])
print(*(x for x in extras["test"].split() if x[:4] in ("pyte", "hypo")), sep="\n")
EOF
)
stamp=.venv-strangers/installed_$(cksum <<<"$requirements" | cut -d " " -f 1)

say() { echo "[strangers] $*" >&2; }

install() {
  local pip=("$python" -m pip --quiet --disable-pip-version-check install)
  "${PYTHON:-python3}" -m venv .venv-strangers || return
  "${pip[@]}" "pip>=24.1" || return
  "${pip[@]}" -r <(echo "$requirements") || return
  touch "$stamp"
}

if [[ ! -e $stamp ]]; then
  say "installing the libraries into .venv-strangers (two minutes, once)"
  rm -rf .venv-strangers
  if ! install; then
    rm -rf .venv-strangers
    say "the libraries cannot be installed here: NOT CHECKED"
    exit 0
  fi
fi
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
# A library that is installed but cannot be imported fails its tests.
export STRANGERS_MUST_RUN=1
"$python" -m pytest -m "" "$@" tests/equivalence/strangers_test.py
