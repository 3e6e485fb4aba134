"""The base of callbacks for groups, in both Keras versions; common checks."""

import functools
import importlib
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import callback_cases as cases
from tests.support import testbed
from tests.support.callback_cases import PAIR, VALIDATION
from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  callbacks,
  keras3,
  schedules,
  tf_keras,
)
from tf_cross_shard import groups as groups_lib


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
  stop = callbacks.PerModelEarlyStopping("val_accuracy")
  history = cases.fit(
    model,
    callbacks.PerModelMetrics(VALIDATION),
    stop,
    callbacks.PerModelCheckpoint(tmp_path / "best"),
    callbacks.PerModelTensorBoard(tmp_path / "curves"),
  )
  loss = [history[f"val_loss/model_{i}"] for i in (0, 1)]
  assert loss[0] != loss[1]
  assert stop.best == [history[f"val_accuracy/model_{i}"][0] for i in (0, 1)]
  curves = cases.curves(tmp_path / "curves" / "model_1")
  assert curves["val_loss"] == pytest.approx(loss[1])
  assert curves["learning_rate"] == [0.125]


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("validates", [True, False])
def test_warning_only_if_keras_evaluates_groups_together(
  said: list[str], validates: bool
) -> None:
  """Once, where it happens: in `fit` with validation data, or `evaluate`."""
  model = cases.grouped()
  testbed.fit(model, cases.data())
  assert not said
  for _ in range(2):
    if validates:
      testbed.fit(model, cases.data(), validation_data=cases.data())
    else:
      model.evaluate(cases.data(), verbose=0)
  [line] = said
  assert "so the result describes none of the groups" in line
  assert "tf_cross_shard.callbacks.PerModelMetrics" in line


@pytest.mark.tf_keras_mode
def test_callbacks_warn_once_that_evaluation_mixes_groups(
  said: list[str],
) -> None:
  used = callbacks.PerModelTensorBoard("unused")
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


def test_names_of_groups_in_the_logs() -> None:
  named = groups_lib.singletons(2, names=["small", "a/b"])
  model = cases.grouped(groups=named)
  stop = callbacks.PerModelEarlyStopping(patience=3)
  used = [callbacks.PerModelMetrics(VALIDATION), stop]
  history = cases.fit(model, *used, epochs=2)
  for key in ("loss", "val_loss", "val_mae"):
    assert {f"{key}/small", f"{key}/a_b"} <= history.keys()
  assert not any("model_" in key for key in history)
  assert stop.best == [min(history[f"val_loss/{n}"]) for n in ("small", "a_b")]


def test_a_group_that_diverges(said: list[str], tmp_path: pathlib.Path) -> None:
  """One warning; its best value and epoch are those of no epoch."""
  rates = schedules.PerModel([1e30, 0.01])
  with testbed.mirrored(2).scope():
    model = testbed.one_weight()
    sgd = tf.keras.optimizers.SGD(rates)
    model.compile(CrossShardOptimizer(sgd, group_assignment=PAIR), "mse")
  x = np.ones([4, 1], "float32")
  stop = callbacks.PerModelEarlyStopping(patience=9)
  keep = callbacks.PerModelCheckpoint(tmp_path / "best")
  metrics = callbacks.PerModelMetrics((x, 5 * x))
  data = tf.data.Dataset.from_tensors((x, 5 * x))
  testbed.fit(model, data, 3, callbacks=[metrics, stop, keep])
  texts = [text for text in said if "diverged" in text]
  assert len(texts) == 1
  assert "lr=1e+30 (val_loss inf), in epoch 0" in texts[0]
  assert "PerModelEarlyStopping and PerModelCheckpoint count" in texts[0]
  for callback in (stop, keep):
    assert callback.best[0] == np.inf > callback.best[1]
  assert stop.best_epoch == [-1, 2]


# ------------------------------------------------------- judging by a metric


