"""`callbacks.OptunaSearch`: each trial equals a plain fit with its settings."""

import functools
import gc
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import optuna
import pytest
import tensorflow as tf

from tests.support import programs, replica_state_cases, testbed
from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  callbacks,
  groups,
  layers,
)
from tf_cross_shard._src.core import workers as workers_lib

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(64, 4)).astype("float32")
Y = (X[:, :1] * X[:, 1:2] + X[:, 2:3]).astype("float32")
TRAIN, VALIDATION = (X[:48], Y[:48]), (X[48:], Y[48:])
EPOCHS = 3
SETTINGS = [
  {"learning_rate": 0.03, "beta_1": 0.9, "dropout": 0.5},
  {"learning_rate": 0.001, "beta_1": 0.5, "dropout": 0.0},
  {"learning_rate": 0.01, "beta_1": 0.8, "dropout": 0.25},
  {"learning_rate": 0.1, "beta_1": 0.0, "dropout": 0.125},
  {"learning_rate": 0.02, "beta_1": 0.7, "dropout": 0.75},
]
State = optuna.trial.TrialState


class Killed(BaseException):
  """Ends a program as a kill does: no `except Exception` catches it."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
  level = optuna.logging.get_verbosity()
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  yield
  optuna.logging.set_verbosity(level)


def make_study(settings: Any = SETTINGS, **options: Any) -> optuna.Study:
  """Returns a study that asks for these settings, one after the other."""
  study = optuna.create_study(**options)
  if not study.trials:
    for each in settings:
      study.enqueue_trial(each)
  return study


def suggest(trial: optuna.Trial) -> dict[str, float]:
  return {
    "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e6, log=True),
    "beta_1": trial.suggest_float("beta_1", 0.0, 0.99),
    "dropout/rate": trial.suggest_float("dropout", 0.0, 0.9),
  }


def network(dropout: Callable[[], Any]) -> Any:
  keras.utils.set_random_seed(1)
  return keras.Sequential(
    [
      keras.Input((4,)),
      keras.layers.Dense(8, "tanh"),
      keras.layers.BatchNormalization(),
      dropout(),
      keras.layers.Dense(1),
    ]
  )


def strategies() -> dict[str, Callable[[], Any]]:
  return {
    "vectorized": lambda: VectorizedStrategy(2),
    "mirrored": lambda: testbed.mirrored(2),
  }


def tunable() -> Any:
  return layers.TunableDropout(0.5, name="dropout")


def grouped(strategy: Any, dropout: Callable[[], Any] = tunable) -> Any:
  """Returns a model of two groups, whose settings a search changes."""
  with strategy.scope():
    model = network(dropout)
    adam = keras.optimizers.Adam(0.5, epsilon=1e-3)
    singles = groups.singletons(2)
    model.compile(CrossShardOptimizer(adam, group_assignment=singles), "mse")
  return model


def data(is_mirrored: bool = False) -> tf.data.Dataset:
  """Batches of 16; replicas of a MirroredStrategy both get 8 equal ones."""
  found = tf.data.Dataset.from_tensor_slices(TRAIN).batch(8)
  if is_mirrored:  # Both replicas receive the same eight examples.
    found = found.map(lambda x, y: (tf.tile(x, [2, 1]), tf.tile(y, [2, 1])))
  return found


def run(
  search: Any, model: Any, *others: Any, is_mirrored: bool = False
) -> list[float]:
  judge = callbacks.PerModelMetrics(VALIDATION, ensemble=False)
  with tf.device("CPU"):
    history = model.fit(
      data(is_mirrored),
      epochs=search.most_epochs,
      verbose=0,
      callbacks=[judge, search, *others],
    )
  return list(history.epoch)


@functools.cache
def plain_values(**settings: float) -> Any:
  """Returns the values of a plain fit, and its model at the best epoch."""
  model = network(lambda: keras.layers.Dropout(0.5))
  # Keras' Dropout(0.0) draws no seed, so that the next layer draws another one.
  model.layers[2].rate = settings["dropout"]
  adam = keras.optimizers.Adam(
    settings["learning_rate"], settings["beta_1"], epsilon=1e-3
  )
  model.compile(adam, "mse", run_eagerly=True)
  best = keras.callbacks.EarlyStopping(
    patience=99, restore_best_weights=True, monitor="val_loss"
  )
  history = model.fit(
    data(),
    validation_data=VALIDATION,
    epochs=EPOCHS,
    verbose=0,
    callbacks=[best],
  ).history
  return history["val_loss"], model


def values_of(trial: Any) -> list[float]:
  return [trial.intermediate_values[i] for i in range(trial.last_step + 1)]


@pytest.mark.parametrize(
  "kind", ["vectorized", pytest.param("mirrored", marks=pytest.mark.slow)]
)
def test_each_trial_equals_a_plain_fit(
  kind: str, tmp_path: pathlib.Path
) -> None:
  """Five trials in two groups: weights, slots and seeds begin anew."""
  study = make_study()
  search = callbacks.OptunaSearch(
    study, suggest, trials=5, epochs=EPOCHS, folder=tmp_path / "best"
  )
  traces = []

  def dropout() -> Any:
    made = tunable()
    call = made.call

    def counted(*args: Any, **options: Any) -> Any:
      traces.append(1)
      return call(*args, **options)

    made.call = counted
    return made

  is_mirrored = kind == "mirrored"
  model = grouped(strategies()[kind](), dropout)
  run(search, model, is_mirrored=is_mirrored)
  count = len(traces)
  assert search.most_epochs == 5 * EPOCHS
  best = math.inf, None
  for trial, settings in zip(study.trials, SETTINGS, strict=True):
    assert trial.params == settings
    assert trial.state == State.COMPLETE
    right, plain = plain_values(**settings)
    np.testing.assert_allclose(values_of(trial), right, rtol=1e-5)
    assert trial.value == min(values_of(trial))
    if trial.value < best[0]:
      best = trial.value, plain
  assert best[1] is not None
  assert study.best_value == best[0]
  found = search.best_model()
  for mine, right in zip(
    found.get_weights()[:8], best[1].get_weights()[:8], strict=True
  ):
    np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)
  assert found.layers[2].rate == study.best_params["dropout"]
  # A second search in the same program traces nothing.
  search.study = make_study()
  run(search, model, is_mirrored=is_mirrored)
  assert len(traces) == count


class Lower(keras.callbacks.Callback):  # type: ignore[misc]
  """Lowers the learning rate after the first epoch of each trial of two."""

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    if epoch % 2 == 0:
      self.model.optimizer.learning_rate = 0.125


def test_groups_begin_as_they_were() -> None:
  """Groups with different weights: trial i has those of its group."""
  study = make_study([{"beta_1": 0.5}] * 4)
  search = callbacks.OptunaSearch(
    study,
    lambda t: {"beta_1": t.suggest_float("beta_1", 0.0, 0.9)},
    **{"trials": 4, "epochs": 2},
  )
  model = grouped(VectorizedStrategy(2))
  [kernel, *_] = model.trainable_variables
  start = kernel.numpy()
  replica_state_cases.spread(kernel, [start * (1 + i) for i in range(2)])
  run(search, model, Lower())
  first, second, third, fourth = map(values_of, study.trials)
  assert first == third != second == fourth


def test_pruned_and_failed_trials_make_room() -> None:
  """A group whose trial is pruned or not finite begins the next trial."""
  settings = [dict(SETTINGS[2]) for _ in range(5)]
  settings[1]["learning_rate"] = 1e6
  settings[1]["dropout"] = 0.0

  class Pruner(optuna.pruners.BasePruner):
    def prune(self, study: Any, trial: Any) -> bool:
      return trial.number == 2 and trial.last_step == 1

  study = make_study(settings, pruner=Pruner())
  search = callbacks.OptunaSearch(study, suggest, trials=5, epochs=EPOCHS)

  model = grouped(VectorizedStrategy(2))
  epochs = run(search, model)
  states = [trial.state.name for trial in study.trials]
  assert states == ["COMPLETE", "FAIL", "PRUNED", "COMPLETE", "COMPLETE"]
  assert [t.last_step for t in study.trials] == [2, 0, 1, 2, 2]
  # Group 0 trains trials 0 and 3, group 1 trials 1, 2 and 4.
  assert len(epochs) == 6
  right, _ = plain_values(**settings[4])
  np.testing.assert_allclose(values_of(study.trials[4]), right, rtol=1e-5)


def test_a_failed_trial_never_wins() -> None:
  failing = {**SETTINGS[2], "learning_rate": 1e6, "dropout": 0.0}
  study = make_study([failing, SETTINGS[2]])
  search = callbacks.OptunaSearch(study, suggest, trials=2, epochs=1)
  run(search, grouped(VectorizedStrategy(2)))
  assert [trial.state for trial in study.trials] == [State.FAIL, State.COMPLETE]
  best = search.best_model()
  best.compile(loss="mse")
  loss = best.evaluate(*VALIDATION, verbose=0)
  np.testing.assert_allclose(loss, study.best_value, rtol=1e-5)


def test_a_fit_that_ends_early(caplog: pytest.LogCaptureFixture) -> None:
  study = make_study()
  search = callbacks.OptunaSearch(study, suggest, trials=5, epochs=EPOCHS)
  model = grouped(VectorizedStrategy(2))
  judge = callbacks.PerModelMetrics(VALIDATION, ensemble=False)
  model.fit(data(), epochs=4, verbose=0, callbacks=[judge, search])
  [message] = [m for m in caplog.messages if "before the search" in m]
  assert "2 of 5 trials were marked as failed, and 1 were not" in message
  states = [trial.state.name for trial in study.trials]
  assert states == ["COMPLETE", "COMPLETE", "FAIL", "FAIL", "WAITING"]


def start(folder: pathlib.Path, every: Any, *others: Any) -> tuple[Any, Any]:
  """Runs a search that goes on where another one in the folder was killed."""
  folder.mkdir(exist_ok=True)
  file = optuna.storages.journal.JournalFileBackend(str(folder / "study.log"))
  study = make_study(
    storage=optuna.storages.JournalStorage(file),
    study_name="search",
    load_if_exists=True,
  )
  search = callbacks.OptunaSearch(study, suggest, trials=5, epochs=EPOCHS)
  model = grouped(VectorizedStrategy(2))
  backup = callbacks.BackupAndRestore(
    folder / "backup", every=every, delete_checkpoint=False
  )
  run(search, model, *others, backup)
  return study, search


class Kill(keras.callbacks.Callback):  # type: ignore[misc]
  """Ends `fit` after a batch, or at an epoch's end, before the backup."""

  def __init__(self, batches: int, is_at_end: bool) -> None:
    super().__init__()
    self.left, self.is_at_end = batches, is_at_end

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    self.left -= 1
    if self.left <= 0 and not self.is_at_end:
      raise Killed

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    # The search, which is before this callback, has told and asked the study.
    if self.left <= 0:
      raise Killed


