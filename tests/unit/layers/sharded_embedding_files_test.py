"""Files of divided tables: each row once, for any number of members."""

import pathlib
import subprocess
import sys
import tracemalloc
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tests.support.tables import IDS, TABLE, make, take_steps, whole
from tf_cross_shard import CrossShardOptimizer, layers, replica_state
from tf_cross_shard._src.core import replicas as replicas_lib


def strategy_of(replicas: int) -> Any:
  """Returns a strategy with a number of replicas."""
  one = tf.distribute.OneDeviceStrategy("CPU:0")
  return testbed.mirrored(replicas) if replicas > 1 else one


def state_of(layer: Any, optimizer: Any) -> Any:
  """Returns the arguments of `replica_state.save` after the path."""
  return optimizer, layer.trainable_variables


@pytest.mark.parametrize(
  ("which", "before", "after"),
  [
    ("keras", 2, 4),
    ("keras", 4, 4),
    ("keras", 4, 1),
    ("tf_keras", 4, 2),
    ("tf_keras", 2, 1),
  ],
)
def test_training_goes_on_with_another_number_of_members(
  which: str, before: int, after: int, tmp_path: pathlib.Path
) -> None:
  path = tmp_path / "state"
  # Rows and slots after a step, and the same step again after the restore.
  first, second = IDS[:1, :1], IDS[1:2, :1]
  strategy, layer, optimizer = make(which, strategy_of(before), "Adam")
  take_steps(strategy, layer, optimizer, np.repeat(first, before, 1))
  right = []
  replica_state.save(path, *state_of(layer, optimizer))
  for replicas in (before, after):
    strategy, layer, optimizer = make(which, strategy_of(replicas), "Adam")
    with strategy.scope():
      optimizer.build(layer.trainable_variables)
    replica_state.restore(path, *state_of(layer, optimizer))
    share = np.repeat(second, replicas, 1)
    # Equal sums: each of the replicas has the same ids.
    take_steps(strategy, layer, optimizer, share, scale=4 / replicas)
    right.append(whole(layer))
  np.testing.assert_allclose(*right, rtol=1e-6, atol=1e-6)
  assert (right[0] != TABLE).any()


@training.in_both
def test_a_file_holds_each_row_once(which: str, tmp_path: pathlib.Path) -> None:
  strategy, layer, optimizer = make(which, strategy_of(4), "Adam")
  take_steps(strategy, layer, optimizer)
  replica_state.assert_in_sync(*state_of(layer, optimizer))
  replica_state.save(tmp_path / "state", *state_of(layer, optimizer))
  with np.load(tmp_path / "state") as file:
    sizes = [file[name].shape for name in file if "embeddings" in name]
  with pytest.raises(replica_state.CheckpointError, match="replicas divide"):
    replica_state.read_group(tmp_path / "state", 0, layer.trainable_variables)
  # The table and two slots, in four parts of 3 rows each.
  assert sizes == [(3, 2)] * 12


@pytest.mark.parametrize("before", [2, 4])
def test_files_are_written_and_read_in_blocks(
  before: int, tmp_path: pathlib.Path
) -> None:
  """Python allocates no whole table, and to restore it only its own parts."""
  path, rows, width = tmp_path / "state", 1 << 18, 8
  size = rows * width * 4
  table = np.arange(rows * width, dtype="float32").reshape(rows, width)
  peaks = []
  for replicas, function in (
    (before, replica_state.save),
    (4, replica_state.restore),
  ):
    with strategy_of(replicas).scope():
      layer = layers.ShardedEmbedding(rows, width, "zeros")
      layer.build()
      optimizer = CrossShardOptimizer("sgd")
      optimizer.build(layer.trainable_variables)
    if function is replica_state.save:
      layer.set_weights([table])
    with mock.patch.object(replicas_lib, "_MOST_WORDS", 1 << 12):
      tracemalloc.start()
      function(path, *state_of(layer, optimizer))
      peaks.append(tracemalloc.get_traced_memory()[1] / size)
      tracemalloc.stop()
  np.testing.assert_array_equal(layer.get_weights()[0], table)
  assert peaks[0] < 0.1
  assert peaks[1] < 1.1


