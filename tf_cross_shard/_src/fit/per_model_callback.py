"""Base classes of the callbacks: their order, their saved state, their metrics.

    PerModelCallback     knows the other callbacks of the same `fit`
      PerModelMonitor    monitors a metric of each model

A Keras callback cannot see the other callbacks. Keras calls `set_model`
and `set_params` of all callbacks before it calls `on_train_begin` of the first
one, so callbacks register themselves in `set_params`. In `on_train_begin`,
`same_fit` returns all of them, and mistakes in the list raise errors before
training starts.
"""

import itertools
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import optimizer_state, single_program, validation
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.per_model import schedule as per_model_lib
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.fit import keras_fit, per_model_evaluation
from tf_cross_shard._src.models import group_state

# All callbacks for which a `fit` has begun.
_in_fits: "Final[weakref.WeakSet[PerModelCallback]]" = weakref.WeakSet()
_order = itertools.count()

# Whether a smaller or a larger metric is better; "auto" lets Keras decide.
Mode: TypeAlias = Literal["auto", "min", "max"]


def group_names(optimizer: Any) -> list[str]:
  """Returns the names of `Groups`, or "lr=0.1, momentum=0.9", or "model_0"."""
  groups = nested_lib.groups_of(optimizer)
  names = getattr(groups, "names", None)
  if names is None:
    rates = per_model_lib.rates_of(optimizer)
    is_numbers = rates is not None and not any(map(callable, rates.rates))
    settings = {"lr": rates.numbers} if rates is not None and is_numbers else {}
    for pipeline in optimizer_state.pipelines_of(optimizer):
      settings |= pipeline.per_model.numbers
    parts = [
      [f"{name}={number:g}" for number in numbers.initial]
      for name, numbers in settings.items()
    ]
    names = [
      ", ".join(names_of_group)
      for names_of_group in zip(*filter(None, parts), strict=False)
    ]
  if len(set(names)) < groups.num_groups:
    names = [f"model_{i}" for i in range(groups.num_groups)]
  return list(names)


def check_count(name: str, value: Any, least: int, unit: str) -> int:
  """Returns an argument that counts a `unit`, or raises `ValueError`."""
  return validation.check_integer(name, value, f"It counts {unit}.", least)


def check_number(name: str, value: Any) -> None:
  if not validation.is_number(value):
    raise TypeError(f"`{name}` must be a number; got {value!r}.")


def collect_state(callback_list: Iterable[Any]) -> dict[str, Any]:
  """Returns the state of this package's callbacks, the same on all workers."""
  return {
    f"{key}/{name}": value
    for key, callback in _keys(callback_list).items()
    for name, value in callback.state().items()
  }


def restore_state(callback_list: Iterable[Any], state: dict[str, Any]) -> None:
  """Gives callbacks the state that `collect_state` returned for such a list."""
  for key, callback in _keys(callback_list).items():
    saved = {
      name.removeprefix(f"{key}/"): value
      for name, value in state.items()
      if name.startswith(f"{key}/")
    }
    if saved:
      callback.set_state(saved)


def _keys(callback_list: Iterable[Any]) -> dict[str, "PerModelCallback"]:
  """Returns this package's callbacks, by class name and, if needed, number."""
  ours = [c for c in callback_list if isinstance(c, PerModelCallback)]
  names = variables_lib.unique([type(c).__name__ for c in ours])
  return dict(zip(names, ours, strict=True))