@pytest.mark.tf_keras_mode
def test_direction_is_what_keras_finds() -> None:
  model = cases.grouped()
  with testbed.mirrored(2).scope():
    model.compile(model.optimizer, "mse", metrics=["accuracy", "mae"])
  # Before this call, Keras has no metrics.
  model.test_on_batch(cases.X[0, 0], cases.Y[0, 0])
  for name, sign in (("loss", 1.0), ("mae", 1.0), ("accuracy", -1.0)):
    stop = callbacks.PerModelEarlyStopping(f"val_{name}", patience=2)
    stop.set_model(model)
    for epoch in range(len(cases.SERIES[0])):
      stop.on_epoch_end(epoch, cases.logs_of(epoch, f"val_{name}", sign))
    assert stop.best_epoch == [2, 4], name


def test_metrics_that_are_missing() -> None:
  """An error in the first epoch; later epochs may lack them."""
  used = callbacks.PerModelEarlyStopping(start_from_epoch=1)
  used.set_model(cases.grouped())
  assert used.best == []
  with pytest.raises(ValueError, match="'val_loss/model_0' in the logs"):
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
  words = (
    r"Plateau needs a metric .*'val_loss'\. Put PerModelMetrics\(.* before"
  )
  wrong = (
    callbacks.PerModelReduceLROnPlateau(),
    callbacks.PerModelMetrics(VALIDATION),
  )
  with pytest.raises(ValueError, match=words):
    cases.fit(model, *wrong)
  assert int(model.optimizer.iterations.numpy()) == 0


# ------------------------------ models of one program, by callbacks of Keras

RATES = (0.1, 0.02)
_RNG = np.random.default_rng(0)
_X = _RNG.normal(size=(96, 4)).astype("float32")
_Y = np.eye(3, dtype="float32")[_RNG.integers(0, 3, 96)]
FIT = {
  **{"x": _X[:48], "y": _Y[:48], "validation_data": (_X[48:], _Y[48:])},
  **{"batch_size": 16, "shuffle": False, "verbose": 0},
}
KERAS = {
  "PerModelEarlyStopping": tf.keras.callbacks.EarlyStopping,
  "PerModelReduceLROnPlateau": tf.keras.callbacks.ReduceLROnPlateau,
}
STOP = "PerModelEarlyStopping"
LOWER = "PerModelReduceLROnPlateau"
USED: dict[str, dict[str, Any]] = {
  STOP: {"monitor": "val_distance", "mode": "min", "patience": 2},
  LOWER: {"monitor": "loss", "patience": 1, "factor": 0.5, "min_delta": 0.05},
}


def distance(y: Any, outputs: Any) -> Any:
  return tf.reduce_mean(tf.abs(y - outputs), axis=-1)


def _network(rate: Any, **options: Any) -> Any:
  tf.keras.utils.set_random_seed(1)
  layers = [tf.keras.layers.Dense(8, "tanh"), tf.keras.layers.Dense(3)]
  model = tf.keras.Sequential([tf.keras.Input((4,)), *layers])
  metrics = ["accuracy", distance]
  model.compile(
    tf.keras.optimizers.Adam(rate), "mse", metrics=metrics, **options
  )
  return model


