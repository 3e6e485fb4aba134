"""Callbacks that treat each group as a model of its own.

In one process; two workers are in multi_worker_test.py.
"""
# bazel: size=large

import functools
import importlib
import pathlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl import logging as absl_logging
from google.protobuf import struct_pb2

from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard import (
  CrossShardOptimizer,
  callbacks,
  keras3,
  replica_state,
  schedules,
  tf_keras,
)
from tf_cross_shard.callbacks import base

N = testbed.REPLICAS
CROSSED = [[3, 0], [1, 2]]
STRATEGIES = {
  **testbed.STRATEGIES,
  "pair": lambda: testbed.mirrored(2),
}
PAIR = [[0], [1]]  # of the last
EPOCHS, STEPS, SHARE = 3, 2, 2
RATES = (0.0625, 0.03125)  # of the groups
RNG = np.random.default_rng(4)
# [step, replica, example, ...]; replicas see different rows
X = RNG.normal(size=(STEPS, N, SHARE, 3)).astype("float32")
Y = RNG.normal(size=(STEPS, N, SHARE, 2)).astype("float32")
VALIDATION = (
  RNG.normal(size=(7, 3)).astype("float32"),
  RNG.normal(size=(7, 2)).astype("float32"),
  RNG.uniform(0.5, 2.0, size=7).astype("float32"),
)


class Subclassed(tf.keras.Model):  # type: ignore[misc]
  """What Keras cannot clone before it was called."""

  def __init__(self, units: int) -> None:
    super().__init__()
    self.layer = tf.keras.layers.Dense(units)

  def call(self, x: Any) -> Any:
    return self.layer(x)


def _compile(model: Any, optimizer: Any) -> Any:
  model.compile(
    optimizer,
    "mse",
    metrics=["mae"],
    weighted_metrics=[tf.keras.metrics.MeanSquaredError("weighted")],
  )
  return model


def _grouped(where: str, groups: Any = CROSSED, outputs: int = 2) -> Any:
  """A compiled model of groups, with all variables of the optimizer."""
  strategy = STRATEGIES[where]()
  assert strategy.num_replicas_in_sync == (2 if where == "pair" else N)
  with strategy.scope():
    model = testbed.network(outputs)
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(RATES[0]),
      group_assignment=groups,
      fused_update=False,  # Compared with Keras' own bits.
    )
    optimizer.build(model.trainable_variables)
    return _compile(model, optimizer)


def _data(replicas: Sequence[int] = range(N)) -> tf.data.Dataset:
  """Batches of these replicas' rows."""
  rows = list(replicas)
  flat = [a[:, rows].reshape(-1, a.shape[-1]) for a in (X, Y)]
  data = tf.data.Dataset.from_tensor_slices(tuple(flat))
  return data.batch(len(rows) * SHARE, drop_remainder=True)


def _fit(model: Any, *used: Any, epochs: int = 1) -> Any:
  return testbed.fit(model, _data(), epochs, callbacks=list(used)).history


@functools.cache
def _plain(group: int) -> Any:
  """Plain Keras on the group's batches, evaluated after each epoch."""
  model = _compile(testbed.network(), tf.keras.optimizers.Adam(RATES[group]))
  model.run_eagerly = True  # Less than tracing takes.
  return model.fit(
    _data(sorted(CROSSED[group])),
    epochs=EPOCHS,
    verbose=0,
    validation_data=VALIDATION,
    validation_batch_size=4,
  )


def _set(variable: Any, values: Sequence[Any]) -> None:
  """Gives each group its own value, in all elements."""
  whole = testbed.copies(variable)
  for members, value in zip(CROSSED, values, strict=True):
    for replica in members:
      whole[replica] = np.full_like(whole[replica], value)
  cases.spread(variable, whole)


def _spread(model: Any, epoch: int) -> None:
  """Makes weights and optimizer tell the epoch and the group."""
  for variable in (*model.weights, *testbed.variables_of(model.optimizer)):
    _set(variable, [10 * epoch, 10 * epoch + 1])


