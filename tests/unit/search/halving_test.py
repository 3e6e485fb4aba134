"""Trials in groups, against plain Keras trained with the settings of each."""

import csv
import math
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  callbacks,
  groups,
  replica_state,
  schedules,
  trials,
)

PAIRS = groups.Groups([[0, 1], [2, 3]])
# Members of a group have different data, and groups the same.
X = np.array([[1.0], [3.0], [1.0], [3.0]], "f")
Y = np.array([[2.0], [8.0], [2.0], [8.0]], "f")
SETTINGS = [
  {"learning_rate": rate, "momentum": momentum, "scale": scale}
  for rate, momentum, scale in [
    (0.015625, 0.5, 1.0),
    (0.0625, 0.25, 0.5),
    (0.5, 0.5, 2.0),  # diverges
    (0.125, 0.0, 1.0),
    (0.03125, 0.75, 1.0),
    (0.0078125, 0.5, 1.0),
  ]
]


class _Scale(tf.keras.layers.Layer):
  """Multiplies by a number that is asked for in every call."""

  def __init__(self, scale: Any) -> None:
    super().__init__()
    self._scale = scale

  def call(self, inputs: Any) -> Any:
    return inputs * self._scale()


def _scale_of(table: trials.Table) -> Any:
  if "scale" in table.names:
    return lambda: table.value("scale")
  return lambda: 1.0


def _layers(scale: Any, dropout: float) -> list[Any]:
  return [
    tf.keras.Input((1,)),
    _Scale(scale),
    tf.keras.layers.Dropout(dropout, seed=7),
    tf.keras.layers.Dense(1, kernel_initializer="ones"),
  ]


def _make(
  settings: Any = SETTINGS,
  dropout: float = 0.0,
  strategy: Any = None,
  **options: Any,
) -> tuple[Any, trials.Table]:
  with (strategy or testbed.mirrored()).scope():
    table = trials.Table(settings, PAIRS)
    model = tf.keras.Sequential(_layers(_scale_of(table), dropout))
    sgd = tf.keras.optimizers.SGD(1.0, momentum=0.5)
    optimizer = CrossShardOptimizer(sgd, group_assignment=PAIRS, **options)
    model.compile(optimizer, "mse", metrics=["mae"])
  return model, table


def _twin(table: trials.Table, dropout: float = 0.0) -> Any:
  """A plain model: Keras cannot clone layers that have a function."""
  twin = tf.keras.Sequential(_layers(_scale_of(table), dropout))
  twin.compile("sgd", "mse", metrics=["mae"])
  return twin


def _fit(
  model: Any,
  table: trials.Table,
  *own: Any,
  dropout: float = 0.0,
  repeats: int = 1,
  **options: Any,
) -> Any:
  judge = callbacks.GroupMetrics(
    (X[:2], Y[:2]), ensemble=False, twin=lambda: _twin(table, dropout)
  )
  total = getattr(own[0], "total_epochs", 1)
  arguments = {"epochs": total, "shuffle": False, **options}
  return model.fit(
    *(np.tile(X, [repeats, 1]), np.tile(Y, [repeats, 1])),
    batch_size=4,
    verbose=0,
    callbacks=[judge, *own],
    **arguments,
  )


def _plain(settings: dict[str, float], epochs: int) -> tuple[Any, list[float]]:
  """One trial alone: the model, and its validation losses."""
  model = tf.keras.Sequential(_layers(lambda: settings["scale"], 0.0))
  sgd = tf.keras.optimizers.SGD(
    settings["learning_rate"], momentum=settings["momentum"]
  )
  model.compile(sgd, "mse")
  history = model.fit(
    *(X[:2], Y[:2]),
    batch_size=2,
    epochs=epochs,
    shuffle=False,
    verbose=0,
    validation_data=(X[:2], Y[:2]),
  ).history
  return model, history["val_loss"]