def check_equal(killed: tuple[Any, Any], whole: tuple[Any, Any]) -> None:
  """Compares the values of all trials, their number, and the best weights."""
  study, search = killed
  expected = {str(t.params): values_of(t) for t in whole[0].trials}
  kept = [t for t in study.trials if "tf_cross_shard_again" not in t.user_attrs]
  assert {t.state for t in kept} == {State.COMPLETE}
  assert {str(t.params): values_of(t) for t in kept} == expected
  assert len(kept) == len(expected) == 5
  assert {t.state for t in study.trials if t not in kept} <= {State.FAIL}
  for mine, other in zip(
    search.best_model().get_weights(),
    whole[1].best_model().get_weights(),
    strict=True,
  ):
    np.testing.assert_array_equal(mine, other)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
  """Returns a search that was not killed."""
  return start(tmp_path_factory.mktemp("whole"), "epoch")


@pytest.mark.parametrize(("every", "batch"), [("epoch", 39), (4, 46)])
def test_a_killed_search_goes_on(
  tmp_path: pathlib.Path, every: Any, batch: int, whole: tuple[Any, Any]
) -> None:
  with pytest.raises(Killed):
    start(tmp_path / "killed", every, Kill(batch, is_at_end=batch % 2 == 1))
  check_equal(start(tmp_path / "killed", every), whole)
  # It has ended: a third program trains nothing.
  kill = Kill(0, is_at_end=False)  # after the first batch
  check_equal(start(tmp_path / "killed", every, kill), whole)