@functools.cache
def _plain(rate: float, *kinds: str) -> tuple[Any, list[Any], Any]:
  """Keras' own callbacks in a fit of one model, and a second fit."""
  model = _network(rate, run_eagerly=True)
  used = [KERAS[kind](**USED[kind]) for kind in kinds]
  if STOP in kinds:
    used[kinds.index(STOP)].restore_best_weights = True
  history = model.fit(**FIT, epochs=12, callbacks=used).history
  optimizer = model.optimizer
  numbers = optimizer.iterations.numpy(), optimizer.learning_rate.numpy()
  model.fit(**FIT)
  return history, model.get_weights(), numbers


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize(
  "kinds",
  [
    (STOP, LOWER),
    pytest.param((LOWER,), marks=pytest.mark.slow),
    pytest.param((LOWER, STOP, "PerModelMetrics"), marks=pytest.mark.slow),
  ],
)
def test_callbacks_of_models_need_no_other_callback_and_no_order(
  kinds: tuple[str, ...],
) -> None:
  """Each model trains as in a `fit` of its own, also in a second `fit`."""
  with VectorizedStrategy(len(RATES)).scope():
    rates = schedules.PerModel(RATES)
    model = _network(rates)
  used = {
    kind: getattr(callbacks, kind)(**USED.get(kind, {})) for kind in kinds
  }
  model.fit(**FIT, epochs=12, callbacks=list(used.values()))
  steps, numbers = testbed.copies(model.optimizer.iterations), rates.values(0)
  model.fit(**FIT)
  stopped = set()
  for i, rate in enumerate(RATES):
    history, weights, right = _plain(rate, *sorted(KERAS.keys() & set(kinds)))
    stopped.add(len(history["loss"]))
    assert (steps[i], numbers[i]) == (right[0], pytest.approx(right[1]))
    assert (numbers[i] < rate) == (LOWER in kinds)
    for mine, other in zip(model.weights, weights, strict=True):
      np.testing.assert_allclose(testbed.copies(mine)[i], other, atol=2e-5)
    if STOP in kinds:
      values = history["val_distance"]
      assert used[STOP].best_epoch[i] == np.argmin(values)
      assert used[STOP].best[i] == pytest.approx(min(values), 1e-5)
  assert (len(stopped) == 2) == (STOP in kinds)


@pytest.mark.tf_keras_mode
def test_files_of_callbacks_alone(tmp_path: pathlib.Path) -> None:
  with VectorizedStrategy(len(RATES)).scope():
    model = _network(schedules.PerModel(RATES))
  keep = callbacks.PerModelCheckpoint(tmp_path / "best", "loss")
  board = callbacks.PerModelTensorBoard(tmp_path / "curves")
  model.fit(**FIT, epochs=3, callbacks=[keep, board])
  for i, rate in enumerate(RATES):
    history, *_ = _plain(rate)
    assert keep.best[i] == pytest.approx(min(history["loss"][:3]), 1e-5)
    curves = cases.curves(tmp_path / "curves" / f"lr={rate:g}")
    for name in ("val_accuracy", "val_distance", "accuracy", "loss"):
      assert curves[name] == pytest.approx(history[name][:3], 1e-5), name


@pytest.mark.tf_keras_mode
def test_a_misspelt_monitor_lists_what_there_is() -> None:
  with VectorizedStrategy(2).scope():
    model = _network(0.1)
  for monitor in ("val_acuracy", "acuracy"):
    stop = callbacks.PerModelEarlyStopping(monitor)
    with pytest.raises(ValueError, match=f"monitor='{monitor}'") as caught:
      model.fit(**FIT, callbacks=[stop])
    listed = re.findall(r"'(\w+)'", str(caught.value))[1:]
    right = {"loss", "accuracy", "distance"}
    assert {*listed} == right | {f"val_{name}" for name in right}
  assert int(model.optimizer.iterations.numpy()) == 0


@pytest.mark.tf_keras_mode
def test_printing_has_one_line_for_each_metric(
  capsys: pytest.CaptureFixture[str],
) -> None:
  n = 40
  with VectorizedStrategy(n).scope():
    model = _network(schedules.PerModel([0.001 * (i + 1) for i in range(n)]))
  used = [callbacks.PerModelReduceLROnPlateau(), callbacks.PerModelMetrics()]
  history = model.fit(**{**FIT, "verbose": 2}, callbacks=used).history
  keras, *lines = capsys.readouterr().out.strip().splitlines()[-4:]
  assert "val_loss: " in keras
  assert "model_" not in keras
  names = "accuracy", "distance", "loss"
  for line, name in zip(sorted(lines), names, strict=True):
    first, last = (f"val_{name}/model_{i}" for i in (0, n - 1))
    assert line.startswith(f"{first} to {last} [")
    assert f"[{history[first][0]:.4g} " in line
    assert f" {history[last][0]:.4g}]" in line
    assert len(line) < 200