@pytest.mark.parametrize(
  "strategy",
  [None, VectorizedStrategy(4, split_batches=True)],
  ids=["mirrored", "vectorized"],
)
def test_each_trial_is_trained_as_plain_keras_trains_it_alone(
  strategy: Any, tmp_path: pathlib.Path
) -> None:
  model, table = _make(strategy=strategy)
  assert model.distribute_strategy.num_replicas_in_sync == 4
  halving = callbacks.Halving(
    table, tmp_path / "new", epochs=4, factor=2, log_dir=tmp_path / "board"
  )
  history = _fit(model, table, halving).history
  # 6 trials for an epoch in 3 waves, 3 for one more in 2 waves, 2 for 2 more
  assert halving.total_epochs == len(history["loss"]) == 3 + 2 + 2
  alone = {i: _plain(row, 4) for i, row in enumerate(SETTINGS)}
  rest = list(alone)
  lengths = dict.fromkeys(alone, 1)
  for count, so_far, until in ((3, 1, 2), (2, 2, 4)):
    best = {i: np.nanmin(alone[i][1][:so_far]) for i in rest}
    rest = sorted(rest, key=best.__getitem__)[:count]
    lengths |= dict.fromkeys(rest, until)
  assert [trial.epochs for trial in table] == list(lengths.values())
  assert sorted(lengths.values()) == [1, 1, 1, 2, 4, 4]
  for i, trial in enumerate(table):
    expected = alone[i][1][: lengths[i]]
    np.testing.assert_allclose(trial.history["val_loss"], expected, 1e-5)
    assert trial.best_epoch == int(np.nanargmin(expected))
    assert sorted(trial.history) == ["loss", "val_loss", "val_mae"]
    assert _curve(tmp_path / f"board/trial_{i}") == pytest.approx(
      expected, 1e-5
    )
  assert table.best.number == min(lengths, key=lambda i: min(alone[i][1]))
  ranking = [trial.number for trial in table.ranking]
  assert ranking[0] == table.best.number
  assert str(table).splitlines()[1].split()[0] == str(ranking[0])
  table.to_csv(tmp_path / "table.csv")
  with open(tmp_path / "table.csv", newline="") as file:
    rows = list(csv.DictReader(file))
  assert [int(row["trial"]) for row in rows] == ranking
  assert [int(row["epochs"]) for row in rows] == [lengths[i] for i in ranking]
  files = sorted(path.name for path in (tmp_path / "new").iterdir())
  assert files == [f"trial_{i}.npz" for i in range(6)]
  with schedules.as_group(0):
    into = _twin(table)
  again = halving.best_model(into=into)
  best, _ = _plain(table.best.settings, table.best.best_epoch + 1)
  for a, b in zip(again.get_weights(), best.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)


def _curve(run: pathlib.Path) -> list[float]:
  """Returns a trial's loss curve in TensorBoard; checks its settings."""
  [path] = run.iterdir()
  values = [
    value
    for event in tf.compat.v1.train.summary_iterator(str(path))
    for value in event.summary.value
  ]
  [table] = [v.tensor for v in values if v.tag == "hyperparameters"]
  assert b"| learning_rate | 0." in tf.make_ndarray(table).item()
  curve = [v.tensor for v in values if v.tag == "val_loss"]
  return [float(tf.make_ndarray(tensor)) for tensor in curve]


def test_resumed_search_equals_uninterrupted_search(
  tmp_path: pathlib.Path,
) -> None:
  """The resumed search has the same results, ranking and weights."""

  def run(name: str, every: Any, *own: Any) -> Any:
    # Of dropout in tf_keras no state of random numbers can be saved.
    dropout = 0.0 if testbed.IS_TF_KERAS else 0.25
    tf.keras.utils.set_random_seed(1)
    model, table = _make(SETTINGS[:4], dropout)
    halving = callbacks.Halving(table, tmp_path / name, epochs=2, factor=2)
    folder = tmp_path / f"{name}_backup"
    backup = callbacks.BackupAndRestore(folder, every=every)
    _fit(model, table, halving, *own, backup, dropout=dropout, repeats=2)
    weights = [testbed.copies(weight) for weight in model.weights]
    ranking = [trial.number for trial in table.ranking]
    histories = [trial.history for trial in table]
    return (histories, ranking), np.concatenate(weights, axis=None)

  expected = run("whole", "epoch")
  assert [len(own["loss"]) for own in expected[0][0]].count(2) == 2
  for crash, every in ((1, "epoch"), (2, 3)):  # in a rung, and between two
    with pytest.raises(KeyboardInterrupt):
      run(f"at {crash}", every, testbed.Interruption(crash))
    found = run(f"at {crash}", every)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize(
  ("number", "num_groups", "factor", "epochs", "total"),
  [
    # Trials and epochs of each rung: (16, 2), (8, 4), (4, 9).
    (16, 4, 2, 9, 4 * 2 + 2 * 2 + 5),
    (4, 4, 3, 5, 5),
    (3, 4, 3, 5, 5),
    (9, 4, 3, 3, 3 * 1 + 2),  # (9, 1), (4, 3)
    # (81, 1), (27, 3), (9, 9), (3, 27), (1, 81)
    (81, 1, 3, 81, 81 * 1 + 27 * 2 + 9 * 6 + 3 * 18 + 54),
  ],
)
def test_rungs(
  number: int,
  num_groups: int,
  factor: int,
  epochs: int,
  total: int,
  tmp_path: pathlib.Path,
) -> None:
  rows = [{"learning_rate": float(i + 1)} for i in range(number)]
  table = trials.Table(rows, groups.singletons(num_groups))
  halving = callbacks.Halving(table, tmp_path, epochs=epochs, factor=factor)
  assert halving.total_epochs == total


