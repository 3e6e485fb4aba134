"""Backups in one process; several are in multi_worker_errors_test.py.

`tools/preemptions.py` kills processes at random moments.
"""

import functools
import os
import pathlib
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl import logging

import tf_cross_shard
import tf_cross_shard.tf_keras
from tests.support import fit_outcome, testbed
from tests.support import replica_state_cases as cases
from tf_cross_shard import CrossShardOptimizer, callbacks, models
from tf_cross_shard._src.fit import per_model_callback
from tf_cross_shard._src.models import archive, group_state

X = np.random.default_rng(0).normal(size=(32, 4)).astype("f4")
DATA = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8)
EPOCHS = 4
GROUPS = [[0, 2], [1, 3]]


def _model(
  groups: Any = None,
  library: Any = tf.keras,
  is_plain: bool = False,
  is_scaled: bool = False,
  **options: Any,
) -> Any:
  """Returns a model whose next step depends on all saved state."""
  library.utils.set_random_seed(3)
  layers = library.layers
  # The random numbers of tf_keras are not variables of the model.
  is_tf_keras = library is tf_keras or testbed.IS_TF_KERAS
  dropout = [] if is_tf_keras else [layers.Dropout(0.5)]
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
  if is_plain:
    optimizer = library.optimizers.Adam(0.01)
  if is_scaled:
    optimizer = library.mixed_precision.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)  # A second build starts anew.
  model.compile(optimizer, "mse", **options)
  return model


def _fit(model: Any, *others: Any, epochs: int = EPOCHS) -> list[int]:
  """Returns the epochs that were trained."""
  data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8)
  history = testbed.fit(model, data, epochs, callbacks=list(others))
  return list(history.epoch)


def _variables(model: Any) -> list[Any]:
  return [*model.variables, *model.optimizer.variables]


def _state(model: Any) -> dict[str, Any]:
  values = map(testbed.copies, _variables(model))
  return {str(i): copies for i, copies in enumerate(values)}


def _terminate() -> None:
  os.kill(os.getpid(), signal.SIGTERM)


STRATEGIES: dict[str, Callable[[], Any]] = {
  "groups": testbed.mirrored,
  "virtual groups": lambda: testbed.virtual(testbed.REPLICAS),
}


def _train(kind: str, *others: Any) -> tuple[dict[str, Any], dict[str, Any]]:
  """Trains a new model; returns the history and the state of all replicas."""
  library = tf_keras if "tf_keras" in kind else tf.keras
  options: dict[str, Any] = {"metrics": ["mae"]}
  options |= {"is_plain": "plain" in kind, "is_scaled": "scaled" in kind}
  if "executions" in kind:
    options["steps_per_execution"] = 3 if "ragged" in kind else 2
  listed = list(others)
  strategy = tf.distribute.get_strategy()
  is_grouped = kind in STRATEGIES
  if is_grouped:
    strategy = STRATEGIES[kind]()
    outer = callbacks.OuterOptimizer(3)
    listed = [outer, callbacks.PerModelMetrics((X, X[:, :1])), *others]
  with strategy.scope():
    model = _model(GROUPS if is_grouped else None, library, **options)
  data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8, True)
  if "ragged" in kind:  # of three batches, and of one
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=listed)
  else:
    history = testbed.fit(model, data, EPOCHS, callbacks=listed)
  return history.history, _state(model)


