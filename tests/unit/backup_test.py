"""Backups in one process; several are in multi_worker_errors_test.py."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, multi_worker, replica_state

X = np.random.default_rng(0).normal(size=(32, 4)).astype("f4")
EPOCHS = 5


def _model(groups: Any = None) -> Any:
  """One whose next step depends on all that has to be saved."""
  tf.keras.utils.set_random_seed(3)
  layers = tf.keras.layers
  model = tf.keras.Sequential(
    [
      tf.keras.Input((4,)),
      layers.Dense(8),
      layers.Dropout(0.5),
      layers.BatchNormalization(),
      layers.Dense(1),
    ]
  )
  adam = tf.keras.optimizers.Adam(0.01)
  model.compile(CrossShardOptimizer(adam, group_assignment=groups), "mse")
  return model


def _fit(model: Any, *callbacks: Any) -> list[int]:
  """The epochs that were trained."""
  data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8)
  history = testbed.fit(model, data, EPOCHS, callbacks=list(callbacks))
  return list(history.epoch)


class _Crash(tf.keras.callbacks.Callback):
  """Ends the training after an epoch."""

  def __init__(self, epoch: int) -> None:
    super().__init__()
    self._epoch = epoch

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Raises what no training expects."""
    if epoch == self._epoch:
      raise KeyboardInterrupt


@pytest.fixture
def crashed(tmp_path: pathlib.Path) -> pathlib.Path:
  """Where a run that saw three epochs left its backups."""
  with pytest.raises(KeyboardInterrupt):
    _fit(_model(), multi_worker.BackupAndRestore(tmp_path), _Crash(2))
  return tmp_path


def test_goes_on_as_if_nothing_had_been(crashed: pathlib.Path) -> None:
  undisturbed = _model()
  _fit(undisturbed)
  resumed = _model()
  # Other weights and random numbers, which the backup has to replace.
  resumed.set_weights([w + 1.0 for w in resumed.get_weights()])
  epochs = _fit(resumed, multi_worker.BackupAndRestore(crashed))
  assert epochs == [3, 4]
  for mine, theirs in zip(
    resumed.get_weights(), undisturbed.get_weights(), strict=True
  ):
    np.testing.assert_array_equal(mine, theirs)
  assert not (crashed / "worker_0").exists()


def test_groups_of_one_process_are_kept(tmp_path: pathlib.Path) -> None:
  """Also each replica's own random numbers and batch statistics."""
  models = []
  for _ in range(3):
    with testbed.mirrored(2).scope():
      models.append(_model([[0], [1]]))
  undisturbed, crashed, resumed = models
  _fit(undisturbed)
  with pytest.raises(KeyboardInterrupt):
    _fit(crashed, multi_worker.BackupAndRestore(tmp_path), _Crash(2))
  assert _fit(resumed, multi_worker.BackupAndRestore(tmp_path)) == [3, 4]
  differing = 0
  for mine, theirs in zip(
    [*resumed.variables, *resumed.optimizer.variables],
    [*undisturbed.variables, *undisturbed.optimizer.variables],
    strict=True,
  ):
    one, other = replica_state.values(mine)
    differing += one.tobytes() != other.tobytes()
    for found, expected in zip(
      (one, other), replica_state.values(theirs), strict=True
    ):
      assert found.tobytes() == expected.tobytes(), mine.path
  assert differing > 10


def test_groups_of_another_number_of_replicas(tmp_path: pathlib.Path) -> None:
  backup = multi_worker.BackupAndRestore(tmp_path, delete_checkpoint=False)
  with testbed.mirrored(2).scope():
    _fit(_model([[0], [1]]), backup)
  alone = _model()
  before = alone.get_weights()
  with pytest.raises(ValueError, match=r"of 2 replicas .* has 1\. Go on"):
    _fit(alone, backup)
  for weight, same in zip(alone.get_weights(), before, strict=True):
    np.testing.assert_array_equal(weight, same)
  # Without groups only what each replica has of its own differs.
  with testbed.mirrored(2).scope():
    other = multi_worker.BackupAndRestore(tmp_path / "b", False)
    _fit(_model(), other)
  assert _fit(_model(), other) == []


def test_a_backup_that_was_cut_off_gives_way_to_the_one_before(
  crashed: pathlib.Path,
) -> None:
  markers = {int(file.read_text()): file for file in crashed.rglob("epoch.txt")}
  assert sorted(markers) == [2, 3]
  markers[3].write_text("")  # as a crash in mid-write may leave it
  model = _model()
  assert _fit(model, multi_worker.BackupAndRestore(crashed)) == [2, 3, 4]


def test_files_are_kept_where_that_is_asked(tmp_path: pathlib.Path) -> None:
  backup = multi_worker.BackupAndRestore(tmp_path, delete_checkpoint=False)
  _fit(_model(), backup)
  assert len(list(tmp_path.rglob("epoch.txt"))) == 2
  assert _fit(_model(), backup) == []


@pytest.mark.parametrize("wrong", ["", "gs://bucket/backup"])
def test_what_is_no_directory_is_refused(wrong: str) -> None:
  with pytest.raises(ValueError, match="`backup_dir`"):
    multi_worker.BackupAndRestore(wrong)


def test_the_newest_of_one_process_is_its_own() -> None:
  strategy = tf.distribute.get_strategy()
  assert multi_worker.newest_common(strategy, [3, 7, 5]) == 7
  assert multi_worker.newest_common(strategy, []) is None


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
