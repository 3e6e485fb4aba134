"""Early stopping that monitors each group by its own metric."""

from typing import Any, Final

import numpy as np

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.fit import per_model_callback
from tf_cross_shard._src.models import group_state

_WEIGHTS: Final = "best_weights/"  # prefix of the best weights in a backup


class PerModelEarlyStopping(per_model_callback.PerModelMonitor):
  """Stops `fit` when every group has stopped improving.

  The callback works like `tf.keras.callbacks.EarlyStopping`, but monitors each
  group separately, by the group's own metric. After a group has stopped, its
  later metrics are ignored. `fit` continues until the last group has stopped,
  and then gives each group its own best weights.
  With this package's `BackupAndRestore` in the list of callbacks, the best
  weights and wait counts survive a crash.

  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, callbacks
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   sgd = tf.keras.optimizers.SGD(2.0)  # too large: training diverges
  ...   model.compile(
  ...     CrossShardOptimizer(sgd, group_assignment=[[0], [1]]), "mse"
  ...   )
  >>> x = np.ones([4, 1], "float32")
  >>> stop = callbacks.PerModelEarlyStopping(patience=2)
  >>> _ = model.fit(
  ...   *(x, 5 * x),
  ...   epochs=9,
  ...   verbose=0,
  ...   callbacks=[callbacks.PerModelMetrics((x, 5 * x)), stop],
  ... )
  >>> stop.best_epoch, stop.stopped_epoch
  ([0, 0], [2, 2])
  """

  _counters = ("best_epoch", "wait", "stopped_epoch")

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
      monitor: The metric that decides, as `PerModelMetrics` names it, without
        the suffix `/model_0`.
      mode: `"min"`, `"max"`, or `"auto"` to let Keras decide by the metric.
      patience: The number of evaluations without improvement after which a
        group stops.
      min_delta: A metric has to be better by more than this to count as an
        improvement.
      restore_best_weights: Whether each group receives its best weights back
        (all of `model.variables`) when `fit` ends, even if some groups have
        not stopped. The default of Keras is False; here, False would
        leave each group with the weights that it had when the last group
        stopped.
      start_from_epoch: The number of epochs to ignore at the start.
    """
    super().__init__(monitor, mode, patience, min_delta)
    start_from_epoch = per_model_callback.check_count(
      "start_from_epoch", start_from_epoch, 0, "epochs"
    )
    self.restore_best_weights = restore_best_weights
    self.start_from_epoch = start_from_epoch
    # The best values of each variable, one array per replica of this process.
    self._weights: dict[str, list[replicas_lib.Array]] = {}

  @property
  def best_epoch(self) -> list[int]:
    """The epoch, from 0, of each group's best metric; -1 if none was finite."""
    return list(map(int, self._numbers.get("best_epoch", ())))

  @property
  def stopped_epoch(self) -> list[int]:
    """The epoch after which each group was stopped, or 0 if it was not."""
    return list(map(int, self._numbers.get("stopped_epoch", ())))

  def state(self) -> dict[str, Any]:
    """Returns counters and best weights.

    The weights of a group are stored once if all its members have the same.
    """
    state = super().state()
    if not self._weights:
      return state
    model_state = self.state_of_groups()
    for name, weights in self._weights.items():
      of_replica = model_state.copies.gather(weights)
      rows = [
        [of_replica[r] for r in members] for members in model_state.groups
      ]
      is_alike = all(map(replicas_lib.are_alike, rows))
      state[f"{_WEIGHTS}{name}"] = np.stack(
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
    self._weights = {
      name.removeprefix(_WEIGHTS): [
        rows[place * len(rows) // len(order)] for place in places
      ]
      for name, rows in state.items()
      if name.startswith(_WEIGHTS)
    }

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    self._weights = {}

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Compares the metric of each group that has not stopped with its best."""
    if not self.begin(logs) or epoch < self.start_from_epoch:
      return
    wait, stopped = self._numbers["wait"], self._numbers["stopped_epoch"]
    judged = stopped == 0
    improved = self.improve(logs, judged)
    # If no value is ever better (all NaN), the first weights are the best.
    renewed = improved | (self.restore_best_weights and not self._weights)
    self._numbers["best_epoch"][improved] = epoch
    if self.restore_best_weights and renewed.any():
      self._keep(self.state_of_groups(), renewed)
    wait[judged] += 1
    wait[improved] = 0
    stops = judged & ~improved & (wait >= self.patience)
    # As in Keras, 0 means "not stopped", so no group stops after epoch 0.
    stopped[stops] = epoch
    if stopped.all():
      self.model.stop_training = True

  def on_train_end(self, logs: Any = None) -> None:
    """Restores each group's best weights."""
    if not self._weights:
      return
    model_state = self.state_of_groups()
    for entry in model_state.entries:
      model_state.copies.write(entry.variable, self._weights[entry.name])
    group_state.accept_values(self.model.optimizer)

  def _keep(self, model_state: group_state.GroupState, renewed: Any) -> None:
    """Stores the current weights of these groups as their best."""
    replicas = model_state.copies.engine.local_replicas
    is_renewed = [renewed[model_state.groups.index_of(r)] for r in replicas]
    for entry in model_state.entries:
      now = model_state.copies.here(entry.variable)
      before = self._weights.get(entry.name, now)
      self._weights[entry.name] = [
        new if is_new else old
        for new, old, is_new in zip(now, before, is_renewed, strict=True)
      ]
