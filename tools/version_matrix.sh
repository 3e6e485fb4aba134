#!/usr/bin/env bash
# Runs the contract, equivalence and mixed-precision tests, and those of vectorized
# replicas, with other versions of TensorFlow and Keras, and prints a Markdown table
# with one row for each pair.
#
#   bash tools/version_matrix.sh              # every row, which takes hours
#   bash tools/version_matrix.sh 2.16 2.21    # the rows of these TensorFlows
#   bash tools/version_matrix.sh 2.18/3.11    # TensorFlow 2.18 with Keras 3.11
#
# Installs one environment at a time in a temporary folder (TMPDIR chooses
# where). The tests run once with Keras 3, and once with tf_keras
# (TF_USE_LEGACY_KERAS=1). Exits with 1 if a test fails, or if the package does
# not refuse the versions that it must refuse. PYTEST_ADDOPTS has more options
# for pytest, and LOGS is a folder in which its output is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The columns are the versions of Python, TensorFlow, Keras and tf_keras, and the
# expected results with Keras and with tf_keras: "tested", "refused", or "-" to
# run nothing, because another row tests the same versions.
rows=(
  "3.11 2.16.2 3.10.0 2.16.0 tested  tested"
  "3.11 2.16.2 3.15.1 -      tested  -"
  "3.11 2.16.2 3.5.0  2.15.1 refused refused"
  "3.11 2.17.1 3.15.1 2.17.0 tested  tested"
  "3.11 2.18.1 3.11.3 2.18.0 tested  tested"
  "3.12 2.19.1 3.10.0 -      tested  -"
  "3.12 2.19.1 3.13.2 2.19.0 tested  tested"
  "3.12 2.19.1 3.9.2  -      refused refused"
  "3.11 2.20.0 3.10.0 2.20.1 tested  tested"
  "3.11 2.20.0 3.14.1 -      tested  -"
  "3.10 2.21.0 3.12.4 2.21.0 tested  tested"
  "3.11 2.21.0 3.15.1 2.21.0 tested  tested"
  "3.13 2.21.0 3.15.1 2.21.0 tested  tested"
  "3.11 2.15.1 2.15.0 2.15.1 refused refused"
)
tests=(tests/equivalence/{contract,equivalence,mixed_precision}_test.py)
# These tests run only with Keras 3; `both_tests` also needs tf_keras.
keras3_tests=(tests/unit/core/keras3/classes_test.py tests/unit/vectorized)
both_tests=(tests/unit/core/tf_keras/classes_test.py)
limit=7200  # the time limit of one run of pytest, in seconds

say() { echo "[version_matrix] $*" >&2; }

