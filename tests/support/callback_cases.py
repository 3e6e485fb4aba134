"""Small grouped models, and known metrics, for the tests of callbacks."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support import replica_state_cases, testbed
from tf_cross_shard import CrossShardOptimizer

N = testbed.REPLICAS
CROSSED = [[3, 0], [1, 2]]
PAIR = [[0], [1]]  # the groups of the strategy of this name
STRATEGIES = {**testbed.STRATEGIES, "pair": lambda: testbed.mirrored(2)}
STEPS, SHARE = 2, 2
RATE = 0.0625
_RNG = np.random.default_rng(4)
# [step, replica, example, ...]; replicas see different rows.
X = _RNG.normal(size=(STEPS, N, SHARE, 3)).astype("float32")
Y = _RNG.normal(size=(STEPS, N, SHARE, 2)).astype("float32")
VALIDATION = (
  _RNG.normal(size=(7, 3)).astype("float32"),
  _RNG.normal(size=(7, 2)).astype("float32"),
  _RNG.uniform(0.5, 2.0, size=7).astype("float32"),
)
# A metric of both groups in eight epochs. It is best in epochs 2 and 4; with a
# patience of 2, training stops in epochs 4 and 6.
SERIES = ([5.0, 4.0, 1.0, 2.0, 3.0, 0.5, 4.0, 1.0], [9, 9, 8, 8.5, 7, 9, 8, 1])


def logs_of(epoch: int, name: str = "val_loss", sign: float = 1.0) -> Any:
  return {
    f"{name}/model_{i}": sign * series[epoch] for i, series in enumerate(SERIES)
  }


def compiled(model: Any, optimizer: Any) -> Any:
  model.compile(
    optimizer,
    "mse",
    metrics=["mae"],
    weighted_metrics=[tf.keras.metrics.MeanSquaredError("weighted")],
  )
  return model


def grouped(where: str = "pair", groups: Any = PAIR, outputs: int = 2) -> Any:
  """Returns a compiled model with groups, whose optimizer is built."""
  strategy = STRATEGIES[where]()
  assert strategy.num_replicas_in_sync == (2 if where == "pair" else N)
  with strategy.scope():
    model = testbed.network(outputs)
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(RATE),
      group_assignment=groups,
      fused_update=False,  # Compared with Keras' own bits.
    )
    optimizer.build(model.trainable_variables)
    return compiled(model, optimizer)


def with_rates(rates: Any, traces: list[None], **options: Any) -> Any:
  """Returns a model with one weight, whose gradient is 1.

  Its loss appends to `traces` in each trace.
  """

  def loss(y: Any, outputs: Any) -> Any:
    traces.append(None)
    return tf.reduce_mean(outputs - y, axis=-1)

  with testbed.mirrored(2).scope():
    model = testbed.one_weight()
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.SGD(rates, momentum=0.25 if options else 0.0),
      group_assignment=PAIR,
      **options,
    )
    model.compile(optimizer, loss)
  return model


def data(replicas: Sequence[int] = range(N)) -> tf.data.Dataset:
  """Returns batches of these replicas' rows."""
  rows = list(replicas)
  flat = [a[:, rows].reshape(-1, a.shape[-1]) for a in (X, Y)]
  dataset = tf.data.Dataset.from_tensor_slices(tuple(flat))
  return dataset.batch(len(rows) * SHARE, drop_remainder=True)


def fit(model: Any, *used: Any, epochs: int = 1) -> Any:
  return testbed.fit(model, data(), epochs, callbacks=list(used)).history


def begin(model: Any, *used: Any) -> list[Any]:
  """Calls the callbacks' methods that `fit` calls before the first epoch."""
  for callback in used:
    callback.set_model(model)
    callback.on_train_begin()
  model.stop_training = False
  return list(used)


def set_groups(variable: Any, values: Sequence[Any]) -> None:
  """Gives each group of `CROSSED` its own value, in all elements."""
  whole = testbed.copies(variable)
  for members, value in zip(CROSSED, values, strict=True):
    for replica in members:
      whole[replica] = np.full_like(whole[replica], value)
  replica_state_cases.spread(variable, whole)


def mark(model: Any, epoch: int) -> None:
  """Sets all variables to a number that encodes the epoch and the group."""
  for variable in (*model.weights, *model.optimizer.variables):
    set_groups(variable, [10 * epoch, 10 * epoch + 1])


def curves(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the values that TensorBoard reads from a run, by tag."""
  [file] = folder.iterdir()
  found: dict[str, Any] = {}
  for event in tf.compat.v1.train.summary_iterator(str(file)):
    for value in event.summary.value:
      plugin = value.metadata.plugin_data
      if value.tag == "hyperparameters":
        assert value.tag not in found
        assert plugin.plugin_name == "text"
        found[value.tag] = tf.make_ndarray(value.tensor).item().decode()
        continue
      points = found.setdefault(value.tag, [])
      assert event.step == len(points)
      assert points or plugin.plugin_name == "scalars"
      points.append(float(tf.make_ndarray(value.tensor)))
  return found