@pytest.mark.slow
def test_ten_kills(tmp_path: pathlib.Path, whole: tuple[Any, Any]) -> None:
  """Searches that are killed again and again, at random batches."""
  rng, kills = np.random.default_rng(0), 0
  while kills < 10:
    folder, every = tmp_path / f"killed_{kills}", rng.choice(["epoch", "4"])
    every = every if every == "epoch" else int(every)
    for _ in range(4):
      kill = Kill(int(rng.integers(1, 30)), is_at_end=bool(rng.integers(2)))
      try:
        start(folder, every, kill)
      except Killed:
        kills += 1
      else:
        break
    check_equal(start(folder, every), whole)


CHOICE = """
@keras.saving.register_keras_serializable()
class Choice(keras.layers.Layer):
  def build(self, shape):
    self.activation = self.add_weight(
      shape=(), initializer="zeros", trainable=False, name="activation"
    )

  def call(self, x):
    values = tf.stack([tf.nn.relu(x), tf.nn.tanh(x), tf.nn.gelu(x)])
    return tf.gather(values, tf.cast(self.activation, "int32"))
"""
LOAD = f"""
import sys, keras, numpy as np, tensorflow as tf
{CHOICE}
model = keras.models.load_model("best.keras")
x = np.load("x.npy")
np.testing.assert_allclose(model(x), np.load("right.npy"), rtol=1e-5, atol=1e-6)
model.compile("sgd", "mse")
model.fit(x, x[:, :1], verbose=0)
assert "tf_cross_shard" not in sys.modules
print(float(model.layers[1].activation), model.layers[2].rate)
"""