@functools.cache
def _undisturbed(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
  return _train(kind)


@pytest.mark.parametrize(
  ("kind", "at_end", "within"),
  [
    ("groups", 4, 2),
    ("virtual groups", 4, 2),
    ("tf_keras, plain", 4, 2),
    ("one device, plain, scaled", 4, 2),
    ("one device, ragged executions", 6, 3),  # as Keras 3 counts
    ("tf_keras, ragged executions", 4, 3),
  ],
)
def test_resumed_fit_equals_uninterrupted_fit(
  kind: str, at_end: int, within: int, tmp_path: pathlib.Path
) -> None:
  """Compares weights, metrics, and outer steps within and between epochs."""
  history, state = _undisturbed(kind)
  crash = testbed.Interruption(2, within - 1)
  every = 1 if "ragged" in kind else 2
  with pytest.raises(KeyboardInterrupt):
    _train(kind, callbacks.BackupAndRestore(tmp_path, every=every), crash)
  names = {path.name for path in (tmp_path).iterdir()}
  newest = [f"epoch_2_batch_{within}.npz", f"epoch_1_batch_{at_end}.npz"]
  assert names == set(newest)
  for name, epoch in zip(newest, (2, 1), strict=True):
    folder = tmp_path / f"only_{epoch}"
    folder.mkdir()
    (tmp_path / name).rename(folder / name)
    backup = callbacks.BackupAndRestore(folder, False, every=99)
    resumed, after = _train(kind, backup)
    assert resumed == {key: values[epoch:] for key, values in history.items()}
    assert cases.differing(after, state) == []


@pytest.mark.parametrize(
  ("patience", "min_delta", "epochs"), [(9, 0.0, 3), (1, 9.0, 2)]
)
def test_callbacks_resume_at_every_place_of_every_epoch(
  patience: int, min_delta: float, epochs: int, tmp_path: pathlib.Path
) -> None:
  """Includes the epoch after which all groups have stopped."""

  def run(name: str, *at_batch: Any, **at_end: int) -> dict[str, Any]:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    with testbed.mirrored(2).scope():
      model = _model([[0], [1]])
    stop = callbacks.PerModelEarlyStopping(
      patience=patience, min_delta=min_delta
    )
    other = callbacks.PerModelEarlyStopping(
      mode="max", patience=4, restore_best_weights=False, start_from_epoch=1
    )
    lower = callbacks.PerModelReduceLROnPlateau(
      factor=0.5, patience=1, cooldown=1, mode="max"
    )
    keep = callbacks.PerModelCheckpoint(folder / "best.npz")
    ends = {
      place: tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, _, place=place: (
          testbed.interrupt() if at_end.get(place) == epoch else None
        )
      )
      for place in ("before", "after")
    }
    _fit(
      model,
      callbacks.PerModelMetrics((X[:8], -X[:8, :1])),
      *(lower, stop, other, keep, fit_outcome.history(folder / "history")),
      *(ends["before"], callbacks.BackupAndRestore(folder / "backup")),
      *(ends["after"], *at_batch),
      epochs=3,
    )
    numbers = [keep.best, lower.best, lower.state()["wait"].tolist()]
    for each in (stop, other):
      numbers.append([each.best, each.best_epoch, each.stopped_epoch])
    # A `fit` that has nothing to train keeps the program's learning rate.
    kept = [v for v in _variables(model) if "learning_rate" not in v.name]
    state = [copy.tobytes() for v in kept for copy in testbed.copies(v)]
    return {**fit_outcome.of(folder), "numbers": numbers, "state": state}

  right = run("undisturbed")
  assert f"history/epoch {epochs - 1}" in right
  assert f"history/epoch {epochs}" not in right
  for epoch in range(epochs):
    for place in ({}, {"before": epoch}, {"after": epoch}):
      at_batch = [] if place else [testbed.Interruption(epoch, 1)]
      with pytest.raises(KeyboardInterrupt):
        run("interrupted", *at_batch, **place)
  assert run("interrupted") == right


class _Retraced(per_model_callback.PerModelCallback):
  """Makes Keras trace the step again, as callbacks that change settings do."""

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    self.model.make_train_function(force=True)


