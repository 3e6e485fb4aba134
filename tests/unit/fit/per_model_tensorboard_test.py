"""PerModelTensorBoard writes one run for each group."""

import pathlib

import numpy as np
import pytest

from tests.support import callback_cases as cases
from tests.support import replica_state_cases
from tests.support.callback_cases import CROSSED
from tf_cross_shard import callbacks, schedules


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("where", ["mirrored", "virtual"])
def test_curves_of_groups(where: str, tmp_path: pathlib.Path) -> None:
  """Metrics, learning rates, and the distance from the mean of the groups."""
  model = cases.grouped(where, CROSSED)
  cases.set_groups(model.optimizer.learning_rate, [0.5, 0.25])
  [board] = cases.begin(model, callbacks.PerModelTensorBoard(tmp_path))
  drift = []
  for epoch in range(2):
    of_group = []
    for i, weight in enumerate(model.trainable_variables):
      rng = np.random.default_rng([epoch, i])
      values = rng.normal(size=(2, *weight.shape)).astype("f4")
      by_replica = [values[int(r in CROSSED[1])] for r in range(cases.N)]
      replica_state_cases.spread(weight, by_replica)
      of_group.append(values.reshape(2, -1))
    flat = np.concatenate(of_group, axis=1).astype("float64")
    drift.append(np.sqrt(np.mean((flat - flat.mean(0)) ** 2, axis=1)))
    logs = {**cases.logs_of(epoch), "val_loss/ensemble": 3.0, "loss": 1.0}
    board.on_epoch_end(epoch, logs)
  board.on_train_end()
  found = {run.name: cases.curves(run) for run in tmp_path.iterdir()}
  assert set(found) == {"model_0", "model_1", "ensemble"}
  assert found["ensemble"] == {"val_loss": [3.0] * 2}
  for i, rate in enumerate((0.5, 0.25)):
    curves = found[f"model_{i}"]
    assert curves["val_loss"] == list(cases.SERIES[i][:2])
    assert curves["learning_rate"] == [rate] * 2
    assert curves["drift"] == pytest.approx([row[i] for row in drift], 1e-6)
    assert min(curves["drift"]) > 0


def test_groups_are_named_by_their_rates(tmp_path: pathlib.Path) -> None:
  for number, (given, names) in enumerate(
    (
      (schedules.PerModel([0.5, 0.5]), {"model_0", "model_1"}),
      (0.5, {"model_0", "model_1"}),
      (
        schedules.PerModel([0.5, 0.5]),
        {"lr=0.5, momentum=0", "lr=0.5, momentum=0.5"},
      ),
      (schedules.PerModel([0.5, 3e-4]), {"lr=0.5", "lr=0.0003"}),
    )
  ):
    folder = tmp_path / str(number)
    momenta = {"per_model": {"momentum": [0.0, 0.5]}}
    model = cases.with_rates(given, [], **(momenta if number == 2 else {}))
    [board] = cases.begin(model, callbacks.PerModelTensorBoard(folder))
    board.on_epoch_end(0, {"val_loss/model_1": 2.0, "val_loss/ensemble": 3.0})
    board.on_train_end()
    runs = {run.name: cases.curves(run) for run in folder.iterdir()}
    assert set(runs) == {*names, "ensemble"}
  assert runs["lr=0.0003"]["val_loss"] == [2.0]
  assert runs["lr=0.0003"]["learning_rate"] == [np.float32(3e-4)]
  assert runs["lr=0.5"]["hyperparameters"].splitlines() == [
    "| name | value |",
    "| --- | --- |",
    "| model | lr=0.5 |",
    "| learning_rate | 0.5 |",
  ]
  assert "hyperparameters" not in runs["ensemble"]