@pytest.mark.slow
def test_the_winner_keeps_its_choice_in_a_new_process(
  tmp_path: pathlib.Path,
) -> None:
  """Both settings are weights; the best trial is not the last of its model."""
  names: dict[str, Any] = {"keras": keras, "tf": tf}
  exec(CHOICE, names)

  def build(dropout: Any) -> Any:
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(8), names["Choice"](), dropout]
    return keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(1)])

  settings = [
    {"activation": choice, "rate": rate}
    for choice, rate in [(2, 0.125), (0, 0.75), (1, 0.0), (0, 0.5)]
  ]
  study = make_study([])
  search = callbacks.OptunaSearch(
    study, lambda t: dict(settings[t.number % 4]), **{"trials": 4, "epochs": 2}
  )
  with VectorizedStrategy(2).scope():
    model = build(layers.TunableDropout(0.5, seed=1))
    model.compile("sgd", "mse")
  run(search, model)
  found = []
  for each in settings:
    plain = build(keras.layers.Dropout(0.5, seed=1))
    plain.layers[1].activation.assign(each["activation"])
    plain.layers[2].rate = each["rate"]
    plain.compile("sgd", "mse", run_eagerly=True)
    plain.fit(data(), epochs=2, verbose=0)
    found.append(plain.evaluate(*VALIDATION, verbose=0))
  values = [trial.intermediate_values[1] for trial in study.trials]
  np.testing.assert_allclose(values, found, rtol=1e-5)
  best = search.best_model()
  best.save(tmp_path / "best.keras")
  best.compile(loss="mse")
  loss = best.evaluate(*VALIDATION, verbose=0)
  assert loss == pytest.approx(study.best_value, 1e-5)
  np.save(tmp_path / "x.npy", X)
  np.save(tmp_path / "right.npy", best(X))
  output = programs.run(["-c", LOAD], tmp_path)
  choice, rate = settings[study.best_trial.number].values()
  assert output.splitlines()[-1] == f"{float(choice)} {rate}"


def ending(error: BaseException, at: int) -> tuple[Any, Any]:
  """Returns a study and a search; the trial `at` of `suggest` raises."""

  def suggest(trial: optuna.Trial) -> dict[str, float]:
    rate = trial.suggest_float("rate", 1e-3, 0.1)
    if trial.number == at:
      raise error
    return {"learning_rate": rate}

  study = make_study([])
  return study, callbacks.OptunaSearch(study, suggest, trials=6, epochs=1)


