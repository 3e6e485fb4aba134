#!/usr/bin/env bash
# Tries this package on a GPU, and prints a table for docs/limits.md.
#
#   bash tools/gpu_check.sh
#
# Installs what it needs into .venv, runs the tests that concern devices on four
# logical GPUs (or on four GPUs, where TensorFlow uses NCCL), trains on two whole
# GPUs if there are two, and measures steps of `fit`. Without a GPU it does the
# same on CPUs, with fewer tests and rounds: about five minutes. Exit status 1 if
# anything failed. LOGS is a folder for what the tests print.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

say() { echo "[gpu_check] $*" >&2; }

# Prints how many GPUs TensorFlow sees.
count_gpus() {
  .venv/bin/python - 2>/dev/null <<'PYTHON'
import tensorflow as tf
print(len(tf.config.list_physical_devices("GPU")))
PYTHON
}

# Makes TensorFlow see the GPUs of this machine: installs CUDA's libraries.
install_cuda() {
  ensure_environment tensorflow test tf-keras virtual-tpu
  if [[ $(count_gpus) != 0 ]]; then return; fi
  local version
  version=$(.venv/bin/python - <<'PYTHON'
from importlib import metadata
print(metadata.version("tensorflow"))
PYTHON
  ) || {
    say "there is a GPU, but .venv has a TensorFlow without GPU support. Move" \
      ".venv away and run this again."
    return 1
  }
  say "installing CUDA's libraries"
  .venv/bin/python -m pip --quiet --disable-pip-version-check install \
    "tensorflow[and-cuda]==$version"
  [[ $(count_gpus) != 0 ]] || {
    say "there is a GPU, but TensorFlow $version does not see it. See what it" \
      "prints for: python -c 'import tensorflow as tf;" \
      "tf.config.list_physical_devices(\"GPU\")'"
    return 1
  }
}

# row WHAT RESULT SECONDS: a row of the table.
row() { rows+=("| $1 | $2 | $3 s |"); }

# run_tests NAME ARGUMENT...: runs pytest.
run_tests() {
  local name=$1 log=$logs/${1// /-}.log start=$SECONDS counts
  shift
  say "$name"
  .venv/bin/python -m pytest -q -p no:cacheprovider "${slow[@]}" "$@" \
    &>"$log" || { failed=1 && tail -n 20 "$log" >&2; }
  counts=$(tail -n 1 "$log" | grep -oE \
    '[0-9]+ (passed|failed|skipped|errors?)' | paste -sd, | sed 's/,/, /g') || true
  row "$name" "${counts:-no result: see $log}" $((SECONDS - start))
}

# Trains on whole devices, where TensorFlow uses NCCL between GPUs.
train_on_two() {
  local start=$SECONDS result
  say "two whole devices"
  result=$(.venv/bin/python - 2>"$logs/two.log" <<'PYTHON'
import numpy as np
import tensorflow as tf
from tf_cross_shard import CrossShardOptimizer, local_strategy

strategy = local_strategy(2)
tf.config.experimental.enable_tensor_float_32_execution(False)


def train(wrap):
  tf.keras.utils.set_random_seed(0)
  with strategy.scope():
    layers = [tf.keras.layers.Dense(16, "tanh"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential([tf.keras.Input((8,)), *layers])
    model.compile(wrap(tf.keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
  x = np.random.default_rng(0).normal(size=[64, 8]).astype("float32")
  model.fit(x, x[:, :1], batch_size=16, epochs=3, shuffle=False, verbose=0)
  return model.get_weights()


pairs = zip(train(lambda inner: inner), train(CrossShardOptimizer))
difference = max(np.abs(plain - ours).max() for plain, ours in pairs)
assert difference < 1e-5, f"differs from plain Keras by {difference:.1e}"
[device, _] = (name[-5:] for name in strategy.extended.worker_devices)
print(f"as plain Keras, to {difference:.0e} ({device} and the next)")
PYTHON
  ) || { failed=1 && result="failed: $(tail -n 1 "$logs/two.log")"; }
  row "two whole devices" "$result" $((SECONDS - start))
}

# measure PART ARGUMENT...: what `fit` takes, relative to plain Keras.
measure() {
  local log=$logs/measure-$1.log start=$SECONDS name ratio
  say "measuring: $1"
  # The sources beside this script, also where .venv has another copy.
  PYTHONPATH=$PWD .venv/bin/python benchmarks/whole_step.py --parts="$@" \
    &>"$log" || { failed=1 && tail -n 20 "$log" >&2; }
  while IFS=: read -r name ratio; do
    rows+=("| step of \`fit\`, $name | $ratio of plain Keras | |")
  done < <(awk '/ to plain Keras$/ {sub(/ +ms +to.*/, ""); sub(":", ","); name = $0}
    /^  ours / {print name ":" $3 " " $4 " " $5}' "$log")
}

gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader \
  2>/dev/null | head -n 1) || gpu=""
if [[ -n $gpu ]]; then
  install_cuda
  export TEST_DEVICE=GPU TF_FORCE_GPU_ALLOW_GROWTH=true
  slow=(-m "")
  sharded=(tests/unit/core/update)
  measured=(--rounds=9)
else
  say "there is no GPU here (nvidia-smi finds none): running on CPUs"
  ensure_environment cpu test tf-keras virtual-tpu
  gpu="no GPU: four logical CPUs"
  slow=(-m "not slow and not nightly")
  sharded=(tests/unit/core/update/sharded_test.py
    -k "numbers_of_plain_keras or rows_and")
  measured=(--rounds=3 --steps=10 "--networks=3 dense layers of 64,small CNN")
fi
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$logs"

rows=()
failed=0
core=tests/unit/core
run_tests "reduction" $core/collectives/{engine,mirrored,wire_dtype}_test.py
run_tests "kernels and fused update" $core/wrapped/fused_update_test.py
run_tests "groups" tests/equivalence/contract_test.py
run_tests "mixed precision" tests/equivalence/mixed_precision_test.py
run_tests "embedding rows" $core/update/embedding_tables_test.py
run_tests "shard_update" "${sharded[@]}"
train_on_two
measure device "${measured[@]}"
measure mirrored "${measured[@]}"

versions=$(.venv/bin/python -c 'import keras, tensorflow as tf
print("TensorFlow", tf.__version__ + ", Keras", keras.__version__)' 2>/dev/null)
echo
echo "$(date +%F), $gpu, $versions:"
echo
printf '%s\n' "| what | result | time |" "|---|---|---|" "${rows[@]}"
say "logs are in $logs"
exit "$failed"