def test_too_few_epochs(tmp_path: pathlib.Path) -> None:
  words = "at least 3, because 5 trials in 4 groups take 2 rungs with"
  rows = [{"learning_rate": float(i + 1)} for i in range(5)]
  table = trials.Table(rows, groups.singletons(4))
  with pytest.raises(ValueError, match=words):
    callbacks.Halving(table, tmp_path, epochs=2, factor=3)


@pytest.mark.parametrize(
  ("rows", "error", "message"),
  [
    ([], ValueError, "must contain a dictionary for each trial"),
    ([0.1, 0.2], TypeError, "must hold dictionaries; got 0.1. Use"),
    ([{"a": 1}, {"b": 1}], ValueError, "must have the same names"),
    ([{"a": "relu"}], TypeError, "'a' is 'relu'. For a categorical"),
    ([{"a": 1}, {"a": math.nan}], ValueError, "'a' is nan in {'a': nan}"),
    ({"a": [1, 2]}, TypeError, "a list of dictionaries; got {'a': "),
    ("abc", TypeError, "a list of dictionaries; got 'abc'"),
    (None, TypeError, "a list of dictionaries; got None"),
    ([{1: 2}], TypeError, "must name settings by strings; got 1"),
  ],
)
def test_bad_tables(rows: Any, error: Any, message: str) -> None:
  with pytest.raises(error, match=message):
    trials.Table(rows, [[0], [1]])


def _halving(table: trials.Table, folder: Any = "unused") -> callbacks.Halving:
  return callbacks.Halving(table, folder, epochs=9, factor=2)


@pytest.mark.parametrize(
  ("options", "least"), [({"epochs": 14}, 15), ({"initial_epoch": 1}, 16)]
)
def test_a_fit_that_is_too_short(
  options: Any, least: int, tmp_path: pathlib.Path
) -> None:
  model, table = _make()
  words = f"`epochs` of fit must be at least {least}, for 6 trials"
  with pytest.raises(ValueError, match=words):
    _fit(model, table, _halving(table, tmp_path), **options)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (
      lambda: callbacks.OuterOptimizer(2),
      "OuterOptimizer assumes that a group",
    ),
    (
      lambda: _halving(trials.Table(SETTINGS, groups.singletons(4))),
      "`table` is for the groups",
    ),
  ],
)
def test_wrong_arguments_raise_before_the_first_step(
  make: Any, message: str
) -> None:
  model, table = _make()
  before = testbed.copies(model.weights[-1])
  with pytest.raises((TypeError, ValueError), match=re.escape(message)):
    _fit(model, table, make(), _halving(table))
  np.testing.assert_array_equal(testbed.copies(model.weights[-1]), before)


@pytest.mark.parametrize("name", ["learning_rate", "momentum"])
def test_no_other_callback_sets_rates(
  name: str, tmp_path: pathlib.Path
) -> None:
  """The other callback would set one learning rate for all trials."""
  model, table = _make([{name: 0.5 / 2**i} for i in range(4)])
  setter = tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.5**epoch)
  with pytest.raises(ValueError, match="learning rates of the groups changed"):
    _fit(model, table, _halving(table, tmp_path), setter)


