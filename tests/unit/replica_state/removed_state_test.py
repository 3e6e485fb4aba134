"""Files with state of features that were removed still load."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import islands, testbed
from tf_cross_shard import CrossShardOptimizer, callbacks, replica_state
from tf_cross_shard import tf_keras as ours_tf_keras
from tf_cross_shard._src.core.inner import keras_private
from tf_cross_shard._src.replica_state import archive

# Names in a file of OuterOptimizer(4, fragments=2, delay=3, wire_dtype="int8"),
# for weights of these shapes.
SHAPES = [(3,), (5, 4), ()]
REMOVED = {
  "optimizer/outer_sent": np.array([6, 8]),
  "optimizer/fragment0_sent0": np.ones([5, 4], "f"),
  "optimizer/fragment0_kept0": np.ones([5, 4], "f"),
  "optimizer/fragment0_state0": np.array(3),
  "optimizer/fragment1_sent0": np.ones([3], "f"),
  "optimizer/fragment1_sent1": np.ones([], "f"),
  "optimizer/fragment1_kept0": np.ones([3], "f"),
  "optimizer/fragment1_kept1": np.ones([], "f"),
  "optimizer/fragment1_state0": np.array(2),
}
GRADS = [
  np.random.default_rng(7).normal(size=(12, testbed.REPLICAS, *shape))
  for shape in SHAPES
]


def make() -> islands.Islands:
  """Weights that groups train independently, and their OuterOptimizer."""
  return islands.Islands(callbacks.OuterOptimizer(4), SHAPES)


def train(loop: islands.Islands, steps: slice) -> None:
  loop.train(*(rows[steps].astype("f") for rows in GRADS))


def add(path: pathlib.Path, variables: dict[str, Any]) -> None:
  """Adds variables of the optimizer to a saved file, for every group."""
  with archive.reading(path) as file:
    arrays, about = dict(file), dict(file.about)
  about["names"] = [*about["names"], *variables]
  for group in range(len(about["group_assignment"])):
    arrays |= {f"group_{group}/{name}": v for name, v in variables.items()}
  archive.write(path, arrays, about)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
  """The warnings about state that was left out."""
  return [text for text in caplog.messages if "left out" in text]


def test_restore_leaves_it_out_and_warns_once(
  tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
  """Everything else is restored, to the bit."""
  path = tmp_path / "state"
  whole, again = make(), make()
  train(whole, slice(6))
  replica_state.save(path, whole.optimizer, whole.weights)
  replica_state.restore(path, again.optimizer, again.weights)
  assert said(caplog) == []
  add(path, REMOVED)
  train(again, slice(3))
  replica_state.restore(path, again.optimizer, again.weights)
  [warning] = said(caplog)
  for argument in ("delay=", 'wire_dtype="int8"', "fragments="):
    assert warning.count(f"OuterOptimizer({argument}") == 1
  assert str(path) in warning
  for loop in (whole, again):
    train(loop, slice(6, 12))
  np.testing.assert_equal(again.values(), whole.values())


def test_only_what_the_file_holds_is_named(
  tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
  path = tmp_path / "state"
  loop = make()
  replica_state.save(path, loop.optimizer, loop.weights)
  add(path, {"optimizer/fragment0_state0": np.array(3)})
  replica_state.restore(path, loop.optimizer, loop.weights)
  [warning] = said(caplog)
  assert "fragments=" in warning
  assert "delay=" not in warning
  assert "int8" not in warning


@pytest.mark.parametrize(
  "name", ["optimizer/fragment", "optimizer/my_outer_sent", "model/outer_sent"]
)
def test_other_names_are_errors(name: str, tmp_path: pathlib.Path) -> None:
  path = tmp_path / "state"
  loop = make()
  replica_state.save(path, loop.optimizer, loop.weights)
  add(path, {name: np.array(3)})
  with pytest.raises(replica_state.CheckpointError, match=name):
    replica_state.restore(path, loop.optimizer, loop.weights)


def test_sums_that_were_named_by_numbers_of_layers(
  tmp_path: pathlib.Path,
) -> None:
  """Files of 0.2.0, of a program that had made other layers before."""
  path = tmp_path / "state"
  names = [f"dense_{number}/kernel" for number in (1, 2)]
  weights = [tf.Variable(float(i), name=name) for i, name in enumerate(names)]
  optimizer = CrossShardOptimizer("sgd", accumulate_steps=2)
  optimizer.build(weights)
  sums = optimizer._step.window.variables[1:]
  for i, each in enumerate(sums):
    each.assign(10.0 + i)
  replica_state.save(path, optimizer, weights)
  with archive.reading(path) as file:
    arrays, about = dict(file), dict(file.about)
  now = [f"optimizer/gradient_sum/{name}" for name in ("dense", "dense_1")]
  then = [f"optimizer/gradient_sum/{name}" for name in ("dense_1", "dense_2")]
  older = {f"{a}/kernel": f"{b}/kernel" for a, b in zip(now, then, strict=True)}
  assert {*older} <= {*about["names"]}
  about["names"] = [older.get(name, name) for name in about["names"]]
  renamed = {f"group_0/{a}": f"group_0/{b}" for a, b in older.items()}
  arrays = {renamed.get(name, name): array for name, array in arrays.items()}
  archive.write(path, arrays, about)
  for each in sums:
    each.assign(0.0)
  replica_state.restore(path, optimizer, weights)
  assert [float(each) for each in sums] == [10.0, 11.0]


def fit(*others: Any) -> None:
  """Trains a new model with groups for two epochs of four batches."""
  x = np.random.default_rng(0).normal(size=(32, 4)).astype("f")
  tf.keras.utils.set_random_seed(3)
  with testbed.mirrored().scope():
    model = tf.keras.Sequential(
      [tf.keras.Input((4,)), tf.keras.layers.Dense(1)]
    )
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(0.01), group_assignment=islands.PAIRS
    )
    model.compile(optimizer, "mse")
  data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
  outer = callbacks.OuterOptimizer(3)
  testbed.fit(model, data, 2, callbacks=[outer, *others])


def test_backups_leave_it_out_and_warn_once(
  tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
  """A `fit` that resumes within an epoch restores the file twice."""
  backup = callbacks.BackupAndRestore(tmp_path, every=2)
  with pytest.raises(KeyboardInterrupt):
    fit(backup, testbed.Interruption(1, 2))
  add(tmp_path / "worker_0" / "epoch_1_batch_2.npz", REMOVED)
  fit(callbacks.BackupAndRestore(tmp_path))
  assert len(said(caplog)) == 1


def test_older_files_lack_what_keras_does_not_list(
  tmp_path: pathlib.Path,
  caplog: pytest.LogCaptureFixture,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """The product of tf_keras' Nadam stays as it is, with a warning."""
  weight = tf.Variable([1.0, 2.0])
  optimizer = ours_tf_keras.CrossShardOptimizer(tf_keras.optimizers.Nadam())
  optimizer.apply_gradients([(tf.ones(2), weight)])
  with monkeypatch.context() as older:
    older.setattr(keras_private, "unlisted_attributes", lambda _: {})
    replica_state.save(tmp_path / "older", optimizer, [weight])
  saved = weight.numpy()
  optimizer.apply_gradients([(tf.ones(2), weight)])
  product = optimizer.inner_optimizer._u_product.numpy()
  replica_state.restore(tmp_path / "older", optimizer, [weight])
  np.testing.assert_array_equal(weight.numpy(), saved)
  assert optimizer.iterations.numpy() == 1
  assert optimizer.inner_optimizer._u_product.numpy() == product
  [text] = [text for text in caplog.messages if "older version" in text]
  assert "did not save optimizer/Variable" in text
