"""The cases that every worker runs, and the data of the cases.

A case returns the values of the worker that runs it. The test's own process
knows the data of all workers, and computes the right values.
"""

import functools
import os
import pathlib
import tempfile
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer, Models, callbacks, multi_worker
from tf_cross_shard._src.core.reduce import multi_worker as engines

Key = tuple[str, ...]
Case = Callable[[tf.distribute.Strategy], Any]

GROUPINGS: dict[int, dict[str, list[list[int]] | None]] = {
  2: {
    "ungrouped": None,
    "together": [[1, 0]],
    "singletons": [[0], [1]],
  },
  4: {
    "ungrouped": None,
    "contiguous": [[0, 1], [2, 3]],
    "strided": [[0, 2], [1, 3]],
    "crossed": [[0, 3], [1, 2]],
    "singletons": [[0], [1], [2], [3]],
  },
}
ROWS = 7  # of each table whose gradients are sparse
STEPS = 3  # of cases that take several steps
FIT = {"share": 2, "steps": 3, "epochs": 2}  # of `model.fit`


def own(variables: Sequence[Any]) -> list[np.ndarray]:
  """Returns this worker's value of each variable."""
  values = [testbed.copies(variable) for variable in variables]
  assert all(len(value) == 1 for value in values)
  return [value[0] for value in values]


def place_of(strategy: tf.distribute.Strategy) -> int:
  """Returns the number of this worker's replica, outside of `strategy.run`."""
  resolver = strategy.cluster_resolver
  cluster = resolver.cluster_spec().as_dict()
  before = len(cluster.get("chief", ())) if resolver.task_type != "chief" else 0
  return before + int(resolver.task_id)


def _shared_folder(strategy: tf.distribute.Strategy, name: str) -> str:
  """Returns a folder that is the same in all workers of a launch."""
  workers = strategy.cluster_resolver.cluster_spec().as_dict()["worker"]
  ports = "_".join(address.rpartition(":")[2] for address in workers)
  folder = pathlib.Path(tempfile.gettempdir(), f"tf_cross_shard_{ports}", name)
  folder.mkdir(parents=True, exist_ok=True)
  return str(folder)


def _run(
  strategy: tf.distribute.Strategy, step: Callable[..., Any], mode: str
) -> Callable[..., Any]:
  """Returns a function that runs `step` in every replica.

  It runs eagerly, or as one `tf.function`.
  """

  def run(*args: Any) -> Any:
    return strategy.run(step, args=args)

  if mode == "eager":
    return run
  return tf.function(run, autograph=False)


# ---------------------------------------------------- sums of given gradients


def _shapes(kind: str) -> list[tuple[int, ...]]:
  if kind == "large":  # 5.2 MB in one, and several buckets of 4 MB
    return [(1300, 1000), (700, 1000), (600, 1000), (3,)]
  return [(40, 30), (1,), (7, 3)]


def dense_gradients(kind: str, replica: int) -> list[np.ndarray]:
  """Returns a replica's gradients: integers, unless `kind` is "normal"."""
  rng = np.random.default_rng([replica, len(kind)])
  if kind == "normal":
    return [rng.normal(size=s).astype("float32") for s in _shapes(kind)]
  values = [rng.integers(-8, 9, size=s) for s in _shapes(kind)]
  dtypes: Sequence[Any] = ["float32"] * len(values)
  if kind == "mixed":
    dtypes = ["float32", "float64", "float16"]
  return [v.astype(t) for v, t in zip(values, dtypes, strict=True)]


def _row_ids(kind: str, replica: int) -> list[int]:
  if kind == "nowhere":
    return []
  if kind == "one without":
    return [] if replica == 1 else [replica, 2, 3]
  if kind == "repeated":
    return [3, 3, replica, 3, replica]
  # different numbers of rows: 3, 1, 4, 2
  return [(2 * replica + i) % ROWS for i in range([3, 1, 4, 2][replica])]


