"""The callbacks' common part: their order, their state, how groups are judged.

fit ─▶ set_model, set_params of all ─▶ on_train_begin, in their order
       `same_fit` has all of ours      mistakes are raised here
"""

import itertools
import json
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard import group_schedule, validation
from tf_cross_shard.inner_optimizer import libraries, optimizer_state
from tf_cross_shard.replica_state import group_state

_in_fits: "Final[weakref.WeakSet[GroupCallback]]" = weakref.WeakSet()
_order = itertools.count()


def engine_of(optimizer: Any) -> Any:
  """Returns what adds numbers of the replicas of a CrossShardOptimizer."""
  return optimizer._checks.engine


def group_names(optimizer: Any) -> list[str]:
  """Returns the groups' own names, what they differ in, or `group_0`, ..."""
  groups = group_state.groups_of(optimizer, None)
  names = getattr(groups, "names", None)
  if names is None:
    rates = getattr(group_schedule.rates_of(optimizer), "rates", [])
    parts = [[f"lr={rate:g}" for rate in rates if not callable(rate)]]
    for name, numbers in (
      getattr(optimizer, "group_settings", None) or {}
    ).items():
      parts.append([f"{name}={number:g}" for number in numbers])
    names = [", ".join(own) for own in zip(*filter(None, parts), strict=False)]
  if len(set(names)) < groups.num_groups:
    names = [f"group_{i}" for i in range(groups.num_groups)]
  return list(names)


def check_count(name: str, value: Any, least: int, unit: str) -> None:
  """Raises `ValueError` unless an argument is an integer that is enough."""
  if type(value) is not int or value < least:
    raise ValueError(
      f"`{name}` must be an integer of at least {least}; got {value!r}. It"
      f" counts {unit}."
    )


def check_number(name: str, value: Any) -> None:
  """Raises `TypeError` unless an argument is a number."""
  if not validation.is_number(value):
    raise TypeError(f"`{name}` must be a number; got {value!r}.")


def to_array(value: Any) -> Any:
  """Returns what JSON knows as an array for a file; floats to the bit."""
  return np.frombuffer(json.dumps(value).encode(), np.uint8)


def from_array(array: Any) -> Any:
  """Returns what `to_array` was given."""
  return json.loads(np.asarray(array, np.uint8).tobytes())


def collect_state(callback_list: Iterable[Any]) -> dict[str, Any]:
  """Returns the state of our callbacks, as arrays and numbers by name.

  On several machines all workers call it, and have the same afterwards.
  """
  return {
    f"{key}/{name}": value
    for key, callback in _keys(callback_list).items()
    for name, value in callback.state().items()
  }


def restore_state(callback_list: Iterable[Any], state: dict[str, Any]) -> None:
  """Gives callbacks what `collect_state` returned of the same list.

  A callback that is new in the list begins anew.
  """
  for key, callback in _keys(callback_list).items():
    own = {
      name.removeprefix(f"{key}/"): value
      for name, value in state.items()
      if name.startswith(f"{key}/")
    }
    if own:
      callback.set_state(own)


def _keys(callback_list: Iterable[Any]) -> dict[str, "GroupCallback"]:
  """Returns our callbacks by class name, numbered where it is not the first."""
  ours = [c for c in callback_list if isinstance(c, GroupCallback)]
  names = optimizer_state.unique([type(c).__name__ for c in ours])
  return dict(zip(names, ours, strict=True))