@pytest.mark.parametrize(
  ("last", "options", "message"),
  [
    ({"clipnorm": -1}, {}, "`clipnorm` must be a number of at least 0"),
    (
      {"weight_decay": 1},
      {},
      "`table` contains 'weight_decay', but SGD.weight_decay is None, [^`]*"
      " `opt` [^`]* numbers in `table`",
    ),
    (
      {"gradient_accumulation_steps": 2},
      {},
      "`table` contains 'gradient_accumulation_steps'",
    ),
    (
      {"clipnorm": 1},
      {"group_settings": {"momentum": [0.5, 0.25]}},
      "different values of 'momentum', .* but `table` does not contain",
    ),
  ],
)
def test_settings_that_no_trial_can_have(
  last: Any, options: Any, message: str, tmp_path: pathlib.Path
) -> None:
  """The last trial's settings are checked before the first step, too."""
  rows = [*[dict.fromkeys(last, 0.5)] * 2, last]
  model, table = _make(rows, **options)
  with pytest.raises(ValueError, match=message):
    _fit(model, table, _halving(table, tmp_path / "new"))
  assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
  ("rows", "message"),
  [
    (SETTINGS[:5], "a different search: its plan is"),
    (
      [*SETTINGS[:5], SETTINGS[4]],
      "a different table: it contains {'learning_rate': 0.0078125",
    ),
  ],
)
def test_backups_of_other_trials(rows: Any, message: str) -> None:
  before, after = (
    _halving(trials.Table(settings, PAIRS)) for settings in (SETTINGS, rows)
  )
  with pytest.raises(replica_state.CheckpointError, match=message):
    after.set_state(before.state())


@pytest.mark.parametrize("shuffle", [True, False])
def test_warns_if_fit_shuffles_arrays(
  tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, shuffle: bool
) -> None:
  """A resumed search could choose another trial."""
  model, table = _make([SETTINGS[2], SETTINGS[4]])
  halving = callbacks.Halving(table, tmp_path / "new", epochs=1)
  backup = callbacks.BackupAndRestore(tmp_path / "backup")
  with caplog.at_level("WARNING"):
    _fit(model, table, halving, backup, shuffle=shuffle)
  warned = "resumed, Halving may choose another trial. Pass" in caplog.text
  assert warned == shuffle


def test_completed_search_does_not_train_again(tmp_path: pathlib.Path) -> None:
  """`table.value` returns the settings of the best trial."""
  rows = [SETTINGS[2], SETTINGS[4]]
  for count in (1, 0):
    model, table = _make(rows)
    halving = callbacks.Halving(table, tmp_path / "new", epochs=1)
    with pytest.raises(ValueError, match="No trial has a finite"):
      halving.best_model()
    backup = callbacks.BackupAndRestore(
      tmp_path / "backup", delete_checkpoint=False
    )
    history = _fit(model, table, halving, backup, epochs=3)
    assert len(history.epoch) == count
    assert table.best.number == 1  # trained in group 1
    with schedules.as_group(0):
      winner = halving.best_model(into=_twin(table))
      loss, _ = winner.evaluate(X[:2], Y[:2], verbose=0)
    assert loss == pytest.approx(table.best.best, 1e-5)


@pytest.mark.parametrize(
  ("name", "meant"),
  [
    ("wieght_decay", r" \(did you mean 'weight_decay'\?\), or"),
    ("learnin_rate", r" \(did you mean 'learning_rate'\?\), or"),
    ("global_clipnrm", r" \(did you mean 'global_clipnorm'\?\), or"),
    ("strength", ", or"),
  ],
)
def test_a_setting_that_nothing_reads(
  name: str, meant: str, tmp_path: pathlib.Path
) -> None:
  model, table = _make([{"learning_rate": 0.125, name: 0.5}])
  halving = callbacks.Halving(table, tmp_path, epochs=2)
  words = f"uses the setting '{name}' of .* Correct the name{meant} call table"
  with pytest.raises(ValueError, match=words):
    _fit(model, table, halving)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_search_lacks_that_was_stopped(
  is_first: bool, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
  """A callback of Keras ends `fit`, before or after Halving in the list."""
  model, table = _make()
  halving = _halving(table, tmp_path)
  with pytest.raises(
    ValueError, match=r"6 of 6 trials were not trained.* Call fit"
  ):
    halving.best_model()
  stop = tf.keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)
  both = [stop, halving] if is_first else [halving, stop]
  _fit(model, table, *both, epochs=halving.total_epochs)
  words = "4 of 6 trials were not trained, and no trial was trained for all 9"
  [warning] = [r.getMessage() for r in caplog.records if "ended" in r.message]
  assert words in warning
  assert "EarlyStopping" in warning
  caplog.clear()
  with schedules.as_group(0):
    into = _twin(table)
  assert halving.best_model(into=into) is into
  assert words in caplog.text