def sparse_gradients(
  kind: str, replica: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the indices and values of rows, and a dense gradient."""
  rng = np.random.default_rng([replica, len(kind), 1])
  ids = np.array(_row_ids(kind, replica), "int32")
  if kind == "int64":
    ids = ids.astype("int64")
  values = rng.integers(-8, 9, size=(len(ids), 2)).astype("float32")
  if kind == "normal":
    values = rng.normal(size=values.shape).astype("float32")
  return ids, values, rng.integers(-8, 9, size=(3,)).astype("float32")


def _summing(
  strategy: tf.distribute.Strategy, grouping: str, **options: Any
) -> CrossShardOptimizer:
  """Returns an optimizer whose step subtracts the sum of the gradients."""
  return CrossShardOptimizer(
    tf.keras.optimizers.SGD(1.0),
    "sum",
    group_assignment=GROUPINGS[strategy.num_replicas_in_sync][grouping],
    **options,
  )


def _summed(
  strategy: tf.distribute.Strategy,
  grouping: str,
  like: Sequence[np.ndarray],
  **options: Any,
) -> tuple[list[Any], CrossShardOptimizer]:
  """Returns weights of 0, and an optimizer that is built on these weights."""
  with strategy.scope():
    variables = [
      tf.keras.Variable(np.zeros_like(each), dtype=each.dtype.name)
      for each in like
    ]
    optimizer = _summing(strategy, grouping, **options)
    optimizer.build(variables)
  return variables, optimizer


def _stepper(
  strategy: tf.distribute.Strategy, variables: Sequence[Any], optimizer: Any
) -> Callable[..., Any]:

  def step(*grads: tf.Tensor) -> None:
    optimizer.apply_gradients(zip(grads, variables, strict=True))

  return _run(strategy, step, "function")


def dense_sum(
  kind: str,
  grouping: str,
  mode: str,
  strategy: tf.distribute.Strategy,
  **options: Any,
) -> list[np.ndarray]:
  """Returns the weights after a step from 0: the negative sums of gradients."""
  mine = dense_gradients(kind, place_of(strategy))
  variables, optimizer = _summed(strategy, grouping, mine, **options)

  def step(*grads: tf.Tensor) -> None:
    if mode == "cond":
      tf.cond(
        tf.reduce_all(tf.math.is_finite(grads[0])),
        lambda: optimizer.apply_gradients(zip(grads, variables, strict=True)),
        lambda: tf.constant(0, tf.int64),
      )
    else:
      optimizer.apply_gradients(zip(grads, variables, strict=True))

  _run(strategy, step, mode)(*map(tf.constant, mine))
  return own(variables)


def islands(
  grouping: str, strategy: tf.distribute.Strategy
) -> dict[str, list[np.ndarray]]:
  """Takes three steps. The groups are synchronized after the second step.

  The gradients of call `c` are `c` times those of `dense_sum`.
  """
  mine = dense_gradients("small", place_of(strategy))
  variables, optimizer = _summed(strategy, grouping, mine)
  outer = callbacks.OuterOptimizer(2, tf.keras.optimizers.SGD(1.0))
  outer.build(optimizer, variables)
  run = _stepper(strategy, variables, optimizer)
  synchronized = []
  for call in (1.0, 2.0, 3.0):
    run(*(tf.constant(call * each) for each in mine))
    outer.step()
    if call == 2:
      synchronized = own(variables)
  return {"synchronized": synchronized, "at the end": own(variables)}


def sharded(
  grouping: str,
  optimizer: str,
  strategy: tf.distribute.Strategy,
  scatter_bytes: int = 1 << 20,
) -> list[np.ndarray]:
  """Trains for three steps, and checks the shapes of this replica's slots.

  Before the last step, the state is saved and loaded into a new optimizer.
  """
  replicas = strategy.num_replicas_in_sync
  task = training.Regression(num_replicas=replicas)

  def make() -> Any:
    rows = unittest.mock.patch.object(
      engines.MultiWorker, "scatter_bytes", scatter_bytes
    )
    with strategy.scope(), rows:
      made = CrossShardOptimizer(
        testbed.OPTIMIZERS[optimizer](),
        group_assignment=GROUPINGS[replicas][grouping],
        shard_update=True,
        fused_update=False,  # Compared with Keras' own bits.
      )
      made.build(variables)
    return made

  with strategy.scope():
    variables = task.variables()
  first = make()
  x, y = task.x, task.y
  task.x, task.y = x[:2], y[:2]
  task.train_replicas(strategy, first, variables)
  store: dict[str, Any] = {}
  first.save_own_variables(store)
  second = make()
  second.load_own_variables(store)
  task.x, task.y = x[2:], y[2:]
  task.train_replicas(strategy, second, variables)
  kept = [list(v.shape) for v in second.inner_optimizer.variables]
  members = testbed.groups_of(
    GROUPINGS[replicas][grouping], replicas
  ).group_size
  in_first_row = 8 if scatter_bytes > 32 else 6
  assert [-(-in_first_row // members)] in kept, kept
  return own(variables)


def sparse_sum(
  kind: str,
  grouping: str,
  mode: str,
  strategy: tf.distribute.Strategy,
  **options: Any,
) -> list[np.ndarray]:
  """Returns the negative sums of a table's and a dense variable's gradients."""
  ids, values, dense = sparse_gradients(kind, place_of(strategy))
  (table, bias), optimizer = _summed(
    strategy, grouping, [np.zeros((ROWS, 2), "f4"), dense], **options
  )

  def step(ids: tf.Tensor, values: tf.Tensor, dense: tf.Tensor) -> None:
    rows = tf.IndexedSlices(values, ids, tf.constant([ROWS, 2], ids.dtype))
    optimizer.apply_gradients([(rows, table), (dense, bias)])

  given = tf.constant(ids), tf.constant(values), tf.constant(dense)
  run = _run(strategy, step, mode)
  if mode == "dynamic":
    run = tf.function(
      lambda *args: strategy.run(step, args=args),
      autograph=False,
      input_signature=[
        tf.TensorSpec([None], given[0].dtype),
        tf.TensorSpec([None, 2], given[1].dtype),
        tf.TensorSpec([3], tf.float32),
      ],
    )
  run(*given)
  return own([table, bias])


def retrace(
  grouping: str, strategy: tf.distribute.Strategy
) -> list[np.ndarray]:
  """Takes steps, and makes worker 1 trace its step a second time.

  In the second step, worker 1 receives a tensor of a different shape, and the
  other workers do not.
  """
  mine = place_of(strategy)
  given = dense_gradients("retrace", mine)
  variables, optimizer = _summed(strategy, grouping, given)
  traced = []

  @tf.function(autograph=False)
  def step(padding: tf.Tensor, *grads: tf.Tensor) -> None:
    traced.append(padding.shape)

    def replica_step(*grads: tf.Tensor) -> None:
      summed = [grad + tf.reduce_sum(padding) for grad in grads]
      optimizer.apply_gradients(zip(summed, variables, strict=True))

    strategy.run(replica_step, args=grads)

  for i in range(STEPS):
    padding = tf.zeros([5 if mine == 1 and i == 1 else 3])
    step(padding, *map(tf.constant, given))
  assert len(traced) == (2 if mine == 1 else 1)
  return own(variables)


# ------------------------------------------------------------ Keras' own loop


def fit_data(replicas: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns examples that differ, [steps, replicas, share, ...]."""
  rng = np.random.default_rng(5)
  shape = (FIT["steps"], replicas, FIT["share"])
  x = rng.normal(size=(*shape, 3)).astype("float32")
  y = rng.normal(size=(*shape, 2)).astype("float32")
  return x, y


def batches(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
  """Returns a dataset with one batch of all given replicas for each step."""
  size = x.shape[1] * x.shape[2]
  return tf.data.Dataset.from_tensor_slices(
    (x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))
  ).batch(size)


def fit(
  optimizer: str,
  grouping: str,
  strategy: tf.distribute.Strategy,
  **options: Any,
) -> dict[str, Any]:
  """Runs `fit`, `evaluate` and `predict` of Keras 3; returns the results."""
  replicas = strategy.num_replicas_in_sync
  with strategy.scope():
    model = testbed.network()
    model.compile(
      CrossShardOptimizer(
        testbed.OPTIMIZERS[optimizer](),
        group_assignment=GROUPINGS[replicas][grouping],
        fused_update=False,  # Compared with Keras' own bits.
        **options,
      ),
      "mse",
      metrics=["mae"],
    )
  data = batches(*fit_data(replicas))
  model.fit(data, epochs=FIT["epochs"], verbose=0)
  return {
    "weights": own(model.trainable_variables),
    "evaluated": model.evaluate(data, verbose=0, return_dict=True),
    "predicted": model.predict(data, verbose=0),
  }


# With patience 1, group 0 stops in epoch 1, and its best epoch is 0; group 1
# stops in epoch 2, and its best epoch is 1.
KNOWN = ([1.0, 2.0, 0.0, 0.0], [3.0, 2.0, 4.0, 1.0])


class _Known(tf.keras.callbacks.Callback):
  """Sets known metrics, and records the weights of each epoch."""

  def __init__(self, known: Sequence[Sequence[float]] = KNOWN) -> None:
    super().__init__()
    self._known = known
    self.weights: list[list[np.ndarray]] = []

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    self.weights.append(own(self.model.trainable_variables))
    for i, series in enumerate(self._known):
      logs[f"val_mae/model_{i}"] = series[epoch]


def group_callbacks(
  grouping: str, strategy: tf.distribute.Strategy
) -> dict[str, Any]:
  """Runs `fit` with callbacks for groups.

  Only the first worker has the right validation data.
  """
  replicas = strategy.num_replicas_in_sync
  with strategy.scope():
    model = testbed.network()
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.SGD(0.125),
      group_assignment=GROUPINGS[replicas][grouping],
    )
    model.compile(optimizer, "mse", metrics=["mae"])
  folder = _shared_folder(strategy, "callbacks")
  x, y = fit_data(replicas)
  data = batches(x, y if place_of(strategy) == 0 else y + 1.0)
  known = _Known()
  stop = callbacks.PerModelEarlyStopping("val_mae", mode="min", patience=1)
  history = model.fit(
    batches(x, y),
    epochs=len(KNOWN[0]),
    verbose=0,
    callbacks=[
      callbacks.PerModelMetrics(data),
      known,
      stop,
      callbacks.PerModelCheckpoint(f"{folder}/best", "val_mae", "min"),
      callbacks.PerModelTensorBoard(f"{folder}/curves"),
    ],
  )
  weights = own(model.trainable_variables)
  lower = callbacks.PerModelReduceLROnPlateau("loss", 0.5, 1)
  lower.set_model(model)
  for epoch in (0, 1):  # Group 0 improves.
    logs = {"loss/model_0": -1.0 * epoch, "loss/model_1": 1.0}
    lower.on_epoch_end(epoch, logs)
  rates = Models(optimizer=optimizer).values(optimizer.learning_rate)
  state = {
    f"{type(callback).__name__}/{name}": value
    for callback in (stop, lower)
    for name, value in callback.state().items()
  }
  model.set_weights([0.0 * value for value in model.get_weights()])
  Models(model, optimizer).restore(f"{folder}/best")
  return {
    "history": history.history,
    "best_epoch": stop.best_epoch,
    "rates": list(map(float, rates)),
    "state": {name: np.asarray(v).tolist() for name, v in state.items()},
    "of_epoch": known.weights,
    "weights": weights,
    "restored": own(model.trainable_variables),
    "runs": sorted(os.listdir(f"{folder}/curves")),
    "files": len(os.listdir(f"{folder}/curves/model_0")),
  }