@pytest.mark.parametrize("at", [1, 3])
def test_suggest_prunes(at: int) -> None:
  study, search = ending(optuna.TrialPruned("a duplicate"), at)
  run(search, grouped(VectorizedStrategy(2)))
  states = [trial.state for trial in study.trials]
  assert states.count(State.PRUNED) == 1
  assert states.count(State.COMPLETE) == 5


@pytest.mark.parametrize(
  ("error", "at"), [(RuntimeError("mine"), 1), (KeyboardInterrupt(), 3)]
)
def test_an_error_of_suggest_leaves_no_trial_running(
  error: BaseException, at: int
) -> None:
  study, search = ending(error, at)
  with pytest.raises(type(error)):
    run(search, grouped(VectorizedStrategy(2)))
  states = [trial.state for trial in study.trials]
  assert states == [State.COMPLETE] * (at - 1) + [State.FAIL] * 2


def test_suggest_prunes_everything() -> None:
  def suggest(trial: Any) -> Any:
    raise optuna.TrialPruned

  search = callbacks.OptunaSearch(make_study([]), suggest, trials=2, epochs=1)
  with pytest.raises(ValueError, match="TrialPruned for 1000 trials in a row"):
    run(search, grouped(VectorizedStrategy(2)))


def test_an_error_elsewhere_ends_with_the_search_or_the_next_fit() -> None:
  study = make_study([SETTINGS[0]] * 6)
  model = grouped(VectorizedStrategy(2))
  for is_deleted in (True, False):
    search = callbacks.OptunaSearch(study, suggest, trials=2, epochs=1)
    with pytest.raises(Killed):
      run(search, model, Kill(2, is_at_end=False))
    if is_deleted:
      del search
      gc.collect()
      assert [t.state for t in study.trials[:2]] == [State.FAIL] * 2
  run(search, model)
  states = [trial.state for trial in study.trials]
  assert states == [State.FAIL] * 4 + [State.COMPLETE] * 2


def test_a_search_that_is_started_again(
  caplog: pytest.LogCaptureFixture, tmp_path: pathlib.Path
) -> None:
  """It trains nothing until there are more trials, in a new process, too."""

  def suggest(trial: optuna.Trial) -> dict[str, float]:
    return {"learning_rate": trial.suggest_float("rate", 1e-3, 0.1)}

  study = make_study([])
  model = grouped(VectorizedStrategy(2))
  for trials, expected in (2, 2), (2, 2), (3, 3):
    search = callbacks.OptunaSearch(
      study, suggest, trials=trials, epochs=1, folder=tmp_path / "best"
    )
    backup = callbacks.BackupAndRestore(tmp_path / "backup")
    for _ in range(2):
      before = model.get_weights()
      count = len(study.trials)
      run(search, model, backup)
      assert len(study.trials) == expected
      said = "To add trials, give it a larger" in caplog.text
      assert said == (count == expected)
      caplog.clear()
      if said:
        np.testing.assert_equal(model.get_weights(), before)
      best = search.best_model()
    best.compile(loss="mse")
    loss = best.evaluate(*VALIDATION, verbose=0)
    assert loss == pytest.approx(study.best_value, 1e-5)


class PruneTheSecond(optuna.pruners.BasePruner):
  def prune(self, study: Any, trial: Any) -> bool:
    return trial.number == 1