def _state(model: Any, members: Sequence[int]) -> list[list[np.ndarray]]:
  """The members' weights, slots and iterations."""
  kept = testbed.variables_of(model.optimizer)
  whole = [testbed.copies(v) for v in [*model.weights, *kept]]
  return [[copies[replica] for replica in members] for copies in whole]


# -------------------------------------------------------------- GroupMetrics


class _Seen(tf.keras.callbacks.Callback):  # type: ignore[misc]
  """What a later callback sees, and the weights at that time."""

  def __init__(self) -> None:
    super().__init__()
    self.logs: list[dict[str, float]] = []
    self.weights: list[list[Any]] = []

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    self.logs.append(dict(logs))
    self.weights.append(list(map(testbed.copies, self.model.weights)))


# The best in epochs 1 and 0; with patience 1 they stop in epochs 2 and 1.
KNOWN = ([1.0, 3.0, 2.0], [9.0, 8.0, 8.5])


class _Known(tf.keras.callbacks.Callback):  # type: ignore[misc]
  """Metrics that are known, beside those of GroupMetrics."""

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    logs.update(
      {f"val_known/group_{i}": series[epoch] for i, series in enumerate(KNOWN)}
    )


class _Run:
  """A `fit` with all callbacks, whose groups have their own rates."""

  def __init__(self, where: str, folder: pathlib.Path) -> None:
    model, self.seen = _grouped(where), _Seen()
    with STRATEGIES[where]().scope():
      noise = tf.Variable(0.0)
    _set(noise, [1.0, 2.0])
    _set(model.optimizer.learning_rate, RATES)
    self.stop = callbacks.GroupEarlyStopping(
      "val_known", mode="max", patience=1
    )
    said = mock.patch.object(absl_logging, "warning")
    kept = mock.patch.object(CrossShardOptimizer, "noise_scale", noise)
    with said as self.said, kept:
      self.history = _fit(
        model,
        callbacks.GroupMetrics(VALIDATION, batch_size=4),
        _Known(),
        self.seen,
        callbacks.GroupTensorBoard(folder / "curves"),
        self.stop,
        epochs=2 * EPOCHS,
      )
      self.last = list(map(testbed.copies, model.weights))
      _fit(model)  # Which would warn of groups that were made equal.
    self.trained = len(model.trainable_variables)
    self.curves = {
      run.name: _curves(run) for run in (folder / "curves").iterdir()
    }

  def of_group(self, epoch: int, group: int) -> list[np.ndarray]:
    """A group's weights at the end of an epoch."""
    first = CROSSED[group][0]
    return [copies[first] for copies in self.seen.weights[epoch]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> _Run:
  """The same for several tests; each Keras in another strategy."""
  where = "virtual" if testbed.IS_TF_KERAS else "mirrored"
  return _Run(where, tmp_path_factory.mktemp("run"))


@pytest.mark.tf_keras_mode
def test_metrics_are_those_of_plain_keras(run: _Run) -> None:
  """Of a plain model that trained on each group's batches alone."""
  for i in (0, 1):
    for name in ("val_loss", "val_mae", "val_weighted"):
      mine = run.history[f"{name}/group_{i}"]
      np.testing.assert_allclose(mine, _plain(i).history[name], rtol=2e-5)
      assert mine == [logs[f"{name}/group_{i}"] for logs in run.seen.logs]
      other = _plain(1 - i).history[name]
      assert np.abs(np.subtract(mine, other)).min() > 1e-3
    np.testing.assert_allclose(
      run.history[f"loss/group_{i}"], _plain(i).history["loss"], rtol=2e-5
    )
    for mine, right in zip(
      run.of_group(-1, i), _plain(i).model.weights, strict=True
    ):
      testbed.assert_close(mine, right.numpy(), f"group {i}")


@pytest.mark.tf_keras_mode
def test_metrics_of_the_mean_prediction(run: _Run) -> None:
  """By NumPy."""
  x, y, weight = VALIDATION
  outputs = []
  for i in (0, 1):
    kernel, bias, last, last_bias = run.of_group(-1, i)
    outputs.append(np.tanh(x @ kernel + bias) @ last + last_bias)
  mean = np.mean(outputs, axis=0)
  errors = np.mean((mean - y) ** 2, axis=-1)
  np.testing.assert_allclose(
    [run.history[f"val_{name}/ensemble"][-1] for name in ("loss", "weighted")],
    [np.mean(weight * errors), np.sum(weight * errors) / np.sum(weight)],
    rtol=1e-5,
  )


def test_looking_on_changes_nothing() -> None:
  """Random numbers included, of layers and of NumPy."""
  with testbed.mirrored(2).scope():
    layers = tf.keras.layers
    model = tf.keras.Sequential(
      [tf.keras.Input((3,)), layers.Dropout(0.5), layers.Dense(2)]
    )
    optimizer = CrossShardOptimizer("sgd", group_assignment=PAIR)
    model.compile(optimizer, "mse")
  before = [testbed.copies(variable) for variable in model.variables]
  assert len(before) == 3  # With the state of the random numbers.
  numbers = np.random.get_state()[1]
  used = callbacks.GroupMetrics(VALIDATION)
  used.set_model(model)
  used.on_epoch_end(0, {})
  np.testing.assert_array_equal(np.random.get_state()[1], numbers)
  for values, variable in zip(before, model.variables, strict=True):
    np.testing.assert_array_equal(values, testbed.copies(variable))


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("is_compiled", [False, True])
def test_every_twin_and_dataset_inside_of_the_scope(is_compiled: bool) -> None:
  """A dataset; a model that Keras cannot clone; `fit` inside of the scope.

  A compiled twin is evaluated as it is.
  """
  made = []

  def twin() -> Any:
    made.append(Subclassed(2))
    made[-1](VALIDATION[0])
    if is_compiled:
      made[-1].compile(loss="mae", run_eagerly=True)
    return made[-1]

  with testbed.mirrored(2).scope():
    model = Subclassed(2)
    optimizer = CrossShardOptimizer("sgd", group_assignment=PAIR)
    model.compile(optimizer, "mse", metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices(VALIDATION).batch(4)
    used = callbacks.GroupMetrics(data, is_compiled, every=2, twin=twin)
    history = _fit(model, used, epochs=5)
  assert len(made) == (3 if is_compiled else 1)
  assert len(history["loss"]) == 5
  assert len(history["val_loss/group_1"]) == 3  # epochs 1, 2 and 4
  names = {"val_loss"} if is_compiled else {"val_loss", "val_mae"}
  assert {name.split("/")[0] for name in history if "val" in name} == names
  assert ("val_loss/ensemble" in history) == is_compiled
  assert history["val_loss/group_0"][0] != history["val_loss/group_1"][0]


def test_what_was_never_compiled_is_an_error() -> None:
  class Own(tf.keras.Model):  # type: ignore[misc]
    def compile(self, optimizer: Any) -> None:
      self.optimizer = optimizer

  inputs = tf.keras.Input((3,))
  with testbed.mirrored().scope():
    model = Own(inputs, tf.keras.layers.Dense(2)(inputs))
    model.compile(CrossShardOptimizer("sgd", group_assignment=CROSSED))
  used = callbacks.GroupMetrics(VALIDATION)
  used.set_model(model)
  with pytest.raises(ValueError, match=r"compile\(\) of Keras was not called"):
    used.on_epoch_end(0, {})


# -------------------------------------------------------- GroupEarlyStopping

# The best in epochs 2 and 4; with patience 2 they stop in epochs 4 and 6.
SERIES = ([5.0, 4.0, 1.0, 2.0, 3.0, 0.5, 4.0, 1.0], [9, 9, 8, 8.5, 7, 9, 8, 1])


def _logs(epoch: int, name: str, sign: float = 1.0) -> dict[str, float]:
  return {
    f"{name}/group_{i}": sign * series[epoch] for i, series in enumerate(SERIES)
  }


@pytest.mark.parametrize("min_delta", [0.0, 1.0])
def test_each_group_stops_as_keras_would_stop_it(min_delta: float) -> None:
  """With metrics that are known; the best weights to the bit."""
  model = _grouped("mirrored")
  stop = callbacks.GroupEarlyStopping(patience=2, min_delta=min_delta)
  stop.set_model(model)
  stop.on_train_begin()
  model.stop_training = False
  for epoch in range(len(SERIES[0])):
    _spread(model, epoch)
    stop.on_epoch_end(epoch, _logs(epoch, "val_loss"))
    if model.stop_training:
      break
  stop.on_train_end()
  plain = []
  for series in SERIES:
    keras = tf.keras.callbacks.EarlyStopping(patience=2, min_delta=min_delta)
    lonely = _compile(testbed.network(), "sgd")
    keras.set_model(lonely)
    keras.on_train_begin()
    for at, value in enumerate(series):
      keras.on_epoch_end(at, {"val_loss": value})
      if lonely.stop_training:
        break
    plain.append((keras.best_epoch, keras.stopped_epoch, float(keras.best)))
  ours = zip(stop.best_epoch, stop.stopped_epoch, stop.best, strict=True)
  assert list(ours) == plain
  assert epoch == max(stop.stopped_epoch)
  for variable in model.weights:
    found = testbed.copies(variable)
    for i, members in enumerate(CROSSED):
      for replica in members:
        assert set(found[replica].ravel()) == {10 * stop.best_epoch[i] + i}


@pytest.mark.tf_keras_mode
def test_fit_ends_with_each_group_at_its_best(run: _Run) -> None:
  """In `fit`, and nothing warns that groups were made equal."""
  assert len(run.history["loss"]) == EPOCHS
  assert run.stop.best_epoch == [1, 0]
  for i, found in enumerate(run.last):
    for epoch, members in zip(run.stop.best_epoch, CROSSED, strict=True):
      for replica in members:
        right = run.seen.weights[epoch][i][replica]
        np.testing.assert_array_equal(found[replica], right)
    assert (found[0] != found[1]).any()
  run.said.assert_not_called()


@pytest.mark.tf_keras_mode
def test_direction_is_what_keras_finds() -> None:
  model = _grouped("pair", PAIR)
  with testbed.mirrored(2).scope():
    model.compile(model.optimizer, "mse", metrics=["accuracy", "mae"])
  model.test_on_batch(X[0, 0], Y[0, 0])  # Before that, Keras has no metrics.
  for name, sign in (("loss", 1.0), ("mae", 1.0), ("accuracy", -1.0)):
    stop = callbacks.GroupEarlyStopping(f"val_{name}", patience=2)
    stop.set_model(model)
    for epoch in range(len(SERIES[0])):
      stop.on_epoch_end(epoch, _logs(epoch, f"val_{name}", sign))
    assert stop.best_epoch == [2, 4], name


def test_metrics_that_are_not_there() -> None:
  """In the first epoch an error; later they may be left out."""
  used = callbacks.GroupEarlyStopping(start_from_epoch=1)
  used.set_model(_grouped("pair", PAIR))
  assert used.best == []
  with pytest.raises(ValueError, match="'val_loss/group_0' in the logs"):
    used.on_epoch_end(0, {"loss": 1.0})
  for epoch, (logs, best) in enumerate(
    (
      (_logs(0, "val_loss"), [np.inf, np.inf]),
      (_logs(1, "val_loss"), [4.0, 9.0]),
      ({"loss": 1.0}, [4.0, 9.0]),
    )
  ):
    used.on_epoch_end(epoch, logs)
    assert used.best == best


# ----------------------------------------------------------- GroupCheckpoint


@pytest.mark.tf_keras_mode
def test_each_group_is_kept_at_its_best(tmp_path: pathlib.Path) -> None:
  """Weights, slots and iterations; `restore` gives each its own."""
  path = tmp_path / "best"
  model = _grouped("virtual")
  keep = callbacks.GroupCheckpoint(path)
  keep.set_model(model)
  right: list[Any] = [None, None]
  for epoch, best in enumerate([(0, 1), (0,), (0, 1), (), (1,)]):
    _spread(model, epoch)
    for i in best:
      right[i] = _state(model, CROSSED[i])
    keep.on_epoch_end(epoch, _logs(epoch, "val_loss"))
  assert keep.best == [1.0, 7.0]
  for each in (model, _grouped("virtual")):
    _spread(each, 9)
    replica_state.restore(path, each.optimizer, each)
    for state, members in zip(right, CROSSED, strict=True):
      for mine, theirs in zip(_state(each, members), state, strict=True):
        np.testing.assert_array_equal(mine, theirs)
  assert len(right[0]) > 4 + 2 * 4  # weights, Adam's slots, and more


@pytest.mark.tf_keras_mode
def test_what_members_have_each_for_themselves(tmp_path: pathlib.Path) -> None:
  """Statistics that members have alike at first, and later not."""
  with testbed.mirrored().scope():
    layers = tf.keras.layers
    model = tf.keras.Sequential(
      [tf.keras.Input((3,)), layers.BatchNormalization(), layers.Dense(2)]
    )
    optimizer = CrossShardOptimizer("sgd", group_assignment=CROSSED)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
  keep = callbacks.GroupCheckpoint(tmp_path / "best")
  keep.set_model(model)
  keep.on_epoch_end(0, {"val_loss/group_0": 1.0, "val_loss/group_1": 1.0})
  with np.load(tmp_path / "best") as file:
    assert not [name for name in file if "member" in name]
  [mean] = [v for v in model.variables if "moving_mean" in v.name]
  then = [np.full(3, float(replica + 1), "f4") for replica in range(N)]
  cases.spread(mean, then)
  keep.on_epoch_end(1, {"val_loss/group_0": 2.0, "val_loss/group_1": 0.5})
  cases.spread(mean, [np.full(3, 9.0, "f4")] * N)
  replica_state.restore(tmp_path / "best", optimizer, model)
  for replica, value in enumerate(testbed.copies(mean)):
    right = then[replica] if replica in CROSSED[1] else np.zeros(3)
    np.testing.assert_array_equal(value, right)


# ---------------------------------------------------------- GroupTensorBoard


@pytest.mark.tf_keras_mode
def test_curves_of_groups(run: _Run) -> None:
  found, trained = run.curves, run.trained
  assert set(found) == {"group_0", "group_1", "ensemble"}
  for name, curves in found.items():
    for tag in ("val_loss", "val_mae"):
      right = np.float32(run.history[f"{tag}/{name}"])
      np.testing.assert_array_equal(curves[tag], right)
  assert "drift" not in found["ensemble"]
  for i in (0, 1):
    curves = found[f"group_{i}"]
    assert curves["learning_rate"] == [RATES[i]] * EPOCHS
    assert curves["noise_scale"] == [1.0 + i] * EPOCHS
    for epoch, value in enumerate(curves["drift"]):
      flat = [
        np.concatenate(
          [copies[r].ravel() for copies in run.seen.weights[epoch][:trained]]
        )
        for r, _ in CROSSED
      ]
      away = flat[i] - np.mean(flat, axis=0, dtype="float64")
      assert value == pytest.approx(np.sqrt(np.mean(away**2)), rel=1e-6)
      assert value > 0


def _curves(folder: pathlib.Path) -> dict[str, Any]:
  """What TensorBoard reads of a run, by tag."""
  [file] = folder.iterdir()
  curves: dict[str, Any] = {}
  for event in tf.compat.v1.train.summary_iterator(str(file)):
    for value in event.summary.value:
      if value.tag == HPARAMS:
        assert value.tag not in curves
        assert value.metadata.plugin_data.plugin_name == "hparams"
        curves[value.tag] = _hparams(value.metadata.plugin_data.content)
        continue
      points = curves.setdefault(value.tag, [])
      assert event.step == len(points)
      if not points:
        assert value.metadata.plugin_data.plugin_name == "scalars"
      points.append(float(tf.make_ndarray(value.tensor)))
  return curves


HPARAMS = "_hparams_/session_start_info"
# What hp.hparams({"group": "lr=0.5", "learning_rate": 0.5}) of TensorBoard 2.21
# wrote; behind the map stand a name and a time.
OF_TENSORBOARD = (
  b"\x1az\n\x1a\n\rlearning_rate\x12\t\x11\x00\x00\x00\x00\x00\x00\xe0?"
  b"\n\x11\n\x05group\x12\x08\x1a\x06lr=0.5"
  b'"@29c07d381544f7d2722c92648512f13369245cd608b854c16c9b15a245b036d1'
  b")\x92\xfe\x88\xf6\xe3\xc0\xdaA"
)


def _hparams(content: bytes) -> dict[str, Any]:
  """The hyperparameters in what a run has for the HParams plugin."""
  assert content[0] == 0x1A
  field = tf.train.BytesList.FromString(b"\x0a" + content[1:])
  return dict(struct_pb2.Struct.FromString(field.value[0]))


# ----------------------------------------------------------- the other Keras


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
  history = _fit(
    model,
    callbacks.GroupMetrics(VALIDATION),
    stop,
    callbacks.GroupCheckpoint(tmp_path / "best"),
    callbacks.GroupTensorBoard(tmp_path / "curves"),
  )
  loss = [history[f"val_loss/group_{i}"] for i in (0, 1)]
  assert loss[0] != loss[1]
  assert stop.best == [history[f"val_accuracy/group_{i}"][0] for i in (0, 1)]
  curves = _curves(tmp_path / "curves" / "group_1")
  assert curves["val_loss"] == pytest.approx(loss[1])
  assert curves["learning_rate"] == [0.125]


# ------------------------------------------------------------------- warnings

BLENDED = "by its own group's weights: the result belongs to no group"


@pytest.mark.tf_keras_mode
def test_what_blends_groups_is_warned_of_once(
  said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  """A note after `fit`; a warning where one of these callbacks notices."""
  notes: list[str] = []
  monkeypatch.setattr(
    absl_logging, "info", lambda text, *args: notes.append(text % args)
  )
  model = _grouped("pair", PAIR)
  testbed.fit(model, _data(), validation_data=_data())
  [line] = notes
  assert said == []
  assert BLENDED in line
  assert "tf_cross_shard.callbacks.GroupMetrics" in line
  used = callbacks.GroupTensorBoard("")
  used.set_model(model)
  used.on_test_begin()
  assert said == [line]  # Now it is one.
  for groups, act, count in (
    (PAIR, used.on_test_begin, 2),
    (PAIR, used.on_predict_begin, 3),
    (None, used.on_predict_begin, 3),
  ):
    used.set_model(_grouped("pair", groups))
    act()
    assert len(said) == count


# ------------------------------------------------------- going on after a crash


def _begin(model: Any, *used: Any) -> list[Any]:
  """What `fit` does at its beginning, for a loop of one's own."""
  for callback in used:
    callback.set_model(model)
    callback.on_train_begin()
  model.stop_training = False
  return list(used)


@pytest.mark.tf_keras_mode
def test_the_best_of_an_earlier_run_is_kept(tmp_path: pathlib.Path) -> None:
  """Where only one group improves, too; and a folder is made.

  Something is kept of a group that has never had a number, too.
  """
  path, model = tmp_path / "new" / "folder" / "best", _grouped("pair", PAIR)
  values = [(0.5, np.nan), (9.0, 0.1), (0.25, 4.0), (9.0, 9.0)]
  for run, logs in enumerate(values):
    [keep] = _begin(model, callbacks.GroupCheckpoint(path))
    model.layers[-1].bias.assign(np.full(2, 10.0 * run))
    keep.on_epoch_end(0, {f"val_loss/group_{i}": logs[i] for i in (0, 1)})
    replica_state.restore(path, model.optimizer, model)
  assert keep.best == [0.25, 0.1]
  bias = testbed.copies(model.layers[-1].bias)
  np.testing.assert_array_equal(bias, [[20.0, 20.0], [10.0, 10.0]])


def test_an_earlier_run_had_other_rows(tmp_path: pathlib.Path) -> None:
  """A window of a table's gradients has any number of them."""
  with testbed.mirrored(2).scope():
    model = tf.keras.Sequential(
      [tf.keras.Input((1,), dtype="int32"), tf.keras.layers.Embedding(3, 2)]
    )
    optimizer = CrossShardOptimizer(
      "sgd", group_assignment=PAIR, accumulate_steps=2
    )
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
  for value in (1.0, 0.5):
    [keep] = _begin(model, callbacks.GroupCheckpoint(tmp_path / "best"))
    keep.on_epoch_end(0, {f"val_loss/group_{i}": value for i in (0, 1)})
  assert keep.best == [0.5, 0.5]


def test_a_file_of_another_run(tmp_path: pathlib.Path) -> None:
  """It is not replaced, and said so before the first epoch."""
  model, path = _grouped("pair", PAIR), tmp_path / "best"
  [keep] = _begin(model, callbacks.GroupCheckpoint(path))
  keep.on_epoch_end(0, {f"val_loss/group_{i}": 1.0 for i in (0, 1)})
  for other, monitor, words in (
    (model, "val_mae", "does not hold val_mae of 2 groups"),
    (_grouped("mirrored", [[0], [1], [2], [3]]), "val_loss", "of 4 groups"),
    (
      _grouped("pair", PAIR, 3),
      "val_loss",
      r"does not hold `model/.*last/kernel` of .*\[4, 3\]",
    ),
  ):
    with pytest.raises(replica_state.CheckpointError, match=words):
      _begin(other, callbacks.GroupCheckpoint(path, monitor))
  path.write_text("no checkpoint")
  with pytest.raises(replica_state.CheckpointError, match="is damaged"):
    _begin(model, callbacks.GroupCheckpoint(path))
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError, match="file"):
    _begin(model, callbacks.GroupCheckpoint(tmp_path / "file" / "best"))


# ---------------------------------------------- mistakes before the first epoch


@pytest.mark.tf_keras_mode
def test_two_sets_of_data_have_two_names() -> None:
  """In one list; the callbacks of another `fit` are not asked."""
  model = _grouped("pair", PAIR)
  test = tuple(array[:3] for array in VALIDATION)
  used = [
    callbacks.GroupMetrics(VALIDATION, False),
    callbacks.GroupMetrics(test, False, name="test"),
    callbacks.GroupEarlyStopping("test_mae", patience=9),
  ]
  history = testbed.fit(
    model, _data(), validation_data=_data(), callbacks=used
  ).history
  # Of training, although fit has evaluated since.
  losses = [history[f"loss/group_{i}"][0] for i in (0, 1)]
  assert np.mean(losses) == pytest.approx(history["loss"][0], rel=1e-6)
  assert losses[0] != losses[1]
  assert history["val_loss/group_0"] != history["test_loss/group_0"]
  twice = [callbacks.GroupMetrics(VALIDATION) for _ in range(2)]
  with pytest.raises(ValueError, match=r"`name` must not be .*'val' twice"):
    _fit(model, *twice)
  assert used[2].same_fit() == used
  assert twice[0].same_fit() == twice


@pytest.mark.parametrize(
  ("make", "error", "words"),
  [
    (
      lambda: [
        callbacks.GroupReduceLROnPlateau(),
        callbacks.GroupMetrics(VALIDATION),
      ],
      ValueError,
      r"Plateau.* reads val_loss/group_0 .* Put GroupMetrics\(.* before",
    ),
    (
      lambda: [callbacks.GroupMetrics((X[0, 0, :, :2], Y[0, 0]))],
      Exception,
      "",
    ),
  ],
)
def test_mistakes_end_fit_before_it_trains(
  make: Any, error: type[Exception], words: str
) -> None:
  model = _grouped("pair", PAIR)
  with pytest.raises(error, match=words):
    _fit(model, *make())
  assert int(model.optimizer.iterations.numpy()) == 0


@pytest.mark.parametrize(
  "make",
  [
    lambda: callbacks.BackupAndRestore("backup"),
    lambda: callbacks.Population(),
  ],
)
def test_state_of_another_optimizer_is_lost_by_nobody(make: Any) -> None:
  """As a GAN has one, whose `train_step` uses both."""
  model = _grouped("pair", PAIR)
  model.own = model.optimizer
  judge = callbacks.GroupMetrics(VALIDATION)
  with testbed.mirrored(2).scope():
    model.second = tf.keras.optimizers.Adam()
  with pytest.raises(ValueError, match="has other optimizers, second"):
    _fit(model, judge, make())


# ------------------------------------------------------ GroupReduceLROnPlateau


def _with_rates(rates: Any, traces: list[None]) -> Any:
  """A model with one weight, whose gradient is 1."""

  def loss(y: Any, outputs: Any) -> Any:
    traces.append(None)
    return tf.reduce_mean(outputs - y, axis=-1)

  with testbed.mirrored(2).scope():
    model = testbed.one_weight()
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.SGD(rates), group_assignment=PAIR
    )
    model.compile(optimizer, loss)
  return model


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("per_group", [True, False])
def test_rates_are_lowered_as_keras_lowers_them(
  per_group: bool, tmp_path: pathlib.Path
) -> None:
  """Each as of a model alone; the next steps have them, and trace nothing."""
  traces: list[None] = []
  given = (0.5, 0.25) if per_group else (0.5, 0.5)
  rates = schedules.PerGroup(given) if per_group else given[0]
  model = _with_rates(rates, traces)
  data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1])))
  testbed.fit(model, data)  # So that a step is traced before.
  options = {
    **{"patience": 1, "factor": 0.5, "min_delta": 1.0},
    **{"cooldown": 1, "min_lr": 0.125},
  }
  lower = callbacks.GroupReduceLROnPlateau(**options)
  lower.set_model(model)
  testbed.fit(model, data)
  count, expected = len(traces), []
  for i, series in enumerate(SERIES):
    keras = tf.keras.callbacks.ReduceLROnPlateau("val_loss", **options)
    alone = _compile(testbed.network(), tf.keras.optimizers.SGD(given[i]))
    keras.set_model(alone)
    keras.on_train_begin()
    expected.append([])
    for epoch, value in enumerate(series):
      keras.on_epoch_end(epoch, {"val_loss": value})
      expected[-1].append(float(alone.optimizer.learning_rate.numpy()))
  lower.on_train_begin()
  for epoch in range(len(SERIES[0])):
    lower.on_epoch_end(epoch, _logs(epoch, "val_loss"))
    assert lower.learning_rates == [row[epoch] for row in expected]
  assert lower.learning_rates == [0.125, 0.125] != list(given)
  replica_state.save(tmp_path / "state", model.optimizer, model)
  [kernel] = model.trainable_variables
  before = testbed.copies(kernel)
  testbed.fit(model, data)
  for was, now in zip(before, testbed.copies(kernel), strict=True):
    np.testing.assert_allclose(was - now, 0.125, rtol=1e-6)
  assert len(traces) == count
  if per_group:
    with pytest.raises(TypeError, match="GroupReduceLROnPlateau"):
      model.optimizer.learning_rate = 0.1


