"""`OptunaSearch`: an Optuna study drives the groups of one `fit`.

    study.ask ─▶ group i: initial state, the trial's settings ─▶ epochs ─┐
        ▲                                                                │
        └──── tell ◀── pruned, failed, or all epochs ◀── report ◀────────┘

A group whose trial ends starts the next trial at once. The settings are
variables that a step reads, so that nothing is traced again.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from absl import logging

from tf_cross_shard._src.core import group_value
from tf_cross_shard._src.core.workers import agreement
from tf_cross_shard._src.fit import per_model_callback
from tf_cross_shard._src.models import (
  archive,
  group_state,
  paths,
  plain_models,
)
from tf_cross_shard._src.search import settings as settings_lib
from tf_cross_shard._src.search import study as study_lib
from tf_cross_shard._src.search import weights as weights_lib


class OptunaSearch(per_model_callback.PerModelMonitor):
  """Searches hyperparameters: an Optuna study drives the groups of one `fit`.

  Each group trains one trial at a time, from the state that the group has when
  `fit` begins: weights, slots, iteration count and random numbers. After each
  epoch it reports `monitor` to the study. When its trial ends, the group takes
  the next one, and nothing is traced again. A trial ends after `epochs` epochs,
  when the study's pruner says so, or when its value is not finite, which fails
  this trial alone. The value of a trial is that of its best epoch.

  Samplers, pruners, storages and curves are Optuna's. With a
  `VectorizedStrategy`, ask TPE for `constant_liar=True`, so that it does not
  suggest nearly the same settings to all groups.

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
  ...   callbacks=[callbacks.PerModelMetrics(), search],
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
    trials: The number of trials of the next `fit`.
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
        `"learning_rate"`, any name of the optimizer's `per_model`, or a
        setting of the model, which reads it by `value`.
      trials: The number of trials that this `fit` trains.
      epochs: The number of epochs of a trial.
      monitor: The metric that is reported, as `PerModelMetrics` names it,
        without the suffix `/model_0`.
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
    self._folder = None if folder is None else paths.as_path(folder, "folder")
    self._settings = settings_lib.TrialSettings()
    self._trials = study_lib.Trials(study, suggest)
    if mode != "auto":
      self._check_mode({"min": -1.0, "max": 1.0}[mode])
    self._reset()

  def _reset(self, num_groups: int = 0) -> None:
    self._trials = study_lib.Trials(self.study, self._suggest)
    self._running: list[study_lib.Running | None] = []
    # By name, the initial values of each group.
    self._initial: weights_lib.Weights = {}
    self._best = weights_lib.BestWeights(
      self._trials.sign, num_groups, self._folder
    )

  @property
  def most_epochs(self) -> int:
    """The number of epochs to pass to `fit`: `trials` times `epochs`.

    It is an upper limit. The search ends `fit` when its last trial ends.
    """
    return self.trials * self.epochs

  def value(self, name: str) -> group_value.GroupValue:
    """Returns a setting of the model, which layers use like a number.

    In a replica, it is the number that `suggest` returned for the trial of the
    replica's group. Outside replicas, it is that of group 0; after
    `best_model`, that of the best trial. `layers.GroupDropout` accepts it as
    its rates.

    Args:
      name: A name in the dictionary that `suggest` returns.

    Returns:
      An object that TensorFlow and Keras convert to a scalar tensor when a
      layer computes with it.
    """
    values = self._settings.values
    if name not in values:
      values[name] = group_value.GroupValue(name)
      if self._running:  # A layer asks while the first step is traced.
        self._settings.write_values(self.model, self._running)
    return values[name]

  # Before the first step.

  def on_train_begin(self, logs: Any = None) -> None:
    """Checks the other callbacks, and notes the state of all groups."""
    super().on_train_begin(logs)
    strategy = self.model.distribute_strategy
    if agreement.of_strategy(strategy) is not None:
      raise NotImplementedError(
        f"OptunaSearch does not work under {type(strategy).__name__}, whose"
        " workers train together. Start one process on each machine with a"
        " strategy of its own, and let all processes share the study: a search"
        " in a database, or in a file that all see."
      )
    for other in self.same_fit():
      if other.follows_groups and other is not self:
        raise ValueError(
          f"{type(other).__name__} assumes that a group trains one model from"
          " start to finish, but OptunaSearch trains several trials per group."
          f" Remove {type(other).__name__}; use a pruner of the study."
        )
      if getattr(other, "every", 1) != 1 and other.prefix:
        raise ValueError(
          "OptunaSearch needs metrics after each epoch, but PerModelMetrics has"
          f" every={getattr(other, 'every', 1)}. Use every=1."
        )
    self._direction()
    self._reset(len(self.keys))
    self._settings.prepare(self.model, self._trials.probe(), len(self.keys))
    with strategy.scope():
      self.model.optimizer.build(self.model.trainable_variables)
    state = self._state_of_trials()
    first = [members[0] for members in state.groups]
    self._initial = {
      entry.name: np.stack(state.copies.here(entry.variable, first))
      for entry in state.entries
    }

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
    """Starts the first trials, unless a backup was restored."""
    if not self._running:
      self._running = [None] * len(self.keys)
      folders = [c.backups for c in self.same_fit() if c.backups]
      self._trials.begin(folders[0] if folders else "")
      with self._failing():
        self._start(range(len(self.keys)))

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Reports the metrics; groups whose trial has ended take the next one."""
    with self._failing():
      if not self.begin(logs):
        return
      ended, better = {}, []
      for group, key in enumerate(self.keys):
        running = self._running[group]
        if running is None:
          continue
        if not running.values:
          self._settings.check(self.model, running.settings)
        value = float(logs[f"{self.monitor}/{key}"])
        if self._trials.report(running, value, self.epochs):
          ended[group] = running
        is_best = running.best_epoch == len(running.values) - 1
        if is_best and self._best.may_win(running):
          better.append(group)
      if better:
        self._best.keep(better, self.state_of_groups())
      for group, running in ended.items():
        is_complete = len(running.values) == self.epochs
        self._best.finish(group, running, is_complete)
      self._start(ended)
    if not any(self._running):
      self.model.stop_training = True

  @contextlib.contextmanager
  def _failing(self) -> Iterator[None]:
    """Tells the study that running trials failed if there is an error."""
    try:
      yield
    except Exception:
      self._fail_all()
      raise

  def _fail_all(self) -> int:
    left = [running for running in self._running if running is not None]
    for running in left:
      self._trials.fail(running)
    self._running = [None] * len(self._running)
    return len(left)

  def _start(self, groups: Iterable[int]) -> None:
    """Gives free groups their next trials: the initial state, the settings."""
    started = []
    for group in groups:
      self._running[group] = None
      if self._trials.asked < self.trials:
        self._running[group] = self._trials.ask()
        started.append(group)
    if not started:
      return
    state = self._state_of_trials()
    replicas = [r for group in started for r in state.groups.assignment[group]]
    for entry in state.entries:
      copies = state.copies.here(entry.variable)
      for replica in replicas:
        group = state.groups.index_of(replica)
        copies[replica] = self._initial[entry.name][group]
      state.copies.write(entry.variable, copies)
    group_state.accept_values(self.model.optimizer)
    self._settings.write(self.model, self._running)

  def best_model(self) -> Any:
    """Returns a plain Keras model with the weights of the study's best trial.

    The weights are those of the trial's best epoch. The model is created as by
    `Models(model)[i]`. After the search, `value` returns the settings
    of the best trial.

    Raises:
      ValueError: If no trial is complete, or if another process trained the
        best trial and its weights are not in `folder`.
    """
    try:
      number = self.study.best_trial.number
    except ValueError as error:
      raise ValueError("No trial of the study is complete.") from error
    settings, weights = self._best.load(number)
    if not any(self._running):
      best = study_lib.Running(number, settings)
      self._settings.write_values(self.model, [best] * len(self.keys))
    plain = plain_models.load(self.model, 0, self.model.optimizer)
    plain_models.assign(self.state_of_groups(), weights, plain)
    return plain

  # The end, and backups.

  def on_train_end(self, logs: Any = None) -> None:
    """Tells the study that trials which did not end have failed."""
    is_begun, left = bool(self._running), self._fail_all()
    missing = self.trials - self._trials.asked
    if is_begun and (left or missing):
      logging.warning(
        "fit ended before the search: %d of %d trials were marked as failed,"
        " and %d were not started. Call fit(epochs=search.most_epochs), and"
        " remove callbacks that set stop_training.",
        *(left, self.trials, missing),
      )

  def state(self) -> dict[str, Any]:
    about = {
      "plan": [self.monitor, self.trials, self.epochs],
      "fit": self._trials.fit,
      "running": [r and dataclasses.asdict(r) for r in self._running],
      "best": self._best.best and dataclasses.asdict(self._best.best),
    }
    # JSON, which does not round floats, in the form of an array for a file.
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    state = {**super().state(), "search": text}
    parts = {"initial": self._initial, **self._best.state()}
    for kind, arrays in parts.items():
      state |= {f"{kind}/{name}": array for name, array in arrays.items()}
    return state

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues the search of a backup.

    Raises:
      CheckpointError: If the backup is that of another search.
    """
    super().set_state(state)
    about = json.loads(np.asarray(state["search"], np.uint8).tobytes())
    plan = [self.monitor, self.trials, self.epochs]
    if about["plan"] != plan:
      raise archive.CheckpointError(
        "The backup belongs to another search: its monitor, trials and epochs"
        f" are {about['plan']}, but those of OptunaSearch are {plan}. Use the"
        " same as before, or delete the backup."
      )

    parts: dict[str, weights_lib.Weights] = {}
    for key, array in state.items():
      kind, _, name = key.partition("/")
      parts.setdefault(kind, {})[name] = array
    self._running = [r and study_lib.Running(**r) for r in about["running"]]
    best = about["best"] and study_lib.Running(**about["best"])
    self._best.set_state(best, parts)
    self._initial = parts["initial"]
    self._trials.resume(about["fit"], self._running)
    if any(self._running):
      self._settings.write(self.model, self._running)
    else:
      self.model.stop_training = True
