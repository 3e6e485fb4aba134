"""Strategies, optimizers and small models that distributed tests share."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support import logical_devices
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import virtual_tpu
from tf_cross_shard._src.core import replicas

REPLICAS = 4
GROUPINGS: dict[str, list[list[int]] | None] = {
  "ungrouped": None,
  "contiguous": [[0, 1], [2, 3]],
  "strided": [[0, 2], [1, 3]],
  "singletons": [[0], [1], [2], [3]],
}
# TF_USE_LEGACY_KERAS=1 makes `tf.keras` tf_keras, and the same tests run in it.
IS_TF_KERAS = not hasattr(tf.keras, "Variable")


RATES: dict[str, dict[str, float]] = {
  "SGD": {"learning_rate": 0.125},
  "Momentum": {"learning_rate": 0.125, "momentum": 0.5},
  "Adam": {"learning_rate": 0.01},
  "AdamW": {"learning_rate": 0.01, "weight_decay": 0.1},
  "RMSprop": {"learning_rate": 0.01},
  "Adagrad": {"learning_rate": 0.1},
  "Adadelta": {"learning_rate": 1.0},
  "Adamax": {"learning_rate": 0.01},
  "Nadam": {"learning_rate": 0.01},
  "Ftrl": {"learning_rate": 0.1},
  "Lion": {"learning_rate": 0.01},
  "Lamb": {"learning_rate": 0.01},
  "Adafactor": {"learning_rate": 0.01},
}


def optimizers_of(library: Any) -> dict[str, Callable[..., Any]]:
  """Returns functions that make the optimizers of a Keras, by name."""
  found = {}
  for name, options in RATES.items():
    kind = "SGD" if name == "Momentum" else name
    if hasattr(library.optimizers, kind):
      make = getattr(library.optimizers, kind)
      found[name] = functools.partial(make, **options)
  # In Keras 3.12, Muon's update reads an attribute that TensorFlow's variables
  # lack, so that plain Keras cannot use it either.
  muon = getattr(library.optimizers, "Muon", None)
  if muon and "_should_use_adamw" not in inspect.getsource(muon.update_step):
    found["Muon"] = functools.partial(muon, 0.01)
  return found


OPTIMIZERS = optimizers_of(tf.keras)


@functools.cache
def mirrored(num_replicas: int = REPLICAS) -> tf.distribute.MirroredStrategy:
  """Returns a MirroredStrategy over logical devices.

  Asserts that it has several replicas.
  """
  devices = [f"{logical_devices.KIND}:{i}" for i in range(num_replicas)]
  # Collectives of one process share their keys: strategies of two sizes that
  # both used collectives would receive each other's tensors.
  meet = None
  if num_replicas != REPLICAS:
    meet = tf.distribute.ReductionToOneDevice()
  strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=meet)
  assert strategy.num_replicas_in_sync == num_replicas > 1
  return strategy


def replica_id() -> tf.Tensor:
  """Returns this replica's number, as an int32 tensor."""
  context = tf.distribute.get_replica_context()
  return tf.convert_to_tensor(context.replica_id_in_sync_group)


def mark() -> tf.Tensor:
  """Returns 1, 2, 4 or 8: a sum of marks tells which replicas are in it."""
  return tf.constant([1.0, 2.0, 4.0, 8.0])[replica_id()]


def run(step: Callable[[], Any], mode: str = "function") -> list[Any]:
  """Runs a replica step on four replicas; returns each replica's result."""
  strategy = mirrored()

  def run_all() -> Any:
    return strategy.run(step)

  call = (
    tf.function(run_all, autograph=False) if mode == "function" else run_all
  )
  return list(strategy.experimental_local_results(call()))


def copies(variable: Any) -> list[np.ndarray]:
  """Returns every replica's value of a `tf.Variable` or `keras.Variable`."""
  if hasattr(variable, "whole_copies"):  # A slot that is kept in shards.
    return list(variable.whole_copies())
  value = getattr(variable, "value", variable)
  value = variable if callable(value) else value
  strategy = getattr(value, "distribute_strategy", None)
  if strategy is None:
    return [value.numpy()]
  return [copy.numpy() for copy in strategy.experimental_local_results(value)]