class PerModelCallback(tf.keras.callbacks.Callback):
  """Base class of callbacks, for compiled models of both Kerases."""

  prefix = ""  # of the names of metrics that it evaluates on its own data
  acts_on_batches = False
  follows_groups = False  # assumes that a model trains one trial in a `fit`
  backups = ""  # the folder of its backups
  # Set by BackupAndRestore while `fit` reads batches again that were trained on
  # before it was interrupted. Then callbacks must not change the model.
  is_skipping_batches = False
  position_in_list = 0  # grows from callback to callback in one `fit`

  # Only tf_keras asks these three questions. The base class lacks the methods
  # if `tf.keras` is Keras 3.

  def _implements_train_batch_hooks(self) -> bool:
    return "on_train_batch_end" in vars(self)

  def _implements_test_batch_hooks(self) -> bool:
    return False

  _implements_predict_batch_hooks = _implements_test_batch_hooks

  def call_after_batches(self, function: Callable[..., None]) -> None:
    """Makes Keras call `function(batch, logs)` after each batch."""
    # An attribute of this object, not a method of the class: Keras waits for
    # the device after each batch if any callback of the list has such a method.
    self.on_train_batch_end = function

  def set_model(self, model: Any) -> None:
    """Sets the model, and warns of layers that mix groups."""
    super().set_model(model)
    layers = keras_private.layers(model)
    optimizer = getattr(model, "optimizer", None)
    for warnings in optimizer_state.group_warnings_of(optimizer):
      warnings.check_layers(layers)

  def set_params(self, params: Any) -> None:
    """Registers the callback as part of a `fit`; see `same_fit`."""
    super().set_params(params)
    self.position_in_list = next(_order)
    _in_fits.add(self)

  def on_train_begin(self, logs: Any = None) -> None:
    self.is_skipping_batches = False

  def same_fit(self) -> list["PerModelCallback"]:
    """Returns this package's callbacks in the same `fit`; [] in own loops."""
    if not getattr(self, "params", None):
      return []
    # Keras gives one dictionary of parameters to all callbacks of a `fit`.
    same = [c for c in _in_fits if c.params is self.params]
    return sorted(same, key=lambda callback: callback.position_in_list)

  @property
  def keys(self) -> list[str]:
    """How the names of each model's metrics end: its name, or `model_0`."""
    groups = nested_lib.groups_of(self.model.optimizer)
    names = groups.names or ()
    if not names or "ensemble" in names:
      return [f"model_{i}" for i in range(groups.num_groups)]
    # What follows the last slash in the name of a metric is the key.
    return [name.replace("/", "_") for name in names]

  def check_monitor(self, monitor: str, callback: str) -> None:
    """Raises `ValueError` if this callback will write no such metric."""

  def state_of_groups(
    self, with_optimizer: bool = False
  ) -> group_state.GroupState:
    return group_state.GroupState(
      self.model.optimizer, self.model, with_optimizer
    )

  def state(self) -> dict[str, Any]:
    """Returns what a backup has to save, as arrays and numbers by name."""
    return {}

  def set_state(self, state: dict[str, Any]) -> None:
    """Sets what `state` returned; called after `on_train_begin`."""

  def on_test_begin(self, logs: Any = None) -> None:
    """Warns, once, that Keras' `evaluate` mixes the groups."""
    for warnings in optimizer_state.group_warnings_of(self.model.optimizer):
      warnings.before_evaluating()

  def on_predict_begin(self, logs: Any = None) -> None:
    """Warns, once, that Keras' `predict` mixes the groups."""
    PerModelCallback.on_test_begin(self)


class PerModelReader(PerModelCallback):
  """Reads the metrics of each model of a VectorizedStrategy in `fit`.

  All readers of a `fit` share one reading of an epoch, that of the first one.
  """

  def set_model(self, model: Any) -> None:
    super().set_model(model)
    self.reading = per_model_evaluation.MetricsOfModels(model)

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    keras_fit.print_first()

  @property
  def of_models(self) -> per_model_evaluation.MetricsOfModels | None:
    """What all readers share; None unless replicas are models."""
    if not single_program.are_models(self.model.distribute_strategy):
      return None
    readers = (c for c in self.same_fit() if isinstance(c, PerModelReader))
    return next(readers, self).reading

  def on_test_begin(self, logs: Any = None) -> None:
    super().on_test_begin(logs)
    if self.of_models is self.reading:
      self.reading.begin_validation()

  def on_test_end(self, logs: Any = None) -> None:
    if self.of_models is self.reading:
      self.reading.end_validation()

  def metrics_of_models(self, logs: Any) -> dict[str, Any]:
    """Returns what `fit` reports, as "val_loss/model_0"; {} in own loops."""
    of_models = self.of_models
    if of_models is None or not self.same_fit():
      return {}
    found = of_models.of_epoch(logs)
    return per_model_evaluation.by_key(self.model, self.keys, found)


