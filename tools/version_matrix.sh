#!/usr/bin/env bash
# Runs the contract and equivalence tests with other versions of TensorFlow and
# Keras.
#
#   bash tools/version_matrix.sh              # every row, which takes hours
#   bash tools/version_matrix.sh 2.16 2.21    # the rows of these TensorFlows
#   bash tools/version_matrix.sh 2.18/3.11    # TensorFlow 2.18 with Keras 3.11
#   bash tools/version_matrix.sh --output FILE [ROW...]   # also writes a file
#   bash tools/version_matrix.sh --list [ROW...]          # only lists the rows
#
# The script prints a Markdown table with one row for each pair of versions. It
# installs one environment at a time in a temporary folder (set TMPDIR to choose
# where), and deletes it afterwards. The tests run once with Keras 3, and once
# with tf_keras (TF_USE_LEGACY_KERAS=1). The script exits with 1 if a test fails,
# if the package can be imported with versions that it must refuse, or if it
# refuses versions that it must support.
#
# Two environment variables change what pytest does:
#
#   PYTEST_ADDOPTS    more options for pytest, such as "-k groups"
#   LOGS              a folder in which the output of pytest is kept
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The columns are the versions of Python, TensorFlow, Keras and tf_keras, and the
# expected results with Keras and with tf_keras: "tested", "refused", or "-" to
# run nothing, because another row tests the same versions. Rows with the same
# Python and TensorFlow are neighbors, because they share an environment.
rows=(
  "3.11 2.16.2 3.8.0  2.16.0 tested  tested"
  "3.11 2.16.2 3.15.1 -      tested  -"
  "3.11 2.16.2 3.5.0  2.15.1 refused refused"
  "3.11 2.17.1 3.9.2  2.17.0 tested  tested"
  "3.11 2.17.1 3.15.1 -      tested  -"
  "3.11 2.18.1 3.8.0  -      tested  -"
  "3.11 2.18.1 3.11.3 2.18.0 tested  tested"
  "3.12 2.19.1 3.10.0 -      tested  -"
  "3.12 2.19.1 3.13.2 2.19.0 tested  tested"
  "3.12 2.19.1 3.7.0  -      refused refused"
  "3.11 2.20.0 3.10.0 2.20.1 tested  tested"
  "3.11 2.20.0 3.14.1 -      tested  -"
  "3.10 2.21.0 3.12.4 2.21.0 tested  tested"
  "3.11 2.21.0 3.15.1 2.21.0 tested  tested"
  "3.13 2.21.0 3.15.1 2.21.0 tested  tested"
  "3.11 2.15.1 2.15.0 2.15.1 refused refused"
)
tests=(
  tests/equivalence/contract_test.py
  tests/equivalence/equivalence_test.py
)
# These tests run only with Keras 3; `both_tests` also needs tf_keras.
keras3_tests=(tests/unit/core/keras3/classes_test.py)
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
  for candidate in "python$1" python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if [[ "$("$candidate" -c \
      'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" == "$1" ]]
    then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# Prints the requirements of setup.cfg's extra `test` that pytest needs.
test_requirements() {
  "$python" - <<'EOF'
import configparser
config = configparser.ConfigParser(interpolation=None)
config.read("setup.cfg")
for line in config["options.extras_require"]["test"].split("\n"):
  if line.startswith(("pytest", "hypothesis")):
    print(line)
EOF
}

# Installs Python $1, TensorFlow $2, Keras $3 and tf_keras $4. If the existing
# environment has the same Python and TensorFlow, only Keras and tf_keras change.
install() {
  local interpreter requirements
  if [[ ! -e $venv/$1-$2 ]]; then
    rm -rf "$venv"
    interpreter=$(find_python "$1") || {
      echo "no Python $1 here" >"$scratch/fault"
      return 1
    }
    "$interpreter" -m venv "$venv" &>"$scratch/fault" || return
    "${pip[@]}" install "pip>=24.1" &>"$scratch/fault" || return
    touch "$venv/$1-$2"
  fi
  requirements=$(test_requirements) || return
  # Install everything in one call, so that pip respects the versions of NumPy,
  # ml_dtypes and protobuf that TensorFlow requires.
  "${pip[@]}" install "$flavour==$2" "keras==$3" $requirements \
    &>"$scratch/fault" || return
  "${pip[@]}" uninstall --yes tf_keras &>"$scratch/fault" || return
  if [[ $4 != - ]]; then
    # tf_keras requires `tensorflow`, which would overwrite tensorflow-cpu.
    "${pip[@]}" install --no-deps "tf_keras==$4" &>"$scratch/fault" || return
  fi
}

