"""PerModelCheckpoint keeps each group as it was at its best."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import callback_cases as cases
from tests.support import replica_state_cases, testbed
from tests.support.callback_cases import CROSSED
from tf_cross_shard import CrossShardOptimizer, Models, callbacks, models


def _state(model: Any, members: Sequence[int]) -> list[list[np.ndarray]]:
  """The members' weights, slots and iterations."""
  kept = model.optimizer.variables
  whole = [testbed.copies(v) for v in [*model.weights, *kept]]
  return [[copies[replica] for replica in members] for copies in whole]


@pytest.mark.tf_keras_mode
def test_each_group_is_kept_at_its_best(tmp_path: pathlib.Path) -> None:
  """Weights, slots and iterations; `restore` gives each group its own."""
  path = tmp_path / "best"
  model = cases.grouped("virtual", CROSSED)
  keep = callbacks.PerModelCheckpoint(path)
  keep.set_model(model)
  right: list[Any] = [None, None]
  for epoch, best in enumerate([(0, 1), (0,), (0, 1), (), (1,)]):
    cases.mark(model, epoch)
    for i in best:
      right[i] = _state(model, CROSSED[i])
    keep.on_epoch_end(epoch, cases.logs_of(epoch))
  assert keep.best == [1.0, 7.0]
  for each in (model, cases.grouped("virtual", CROSSED)):
    cases.mark(each, 9)
    Models(each).restore(path)
    found = [_state(each, members) for members in CROSSED]
    np.testing.assert_equal(found, right)
  assert len(right[0]) > 4 + 2 * 4  # weights, Adam's slots, and more


@pytest.mark.tf_keras_mode
def test_each_member_has_its_own_statistics(tmp_path: pathlib.Path) -> None:
  """The statistics of members are equal at first, and differ later."""
  with testbed.mirrored().scope():
    layers = tf.keras.layers
    model = tf.keras.Sequential(
      [tf.keras.Input((3,)), layers.BatchNormalization(), layers.Dense(2)]
    )
    optimizer = CrossShardOptimizer("sgd", group_assignment=CROSSED)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
  keep = callbacks.PerModelCheckpoint(tmp_path / "best")
  keep.set_model(model)
  keep.on_epoch_end(0, {"val_loss/model_0": 1.0, "val_loss/model_1": 1.0})
  with np.load(tmp_path / "best") as file:
    assert not [name for name in file if "member" in name]
  [mean] = [v for v in model.variables if "moving_mean" in v.name]
  then = [np.full(3, float(replica + 1), "f4") for replica in range(cases.N)]
  replica_state_cases.spread(mean, then)
  keep.on_epoch_end(1, {"val_loss/model_0": 2.0, "val_loss/model_1": 0.5})
  replica_state_cases.spread(mean, [np.full(3, 9.0, "f4")] * cases.N)
  Models(model, optimizer).restore(tmp_path / "best")
  for replica, value in enumerate(testbed.copies(mean)):
    right = then[replica] if replica in CROSSED[1] else np.zeros(3)
    np.testing.assert_array_equal(value, right)


def _resume(model: Any, path: pathlib.Path, *options: Any) -> Any:
  """Returns the callback in a run that BackupAndRestore resumes."""
  [keep] = cases.begin(model, callbacks.PerModelCheckpoint(path, *options))
  keep.set_state(callbacks.PerModelCheckpoint(path).state())
  return keep


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("how", ["resumed", "the same callback"])
def test_the_best_of_an_earlier_fit_is_kept(
  how: str, tmp_path: pathlib.Path
) -> None:
  """One group improves; another one never had a finite metric.

  The folder is created.
  """
  path, model = tmp_path / "new" / "folder" / "best", cases.grouped()
  same = callbacks.PerModelCheckpoint(path)
  values = [(0.5, np.nan), (9.0, 0.1), (0.25, 4.0), (9.0, 9.0)]
  for run, logs in enumerate(values):
    if how == "resumed":
      keep = _resume(model, path)
    else:
      [keep] = cases.begin(model, same)
    model.layers[-1].bias.assign(np.full(2, 10.0 * run))
    keep.on_epoch_end(0, {f"val_loss/model_{i}": logs[i] for i in (0, 1)})
    Models(model).restore(path)
  assert keep.best == [0.25, 0.1]
  bias = testbed.copies(model.layers[-1].bias)
  np.testing.assert_array_equal(bias, [[20.0, 20.0], [10.0, 10.0]])


def test_a_new_callback_begins_anew(tmp_path: pathlib.Path) -> None:
  """Whatever model and metric a file at its path is of."""
  path = tmp_path / "best"
  for model, loss in ((cases.grouped(outputs=3), 0.1), (cases.grouped(), 9.0)):
    [keep] = cases.begin(model, callbacks.PerModelCheckpoint(path))
    model.layers[-1].bias.assign(np.full(model.output_shape[-1], loss))
    keep.on_epoch_end(0, {f"val_loss/model_{i}": loss for i in (0, 1)})
  assert keep.best == [9.0, 9.0]
  model.layers[-1].bias.assign(np.zeros(2))
  Models(model).restore(path)
  assert (np.array(testbed.copies(model.layers[-1].bias)) == 9.0).all()


def test_resuming_with_the_file_of_another_run_raises_an_error(
  tmp_path: pathlib.Path,
) -> None:
  """An error before the first epoch; the file is not replaced."""
  model, path = cases.grouped(), tmp_path / "best"
  [keep] = cases.begin(model, callbacks.PerModelCheckpoint(path))
  keep.on_epoch_end(0, {f"val_loss/model_{i}": 1.0 for i in (0, 1)})
  singletons = cases.grouped("mirrored", [[0], [1], [2], [3]])
  another_shape = r"does not hold `.*last/kernel` of .*\[4, 3\]"
  for other, monitor, words in (
    (model, "val_mae", "does not hold val_mae of 2 models"),
    (singletons, "val_loss", "of 4 models"),
    (cases.grouped(outputs=3), "val_loss", another_shape),
  ):
    with pytest.raises(models.CheckpointError, match=words):
      _resume(other, path, monitor)
  path.write_text("no checkpoint")
  with pytest.raises(models.CheckpointError, match="is damaged"):
    _resume(model, path)
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError, match="file"):
    cases.begin(model, callbacks.PerModelCheckpoint(tmp_path / "file" / "best"))