def test_backups_continue_after_a_whole_epoch_is_skipped(
  tmp_path: pathlib.Path,
) -> None:
  history, state = _undisturbed("one device")
  backup = callbacks.BackupAndRestore(tmp_path, False, every=4)
  with pytest.raises(KeyboardInterrupt):
    _train("one device", _Retraced(), backup, testbed.Interruption(1, 1))
  resumed, after = _train("one device", _Retraced(), backup)
  assert resumed == history
  assert cases.differing(after, state) == []
  names = {path.name for path in (tmp_path).iterdir()}
  assert names == {"epoch_3_batch_4.npz", "epoch_4.npz"}  # The last: its end.


@pytest.fixture
def received() -> Iterator[list[int]]:
  """The signals that the program's own handler receives."""
  signals: list[int] = []
  before = signal.signal(
    signal.SIGTERM, lambda number, _: signals.append(number)
  )
  yield signals
  signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
  "kind", [pytest.param("one device", marks=pytest.mark.fast), "tf_keras"]
)
def test_a_signal_ends_the_process_with_a_backup(
  kind: str, tmp_path: pathlib.Path, received: list[int]
) -> None:
  history, state = _undisturbed(kind)

  def train(at: Any, **options: Any) -> Any:
    backup = callbacks.BackupAndRestore(
      tmp_path, on_preemption=True, keep=3, **options
    )
    return _train(kind, testbed.Interruption(*at, _terminate), backup)

  for at, options, code, newest in (
    ((0, 2), {}, 143, "epoch_0_batch_3.npz"),
    ((1, 1), {"exit_code": 7}, 7, "epoch_1_batch_2.npz"),
  ):
    with pytest.raises(SystemExit) as end:
      train(at, **options)
    assert end.value.code == code
    assert (tmp_path / newest).exists()
    assert received == []
  resumed, after = train((9, 9))
  assert resumed == {name: values[1:] for name, values in history.items()}
  assert cases.differing(after, state) == []
  _terminate()
  assert received == [signal.SIGTERM]  # as before `fit`


def test_a_second_signal_is_the_programs_own(
  tmp_path: pathlib.Path, received: list[int]
) -> None:
  def twice() -> None:
    _terminate()
    assert received == []
    _terminate()
    assert received == [signal.SIGTERM]

  backup = callbacks.BackupAndRestore(tmp_path, on_preemption=True)
  with pytest.raises(SystemExit):
    _train("one device", testbed.Interruption(0, 0, twice), backup)


def test_a_signal_after_the_last_batch_is_passed_on(
  tmp_path: pathlib.Path, received: list[int]
) -> None:
  class AtEnd(per_model_callback.PerModelCallback):
    def on_train_end(self, logs: Any = None) -> None:
      _terminate()

  backup = callbacks.BackupAndRestore(tmp_path, on_preemption=True)
  _train("one device", AtEnd(), backup)
  assert received == [signal.SIGTERM]


def test_backups_by_the_clock(tmp_path: pathlib.Path) -> None:
  """Backups are saved at intervals of seconds; the last three are kept."""
  backup = callbacks.BackupAndRestore(
    tmp_path, False, every=99, every_seconds=0, keep=3
  )
  _train("one device", backup)
  names = {path.name for path in (tmp_path).iterdir()}
  last = [f"epoch_{EPOCHS - 1}_batch_{batch}.npz" for batch in (3, 4)]
  assert names == {*last, f"epoch_{EPOCHS}.npz"}
  backup = callbacks.BackupAndRestore(tmp_path, False, every_seconds=1e6)
  assert _train("one device", backup)[0] == {}


def test_other_executions_than_before(tmp_path: pathlib.Path) -> None:
  crash = testbed.Interruption(0, 2)
  backup = callbacks.BackupAndRestore(tmp_path, every=3)
  with pytest.raises(KeyboardInterrupt):
    _train("one device", backup, crash)
  with pytest.raises(
    ValueError, match=r"after 3 batches.*steps_per_execution=2"
  ):
    _train("one device, executions", backup)


