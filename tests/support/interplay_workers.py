"""What each of two workers trains of `interplay`'s cells."""

import time
from typing import Any

import tensorflow as tf

from tests.support import interplay
from tf_cross_shard import multi_worker

Key = tuple[str, ...]

ENGINE = "multi_worker"
# Each pair of settings occurs once: Keras, way, policy, where a loss is scaled;
# then the grouping, and whether a group skips a step by itself.
_CELLS = (
  ("keras3", "loop", "float32", "plain", "ungrouped", True),
  ("keras3", "fit", "mixed_float16", "inside", "ungrouped", False),
  ("keras3", "loop", "mixed_bfloat16", "outside", "singletons", False),
  ("tf_keras", "loop", "float32", "inside", "singletons", False),
  ("tf_keras", "fit", "mixed_float16", "outside", "ungrouped", False),
  ("tf_keras", "fit", "mixed_bfloat16", "plain", "ungrouped", False),
  ("tf_keras_legacy", "fit", "float32", "outside", "ungrouped", False),
  ("tf_keras_legacy", "loop", "mixed_float16", "plain", "singletons", True),
  ("tf_keras_legacy", "loop", "mixed_bfloat16", "inside", "ungrouped", False),
)
# TensorFlow's own strategy, under which Keras 3's `fit` fails.
OF_TENSORFLOW = interplay.Cell(
  "tf_keras", "fit", ENGINE, "mixed_float16", "outside"
)


def wanted() -> dict[Key, tuple[interplay.Cell, str, dict[str, Any]]]:
  """Cell, grouping and options of each run under our strategy."""
  found: dict[Key, tuple[interplay.Cell, str, dict[str, Any]]] = {}
  for kind, way, policy, scaling, grouping, skips in _CELLS:
    cell = interplay.Cell(kind, way, ENGINE, policy, scaling)
    options = {"skip_nonfinite": True} if skips else {}
    found[str(cell), grouping] = cell, grouping, options
  return found


def train() -> dict[Key, Any]:
  """Trains all; answers what this worker has of each."""
  strategy = multi_worker.MultiWorkerStrategy()
  found: dict[Key, Any] = {
    key: _timed(key, strategy, *cell) for key, cell in wanted().items()
  }
  given = interplay.data(strategy.num_replicas_in_sync, with_nan=False)
  data = interplay.batches(given)
  with strategy.scope():
    model = interplay.model_of("tf_keras", given)
    model.compile(loss="mse")
  evaluated = model.evaluate(data, verbose=0)
  found["evaluated", "predicted"] = evaluated, model.predict(data, verbose=0)
  return found


def train_with_tensorflows(strategy: tf.distribute.Strategy) -> interplay.Run:
  """Trains the cell under TensorFlow's strategy."""
  return _timed(("tensorflow",), strategy, OF_TENSORFLOW, "ungrouped", {})


def with_nan(cell: interplay.Cell, options: dict[str, Any]) -> bool:
  """Whether a run is to meet one."""
  return cell.scale is not None or bool(options)


def _timed(
  key: Key,
  strategy: tf.distribute.Strategy,
  cell: interplay.Cell,
  grouping: str,
  options: dict[str, Any],
) -> interplay.Run:
  """One run; the log says how long it took."""
  begin = time.monotonic()
  replicas = strategy.num_replicas_in_sync
  assert replicas > 1
  done = interplay.run(
    cell,
    strategy,
    interplay.GROUPINGS[ENGINE][grouping],
    interplay.data(replicas, with_nan(cell, options)),
    **options,
  )
  print(f"{time.monotonic() - begin:.2f} s: {' '.join(key)}", flush=True)
  return done