def test_rates_that_cannot_be_lowered() -> None:
  decay = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
  for rates, error, words in (
    (decay, TypeError, "Plateau needs an optimizer with one learning rate"),
    (schedules.PerGroup([decay, 0.1]), TypeError, "PerGroup holds schedules"),
    (schedules.PerGroup([0.1, 0.0]), ValueError, "PerGroup holds 0"),
  ):
    with pytest.raises(error, match=words):
      _begin(_with_rates(rates, []), callbacks.GroupReduceLROnPlateau())


def test_groups_are_named_by_their_rates(tmp_path: pathlib.Path) -> None:
  for given, names in (
    (schedules.PerGroup([0.5, 3e-4]), ["lr=0.5", "lr=0.0003"]),
    (schedules.PerGroup([0.5, 0.5]), ["group_0", "group_1"]),
    (0.5, ["group_0", "group_1"]),
  ):
    model = _with_rates(given, [])
    assert base.group_names(model.optimizer) == names
  model = _with_rates(schedules.PerGroup([0.5, 3e-4]), [])
  [board] = _begin(model, callbacks.GroupTensorBoard(tmp_path))
  board.on_epoch_end(0, {"val_loss/group_1": 2.0, "val_loss/ensemble": 3.0})
  board.on_train_end()
  runs = {run.name: _curves(run) for run in tmp_path.iterdir()}
  assert set(runs) == {"lr=0.5", "lr=0.0003", "ensemble"}
  assert runs["lr=0.0003"]["val_loss"] == [2.0]
  assert runs["lr=0.0003"]["learning_rate"] == [np.float32(3e-4)]
  known = {"group": "lr=0.5", "learning_rate": 0.5}
  assert runs["lr=0.5"][HPARAMS] == _hparams(OF_TENSORBOARD) == known
  assert runs["lr=0.0003"][HPARAMS]["group"] == "lr=0.0003"
  assert HPARAMS not in runs["ensemble"]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