# ------------------------------------------------------------------ all cases

# Function, its arguments and options. Each pair of settings occurs once.
CASES: dict[str, list[tuple[Any, ...]]] = {
  "own-4": [
    (dense_sum, "large", "crossed", "function", {"wire_dtype": "bfloat16"}),
    (dense_sum, "mixed", "strided", "eager", {}),
    (dense_sum, "small", "crossed", "cond", {}),
    (dense_sum, "normal", "crossed", "function", {"wire_dtype": "float16"}),
    (sharded, "ungrouped", "Momentum", {}),
    (sharded, "ungrouped", "Momentum", {"scatter_bytes": 24}),
    (sparse_sum, "different", "ungrouped", "dynamic", {}),
    (sparse_sum, "one without", "crossed", "eager", {}),
    (sparse_sum, "nowhere", "contiguous", "function", {}),
    (sparse_sum, "int64", "crossed", "function", {}),
    (sparse_sum, "repeated", "crossed", "function", {"wire_dtype": "float16"}),
    (sparse_sum, "normal", "ungrouped", "function", {"wire_dtype": "bfloat16"}),
    (retrace, "crossed", {}),
    (fit, "Adam", "crossed", {}),
    (islands, "crossed", {}),
    (group_callbacks, "crossed", {}),
  ],
  # TensorFlow's own strategy, under which Keras 3's `fit` fails.
  "tensorflow-2": [
    (dense_sum, "mixed", "together", "function", {"wire_dtype": "bfloat16"}),
    (sparse_sum, "different", "singletons", "function", {}),
    (islands, "singletons", {}),
  ],
}