def base_optimizer(optimizer: Any) -> Any:
  while hasattr(optimizer, "inner_optimizer"):
    optimizer = optimizer.inner_optimizer
  return optimizer


def variable(
  value: Any, name: str | None = None, library: Any = tf.keras
) -> Any:
  """Returns a variable of a Keras. tf_keras uses `tf.Variable`."""
  return getattr(library, "Variable", tf.Variable)(value, name=name)


def groups_of(
  grouping: Sequence[Sequence[int]] | None, num_replicas: int = REPLICAS
) -> groups_lib.Groups:
  """Returns the groups that belong to a `group_assignment`."""
  if grouping is None:
    return groups_lib.contiguous(num_replicas, num_replicas)
  return groups_lib.Groups(grouping)


def fit(
  model: Any, data: tf.data.Dataset, epochs: int = 1, **options: Any
) -> Any:
  """Calls `fit` with one iterator for all epochs.

  Creating an iterator takes most of the time of a small `fit`. The dataset
  repeats without end, so that replicas need not check for data.
  """
  steps = int(data.cardinality())
  return model.fit(
    data.repeat(), epochs=epochs, steps_per_epoch=steps, verbose=0, **options
  )


def network(outputs: int = 2, dropout: float = 0.0) -> Any:
  """Returns a network with a nonlinearity; its weights are always the same."""
  tf.keras.utils.set_random_seed(1)
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      tf.keras.Input((3,)),
      layers.Dense(4, activation="tanh", name="hidden"),
      layers.Dropout(dropout),
      layers.Dense(outputs, name="last"),
    ]
  )


def one_weight() -> Any:
  """Returns a model that multiplies its input by a weight, 0 at first."""
  layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
  return tf.keras.Sequential([tf.keras.Input((1,)), layer])


def interrupt() -> None:
  raise KeyboardInterrupt


class Interruption(tf.keras.callbacks.Callback):  # type: ignore[misc]
  """Ends `fit`, or calls a function, at a certain epoch or batch."""

  def __init__(
    self,
    epoch: int,
    batch: int | None = None,
    act: Callable[[], None] = interrupt,
  ) -> None:
    super().__init__()
    self._at, self._act, self._epoch = (epoch, batch), act, 0

  # tf_keras asks for these three; the callback of Keras 3 lacks them.
  def _implements_train_batch_hooks(self) -> bool:
    return True

  def _implements_test_batch_hooks(self) -> bool:
    return False

  _implements_predict_batch_hooks = _implements_test_batch_hooks

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    self._epoch = epoch
    self.on_train_batch_end(None)

  def on_train_batch_end(self, batch: Any, logs: Any = None) -> None:
    if (self._epoch, batch) == self._at:
      self._act()


@functools.cache
def virtual(num_replicas: int) -> virtual_tpu.VirtualTPUStrategy:
  """Returns a virtual TPU that tests share. Asserts its number of replicas."""
  strategy = virtual_tpu.VirtualTPUStrategy(num_replicas)
  assert strategy.num_replicas_in_sync == num_replicas
  return strategy


STRATEGIES: dict[str, Callable[[], Any]] = {
  "mirrored": mirrored,
  "virtual": lambda: virtual(REPLICAS),
}


def values(variable: Any) -> list[Any]:
  """Returns each replica's value of a variable, on every worker."""
  strategy = replicas.strategy_of(variable)
  copies = replicas.Copies(strategy or tf.distribute.get_strategy())
  if strategy is None:
    return copies.here(variable)[:1]
  return copies.read(variable, range(copies.engine.num_replicas))


def per_replica(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> Any:
  """Returns a value that is the i-th of `values` on the i-th replica."""
  assert len(values) > 1
  return strategy.experimental_distribute_values_from_function(
    lambda context: tf.convert_to_tensor(
      values[context.replica_id_in_sync_group]
    )
  )


def per_replica_results(strategy: tf.distribute.Strategy, value: Any) -> Any:
  """Returns each replica's result, converted to lists and numbers."""
  results = strategy.experimental_local_results(value)
  assert len(results) > 1
  return [np.asarray(result.numpy()).tolist() for result in results]
