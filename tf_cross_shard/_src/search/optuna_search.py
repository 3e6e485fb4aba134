"""`OptunaSearch`: an Optuna study drives the models of one `fit`.

study.ask ─▶ model i: initial state, the trial's settings ─▶ epochs ─┐
▲                                                                │
└──── tell ◀── pruned, failed, or all epochs ◀── report ◀────────┘
"""

import contextlib
import dataclasses
import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from absl import logging

from tf_cross_shard._src.core import optimizer_state
from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.fit import keras_fit, per_model_callback
from tf_cross_shard._src.models import (
  archive,
  checkpoint,
  group_state,
  plain_models,
)
from tf_cross_shard._src.search import settings as settings_lib
from tf_cross_shard._src.search import study as study_lib
from tf_cross_shard._src.search import weights as weights_lib


class OptunaSearch(per_model_callback.PerModelMonitor):
  """Searches hyperparameters: an Optuna study drives the models of one `fit`.

  Each model trains one trial at a time, from the state that it has when
  `fit` begins: weights, slots, iteration count and random numbers. After each
  epoch it reports `monitor` to the study. When its trial ends, the model takes
  the next one, and nothing is traced again: all settings are variables. A trial
  ends after `epochs` epochs, when the study's pruner says so, or when its value
  is not finite, which fails this trial alone. The value of a trial is that of
  its best epoch.

  Samplers, pruners, storages and curves are Optuna's. With a
  `VectorizedStrategy`, ask TPE for `constant_liar=True`, so that it does not
  suggest nearly the same settings to all models.

  >>> import numpy as np, optuna, tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, VectorizedStrategy
  >>> from tf_cross_shard import callbacks
  >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
  >>> def suggest(trial):
  ...   return {"learning_rate": trial.suggest_float("rate", 1e-3, 0.5)}
  >>> study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
  >>> search = callbacks.OptunaSearch(study, suggest, trials=6, epochs=4)
  >>> with VectorizedStrategy(3).scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   model.compile(CrossShardOptimizer("sgd"), "mse")
  >>> x = np.ones([8, 1], "float32")
  >>> _ = model.fit(
  ...   *(x, 5 * x),
  ...   validation_data=(x, 5 * x),
  ...   epochs=search.most_epochs,
  ...   verbose=0,
  ...   callbacks=[search],
  ... )
  >>> best = search.best_model()
  >>> best.compile(loss="mse")
  >>> loss = best.evaluate(x, 5 * x, verbose=0)
  >>> len(study.trials), bool(np.isclose(loss, study.best_value, atol=1e-6))
  (6, True)

  Attributes:
    study: The study. You can assign another one before a `fit`. Its trials
      start from the weights that the model then has;
      `Models.initialize` gives the model new ones.
    trials: The number of trials. When they have ended, `fit` trains nothing; if
      you assign a larger number, the next `fit` trains the rest.
    epochs: The number of epochs of a trial.
  """

  def __init__(
    self,
    study: Any,
    suggest: Callable[[Any], Mapping[str, float]],
    *,
    trials: int,
    epochs: int,
    monitor: str = "val_loss",
    mode: per_model_callback.Mode = "auto",
    folder: Any = None,
  ) -> None:
    """Creates a search.

    Args:
      study: An `optuna.Study` with one objective. Several processes may share
        it.
      suggest: A function of an `optuna.Trial` that returns the trial's
        settings, a dictionary of numbers, with the same names for each trial:
        `"learning_rate"`, any name of the optimizer's `per_model`, or the end
        of the path of non-trainable scalar weights of the model, such as
        `"dropout/rate"` or `"rate"`, all of which are set. It may raise
        `optuna.TrialPruned`. It is also called once before the first trial.
      trials: The number of trials.
      epochs: The number of epochs of a trial.
      monitor: The metric that is reported, as `fit` or PerModelMetrics names
        it, without the suffix `/model_0`.
      mode: `"min"`, `"max"`, or `"auto"`. The study's `direction` must agree.
      folder: A folder for the weights of the best trials. None keeps them in
        memory. Processes that share a study can share the folder.

    Raises:
      ImportError: If Optuna is not installed.
      TypeError: If `study` is not a study, or `suggest` is not a function.
      ValueError: If the study has several objectives, if its direction is not
        `mode`, or if another argument is invalid.
    """
    super().__init__(monitor, mode)
    optuna = study_lib.import_optuna()
    if not isinstance(study, optuna.Study):
      raise TypeError(f"`study` must be an optuna.Study; got {study!r}.")
    if len(study.directions) != 1:
      raise ValueError(
        f"`study` has {len(study.directions)} objectives, but OptunaSearch"
        " reports one. Use create_study(direction=...)."
      )
    if not callable(suggest):
      raise TypeError(
        "`suggest` must be a function of a trial that returns a dictionary of"
        f" numbers; got {suggest!r}."
      )
    self.study = study
    self.trials = per_model_callback.check_count("trials", trials, 1, "trials")
    self.epochs = per_model_callback.check_count("epochs", epochs, 1, "epochs")
    self._suggest = suggest
    self._folder = None if folder is None else archive.as_path(folder, "folder")
    self._settings = settings_lib.TrialSettings()
    self._forget_trials()
    if mode != "auto":
      self._check_mode({"min": -1.0, "max": 1.0}[mode])

  def _forget_trials(self) -> None:
    self._trials = study_lib.Trials(self.study, self._suggest)
    # An error in other code ends `fit` without a call of `on_train_end`.
    weakref.finalize(self, self._trials.end)
    self._best = weights_lib.BestWeights(self._trials.sign, self._folder)
    self._running: list[study_lib.Running | None] = []
    # The initial values of each model, and those of its trial's best epoch.
    self._initial: group_state.Values = {}
    self._kept: group_state.Values = {}
    self._has_trained = False

  @property
  def most_epochs(self) -> int:
    """The number of epochs to pass to `fit`: `trials` times `epochs`.

    It is an upper limit. The search ends `fit` when its last trial ends.
    """
    return self.trials * self.epochs

  # Before the first step.

  def on_train_begin(self, logs: Any = None) -> None:
    """Checks the other callbacks, and notes the state of all models."""
    super().on_train_begin(logs)
    strategy = self.model.distribute_strategy
    if workers_lib.of_strategy(strategy) is not None:
      raise NotImplementedError(
        f"OptunaSearch does not work under {type(strategy).__name__}, whose"
        " workers train together. Start one process on each machine with a"
        " strategy of its own, and let all processes share the study: a search"
        " in a database, or in a file that all see."
      )
    for other in self.same_fit():
      if other.follows_groups and other is not self:
        raise ValueError(
          f"{type(other).__name__} assumes that a model is trained from start"
          " to finish, but OptunaSearch trains several trials per model."
          f" Remove {type(other).__name__}; use a pruner of the study."
        )
    of_fit = keras_private.arguments_of_fit().get("validation_freq", 1)
    every = getattr(self._judge, "every", of_fit if self._prefix else 1)
    if every != 1:
      name = "every" if self._judge else "validation_freq"
      raise ValueError(
        f"OptunaSearch needs {self.monitor!r} after each epoch, but {name} is"
        f" {every}. Use {name}=1."
      )
    for name in ("LearningRateScheduler", "ReduceLROnPlateau"):
      if keras_private.callback_of_fit(name):
        logging.warning(
          "%s sets the learning rates of all models alike, in the middle of"
          " their trials. Remove it, and return rates from `suggest`.",
          name,
        )
    folders = [c.backups for c in self.same_fit() if c.backups]
    if not folders:
      self._fail_all()  # An error of another callback has ended a `fit`.
    if self._trials.study is not self.study:
      self._forget_trials()
    self._direction()
    num_models = len(self.keys)
    self._running = [None] * num_models
    self._kept = {}
    self._has_trained = False
    self._trials.begin(folders[0] if folders else "")
    if self._trials.asked >= self.trials:
      self.model.stop_training = True
      keras_fit.begin_at(self.model, self.params["epochs"])
    self._settings.prepare(self.model, self._trials.probe(), num_models)
    checkpoint.build_optimizer(self.model.optimizer, self.model)
    self._initial = self._state_of_trials().read()

  def _direction(self) -> float:
    try:
      sign = super()._direction()
    except ValueError:  # Keras does not know the metric.
      return self._trials.sign
    self._check_mode(sign)
    return sign

  def _check_mode(self, sign: float) -> None:
    if sign != self._trials.sign:
      words = {1.0: "maximize", -1.0: "minimize"}
      raise ValueError(
        f"The study's direction is {words[self._trials.sign]!r}, but"
        f" {self.monitor!r} is better if it is"
        f" {'larger' if sign > 0 else 'smaller'} (mode={self.mode!r}). Use"
        f" create_study(direction={words[sign]!r}), or another `mode`."
      )

  def _state_of_trials(self) -> group_state.GroupState:
    """Returns the variables with which a trial begins: not the settings."""
    settings = self._settings.variables(self.model.optimizer)
    state = self.state_of_groups(with_optimizer=True)
    ids = set(map(id, settings))
    state.entries = [e for e in state.entries if id(e.variable) not in ids]
    return state

  # Trials.

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Starts trials in models without one: in all, without a backup."""
    with self._failing():
      if not self._has_trained:
        self._trials.ask_again()
      self._has_trained = True
      self._start_trials([i for i, r in enumerate(self._running) if r is None])

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Reports the metrics; models whose trial has ended take the next one."""
    with self._failing():
      metrics = self.read(logs)
      if metrics is None:
        return
      self._check_windows()
      better, ended = [], []
      for i, running in enumerate(self._running):
        if running is None:
          continue
        value = float(metrics[i])
        if self._trials.report(running, value, self.epochs):
          ended.append((i, running))
          self._running[i] = None
        is_best = running.best_epoch == len(running.values) - 1
        if is_best and self._best.may_win(running):
          better.append(i)
      state = self.state_of_groups()
      if better:
        self._kept = state.take(better, self._kept)
      for i, running in ended:
        is_finite = math.isfinite(running.values[-1])  # Otherwise it failed.
        if is_finite and len(running.values) == self.epochs:
          self._best.finish(running, state, i, self._kept)
      self._start_trials([i for i, _ in ended])
    if not any(self._running):
      self.model.stop_training = True

  def _check_windows(self) -> None:
    """Raises `ValueError` if trials would begin in the middle of a window."""
    windows = optimizer_state.windows(self.model.optimizer)
    if not windows or self.trials <= len(self.keys):
      return
    state = self._state_of_trials()
    [calls] = (e for e in state.entries if e.variable is windows[0])
    if state.copies.here(calls.variable)[0] != self._initial[calls.key][0]:
      raise ValueError(
        "`accumulate_steps` of CrossShardOptimizer does not divide the number"
        " of batches of an epoch, so that a trial would begin in the middle"
        " of an accumulation window. Use another number of batches."
      )

  @contextlib.contextmanager
  def _failing(self) -> Iterator[None]:
    """Tells the study that running trials failed if there is an error."""
    try:
      yield
    except BaseException:
      self._fail_all()
      raise

  def _fail_all(self) -> int:
    self._running = [None] * len(self._running)
    return self._trials.fail_all()

  def _start_trials(self, models: Iterable[int]) -> None:
    """Gives free models their next trials: the initial state, the settings."""
    started = []
    for i in models:
      self._running[i] = self._trials.ask(self.trials)
      started += [] if self._running[i] is None else [i]
    if not started:
      return
    self._state_of_trials().put(self._initial, started)
    self._settings.write(self.model, self._running)

  def best_model(self) -> Any:
    """Returns a plain Keras model with the weights of the study's best trial.

    The weights are those of the trial's best epoch, settings that are weights
    among them. The model is created as by `Models(model)[i]`.

    Raises:
      ValueError: If no trial is complete, or if another process trained the
        best trial and its weights are not in `folder`.
    """
    try:
      number = self.study.best_trial.number
    except ValueError as error:
      raise ValueError("No trial of the study is complete.") from error
    weights = self._best.load(number)
    plain = plain_models.load(self.model, 0, self.model.optimizer)
    plain_models.assign(self.state_of_groups(), weights, plain)
    return plain

  # The end, and backups.

  def on_train_end(self, logs: Any = None) -> None:
    """Tells the study that trials which did not end have failed."""
    keras_fit.begin_at(self.model, None)
    missing, left = self.trials - self._trials.asked, self._fail_all()
    if not self._has_trained and missing <= 0:
      logging.warning(
        "OptunaSearch trains nothing, because its %d trials have ended. To add"
        " trials, give it a larger number of `trials`, or another `study`.",
        self.trials,
      )
    elif left or missing > 0:
      logging.warning(
        "fit ended before the search: %d of %d trials were marked as failed,"
        " and %d were not started. Call fit(epochs=search.most_epochs), and"
        " remove callbacks that set stop_training.",
        *(left, self.trials, missing),
      )

  def state(self) -> dict[str, Any]:
    about = {
      "plan": [self.monitor, self.epochs],
      "fit": self._trials.fit,
      "running": [r and dataclasses.asdict(r) for r in self._running],
      "best": self._best.best and dataclasses.asdict(self._best.best),
    }
    # JSON, which does not round floats, in the form of an array for a file.
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    state = {**super().state(), "search": text}
    weights = {name: [array] for name, array in self._best.weights.items()}
    parts = {"initial": self._initial, "kept": self._kept, "weights": weights}
    for kind, values in parts.items():
      state |= {f"{kind}/{name}": np.stack(v) for name, v in values.items()}
    return state

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues the search of a backup."""
    super().set_state(state)
    about = json.loads(np.asarray(state["search"], np.uint8).tobytes())
    plan = [self.monitor, self.epochs]
    if about["plan"] != plan:
      raise archive.CheckpointError(
        "The backup belongs to another search: its monitor and epochs are"
        f" {about['plan']}, but those of OptunaSearch are {plan}. Use the same"
        " as before, or delete the backup."
      )
    parts: dict[str, group_state.Values] = {"kept": {}, "weights": {}}
    for key, array in state.items():
      kind, _, name = key.partition("/")
      if name:
        parts.setdefault(kind, {})[name] = list(array)
    self._running = [r and study_lib.Running(**r) for r in about["running"]]
    self._best.best = about["best"] and study_lib.Running(**about["best"])
    self._best.weights = {n: v[0] for n, v in parts["weights"].items()}
    self._initial, self._kept = parts["initial"], parts["kept"]
    self._trials.resume(about["fit"], self._running)
    self._settings.write(self.model, self._running)
    self.model.stop_training = not any(self._running) and (
      self._trials.asked >= self.trials
    )
