#!/usr/bin/env bash
# Runs the contract, equivalence and mixed-precision tests, and those of vectorized
# replicas, with other versions of TensorFlow and Keras.
#
#   bash tools/version_matrix.sh              # every row, which takes hours
#   bash tools/version_matrix.sh 2.16 2.21    # the rows of these TensorFlows
#
# Needs python3.10 to python3.13 on PATH. Each row has a temporary environment, in
# which the tests run with Keras 3, then with tf_keras (TF_USE_LEGACY_KERAS=1).
# Prints a line for each, and exits with 1 if one failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tests=(tests/equivalence/{contract,equivalence,mixed_precision}_test.py)
keras3_tests=(tests/unit/core/{keras3,tf_keras}/classes_test.py tests/unit/vectorized)
requirements=$(sed -nE 's/^  ((pytest|hypothesis|etils|packaging)[^ ]*)$/\1/p' setup.cfg)
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check install)
status=0

run_tests() {  # TF_USE_LEGACY_KERAS, then arguments of pytest
  TF_USE_LEGACY_KERAS=$1 TF_CPP_MIN_LOG_LEVEL=2 timeout -s KILL 7200 \
    "$venv/bin/python" -m pytest -q -p no:cacheprovider "${@:2}" | tail -n 5
}

# The versions of Python, TensorFlow, Keras and tf_keras.
while read -r python tensorflow keras tf_keras <&3; do
  (( $# == 0 )) || [[ " $* " == *" ${tensorflow%.*} "* ]] || continue
  row="Python $python, TensorFlow $tensorflow, Keras $keras, tf_keras $tf_keras"
  # tf_keras requires `tensorflow`, which would overwrite tensorflow-cpu.
  "python$python" -m venv --clear "$venv" && "${pip[@]}" "pip>=24.1" &&
    "${pip[@]}" "tensorflow-cpu==$tensorflow" "keras==$keras" $requirements &&
    "${pip[@]}" --no-deps "tf_keras==$tf_keras" &&
    run_tests 0 "${tests[@]}" "${keras3_tests[@]}" && run_tests 1 "${tests[@]}" &&
    echo "[version_matrix] passed: $row" ||
    { echo "[version_matrix] FAILED: $row"; status=1; }
done 3<<'EOF'
3.11 2.16.2 3.10.0 2.16.0
3.11 2.16.2 3.15.1 2.16.0
3.11 2.17.1 3.15.1 2.17.0
3.11 2.18.1 3.11.3 2.18.0
3.12 2.19.1 3.13.2 2.19.0
3.11 2.20.0 3.10.0 2.20.1
3.10 2.21.0 3.12.4 2.21.0
3.13 2.21.0 3.15.1 2.21.0
EOF
exit "$status"
