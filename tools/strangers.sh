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
source tools/environment.sh

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
version=$(cksum <<<"$requirements" | cut -d " " -f 1)

install_apart() { "$@" -r <(echo "$requirements"); }

ensure_apart .venv-strangers "$version" "the libraries"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
# A library that is installed but cannot be imported fails its tests.
export STRANGERS_MUST_RUN=1
"$python" -m pytest -m "" "$@" tests/equivalence/strangers_test.py