# Succeeds if the user asked for the row of TensorFlow $1 and Keras $2.
is_asked_for() {
  local asked
  if [[ ${#wanted[@]} == 0 ]]; then return; fi
  for asked in "${wanted[@]}"; do
    # Compare with a dot at the end, so that 2.1 does not match 2.16.
    if [[ $1. == "${asked%%/*}".* ]] &&
      [[ $asked != */* || $2. == "${asked#*/}".* ]]; then
      return
    fi
  done
  return 1
}

# Prints the path of a Python of version $1. Searches PATH and pyenv.
find_python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if "$candidate" -c '' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python $1 here" >&2
  return 1
}

# Makes an environment with Python $1, TensorFlow $2, Keras $3 and tf_keras $4.
install() {
  local interpreter requirements
  rm -rf "$venv"
  interpreter=$(find_python "$1") || return
  "$interpreter" -m venv "$venv" || return
  "${pip[@]}" install "pip>=24.1" || return
  # All in one call, so that pip respects the versions of NumPy, ml_dtypes and
  # protobuf that TensorFlow requires.
  requirements=$(sed -nE 's/^  ((pytest|hypothesis|etils|packaging)[^ ]*)$/\1/p' setup.cfg)
  "${pip[@]}" install "$flavour==$2" "keras==$3" $requirements || return
  # tf_keras requires `tensorflow`, which would overwrite tensorflow-cpu.
  [[ $4 == - ]] || "${pip[@]}" install --no-deps "tf_keras==$4"
}

# Runs the tests $3... with TF_USE_LEGACY_KERAS=$1, and prints the result. Fails
# unless the result is $2: "tested" or "refused". Does nothing if $2 is "-".
outcome() {
  local legacy=$1 expected=$2 log=$logs/$name-$1.log refusal status=0 counts
  shift 2
  if [[ $expected == - ]]; then
    echo -
    return
  fi
  export TF_USE_LEGACY_KERAS=$legacy
  # Import the package as a user's program does.
  "$python" -c 'import tf_cross_shard' &>"$log" || true
  refusal=$(sed -n '$s/^ImportError: tf_cross_shard/tf_cross_shard/p' "$log")
  if [[ -n $refusal || $expected == refused ]]; then
    echo "refused: ${refusal:-no}"
    [[ -n $refusal && $expected == refused ]]
    return
  fi
  timeout --signal KILL "$limit" "$python" -m pytest -q -p no:cacheprovider \
    "$@" &>"$log" || status=$?
  counts=$(tail -n 1 "$log" | grep -oE \
    '[0-9]+ (passed|failed|skipped|errors?|xfailed|xpassed)' | paste -sd, |
    sed 's/,/, /g') || true
  echo "${counts:-no result (exit status $status)}"
  [[ $status == 0 ]] || say "$(grep -E '^(FAILED|ERROR)' "$log" ||
    tail -n 20 "$log")"
  return "$status"
}

# Installs and tests one row, and prints it.
run_row() {
  local name=$1-$2-$3 keras3="not installed" tf_keras="not installed" failed=0
  say "Python $1, TensorFlow $2, Keras $3, tf_keras $4"
  if install "$1" "$2" "$3" "$4" &>"$logs/$name-installation.log"; then
    local with_keras3=("${tests[@]}" "${keras3_tests[@]}")
    if [[ $4 != - ]]; then
      with_keras3+=("${both_tests[@]}")
    else
      with_keras3+=(-k "not OfTfKeras")
    fi
    keras3=$(outcome 0 "$5" "${with_keras3[@]}") || failed=1
    tf_keras=$(outcome 1 "$6" "${tests[@]}") || failed=1
  else
    failed=1
    say "not installed: $(tail -n 3 "$logs/$name-installation.log")"
  fi
  echo "| $(date +%F) | $1 | $2 | $3 | $keras3 | $4 | $tf_keras |"
  return "$failed"
}

wanted=("$@")
chosen=()
for row in "${rows[@]}"; do
  read -r _ tensorflow keras _ <<<"$row"
  if is_asked_for "$tensorflow" "$keras"; then chosen+=("$row"); fi
done
if [[ ${#chosen[@]} == 0 ]]; then
  say "no row of: ${wanted[*]}"
  exit 2
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
venv=$scratch/venv
python=$venv/bin/python
pip=("$python" -m pip --quiet --disable-pip-version-check)
logs=${LOGS:-$scratch}
mkdir -p "$logs"
logs=$(realpath "$logs")
flavour=tensorflow
if [[ $(uname -sm) == "Linux x86_64" ]]; then flavour=tensorflow-cpu; fi
unset PYTHONHOME TF_CONFIG KERAS_BACKEND
export PIP_USER=0 PYTHONDONTWRITEBYTECODE=1 TMPDIR=$scratch
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"

printf '%s\n' "| date | Python | TensorFlow | Keras 3 | its tests | tf_keras | its tests |" \
  "|---|---|---|---|---|---|---|"
status=0
{ # Bash reads this block as a whole. You can edit the script while it runs.
  for row in "${chosen[@]}"; do
    read -ra columns <<<"$row"
    run_row "${columns[@]}" || status=1
  done
  exit "$status"
}