# Prints the installed version of the package $1, or "none".
version_of() {
  "$python" - "$1" <<'EOF'
import sys
from importlib import metadata
try:
  print(metadata.version(sys.argv[1]))
except metadata.PackageNotFoundError:
  print("none")
EOF
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
  if [[ -n $refusal ]]; then
    echo "refused: $refusal"
    [[ $expected == refused ]]
    return
  elif [[ $expected == refused ]]; then
    echo "not refused"
    say "$(tail -n 1 "$log")"
    return 1
  fi
  timeout --signal KILL "$limit" "$python" -m pytest -q -p no:cacheprovider \
    "$@" &>"$log" || status=$?
  counts=$(tail -n 1 "$log" | grep -oE \
    '[0-9]+ (passed|failed|skipped|errors?|xfailed|xpassed)' | paste -sd, |
    sed 's/,/, /g') || true
  echo "${counts:-no result (exit status $status)}"
  [[ $status == 0 ]] || say "$(grep -E '^(FAILED|ERROR)' "$log" ||
    tail -n 20 "$log")"
  [[ $status == 0 && $expected == tested ]]
}

# Prints a row of the table, and appends it to $output.
print_row() {
  local row
  row=$(printf '| %s ' "$@")"|"
  echo "$row"
  if [[ -n $output ]]; then echo "$row" >>"$output"; fi
}

# Installs and tests one row.
run_row() {
  local name=$1-$2-$3 keras3 tf_keras failed=0
  say "Python $1, TensorFlow $2, Keras $3, tf_keras $4"
  if ! install "$1" "$2" "$3" "$4"; then
    say "not installed: $(tail -n 3 "$scratch/fault")"
    print_row "$(date +%F)" "$1" "$2" "$3" "not installed" "$4" "not installed"
    return 1
  fi
  local with_keras3=("${tests[@]}" "${keras3_tests[@]}")
  if [[ $4 != - ]]; then
    with_keras3+=("${both_tests[@]}")
  else
    with_keras3+=(-k "not OfTfKeras")
  fi
  keras3=$(outcome 0 "$5" "${with_keras3[@]}") || failed=1
  tf_keras=$(outcome 1 "$6" "${tests[@]}") || failed=1
  print_row "$(date +%F)" "$("$python" -c \
    'import platform; print(platform.python_version())')" \
    "$(version_of "$flavour")" "$(version_of keras)" "$keras3" \
    "$(version_of tf_keras)" "$tf_keras"
  return "$failed"
}

output="" list=""
wanted=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --output) output=$(realpath -m "${2:?--output takes a file}") && shift ;;
    --list) list=yes ;;
    -*) say "unknown option $1; see the head of $0" && exit 2 ;;
    *) wanted+=("$1") ;;
  esac
  shift
done

chosen=()
for row in "${rows[@]}"; do
  read -r _ tensorflow keras _ <<<"$row"
  if is_asked_for "$tensorflow" "$keras"; then chosen+=("$row"); fi
done
if [[ ${#chosen[@]} == 0 ]]; then
  say "no row of: ${wanted[*]}"
  exit 2
fi
if [[ -n $list ]]; then
  printf '%s\n' "${chosen[@]}"
  exit
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

if [[ -n $output ]]; then : >"$output"; fi
print_row date Python TensorFlow "Keras 3" "its tests" tf_keras "its tests"
print_row --- --- --- --- --- --- ---
status=0
{ # Bash reads this block as a whole. You can edit the script while it runs.
  for row in "${chosen[@]}"; do
    read -ra columns <<<"$row"
    run_row "${columns[@]}" || status=1
  done
  exit "$status"
}