class PerModelMonitor(PerModelReader):
  """Monitors one metric of each model, as Keras' EarlyStopping does.

  Arrays `[n]` have `best` and the counters that `_counters` names.
  """

  follows_groups = True
  _counters: tuple[str, ...] = ()

  def __init__(
    self, monitor: str, mode: Mode, patience: int = 0, min_delta: float = 0.0
  ) -> None:
    """Takes the arguments of Keras' EarlyStopping."""
    super().__init__()
    if not isinstance(monitor, str):
      raise TypeError(f"`monitor` must be a string; got {monitor!r}.")
    if re.search(r"/(model_\d+|ensemble)$", monitor):
      raise ValueError(
        f"`monitor` must name a metric of all models; got {monitor!r}. Remove"
        f" {monitor[monitor.rindex('/') :]!r}: each model is judged by its own."
      )
    if mode not in ("auto", "min", "max"):
      raise ValueError(f'`mode` must be "auto", "min" or "max"; got {mode!r}.')
    patience = check_count("patience", patience, 0, "evaluations")
    check_number("min_delta", min_delta)
    self.monitor = monitor
    self.mode = mode
    self.patience = patience
    self.min_delta = min_delta
    # 1 if a larger metric is better, -1 if a smaller one is; 0 if unknown.
    self._sign = 0.0
    self._numbers: dict[str, Any] = {}
    # The PerModelMetrics whose metric this is; None in a loop of your own, and
    # if it is a metric of `fit`.
    self._judge: PerModelCallback | None = None

  @property
  def best(self) -> list[float]:
    """The best value of each model; infinite before the first evaluation."""
    return list(map(float, self._numbers.get("best", ())))

  def state(self) -> dict[str, Any]:
    return {name: np.array(row) for name, row in self._numbers.items()}

  def set_state(self, state: dict[str, Any]) -> None:
    self._numbers = {
      name: np.array(state[name])
      for name in ("best", *self._counters)
      if name in state
    }

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    self._sign, self._numbers = 0.0, {}
    same_fit, caller = self.same_fit(), type(self).__name__
    judges = [c for c in same_fit if self.monitor.startswith(c.prefix or "/")]
    self._judge = judges[0] if judges else None
    places = [c.position_in_list for c in judges[:1]]
    if not same_fit:
      return
    if max(places, default=0) > self.position_in_list or not (
      judges or self.of_models
    ):
      raise ValueError(
        f"{caller} needs a metric of a PerModelMetrics before it, such as"
        f" 'val_loss'; got monitor={self.monitor!r}. Put"
        " PerModelMetrics(validation_data) before it in the list of callbacks,"
        " or create the model in the scope of a VectorizedStrategy."
      )
    if judges:
      judges[0].check_monitor(self.monitor, caller)
    else:
      self._check_monitor_of_fit(caller)

  def _check_monitor_of_fit(self, caller: str) -> None:
    validates = keras_fit.may_validate()
    if self.monitor.startswith("val_") and not validates:
      raise ValueError(
        f"{caller} has monitor={self.monitor!r}, but this `fit` has no"
        " validation_data. Pass it to `fit`, or put PerModelMetrics(data)"
        f" before {caller}."
      )
    prefixes = ("", "val_") if validates else ("",)
    names = keras_fit.names_of_metrics(self.model)
    keras_fit.check_monitor(caller, self.monitor, prefixes, names)

  @property
  def _prefix(self) -> str:
    """How the name of the monitored metric begins; "" in training."""
    if self._judge is not None:
      return self._judge.prefix
    return "val_" if self.monitor.startswith("val_") else ""

  def read(self, logs: Any) -> Any:
    """Returns the metric of each model, `[n]`; None in an epoch without it."""
    keys, found = self.keys, {} if logs is None else logs
    if self._judge is None:
      found = self.metrics_of_models(found) | found
    name = f"{self.monitor}/{keys[0]}"
    if name not in found:
      # PerModelMetrics(every=...) and `validation_freq` leave out epochs.
      is_due = not self.same_fit() or any(
        n.startswith(self._prefix) and n.endswith(f"/{keys[0]}") for n in found
      )
      if is_due and not self._numbers:
        listed = [n.rpartition("/")[0] for n in found if n.endswith(keys[0])]
        raise ValueError(
          f"{type(self).__name__} needs {name!r} in the logs; the metrics of"
          f" each model are {sorted(listed)}. Monitor one of them, or put"
          " PerModelMetrics(validation_data) before it."
        )
      return None
    if np.ndim(found[name]):
      raise ValueError(
        f"`monitor` must name a metric that is one number; got"
        f" {self.monitor!r}, of shape {list(np.shape(found[name]))}."
        " Monitor another metric, or give this one an average."
      )
    if not self._sign:
      self._sign = self._direction()
      counters = {
        counter: np.full(len(keys), -1 if counter == "best_epoch" else 0)
        for counter in self._counters
      }
      best = np.full(len(keys), -self._sign * np.inf)
      self._numbers = {"best": best, **counters, **self._numbers}
    return np.array([float(found[f"{self.monitor}/{key}"]) for key in keys])

  def improve(self, values: Any, judged: Any = True) -> Any:
    """Updates the best values; returns which judged models have improved."""
    best = self._numbers["best"]
    is_better = self._sign * values - abs(self.min_delta) > self._sign * best
    improved = judged & is_better & np.isfinite(values)
    best[improved] = values[improved]
    return improved

  def _direction(self) -> float:
    """Returns 1 if a larger metric is better, else -1, as Keras decides it."""
    monitor = self.monitor
    if self._judge is not None:  # The name that Keras gives to the metric.
      monitor = f"val_{monitor.removeprefix(self._judge.prefix)}"
    keras = keras_private.keras_of(self.model)
    probe = keras.callbacks.EarlyStopping(monitor, mode=self.mode, patience=9)
    probe.set_model(self.model)
    probe.on_train_begin()
    for epoch, value in enumerate((0.0, 1.0)):
      probe.on_epoch_end(epoch, {monitor: value})
    return 1.0 if probe.best == 1.0 else -1.0
