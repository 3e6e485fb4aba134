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

from tf_cross_shard._src.core import optimizer_state, validation
from tf_cross_shard._src.core import per_model as per_model_lib
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import names as names_lib
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.models import group_state

# All callbacks for which a `fit` has begun.
_in_fits: "Final[weakref.WeakSet[PerModelCallback]]" = weakref.WeakSet()
_order = itertools.count()

# Whether a smaller or a larger metric is better; "auto" lets Keras decide.
Mode: TypeAlias = Literal["auto", "min", "max"]


def group_names(optimizer: Any) -> list[str]:
  """Returns a name for each group.

  The names are those of the `Groups`; else what the groups differ in when the
  program begins, such as `lr=0.1, momentum=0.9`; else `model_0`, `model_1` and
  so on.
  """
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
  """Returns the state of this package's callbacks, as arrays by name.

  On several machines, all workers make this call and receive the same state.
  """
  return {
    f"{key}/{name}": value
    for key, callback in _keys(callback_list).items()
    for name, value in callback.state().items()
  }


def restore_state(callback_list: Iterable[Any], state: dict[str, Any]) -> None:
  """Gives callbacks the state that `collect_state` returned for the same list.

  A callback without an entry in the state starts from the beginning.
  """
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
  names = names_lib.unique([type(c).__name__ for c in ours])
  return dict(zip(names, ours, strict=True))


class PerModelCallback(tf.keras.callbacks.Callback):
  """Base class of callbacks for a model whose optimizer may have groups.

  The model is compiled. The callbacks subclass Keras' callback of `tf.keras`,
  but work with models of the other Keras too.

  Attributes:
    prefix: The beginning of the names of metrics that this callback writes.
    acts_on_batches: Whether the callback acts when a batch ends.
    follows_groups: Whether the callback assumes that each group trains the same
      trial until `fit` ends.
    backups: The folder of the backups that the callback makes; "" if none.
    is_skipping_batches: Whether `fit` reads batches again that were trained on
      before it was interrupted. `BackupAndRestore` sets it. A callback that
      changes the model must do nothing while it is True.
  """

  prefix = ""
  acts_on_batches = False
  follows_groups = False
  backups = ""
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
    """Makes Keras call a function after each batch.

    The function takes the number of the batch and the logs.
    """
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
    """Returns this package's callbacks in the same `fit`, in list order.

    The list is empty in a training loop of your own.
    """
    if not getattr(self, "params", None):
      return []
    # Keras gives one dictionary of parameters to all callbacks of a `fit`.
    same = [c for c in _in_fits if c.params is self.params]
    return sorted(same, key=lambda callback: callback.position_in_list)

  def prefixes_before(self) -> list[str]:
    """Returns the `prefix` of each earlier PerModelMetrics in this `fit`."""
    return [
      callback.prefix
      for callback in self.same_fit()
      if callback.prefix and callback.position_in_list < self.position_in_list
    ]

  @property
  def keys(self) -> list[str]:
    """How the names of each group's metrics end: its name, or `model_0`."""
    groups = nested_lib.groups_of(self.model.optimizer)
    names = groups.names or ()
    if not names or "ensemble" in names:
      return [f"model_{i}" for i in range(groups.num_groups)]
    # What follows the last slash in the name of a metric is the key.
    return [name.replace("/", "_") for name in names]

  def check_monitor(self, monitor: str, callback: str) -> None:
    """Raises `ValueError` if this callback will write no such metric.

    Args:
      monitor: The name of the metric, which begins with `prefix`.
      callback: The class that monitors it, for the error.
    """

  def state_of_groups(
    self, with_optimizer: bool = False
  ) -> group_state.GroupState:
    """Returns the model's variables in all groups.

    If `with_optimizer`, the optimizer's variables are included.
    """
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
    self.on_test_begin()