@pytest.mark.parametrize(
  "kind", ["keras", "ours, 5 batches", "ours, 5 batches in a window", "ours"]
)
def test_a_trial_begins_with_its_own_window(kind: str) -> None:
  """Trial 2 begins after epoch 0 of trial 1, while trial 0 goes on."""
  rates = [0.1, 0.2, 0.3]
  batches = data().take(6 if kind == "ours" else 5)

  def sgd(rate: float, **options: Any) -> Any:
    own = {"gradient_accumulation_steps": 2} if kind == "keras" else {}
    wrapped = keras.optimizers.SGD(rate, **own)
    steps = None if own else 2
    return CrossShardOptimizer(wrapped, accumulate_steps=steps)

  study = make_study(
    [{"learning_rate": rate} for rate in rates], pruner=PruneTheSecond()
  )
  search = callbacks.OptunaSearch(
    study,
    lambda t: {"learning_rate": t.suggest_float("learning_rate", 0.01, 1)},
    **{"trials": 3, "epochs": 3},
  )
  with VectorizedStrategy(2).scope():
    model = network(tunable)
    model.compile(sgd(0.1), "mse")
  judge = callbacks.PerModelMetrics(VALIDATION, ensemble=False)
  options = {"epochs": search.most_epochs, "callbacks": [judge, search]}
  if kind.endswith("window"):
    model.fit(batches, verbose=0)
  if kind.startswith("ours, 5 batches"):
    with pytest.raises(ValueError, match=r"`accumulate_steps` .* does not div"):
      model.fit(batches, verbose=0, **options)
    assert {trial.state for trial in study.trials[:2]} == {State.FAIL}
    return
  model.fit(batches, verbose=0, **options)
  plain = network(tunable)
  plain.compile(sgd(0.3), "mse", run_eagerly=True)
  right = plain.fit(
    batches, validation_data=VALIDATION, epochs=3, verbose=0
  ).history["val_loss"]
  np.testing.assert_allclose(values_of(study.trials[2]), right, rtol=1e-4)


# Mistakes.


@pytest.mark.parametrize(
  ("options", "error", "words"),
  [
    ({"study": "s"}, TypeError, "`study` must be an optuna.Study; got 's'"),
    ({"suggest": {}}, TypeError, "`suggest` must be a function"),
    ({"trials": 0}, ValueError, "`trials` must be an integer of at least 1"),
    ({"epochs": 1.5}, ValueError, "`epochs` must be an integer of at least 1"),
    ({"mode": "max"}, ValueError, "direction is 'minimize', but 'val_loss'"),
    ({"monitor": "val_loss/model_0"}, ValueError, "Remove '/model_0'"),
  ],
)
def test_invalid_arguments(
  options: Any, error: type[Exception], words: str
) -> None:
  given = {"study": make_study(), "suggest": suggest, "trials": 1, "epochs": 1}
  given |= options
  with pytest.raises(error, match=words):
    callbacks.OptunaSearch(given.pop("study"), given.pop("suggest"), **given)


def test_several_objectives() -> None:
  study = optuna.create_study(directions=["minimize", "maximize"])
  with pytest.raises(ValueError, match="2 objectives"):
    callbacks.OptunaSearch(study, suggest, trials=1, epochs=1)


def test_without_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
  study = make_study()
  monkeypatch.setitem(sys.modules, "optuna", None)
  with pytest.raises(ImportError, match=r"pip install 'tf-cross-shard\[optuna"):
    callbacks.OptunaSearch(study, suggest, trials=1, epochs=1)


def test_wrong_settings() -> None:
  """Wrong settings raise an error before the first trial is asked for."""
  returned: list[Any] = [None]
  search = callbacks.OptunaSearch(
    make_study([]), lambda _: returned[0], trials=4, epochs=2
  )
  model = grouped(VectorizedStrategy(2))
  for returned[0], words in (
    ([0.1], r"`suggest` must return a dictionary .*; got \[0.1\]"),
    ({"learning_rate": math.nan}, "dictionary of finite numbers"),
    ({"activation": "relu"}, "got .*'relu'.*choice, return its index"),
    ({"momentum_1": 0.5}, "Nothing has the name 'momentum_1' that `suggest`"),
    ({"beta1": 0.5, "rate": 0}, r"did you mean 'beta_1'\?.*, .*dropout/rate\."),
    ({"ate": 0}, r"did you mean 'rate'\?"),
    ({"kernel": 0.5}, "Nothing has the name 'kernel'"),
    ({"weight_decay": 0.5}, "Adam.weight_decay is None"),
  ):
    search.study = make_study([])
    with pytest.raises(ValueError, match=words):
      run(search, model)
    assert not search.study.trials