def test_an_error_of_the_disk_ends_the_fit(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  failing = mock.Mock(side_effect=OSError(28, "No space"))
  monkeypatch.setattr(archive, "write", failing)
  backup = callbacks.BackupAndRestore(tmp_path)
  with pytest.raises(OSError, match="No space"):
    _model().fit(X, X[:, :1], epochs=2, verbose=0, callbacks=[backup])
  assert failing.call_count == 1


class _AtBegin(per_model_callback.PerModelCallback):
  """Takes the state of all replicas when a backup has been restored."""

  state_then: dict[tuple[str, str], Any]

  def on_train_begin(self, logs: Any = None) -> None:
    optimizer, model = self.model.optimizer, self.model
    whole = group_state.GroupState(optimizer, model)
    self.state_then = {
      (part.key, part.name): whole.copies.here(part.variable)
      for part in whole.entries
    }


@pytest.mark.parametrize(
  ("before", "after"),
  [(GROUPS, [[0], [1]]), ([[1], [0]], GROUPS)],
)
def test_as_many_groups_of_other_replicas(
  before: Any, after: Any, tmp_path: pathlib.Path
) -> None:
  """Every group resumes. New members get the mean of the old statistics."""
  path = tmp_path / "epoch_2.npz"
  best = callbacks.PerModelCheckpoint(tmp_path / "best.npz")
  with testbed.mirrored(sum(map(len, before))).scope():
    model = _model(before)
  backup = callbacks.BackupAndRestore(tmp_path)
  listed = [callbacks.PerModelMetrics((X, X[:, :1])), best, backup]
  with pytest.raises(KeyboardInterrupt):
    _fit(model, *listed, testbed.Interruption(2))
  with np.load(path) as file:
    saved = {name: file[name] for name in file}
  with testbed.mirrored(sum(map(len, after))).scope():
    model = _model(after)
  begun = _AtBegin()
  with mock.patch.object(logging, "warning") as said:
    assert _fit(model, *listed, begun) == [2, 3]
  logged = [str(c.args[0]) for c in said.call_args_list]
  [words] = [words for words in logged if "start again" in words]
  assert "made with groups of another size" in words
  for (key, name), copies in begun.state_then.items():
    for i, members in enumerate(after):
      keys = [f"model_{i}/{key}"]
      if keys[0] not in saved:
        keys = [f"model_{i}/member_{j}/{key}" for j in range(2)]
      rows = [saved[key] for key in keys]
      right = rows[0] if rows[0].dtype.kind in "iu" else np.mean(rows, axis=0)
      for member in members:
        np.testing.assert_allclose(copies[member], right, rtol=1e-6)
    if "kernel" in name:
      assert (copies[after[0][0]] != copies[after[1][0]]).any()
  moving = [k for k, name in begun.state_then if "moving" in name]
  own = [k for k in saved if k.partition("member_1/")[2] in moving]
  assert len(own) == 2 * len(before) * (len(before[0]) - 1)


def test_another_number_of_replicas_in_mid_epoch(
  tmp_path: pathlib.Path,
) -> None:
  """The metrics of a resumed epoch cover the remaining batches only."""

  def fit(*others: Any) -> Any:
    tf.keras.utils.set_random_seed(3)
    model = tf.keras.Sequential(
      [tf.keras.Input((4,)), tf.keras.layers.Dense(1)]
    )
    frozen = tf.keras.optimizers.SGD(0.0)
    model.compile(tf_cross_shard.CrossShardOptimizer(frozen), "mse")
    backup = callbacks.BackupAndRestore(tmp_path, every=2)
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8)
    history = testbed.fit(model, data, callbacks=[backup, *others])
    return model, history.history["loss"]

  with testbed.mirrored(2).scope(), pytest.raises(KeyboardInterrupt):
    fit(testbed.Interruption(0, 1))
  model, [loss] = fit()
  rest = model.evaluate(X[16:], X[16:, :1], verbose=0)
  assert loss == pytest.approx(rest, rel=1e-6)
  assert rest != pytest.approx(model.evaluate(X, X[:, :1], verbose=0), rel=1e-3)