class GroupCallback(tf.keras.callbacks.Callback):
  """A callback for a compiled model whose optimizer may have groups.

  It serves models of the Keras that `tf.keras` is not, too.
  """

  prefix = ""  # of the metrics that it writes into the logs
  acts_on_batches = False
  follows_groups = False  # whether a group is one training to it, till the end
  moves_optimizer = False  # whether it saves or copies the optimizer's state
  passes_over = False  # batches that a backup has been trained on

  def _does_nothing_in_batches(self) -> bool:
    """Returns what tf_keras asks, where the base class is that of Keras 3."""
    return False

  def _implements_train_batch_hooks(self) -> bool:
    """Returns the same of training."""
    return "on_train_batch_end" in vars(self)

  _implements_test_batch_hooks = _does_nothing_in_batches
  _implements_predict_batch_hooks = _does_nothing_in_batches

  def call_after_batches(self, function: Callable[..., None]) -> None:
    """Has Keras call a function when batches end, and wait for each of them."""
    # Not a method of the class: Keras would wait for whoever has it.
    self.on_train_batch_end = function

  def set_model(self, model: Any) -> None:
    """Takes the model; warns of layers that mix groups."""
    super().set_model(model)
    layers = libraries.layers(model)
    for watch in group_state.watches_of(getattr(model, "optimizer", None)):
      watch.check_layers(layers)
      watch.is_judged_by_group = True

  def set_params(self, params: Any) -> None:
    """Notes which callbacks are in one `fit`: Keras shows them no list."""
    super().set_params(params)
    self._place_in_list = next(_order)
    _in_fits.add(self)

  def on_train_begin(self, logs: Any = None) -> None:
    """Raises an error where the model has state that it cannot see."""
    self.passes_over = False
    if self.moves_optimizer:
      self._check_optimizers()

  def _check_optimizers(self) -> None:
    """Raises `ValueError` for a model that has more optimizers."""
    known = list(optimizer_state.nested_optimizers(self.model.optimizer))
    others = [
      name
      for name, value in vars(self.model).items()
      if hasattr(value, "apply_gradients")
      and not any(value is optimizer for optimizer in known)
    ]
    if others:
      raise ValueError(
        f"{type(self).__name__} has the state of model.optimizer only, and the"
        f" model has other optimizers, {', '.join(sorted(others))}. Save each"
        " by replica_state.save in a callback of your own, or keep what does"
        " not train here outside of the model."
      )

  def same_fit(self) -> list["GroupCallback"]:
    """Returns our callbacks in this `fit`, in order; none in another loop."""
    if not getattr(self, "params", None):
      return []
    same = [c for c in _in_fits if c.params is self.params]
    return sorted(same, key=lambda callback: callback._place_in_list)

  def prefixes_before(self) -> list[str]:
    """Returns the `prefix` of those that come earlier in this `fit`."""
    return [
      callback.prefix
      for callback in self.same_fit()
      if callback.prefix and callback._place_in_list < self._place_in_list
    ]

  def copies(self, is_whole: bool = False) -> group_state.GroupCopies:
    """Returns the model in all groups; the optimizer's state too, if whole."""
    return group_state.GroupCopies(self.model.optimizer, self.model, is_whole)

  def state(self) -> dict[str, Any]:
    """Returns what goes on after a crash, as arrays and numbers by name."""
    return {}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from what `state` returned, once `fit` has begun for it."""

  def on_test_begin(self, logs: Any = None) -> None:
    """Warns, once, that evaluating the model blends its groups."""
    for watch in group_state.watches_of(self.model.optimizer):
      watch.before_evaluating()

  def on_predict_begin(self, logs: Any = None) -> None:
    """Warns, once, that predicting with the model blends its groups."""
    self.on_test_begin()


class GroupMonitor(GroupCallback):
  """Judges each group by its own metric, as a callback of Keras does.

  What it knows of the groups are arrays with one number for each group: `best`,
  and those that `_counters` names, which begin at 0.
  """

  follows_groups = True
  _counters: tuple[str, ...] = ()

  def __init__(
    self, monitor: str, mode: str, patience: int = 0, min_delta: float = 0.0
  ) -> None:
    """Takes what Keras' EarlyStopping takes."""
    super().__init__()
    if not isinstance(monitor, str):
      raise TypeError(f"`monitor` must be a string; got {monitor!r}.")
    if re.search(r"/(group_\d+|ensemble)$", monitor):
      raise ValueError(
        f"`monitor` names a metric of all groups; got {monitor!r}. Leave"
        f" {monitor[monitor.rindex('/') :]!r} out: each group is judged by its"
        " own."
      )
    if mode not in ("auto", "min", "max"):
      raise ValueError(f'`mode` must be "auto", "min" or "max"; got {mode!r}.')
    check_count("patience", patience, 0, "evaluations")
    check_number("min_delta", min_delta)
    self.monitor = monitor
    self.mode = mode
    self.patience = patience
    self.min_delta = min_delta
    self._sign = 0.0  # 1 where more is better, -1 where less is; 0 is unknown
    self._numbers: dict[str, Any] = {}

  @property
  def best(self) -> list[float]:
    """The best value of each group; infinite where no epoch counted yet."""
    return list(map(float, self._numbers.get("best", ())))

  def state(self) -> dict[str, Any]:
    """Returns the numbers of all groups."""
    return {name: np.array(row) for name, row in self._numbers.items()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from the numbers of all groups."""
    self._numbers = {
      name: np.array(state[name])
      for name in ("best", *self._counters)
      if name in state
    }

  def on_train_begin(self, logs: Any = None) -> None:
    """Forgets what another `fit` left; raises where no metrics can come."""
    super().on_train_begin(logs)
    self._sign, self._numbers = 0.0, {}
    if self.same_fit() and not self.monitor.startswith(
      tuple(self.prefixes_before())
    ):
      raise ValueError(
        f"{type(self).__name__} reads {self.monitor}/group_0 and so on, which"
        " GroupMetrics writes. Put GroupMetrics(validation_data) before it in"
        " the list of callbacks; with name= they are others than val_loss."
      )

  def begin(self, logs: Any) -> bool:
    """Makes the numbers that are not there yet, if there is something to judge.

    Returns whether the logs have the groups' metrics; when first written, they
    do. They have not where `GroupMetrics` leaves epochs out.
    """
    name = f"{self.monitor}/group_0"
    prefixes = tuple(self.prefixes_before())
    is_due = not prefixes or any(
      key.startswith(prefixes) and key.endswith("/group_0") for key in logs
    )
    if name not in (logs or {}) and not self._numbers and is_due:
      raise ValueError(
        f"{type(self).__name__}(monitor={self.monitor!r}) needs {name!r} in the"
        f" logs, which have {sorted(logs or {})}. Put"
        " GroupMetrics(validation_data) before it in the list of callbacks."
      )
    if name not in (logs or {}):
      return False
    if not self._sign:
      self._sign = self._direction()
      num_groups = group_state.groups_of(self.model.optimizer, None).num_groups
      counters = {name: np.zeros(num_groups, int) for name in self._counters}
      best = np.full(num_groups, -self._sign * np.inf)
      self._numbers = {"best": best, **counters, **self._numbers}
    return True

  def improve(self, logs: Any, judged: Any = True) -> Any:
    """Returns which of the judged groups are better than ever; notes how good.

    A group is better by more than `min_delta`; NaN is not.
    """
    best = self._numbers["best"]
    values = np.array(
      [float(logs[f"{self.monitor}/group_{i}"]) for i in range(len(best))]
    )
    is_better = self._sign * values - abs(self.min_delta) > self._sign * best
    improved = judged & is_better
    best[improved] = values[improved]
    return improved

  def _direction(self) -> float:
    """Returns 1 if Keras finds that more of the metric is better, else -1."""
    monitor = self.monitor
    for prefix in self.prefixes_before():
      if monitor.startswith(prefix):
        monitor = f"val_{monitor.removeprefix(prefix)}"  # as Keras names it
        break
    keras = libraries.keras_of(self.model)
    probe = keras.callbacks.EarlyStopping(monitor, mode=self.mode, patience=9)
    probe.set_model(self.model)
    probe.on_train_begin()
    for epoch, value in enumerate((0.0, 1.0)):
      probe.on_epoch_end(epoch, {monitor: value})
    return 1.0 if probe.best == 1.0 else -1.0