class PerModelMonitor(PerModelCallback):
  """Monitors one metric per group, as Keras' EarlyStopping does for a model.

  The state of the groups is stored in arrays of shape `[num_groups]`: `best`,
  and the counters that `_counters` names. These start at 0, and `best_epoch` at
  -1. A group that diverges has no better value than before.
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
        f"`monitor` must name a metric without a group; got {monitor!r}. Remove"
        f" {monitor[monitor.rindex('/') :]!r}: each group is compared by its"
        " own metric."
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

  @property
  def best(self) -> list[float]:
    """The best value of each group; infinite before the first evaluation."""
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
    if self.same_fit() and not self.monitor.startswith(
      tuple(self.prefixes_before())
    ):
      raise ValueError(
        f"{type(self).__name__} needs a metric of PerModelMetrics, such as"
        f" 'val_loss'; got monitor={self.monitor!r}. Put"
        " PerModelMetrics(validation_data) before it in the list of callbacks;"
        " its `name` is the prefix of its metrics. Training losses cannot be"
        " monitored."
      )
    for callback in self.same_fit():
      if callback.prefix and self.monitor.startswith(callback.prefix):
        callback.check_monitor(self.monitor, type(self).__name__)
        break

  def begin(self, logs: Any) -> bool:
    """Prepares for an epoch; returns whether the logs have the groups' metrics.

    The logs lack them in epochs that `PerModelMetrics(every=...)` leaves out.
    The first call with metrics creates the arrays of the groups.

    Raises:
      ValueError: If there are no metrics in an epoch that should have them.
    """
    keys = self.keys
    name = f"{self.monitor}/{keys[0]}"
    prefixes = tuple(self.prefixes_before())
    # Whether any PerModelMetrics has evaluated after this epoch.
    is_due = not prefixes or any(
      key.startswith(prefixes) and key.endswith(f"/{keys[0]}") for key in logs
    )
    if name not in (logs or {}) and not self._numbers and is_due:
      raise ValueError(
        f"{type(self).__name__}(monitor={self.monitor!r}) needs {name!r} in the"
        f" logs, which have {sorted(logs or {})}. "
        + (
          "PerModelMetrics writes the loss and the `metrics` of model.compile."
          if prefixes
          else "Put PerModelMetrics before it in the list of callbacks."
        )
      )
    if name not in (logs or {}):
      return False
    if np.ndim(logs[name]):
      raise ValueError(
        f"`monitor` must name a metric that is one number; got"
        f" {self.monitor!r}, of shape {list(np.shape(logs[name]))}."
        " Monitor another metric, or give this one an average."
      )
    if not self._sign:
      self._sign = self._direction()
      counters = {
        name: np.full(len(keys), -1 if name == "best_epoch" else 0)
        for name in self._counters
      }
      best = np.full(len(keys), -self._sign * np.inf)
      self._numbers = {"best": best, **counters, **self._numbers}
    return True

  def improve(self, logs: Any, judged: Any = True) -> Any:
    """Updates the best values; returns which of the groups have improved.

    A group improves if its metric is better than its best by more than
    `min_delta`. NaN and infinity are never better. `judged`, the groups to look
    at, and the result are bool arrays of shape `[num_groups]`.
    """
    best = self._numbers["best"]
    values = np.array(
      [float(logs[f"{self.monitor}/{key}"]) for key in self.keys]
    )
    is_better = self._sign * values - abs(self.min_delta) > self._sign * best
    improved = judged & is_better & np.isfinite(values)
    best[improved] = values[improved]
    return improved

  def _direction(self) -> float:
    """Returns 1 if a larger metric is better, else -1, as Keras decides it.

    Keras decides from the name of the metric or from the compiled metrics. To
    get its decision, the values 0 and 1 are shown to an EarlyStopping of Keras.
    """
    monitor = self.monitor
    for prefix in self.prefixes_before():
      if monitor.startswith(prefix):
        # The name that Keras gives to the metric.
        monitor = f"val_{monitor.removeprefix(prefix)}"
        break
    keras = keras_private.keras_of(self.model)
    probe = keras.callbacks.EarlyStopping(monitor, mode=self.mode, patience=9)
    probe.set_model(self.model)
    probe.on_train_begin()
    for epoch, value in enumerate((0.0, 1.0)):
      probe.on_epoch_end(epoch, {monitor: value})
    return 1.0 if probe.best == 1.0 else -1.0
