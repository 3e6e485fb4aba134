#!/usr/bin/env bash
# Runs the checks that have no natural end, and reports all that fail.
#
#   bash tools/nightly.sh             # every check, with today's date as seed
#   bash tools/nightly.sh 20261123    # repeats the checks of that night
#
# Each night trains other random programs and kills processes at other moments.
# Takes hours. To repeat one failure only, run the command that is printed before
# its output. Exits with 1 if a check fails, after all checks have run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

seed="${1:-$(date +%Y%m%d)}"
if [[ ! $seed =~ ^[0-9]+$ ]]; then
  echo "[nightly] The seed must be a number, such as 20261123; got $seed." >&2
  exit 2
fi

ensure_environment cpu examples test tf-keras tpu-compiler
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
python=.venv/bin/python
failed=()

# Runs a command, and remembers it if it fails.
check() {
  local start=$SECONDS status=0
  echo "[nightly] $*"
  "$@" || status=$?
  echo "[nightly] exit status $status, after $(((SECONDS - start) / 60)) min"
  if (( status )); then failed+=("$*"); fi
}

# Does a test fail for every known way to break the code?
check "$python" tools/mutants.py
# Does training that was killed end as training that was not? In one process,
# and with two and four workers.
check "$python" tools/preemptions.py --kills=200 --seed="$seed"
check "$python" tools/preemptions.py --kills=60 --seed="$seed" --workers=2
check "$python" tools/preemptions.py --kills=20 --seed="$seed" --workers=4
# The same while disks and servers fail. Disks need root.
check "$python" tools/preemptions.py --kills=40 --seed="$seed" --faults
# Do random programs train as plain Keras and NumPy say? The first seeds of two
# nights are 10,000 apart, so no program is tried in two nights.
for legacy in 0 1; do
  export TF_USE_LEGACY_KERAS=$legacy
  check env RANDOM_SEEDS="${seed}0000:${seed}2000" \
    "$python" -m pytest -q tests/equivalence/random_programs_test.py
  check env RANDOM_SEEDS="${seed}0000:${seed}0500" \
    "$python" -m pytest -q tests/multi_process/random_programs_workers_test.py
done
unset TF_USE_LEGACY_KERAS
# Do models of other libraries train as with plain Keras?
check bash tools/strangers.sh
# Does long training need ever more memory, threads or open files?
check "$python" tools/soak.py

if (( ${#failed[@]} )); then
  printf '[nightly] FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "[nightly] all checks passed, in $((SECONDS / 60)) min"