def cases_of(launch: str) -> dict[Key, Case]:
  return {
    (
      function.__name__,
      *map(str, (*arguments, *options.values())),
    ): functools.partial(function, *arguments, **options)
    for function, *arguments, options in CASES[launch]
  }


def even(strategy: tf.distribute.Strategy) -> dict[str, Any]:
  """Gives two workers the same number of batches, of which they have 2 and 4.

  Returns this worker's batches, or the text of its error.
  """
  is_first = place_of(strategy) == 0
  x = np.arange(1.0, 17.0).astype("f4")

  def data(count: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, -x)).batch(2).take(count)

  whole = data(2 if is_first else 4)
  weighted = whole.map(lambda x, y: ({"a": x}, y, [0.5, 2.0]))
  found: dict[str, Any] = {}
  for name, mode, given in (
    ("stop", "stop", whole),
    ("pad", "pad", whole),
    ("unknown length", "pad", whole.filter(lambda *_: tf.constant(True))),
    ("weighted", "pad", weighted),
    ("modes", "stop" if is_first else "pad", whole),
    ("none", "stop", data(0) if is_first else whole),
    ("endless", "stop", whole.repeat() if is_first else whole),
  ):
    try:
      result = multi_worker.even(given, strategy, mode)
    except ValueError as error:
      found[name] = str(error)
      continue
    policy = result.options().experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF
    epochs = [
      [[each.numpy().tolist() for each in tf.nest.flatten(b)] for b in result]
      for _ in range(2)
    ]
    assert len(result) == len(epochs[0])
    assert epochs[0] == epochs[1]
    found[name] = epochs[0]
  return found