@training.in_both
def test_weights_move_to_and_from_a_plain_embedding(
  which: str, tmp_path: pathlib.Path
) -> None:
  library, package = training.KERASES[which]

  class Model(library.Model):  # type: ignore[name-defined, misc]
    def __init__(self, kind: Any) -> None:
      super().__init__()
      self.items = kind(11, 2)
      self.items.build((None,))

    def call(self, ids: Any) -> Any:
      return self.items(ids)

  with testbed.mirrored().scope():
    ours = Model(package.ShardedEmbedding)
    ours.build((None, 2))
  ours.items.load_own_variables({"0": TABLE})
  plain = Model(library.layers.Embedding)
  ids = np.array([[3, 10], [0, 7]])
  plain.build((None, 2))
  if which == "tf_keras":
    # Its weight files name layers by their class. Move the layer's own store.
    store: dict[str, Any] = {}
    ours.items.save_own_variables(store)
    plain.items.load_own_variables(store)
    np.testing.assert_array_equal(np.array(plain(ids)), TABLE[ids])
    return
  ours.save_weights(tmp_path / "ours.weights.h5")
  plain.load_weights(tmp_path / "ours.weights.h5")
  np.testing.assert_array_equal(np.array(plain(ids)), TABLE[ids])
  plain.items.set_weights([TABLE + 1])
  plain.save_weights(tmp_path / "plain.weights.h5")
  ours.load_weights(tmp_path / "plain.weights.h5")
  np.testing.assert_array_equal(whole(ours.items), TABLE + 1)


@training.in_both
def test_a_model_file_and_a_plain_model_for_serving(
  which: str, tmp_path: pathlib.Path
) -> None:
  library, package = training.KERASES[which]
  with testbed.mirrored().scope():
    ours = library.Sequential(
      [library.Input((2,), dtype="int32"), package.ShardedEmbedding(11, 2)]
    )
    optimizer = package.CrossShardOptimizer("sgd")
  ours.layers[-1].load_own_variables({"0": TABLE})
  ids = np.array([[3, 10], [0, 7]])
  ours.save(tmp_path / "ours.keras")
  loaded = library.models.load_model(tmp_path / "ours.keras")
  np.testing.assert_array_equal(np.array(loaded(ids)), TABLE[ids])
  served = replica_state.load_group(0, optimizer, ours)
  assert type(served.layers[-1]) is library.layers.Embedding
  np.testing.assert_array_equal(np.array(served(ids)), TABLE[ids])


@pytest.mark.parametrize("folder", [None, "ram://tables"])
@training.in_both
def test_export_for_plain_tensorflow(
  which: str, folder: str | None, tmp_path: pathlib.Path
) -> None:
  groups = [[3, 1], [0, 2]]
  strategy, layer, optimizer = make(which, strategy_of(4), groups=groups)
  take_steps(strategy, layer, optimizer)
  table = whole(layer)
  assert (table != whole(layer, 1)).any()
  path = f"{folder or tmp_path}/{which}"
  layer.export(path)
  program = f"""
import sys
import tensorflow as tf
served = tf.saved_model.load({path!r}).signatures["serving_default"]
for ids in (3, [3, 7], [[10, 0], [0, 7]]):
  print(served(ids=tf.constant(ids, tf.int64))["rows"].numpy().tolist())
assert "tf_cross_shard" not in sys.modules
"""
  right = [table[ids].tolist() for ids in (3, [3, 7], [[10, 0], [0, 7]])]
  if folder is None:
    command = [sys.executable, "-c", program]
    output = subprocess.check_output(command, text=True)
    assert output.splitlines() == list(map(str, right))
    return
  served = tf.saved_model.load(path).signatures["serving_default"]
  rows = served(ids=tf.constant([3, 7], tf.int64))["rows"]
  assert rows.numpy().tolist() == right[1]


@training.in_both
def test_checkpoints_and_pickles_have_whole_slots(
  which: str, tmp_path: pathlib.Path
) -> None:
  strategy, layer, optimizer = make(which, strategy_of(4), "Adam")
  take_steps(strategy, layer, optimizer, IDS[:1])
  checkpoint = tf.train.Checkpoint(layer=layer, optimizer=optimizer)
  path = checkpoint.write(str(tmp_path / "checkpoint"))
  take_steps(strategy, layer, optimizer, IDS[1:2])
  right = whole(layer)
  # The same step again: into two members, and into a plain layer and optimizer.
  library, _ = training.KERASES[which]
  other = strategy_of(2)
  _, two, of_two = make(which, other, "Adam")
  with other.scope():
    of_two.build(two.trainable_variables)
  tf.train.Checkpoint(layer=two, optimizer=of_two).read(path).assert_consumed()
  take_steps(other, two, of_two, np.repeat(IDS[1:2, :1], 2, 1), scale=0.0)
  plain = library.layers.Embedding(11, 2)
  plain.build((None,))
  tf.train.Checkpoint(layer=plain).read(path).expect_partial()
  store: dict[str, Any] = {}
  optimizer.save_own_variables(store)
  # The counts, the learning rate, and two slots of all rows.
  assert [np.shape(value) for value in store.values()].count((11, 2)) == 2
  checkpoint.read(path).assert_consumed()
  np.testing.assert_array_equal(np.array(plain.get_weights()[0]), whole(layer))
  take_steps(strategy, layer, optimizer, IDS[1:2])
  np.testing.assert_array_equal(whole(layer), right)
  optimizer.load_own_variables(store)
