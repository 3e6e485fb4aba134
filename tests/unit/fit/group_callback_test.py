"""The base of callbacks for groups, in both Keras versions; common checks."""

import importlib
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import callback_cases as cases
from tests.support import testbed
from tests.support.callback_cases import PAIR, VALIDATION
from tf_cross_shard import callbacks, keras3, tf_keras


@pytest.mark.tf_keras_mode
def test_models_of_the_keras_that_tf_keras_is_not(
  tmp_path: pathlib.Path,
) -> None:
  name = "keras" if testbed.IS_TF_KERAS else "tf_keras"
  home = importlib.import_module(name)
  package = keras3 if testbed.IS_TF_KERAS else tf_keras
  with testbed.mirrored(2).scope():
    model = home.Sequential([home.Input((3,)), home.layers.Dense(2)])
    optimizer = package.CrossShardOptimizer(
      home.optimizers.SGD(0.125), group_assignment=PAIR
    )
    model.compile(optimizer, "mse", metrics=["accuracy"])
  stop = callbacks.GroupEarlyStopping("val_accuracy")
  history = cases.fit(
    model,
    callbacks.GroupMetrics(VALIDATION),
    stop,
    callbacks.GroupCheckpoint(tmp_path / "best"),
    callbacks.GroupTensorBoard(tmp_path / "curves"),
  )
  loss = [history[f"val_loss/group_{i}"] for i in (0, 1)]
  assert loss[0] != loss[1]
  assert stop.best == [history[f"val_accuracy/group_{i}"][0] for i in (0, 1)]
  curves = cases.curves(tmp_path / "curves" / "group_1")
  assert curves["val_loss"] == pytest.approx(loss[1])
  assert curves["learning_rate"] == [0.125]


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize(
  ("options", "is_evaluated"),
  [
    ({"validation_data": cases.data()}, True),
    ({}, False),
  ],
)
def test_fit_warns_that_it_evaluated_groups_together(
  said: list[str], options: dict[str, Any], is_evaluated: bool
) -> None:
  model = cases.grouped()
  for _ in range(2):
    testbed.fit(model, cases.data(), **options)
  assert len(said) == is_evaluated
  for line in said:
    assert "so the result describes none of the groups" in line
    assert "tf_cross_shard.callbacks.GroupMetrics" in line


@pytest.mark.tf_keras_mode
def test_callbacks_warn_once_that_evaluation_mixes_groups(
  said: list[str],
) -> None:
  used = callbacks.GroupTensorBoard("unused")
  used.set_model(cases.grouped())
  for groups, act, count in (
    (PAIR, used.on_test_begin, 1),
    (PAIR, used.on_predict_begin, 2),
    (None, used.on_predict_begin, 2),
  ):
    used.set_model(cases.grouped(groups=groups))
    for _ in range(2):
      act()
    assert len(said) == count


def test_a_model_with_other_optimizers_is_refused() -> None:
  """A GAN has two optimizers, and its `train_step` uses both."""
  model = cases.grouped()
  model.own = model.optimizer
  judge = callbacks.GroupMetrics(VALIDATION)
  with testbed.mirrored(2).scope():
    model.second = tf.keras.optimizers.Adam()
  with pytest.raises(ValueError, match="has other optimizers, second"):
    cases.fit(model, judge, callbacks.BackupAndRestore("backup"))


# ------------------------------------------------------- judging by a metric


@pytest.mark.tf_keras_mode
def test_direction_is_what_keras_finds() -> None:
  model = cases.grouped()
  with testbed.mirrored(2).scope():
    model.compile(model.optimizer, "mse", metrics=["accuracy", "mae"])
  # Before this call, Keras has no metrics.
  model.test_on_batch(cases.X[0, 0], cases.Y[0, 0])
  for name, sign in (("loss", 1.0), ("mae", 1.0), ("accuracy", -1.0)):
    stop = callbacks.GroupEarlyStopping(f"val_{name}", patience=2)
    stop.set_model(model)
    for epoch in range(len(cases.SERIES[0])):
      stop.on_epoch_end(epoch, cases.logs_of(epoch, f"val_{name}", sign))
    assert stop.best_epoch == [2, 4], name


def test_metrics_that_are_missing() -> None:
  """An error in the first epoch; later epochs may lack them."""
  used = callbacks.GroupEarlyStopping(start_from_epoch=1)
  used.set_model(cases.grouped())
  assert used.best == []
  with pytest.raises(ValueError, match="'val_loss/group_0' in the logs"):
    used.on_epoch_end(0, {"loss": 1.0})
  for epoch, (logs, best) in enumerate(
    (
      (cases.logs_of(0), [np.inf, np.inf]),
      (cases.logs_of(1), [4.0, 9.0]),
      ({"loss": 1.0}, [4.0, 9.0]),
    )
  ):
    used.on_epoch_end(epoch, logs)
    assert used.best == best


def test_metrics_that_come_too_late_end_fit_before_it_trains() -> None:
  model = cases.grouped()
  words = r"Plateau.* reads val_loss/group_0 .* Put GroupMetrics\(.* before"
  wrong = callbacks.GroupReduceLROnPlateau(), callbacks.GroupMetrics(VALIDATION)
  with pytest.raises(ValueError, match=words):
    cases.fit(model, *wrong)
  assert int(model.optimizer.iterations.numpy()) == 0