# Groupings of four replicas, wire dtypes, and `accumulate_steps`.
POWERS = (
  ("ungrouped", None, 1),
  ("contiguous", "bfloat16", 1),  # inside workers
  ("crossed", None, 2),  # across them, inside tf.cond
  ("strided", "bfloat16", 1),
  ("singletons", "bfloat16", 1),
)


def powers_of_two(
  grouping: str,
  wire_dtype: str | None,
  window: int,
  steps: int,
  strategy: tf.distribute.Strategy,
) -> dict[str, Any]:
  """Trains with powers of two as gradients; returns all replicas' values.

  Each gradient of replica r is 2 ** r, and that of the table has r + 1 rows.
  """
  counter = tf.Variable(0, dtype=tf.int64)  # one in each process
  zeros = [np.zeros(shape, "f4") for shape in ([3], [ROWS, 2])]
  options = {"wire_dtype": wire_dtype, "accumulate_steps": window}
  (weight, table), optimizer = _summed(strategy, grouping, zeros, **options)

  @tf.function(autograph=False)
  def step() -> None:
    def replica_step() -> None:
      mine = testbed.replica_id()
      power = 2.0 ** tf.cast(mine, tf.float32)
      rows = tf.IndexedSlices(
        power * tf.ones([mine + 1, 2]), tf.range(mine + 1), [ROWS, 2]
      )
      optimizer.apply_gradients(
        [(power * tf.ones([3]), weight), (rows, table)], global_step=counter
      )

    strategy.run(replica_step)

  for _ in range(window * steps):
    step()
  return {
    "weights": testbed.copies(weight),
    "tables": testbed.copies(table),
    "counter": int(counter.numpy()),
  }
