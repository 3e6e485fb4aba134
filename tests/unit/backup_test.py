"""Backups in one process; several are in multi_worker_errors_test.py.

What our callbacks know, and a process that is killed, in killed_fit_test.py.
"""

import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_cross_shard
import tf_cross_shard.tf_keras
from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard import callbacks, multi_worker, replica_state
from tf_cross_shard.callbacks import base
from tf_cross_shard.coordination import agreement

X = np.random.default_rng(0).normal(size=(32, 4)).astype("f4")
EPOCHS = 4
GROUPS = [[0, 2], [1, 3]]


def _model(groups: Any = None, library: Any = tf.keras) -> Any:
  """A model whose next step depends on all that has to be saved."""
  library.utils.set_random_seed(3)
  layers = library.layers
  # The random numbers of tf_keras are not variables of the model.
  dropout = [] if library is tf_keras else [layers.Dropout(0.5)]
  model = library.Sequential(
    [
      *(library.Input((4,)), layers.Dense(8), *dropout),
      *(layers.BatchNormalization(), layers.Dense(1)),
    ]
  )
  home = tf_cross_shard.tf_keras if library is tf_keras else tf_cross_shard
  optimizer = home.CrossShardOptimizer(
    library.optimizers.Adam(0.01), group_assignment=groups
  )
  model.compile(optimizer, "mse")
  return model


def _fit(model: Any, *others: Any) -> list[int]:
  """Returns the epochs that were trained."""
  data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8)
  history = testbed.fit(model, data, EPOCHS, callbacks=list(others))
  return list(history.epoch)


class _Crash(base.GroupCallback):
  """Ends the training after two epochs."""

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    if epoch == 1:
      raise KeyboardInterrupt


def _crash(folder: pathlib.Path, model: Any) -> None:
  with pytest.raises(KeyboardInterrupt):
    _fit(model, callbacks.BackupAndRestore(folder), _Crash())


def _variables(model: Any) -> list[Any]:
  return [*model.variables, *testbed.variables_of(model.optimizer)]


def _state(model: Any) -> dict[str, Any]:
  values = map(testbed.copies, _variables(model))
  return {str(i): copies for i, copies in enumerate(values)}


@pytest.mark.parametrize("kind", ["groups", "tf_keras"])
def test_a_resumed_run_is_that_of_no_crash(
  kind: str, tmp_path: pathlib.Path
) -> None:
  """Weights, slots, batch statistics and random numbers of every replica."""
  is_grouped = kind == "groups"
  strategy = testbed.mirrored() if is_grouped else tf.distribute.get_strategy()
  with strategy.scope():
    groups = GROUPS if is_grouped else None
    library = tf.keras if is_grouped else tf_keras
    undisturbed, model = _model(groups, library), _model(groups, library)
  _fit(undisturbed)
  _crash(tmp_path, model)
  for variable in _variables(model):
    variable.assign(tf.ones_like(variable))
  assert _fit(model, callbacks.BackupAndRestore(tmp_path)) == [2, 3]
  resumed = _state(model)
  assert cases.same(resumed, _state(undisturbed)) == []
  assert not (tmp_path / "worker_0").exists()
  if is_grouped:
    assert sum((v[0] != v[1]).any() for v in resumed.values()) > 10


def test_another_number_of_replicas(tmp_path: pathlib.Path) -> None:
  for groups, folder in (([[0], [1]], "groups"), (None, "replicas")):
    with testbed.mirrored(2).scope():
      _crash(tmp_path / folder, _model(groups))
  alone = _model()
  before = alone.get_weights()
  with pytest.raises(ValueError, match=r"2 groups, .* optimizer has 1, "):
    _fit(alone, callbacks.BackupAndRestore(tmp_path / "groups"))
  for weight, same in zip(alone.get_weights(), before, strict=True):
    np.testing.assert_array_equal(weight, same)
  # Of one group only statistics and random numbers differ.
  assert _fit(alone, callbacks.BackupAndRestore(tmp_path / "replicas")) == [
    *(2, 3)
  ]


def test_the_last_two_are_kept(tmp_path: pathlib.Path) -> None:
  """So that a crash while one is written leaves the one before."""
  folder = tmp_path / "worker_0"
  backup = callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
  _fit(_model(), backup)
  newest = folder / f"epoch_{EPOCHS}.npz"
  names = [f"epoch_{EPOCHS - 1}.npz", newest.name]
  assert sorted(path.name for path in folder.iterdir()) == names
  model = _model()
  assert _fit(model, backup) == []
  assert _fit(model) == [*range(EPOCHS)]  # the place is that of one `fit` only
  newest.rename(folder / f".{newest.name}.1234.partial")
  assert _fit(_model(), backup) == [EPOCHS - 1]
  assert sorted(path.name for path in folder.iterdir()) == names
  newest.write_bytes(newest.read_bytes()[:-9])
  with pytest.raises(replica_state.CheckpointError, match="is damaged"):
    _fit(_model(), backup)


def test_wrong_arguments(tmp_path: pathlib.Path) -> None:
  for folder in ("", "gs://bucket/backup"):
    with pytest.raises(ValueError, match="`backup_dir`"):
      multi_worker.BackupAndRestore(folder)
  model = _model(library=tf_keras)
  model.compile(tf_keras.optimizers.legacy.SGD(), "mse")
  with pytest.raises(ValueError, match=r"method build.*; got SGD\."):
    _fit(model, multi_worker.BackupAndRestore(tmp_path))


def test_the_newest_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
  """Of one process its own; of several, what all have."""
  strategy = tf.distribute.get_strategy()

  def newest(*numbers: list[int]) -> int | None:
    texts = list(map(json.dumps, numbers))
    workers = agreement.Workers(("worker 0", "worker 1"), 0)
    monkeypatch.setattr(agreement, "of_strategy", lambda _: workers)
    monkeypatch.setattr(agreement, "exchange", lambda *_: texts)
    return multi_worker.newest_common(strategy, numbers[0])

  assert multi_worker.newest_common(strategy, [3, 7, 5]) == 7
  assert multi_worker.newest_common(strategy, []) is None
  assert newest([10, 20], [10, 20, 30]) == 20
  assert newest([], []) is None
  for other in ([], [30]):
    words = re.escape(f"worker 0 has [10, 20]; worker 1 has {other}. Copy")
    with pytest.raises(multi_worker.DisagreementError, match=words):
      newest([10, 20], other)


def test_callbacks_with_a_state_come_before_it(tmp_path: pathlib.Path) -> None:
  with testbed.mirrored().scope():
    model = _model(GROUPS)
  used = [
    callbacks.GroupMetrics((X, X[:, :1])),
    callbacks.BackupAndRestore(tmp_path),
    callbacks.GroupReduceLROnPlateau(),
    callbacks.GroupEarlyStopping(),
    callbacks.GroupTensorBoard(tmp_path),
  ]
  words = (
    "what callbacks know; GroupReduceLROnPlateau, GroupEarlyStopping comes"
    " after it, .*Put BackupAndRestore last"
  )
  with pytest.raises(ValueError, match=words):
    _fit(model, *used)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
