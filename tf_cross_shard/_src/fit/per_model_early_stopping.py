"""Early stopping that monitors each model by its own metric."""

from typing import Any, Final

import numpy as np
from absl import logging

from tf_cross_shard._src.core import optimizer_state
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.fit import per_model_callback
from tf_cross_shard._src.models import group_state

# The beginnings of names in a backup.
_BEST: Final = "best_weights/"
_STOPPED: Final = "stopped/"


class PerModelEarlyStopping(per_model_callback.PerModelMonitor):
  """Stops `fit` when every model has stopped improving.

  The callback works like `tf.keras.callbacks.EarlyStopping`, but monitors each
  model by the model's own metric: after `fit`, each model has the weights and
  the optimizer state that it would have after a `fit` of its own. A model that
  has stopped trains on until the last one has stopped; what it learns
  meanwhile is discarded.
  With this package's `BackupAndRestore` in the list of callbacks, the best
  weights and wait counts survive a crash.

  Under VectorizedStrategy, the callback reads the metrics of each model itself.
  Under other strategies, put `PerModelMetrics(data)` before it.

  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import VectorizedStrategy, callbacks, schedules
  >>> with VectorizedStrategy(2).scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   sgd = tf.keras.optimizers.SGD(schedules.PerModel([2.0, 0.01]))
  ...   model.compile(sgd, "mse")  # 2.0 is too large: training diverges
  >>> x = np.ones([4, 1], "float32")
  >>> stop = callbacks.PerModelEarlyStopping(patience=2)
  >>> data = (x, 5 * x)
  >>> _ = model.fit(
  ...   *data, validation_data=data, epochs=9, verbose=0, callbacks=[stop]
  ... )
  >>> stop.best_epoch, stop.stopped_epoch
  ([0, 8], [2, 0])
  """

  _counters = ("best_epoch", "wait", "stopped_epoch", "is_kept")

  def __init__(
    self,
    monitor: str = "val_loss",
    mode: per_model_callback.Mode = "auto",
    patience: int = 0,
    min_delta: float = 0.0,
    restore_best_weights: bool = True,
    start_from_epoch: int = 0,
  ) -> None:
    """Sets arguments, which have the same meaning as in Keras' EarlyStopping.

    `verbose` and `baseline` are not supported. Pass arguments by keyword: their
    order differs from Keras.

    Args:
      monitor: The metric that decides, as `fit` or `PerModelMetrics` names it,
        without the suffix `/model_0`.
      mode: `"min"`, `"max"`, or `"auto"` to let Keras decide by the metric.
      patience: The number of evaluations without improvement after which a
        model stops.
      min_delta: A metric has to be better by more than this to count as an
        improvement.
      restore_best_weights: Whether each model receives its best weights back
        (all of `model.weights`) when `fit` ends, even if some models have
        not stopped. The default of Keras is False. If False, a model that has
        stopped has the weights of that epoch.
      start_from_epoch: The number of epochs to ignore at the start.
    """
    super().__init__(monitor, mode, patience, min_delta)
    start_from_epoch = per_model_callback.check_count(
      "start_from_epoch", start_from_epoch, 0, "epochs"
    )
    self.restore_best_weights = restore_best_weights
    self.start_from_epoch = start_from_epoch
    # The best weights of each model, and the whole state with which it stopped.
    self._best: group_state.Values = {}
    self._stopped: group_state.Values = {}

  @property
  def best_epoch(self) -> list[int]:
    """The epoch, from 0, of each model's best metric; -1 if none was finite."""
    return list(map(int, self._numbers.get("best_epoch", ())))

  @property
  def stopped_epoch(self) -> list[int]:
    """The epoch after which each model was stopped, or 0 if it was not."""
    return list(map(int, self._numbers.get("stopped_epoch", ())))

  def state(self) -> dict[str, Any]:
    """Returns values of a group once, if all its members have the same."""
    state = super().state()
    for prefix, kept in ((_BEST, self._best), (_STOPPED, self._stopped)):
      model_state = self.state_of_groups() if kept else None
      for name, values in kept.items():
        assert model_state is not None
        of_replica = model_state.copies.gather(values)
        rows = [
          [of_replica[r] for r in members] for members in model_state.groups
        ]
        is_alike = all(map(replicas_lib.are_alike, rows))
        state[f"{prefix}{name}"] = np.stack(
          [array for row in rows for array in (row[:1] if is_alike else row)]
        )
    return state

  def set_state(self, state: dict[str, Any]) -> None:
    super().set_state(state)
    if self.stopped_epoch and all(self.stopped_epoch):
      self.model.stop_training = True
    model_state = self.state_of_groups()
    # A variable has one row per group or, if members differ, per replica.
    order = [replica for members in model_state.groups for replica in members]
    places = [order.index(r) for r in model_state.copies.engine.local_replicas]
    self._best, self._stopped = (
      {
        name.removeprefix(prefix): [
          rows[place * len(rows) // len(order)] for place in places
        ]
        for name, rows in state.items()
        if name.startswith(prefix)
      }
      for prefix in (_BEST, _STOPPED)
    )

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    self._best, self._stopped = {}, {}

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Compares the metric of each model that has not stopped with its best."""
    values = self.read(logs)
    if values is None or epoch < self.start_from_epoch:
      return
    wait, stopped = self._numbers["wait"], self._numbers["stopped_epoch"]
    judged = stopped == 0
    improved = self.improve(values, judged)
    self._numbers["best_epoch"][improved] = epoch
    # If no value is ever better (all NaN), the first weights are the best.
    renewed = improved | (not self._best)
    if self.restore_best_weights and renewed.any():
      models = np.flatnonzero(renewed)
      self._best = self._weights().take(models, self._best)
    wait[judged] += 1
    wait[improved] = 0
    stops = judged & ~improved & (wait >= self.patience)
    # As in Keras, 0 means "not stopped", so no model stops after epoch 0.
    stopped[stops] = epoch
    if not self.same_fit():
      self._keep_stopped()
    if stopped.all():
      self.model.stop_training = True

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    # Later callbacks of the epoch may have changed the learning rate.
    self._keep_stopped()

  def _keep_stopped(self) -> None:
    """Keeps the state of models that have stopped in the last epoch."""
    if self._numbers:
      is_kept = self._numbers["is_kept"]
      stops = (self._numbers["stopped_epoch"] > 0) & (is_kept == 0)
      is_kept[stops] = 1
      if stops.any():
        state = self.state_of_groups(with_optimizer=True)
        self._stopped = state.take(np.flatnonzero(stops), self._stopped)

  def on_train_end(self, logs: Any = None) -> None:
    """Gives stopped models their state back, and all their best weights."""
    self._keep_stopped()
    if self._stopped:
      self._put_stopped(self.state_of_groups(with_optimizer=True))
    if self._best:
      self._weights().put(self._best)
    elif self._stopped and self.same_fit():
      # As `fit` did when it ended: writes moving averages into the weights.
      model = self.model
      model.optimizer.finalize_variable_values(model.trainable_variables)

  def _weights(self) -> group_state.GroupState:
    state = self.state_of_groups()
    state.leave_out_seeds()
    return state

  def _put_stopped(self, state: group_state.GroupState) -> None:
    trains = np.flatnonzero(self._numbers["stopped_epoch"] == 0)
    values = state.take(trains, self._stopped)
    copies = state.copies
    rows = optimizer_state.rows_of_models(state.optimizer)
    for entry in state.entries:
      if any(entry.variable is row for row in rows):
        of_replica = copies.gather(values[entry.key])
        row = [of_replica[r[0]][i] for i, r in enumerate(state.groups)]
        values[entry.key] = [np.stack(row)] * len(values[entry.key])
    state.put(values)
    pipelines = optimizer_state.pipelines_of(state.optimizer)
    for window in (p.window_state for p in pipelines if p.window_state):
      # All replicas count the calls of a window alike.
      calls = copies.read(window[0], range(copies.engine.num_replicas))
      if not replicas_lib.are_alike(calls):
        for variable in window:
          zeros = map(np.zeros_like, copies.here(variable))
          copies.write(variable, list(zeros))
        logging.warning(
          "Models have stopped at different calls of an accumulation window, so"
          " that all windows begin again. To continue each model where it"
          " stopped, let `accumulate_steps` divide the number of batches of an"
          " epoch."
        )
