"""Options of tests, for Bazel, and for the marks of conftest.py."""

# Tests that take more than two minutes on one core.
LARGE = [
    "equivalence/keras_layers_test.py",
    "equivalence/mixed_precision_test.py",
    "equivalence/random_programs_test.py",
    "equivalence/repeated_ids_test.py",
    "equivalence/tpu_program_test.py",
    "multi_process/examples_test.py",
    "multi_process/multi_worker_errors_test.py",
    "multi_process/multi_worker_replicas_test.py",
    "multi_process/multi_worker_test.py",
    "multi_process/pages_test.py",
    "unit/models/checkpoint_test.py",
    "unit/models/group_models_loaded_test.py",
    "unit/models/group_models_test.py",
]

# Tests that take long. tools/test.sh runs only those that are marked as fast;
# .ci/run runs all.
SLOW = [
    "equivalence/batch_normalization_test.py",
    "equivalence/keras_layers_test.py",
    "equivalence/keras_own_test.py",
    "equivalence/mixed_precision_test.py",
    "equivalence/original_test.py",
    "equivalence/programs_test.py",
    "equivalence/random_programs_test.py",
    "equivalence/repeated_ids_test.py",
    "equivalence/strangers_test.py",
    "equivalence/tf_keras_mode_test.py",
    "multi_process/examples_test.py",
    "multi_process/imports_test.py",
    "multi_process/multi_worker_errors_test.py",
    "multi_process/multi_worker_replicas_test.py",
    "multi_process/pages_test.py",
    "multi_process/random_programs_workers_test.py",
    "multi_process/search_test.py",
    "unit/backup/backup_test.py",
    "unit/islands/outer_optimizer_test.py",
    "unit/migration/checkpoints_test.py",
    "unit/models/archive_remote_test.py",
    "unit/models/checkpoint_test.py",
    "unit/models/group_models_loaded_test.py",
    "unit/models/group_models_test.py",
    "unit/virtual_tpu/strategy_test.py",
]
