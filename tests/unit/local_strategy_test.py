"""`local_strategy`; this process has four logical CPUs."""

import json
import pathlib
import textwrap
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

import tf_cross_shard
from tests.support import programs

# Prints the number of threads that an iterator of each strategy starts, and the
# losses of a `fit` that shuffles arrays. This needs a new process: devices can
# be divided only once, and tests/conftest.py turns off tuning for iterators.
PROGRAM = """
  import os
  import numpy as np
  import tensorflow as tf
  import tf_cross_shard

  def count():
    return len(os.listdir("/proc/self/task"))

  def threads(strategy):
    before = count()
    data = tf.data.Dataset.range(1000).batch(9)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    next(iterator), next(iterator)
    return count() - before, iterator

  def losses(strategy):
    tf.keras.utils.set_random_seed(0)
    x = np.random.normal(size=(30, 4)).astype("float32")
    with strategy.scope():
      model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
      model.compile("adam", "mse")
    y = x.sum(axis=1, keepdims=True)
    fit = model.fit(x, y, batch_size=9, epochs=2, verbose=0)
    return fit.history["loss"]

  local = tf_cross_shard.local_strategy(3, vectorized=False)
  ids = local.run(
    lambda: tf.distribute.get_replica_context().replica_id_in_sync_group
  )
  devices = [x.device[-5:] for x in ids.values]
  assert devices == ["CPU:0", "CPU:1", "CPU:2"], devices
  pair = tf_cross_shard.local_strategy(2, vectorized=False)
  assert pair.num_replicas_in_sync == 2
  plain = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(3)])
  kept = [threads(strategy) for strategy in (plain, local) * 2]
  numbers = [number for number, _ in kept[2:]]
  print(numbers, losses(plain), losses(local), sep="\\n")
  data = tf.data.Dataset.range(8).batch(4)
  data = local.experimental_distribute_dataset(data)
  assert isinstance(data, tf.distribute.DistributedDataset)
  # Functions of datasets still run in TensorFlow.
  data = tf.data.Dataset.range(1).map(lambda x: tf.executing_eagerly())
  assert not next(iter(data))
  os._exit(0)  # Deleting the plain iterators takes up to minutes.
"""


@pytest.mark.slow
def test_devices_and_iterators_of_a_new_process(
  tmp_path: pathlib.Path,
) -> None:
  """Iterators of `local_strategy` have no tuning threads."""
  program = textwrap.dedent(PROGRAM)
  lines = programs.run(["-u", "-c", program], tmp_path).splitlines()
  (plain, local), *losses = map(json.loads, lines[-3:])
  # Each of the three devices has a tuning thread and a prefetching thread; the
  # dataset has a tuning thread, too.
  assert plain - local == 7
  assert losses[0] == losses[1]


def test_devices_that_exist_are_used() -> None:
  for count in (4, 2, 1):
    strategy = tf_cross_shard.local_strategy(count, vectorized=False)
    assert strategy.num_replicas_in_sync == count
    assert strategy.extended.worker_devices == tuple(
      f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(count)
    )


def test_one_program_unless_there_are_gpus() -> None:
  """It works after other operations, for any number of replicas."""
  tf.constant(0)
  strategy = tf_cross_shard.local_strategy(5)
  assert isinstance(strategy, tf_cross_shard.VectorizedStrategy)
  assert strategy.num_replicas_in_sync == 5


def test_too_late() -> None:
  tf.constant(0)
  with pytest.raises(
    RuntimeError, match=r"needs 5 .* already started with only 4"
  ):
    tf_cross_shard.local_strategy(5, vectorized=False)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "4", None])
def test_no_positive_number(count: Any) -> None:
  with pytest.raises(ValueError, match=f"`num_replicas` must.* got {count!r}"):
    tf_cross_shard.local_strategy(count)


@pytest.mark.parametrize(
  ("gpus", "divided", "kind"), [(1, 1, "CPU"), (2, 1, "GPU"), (1, 3, "GPU")]
)
def test_gpus_if_there_are_enough(gpus: int, divided: int, kind: str) -> None:
  """Whole GPUs, or one that the program has divided; no GPU is needed here."""
  physical = [tf.config.PhysicalDevice(f"GPU:{i}", "GPU") for i in range(gpus)]
  cpus = tf.config.get_visible_devices("CPU")
  with (
    mock.patch.object(
      tf.config,
      "get_visible_devices",
      lambda kind: physical if kind == "GPU" else cpus,
    ),
    mock.patch.object(
      tf.config,
      "get_logical_device_configuration",
      lambda device: [None] * (divided if device in physical else 4),
    ),
    mock.patch.object(
      tf.distribute.MirroredStrategy, "__init__", return_value=None
    ) as create,
  ):
    tf_cross_shard.local_strategy(2, vectorized=False)
  create.assert_called_once_with([f"{kind}:0", f"{kind}:1"])