@pytest.mark.parametrize(
  ("library", "options", "arguments", "is_warned"),
  [
    (tf.keras, {"every": 2}, {}, True),
    (tf_keras, {"every_seconds": 60.0}, {"validation_split": 0.5}, True),
    (tf.keras, {"on_preemption": True}, {"x": {"a": X}}, True),
    (tf_keras, {"every": 2}, {"shuffle": False}, False),
    (tf.keras, {"every": 2}, {"x": "dataset"}, False),
    (tf_keras, {}, {}, False),
  ],
)
def test_warns_if_fit_shuffles_arrays(
  tmp_path: pathlib.Path,
  caplog: pytest.LogCaptureFixture,
  library: Any,
  options: dict[str, Any],
  arguments: dict[str, Any],
  is_warned: bool,
) -> None:
  inputs = library.Input((4,), name="a")
  outputs = library.layers.Dense(1)(inputs)
  is_dictionary = isinstance(arguments.get("x"), dict)
  model = library.Model({"a": inputs} if is_dictionary else inputs, outputs)
  model.compile("sgd", "mse")
  arguments = {"x": X, "y": X[:, :1], **arguments}
  if isinstance(arguments["x"], str):
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).shuffle(9)
    arguments["x"], arguments["y"] = data.batch(8), None
  with caplog.at_level("WARNING"):
    backup = callbacks.BackupAndRestore(tmp_path, **options)
    model.fit(**arguments, verbose=0, callbacks=[backup])
  warned = "some examples of the epoch are used twice" in caplog.text
  assert warned == is_warned


@pytest.mark.fast
def test_the_last_two_are_kept(tmp_path: pathlib.Path) -> None:
  """A crash while a backup is being written leaves the previous backup."""
  folder = tmp_path
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
  with pytest.raises(models.CheckpointError, match="is damaged"):
    _fit(_model(), backup)


def test_state_of_a_callback_that_is_gone_is_left_out(
  tmp_path: pathlib.Path,
) -> None:
  """The callback's class may no longer exist in this version."""
  with testbed.mirrored().scope():
    model = _model(GROUPS)
  backup = callbacks.BackupAndRestore(tmp_path)
  metrics = callbacks.PerModelMetrics((X, X[:, :1]))
  gone = [
    callbacks.PerModelReduceLROnPlateau(),
    callbacks.PerModelEarlyStopping(),
  ]
  with pytest.raises(KeyboardInterrupt):
    _fit(model, metrics, *gone, backup, testbed.Interruption(2))
  with mock.patch.object(logging, "warning") as said:
    assert _fit(model, metrics, gone[0], backup) == [2, 3]
  [warning] = said.call_args_list
  assert re.search(
    "epoch_2.npz also holds the state of PerModelEarlyStopping, .* ignored",
    warning.args[0] % warning.args[1:],
  )


def test_callbacks_with_a_state_come_before_it(tmp_path: pathlib.Path) -> None:
  with testbed.mirrored().scope():
    model = _model(GROUPS)
  used = [
    callbacks.PerModelMetrics((X, X[:, :1])),
    callbacks.BackupAndRestore(tmp_path),
    callbacks.PerModelReduceLROnPlateau(),
    callbacks.PerModelEarlyStopping(),
    callbacks.PerModelTensorBoard(tmp_path),
  ]
  words = (
    "state of other callbacks, but PerModelReduceLROnPlateau,"
    " PerModelEarlyStopping runs after it, .*Put BackupAndRestore last"
  )
  with pytest.raises(ValueError, match=words):
    _fit(model, *used)


