#!/usr/bin/env bash
# Fails where a private name of a Keras is used outside the folder for it. Names
# that exist in both Keras versions are used in keras_private.py and kernels.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
names="accumulat(ed_(delta_vars|gradients|grads)|ors)|average_gradients
  |build_learning_rate|built|distributed_tf_update_step|compile_config|compute_current_learning_rate
  |create_all_weights|flatten_layers|get_own_losses|get_variable_index
  |hyper|hypers_created|index_dict|initial_epoch|inner_optimizers|learning_rate|linears
  |loss_scale|m|model_variables_moving_average|momentums|name|steps_per_execution
  |training_state|trainable_variables(_indices)?|u|use_weight_decay|var_key|velocities"
# As an attribute of another object than self, or in quotes, as for getattr.
pattern="(?<!self)\._(${names//[[:space:]]/})\b|\"_(${names//[[:space:]]/})\""
if grep -rnPo --include=*.py --exclude-dir={keras3,tf_keras} \
  --exclude={keras_private,kernels}.py \
  "$pattern" tf_cross_shard; then
  echo "private_names: move these to _src/core/keras3/ or tf_keras/" >&2
  exit 1
fi
