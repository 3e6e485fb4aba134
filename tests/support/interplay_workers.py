"""What each of two workers trains of `interplay`'s cells."""

import time
from typing import Any

import tensorflow as tf

from tests.support import interplay
from tf_cross_shard import multi_worker

Key = tuple[str, ...]

ENGINE = "multi_worker"
CELLS = interplay.cells(ENGINE)
# Those in which each worker is a group of its own, besides one of all.
APART = [
  cell
  for cell in CELLS
  if cell.policy == "mixed_float16"
  and (cell.way == "loop" or cell.scaling == "plain")
]
# Without loss scaling a step that is not finite is left out on demand.
SKIPPING = [
  cell for cell in CELLS if (cell.policy, cell.scaling) == ("float32", "plain")
]
# TensorFlow's own strategy, under which Keras 3's `fit` fails.
OF_TENSORFLOW = interplay.Cell(
  "tf_keras", "fit", ENGINE, "mixed_float16", "outside"
)


def wanted() -> dict[Key, tuple[interplay.Cell, str, dict[str, Any]]]:
  """Cell, grouping and options of each run under our strategy."""
  found: dict[Key, tuple[interplay.Cell, str, dict[str, Any]]] = {}
  for cell in CELLS:
    found["cell", str(cell), "ungrouped"] = cell, "ungrouped", {}
  for cell in APART:
    found["cell", str(cell), "singletons"] = cell, "singletons", {}
  for cell in SKIPPING:
    options = {"skip_nonfinite": True}
    found["skip", str(cell), "singletons"] = cell, "singletons", options
  return found


def train() -> dict[Key, Any]:
  """Trains all; answers what this worker has of each."""
  strategy = multi_worker.MultiWorkerStrategy()
  found: dict[Key, Any] = {
    key: _timed(key, strategy, *one) for key, one in wanted().items()
  }
  found["evaluated", "predicted"] = _evaluate(strategy)
  return found


def train_with_tensorflows() -> interplay.Run:
  """Trains the cell under TensorFlow's strategy."""
  strategy = tf.distribute.MultiWorkerMirroredStrategy()
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


def _evaluate(strategy: tf.distribute.Strategy) -> Any:
  """Loss and predictions of a tf_keras model that nobody trained."""
  given = interplay.data(strategy.num_replicas_in_sync, with_nan=False)
  with strategy.scope():
    model = interplay.model_of("tf_keras", given)
    model.compile(loss="mse")
  batches = interplay.batches(given)
  return (
    model.evaluate(batches, verbose=0),
    model.predict(batches, verbose=0),
  )