@pytest.mark.parametrize(("second", "at_end"), [(0.5, 0.125), (0.25, 0.25)])
def test_a_run_that_finds_its_work_finished(
  second: float,
  at_end: float,
  tmp_path: pathlib.Path,
  caplog: pytest.LogCaptureFixture,
) -> None:
  """A finished run names the folder to delete, and keeps a changed rate."""
  for rate in (0.5, second):
    model = tf.keras.Sequential(
      [tf.keras.Input((4,)), tf.keras.layers.Dense(1)]
    )
    model.compile(CrossShardOptimizer(tf.keras.optimizers.Adam(rate)), "mse")
    variable = model.optimizer.learning_rate
    lower = tf.keras.callbacks.LambdaCallback(
      on_epoch_end=lambda *_, v=variable: v.assign(v / 2)
    )
    backup = callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    history = testbed.fit(model, DATA, 2, callbacks=[lower, backup]).history
  assert not history
  assert float(model.optimizer.learning_rate.numpy()) == at_end
  [text] = [t for t in caplog.messages if "trains nothing" in t]
  assert f"delete the folder {tmp_path}" in text


@pytest.mark.parametrize("is_compiled", [True, False])
def test_an_optimizer_that_cannot_be_saved_is_named(
  is_compiled: bool, tmp_path: pathlib.Path
) -> None:
  model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(1)])
  adam = tf_keras.optimizers.legacy.Adam()
  model.compile(adam if is_compiled else "sgd", "mse")
  if not is_compiled:
    model.second = adam
  backup = callbacks.BackupAndRestore(tmp_path)
  with pytest.raises(
    TypeError, match=r"legacy; got Adam\. Use a class without"
  ):
    model.fit(X, X[:, :1], verbose=0, callbacks=[backup])


class Gan(tf.keras.Model):
  """A model that keeps its optimizers in a dictionary and in a list."""

  def __init__(self) -> None:
    super().__init__()
    dense = functools.partial(
      tf.keras.layers.Dense, 1, kernel_initializer="ones"
    )
    self.first, self.second = dense(), dense()
    self.by_name = {"first": _momentum(0.05)}
    self.inside = tf.keras.Sequential([tf.keras.Input((1,)), dense()])
    self.inside.compile(_momentum(0.04), "mse")
    self.listed = [_momentum(0.03)]
    self.build((None, 4))

  def build(self, shape: Any) -> None:
    self.first.build(shape)
    self.second.build((None, 1))
    self.built = True

  def call(self, x: Any) -> Any:
    return self.inside(self.second(self.first(x)))

  def train_step(self, data: Any) -> Any:
    x, y = data
    with tf.GradientTape(persistent=True) as tape:
      loss = tf.reduce_mean((self(x) - y) ** 2)
    for part, optimizer in (
      (self.first, self.by_name["first"]),
      (self.second, self.listed[0]),
      (self.inside, self.inside.optimizer),
    ):
      variables = part.trainable_variables
      grads = tape.gradient(loss, variables)
      optimizer.apply_gradients(zip(grads, variables, strict=True))
    return {"loss": loss}


def _momentum(rate: float) -> CrossShardOptimizer:
  return CrossShardOptimizer(
    tf.keras.optimizers.SGD(rate, momentum=0.9), loss_averaged_over="global"
  )


@pytest.mark.tf_keras_mode
def test_all_optimizers_that_a_model_holds(tmp_path: pathlib.Path) -> None:
  """A resumed run equals one that was not interrupted, slots included."""

  def run(epochs: int, *used: Any) -> list[Any]:
    model = Gan()
    model.compile("sgd", "mse")
    testbed.fit(model, DATA, epochs, callbacks=list(used))
    optimizers = model.by_name["first"], model.listed[0], model.inside.optimizer
    slots = [v for o in optimizers for v in o.variables]
    return [np.array(v) for v in (*model.trainable_variables, *slots)]

  def backup() -> callbacks.BackupAndRestore:
    return callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)

  run(2, backup())
  for resumed, right in zip(run(4, backup()), run(4), strict=True):
    np.testing.assert_array_equal(resumed, right)