def test_numbers_in_names_count_the_layers_of_the_model() -> None:
  keras.utils.clear_session()
  _, *dropouts = (layers.TunableDropout(0.5) for _ in range(3))
  with VectorizedStrategy(2).scope():
    model = keras.Sequential([keras.Input((4,)), *dropouts])
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
  rates = {"tunable_dropout/rate": 0.25, "tunable_dropout_1/rate": 0.75}
  run(
    callbacks.OptunaSearch(make_study([]), lambda _: rates, trials=2, epochs=1),
    model,
  )
  assert [float(layer.rate) for layer in dropouts] == [0.25, 0.75]


def test_settings_are_in_force_in_mixed_precision() -> None:
  study = make_study([{"weight_decay": 0.0}, {"weight_decay": 40.0}])
  search = callbacks.OptunaSearch(
    study,
    lambda t: {"weight_decay": t.suggest_float("weight_decay", 0.0, 50.0)},
    trials=2,
    epochs=2,
  )
  keras.mixed_precision.set_global_policy("mixed_float16")
  try:
    with VectorizedStrategy(2).scope():
      model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
      adam = keras.optimizers.AdamW(0.01, weight_decay=0.004)
      model.compile(CrossShardOptimizer(adam), "mse")
    run(search, model)
  finally:
    keras.mixed_precision.set_global_policy("float32")
  # The decay takes 0.01 x 40 of the weights in each step.
  one, other = study.trials
  assert abs(one.value - other.value) > 1e-3


def test_other_names_in_a_later_trial() -> None:
  study = make_study([])
  search = callbacks.OptunaSearch(
    study,
    lambda t: {"rate": 0.5} | ({"beta_1": 0.5} if t.number else {}),
    trials=2,
    epochs=1,
  )
  model = grouped(VectorizedStrategy(2))
  with pytest.raises(ValueError, match="the same names for each trial"):
    run(search, model)


def test_other_callbacks(caplog: pytest.LogCaptureFixture) -> None:
  judge = callbacks.PerModelMetrics(VALIDATION, every=2)
  search = callbacks.OptunaSearch(make_study(), suggest, trials=2, epochs=1)
  model = grouped(VectorizedStrategy(2))
  run(search, model, keras.callbacks.LearningRateScheduler(lambda _: 0.5))
  assert "LearningRateScheduler sets the learning rates" in caplog.text
  search = callbacks.OptunaSearch(make_study(), suggest, trials=4, epochs=2)
  with pytest.raises(ValueError, match="Remove PerModelEarlyStopping"):
    run(search, model, callbacks.PerModelEarlyStopping())
  search = callbacks.OptunaSearch(
    make_study(), suggest, trials=4, epochs=2, monitor="val_nothing"
  )
  model = grouped(VectorizedStrategy(2))
  with pytest.raises(ValueError, match="has monitor='val_nothing'"):
    run(search, model)
  for every, others in (("every", [judge]), ("validation_freq", [])):
    search = callbacks.OptunaSearch(make_study(), suggest, trials=4, epochs=2)
    with pytest.raises(ValueError, match=f"each epoch, but {every} is 2"):
      model.fit(
        data(),
        validation_data=VALIDATION,
        validation_freq=2,
        callbacks=[*others, search],
      )


def test_a_direction_that_keras_decides_otherwise() -> None:
  study = make_study([], direction="maximize")
  search = callbacks.OptunaSearch(study, suggest, trials=4, epochs=2)
  model = grouped(VectorizedStrategy(2))
  with pytest.raises(ValueError, match=r"create_study\(direction='minimize'"):
    run(search, model)
  assert not study.trials


def test_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
  search = callbacks.OptunaSearch(make_study(), suggest, trials=4, epochs=2)
  model = grouped(VectorizedStrategy(2))
  monkeypatch.setattr(workers_lib, "of_strategy", lambda _: object())
  with pytest.raises(NotImplementedError, match="let all processes share the"):
    run(search, model)
  assert all(t.state == State.WAITING for t in search.study.trials)


def test_fewer_trials_than_groups() -> None:
  study = make_study()
  search = callbacks.OptunaSearch(study, suggest, trials=1, epochs=2)
  model = grouped(VectorizedStrategy(2))
  assert len(run(search, model)) == 2
  right, _ = plain_values(**SETTINGS[0])
  np.testing.assert_allclose(values_of(study.trials[0]), right[:2], rtol=1e-5)
