"""Early stopping of groups, each at its own best."""

from typing import Any, Final

import numpy as np

from tf_cross_shard.callbacks import base
from tf_cross_shard.replica_state import group_state, replica_values

_WEIGHTS: Final = "best_weights/"  # before the names of variables in a backup


class GroupEarlyStopping(base.GroupMonitor):
  """Stops `fit` when every group has stopped improving.

  Each group is judged by its own metric as `tf.keras.callbacks.EarlyStopping`
  would judge a model trained alone; what a group does after it has stopped
  does not count. `fit` goes on until the last one has stopped. Then each group
  gets its own best weights back. All of that goes on after a crash, where a
  BackupAndRestore of this package is in the list.

  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, callbacks
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   sgd = tf.keras.optimizers.SGD(2.0)  # Too much: it diverges.
  ...   model.compile(
  ...     CrossShardOptimizer(sgd, group_assignment=[[0], [1]]), "mse"
  ...   )
  >>> x = np.ones([4, 1], "float32")
  >>> stop = callbacks.GroupEarlyStopping(patience=2)
  >>> _ = model.fit(
  ...   *(x, 5 * x),
  ...   epochs=9,
  ...   verbose=0,
  ...   callbacks=[callbacks.GroupMetrics((x, 5 * x)), stop],
  ... )
  >>> stop.best_epoch, stop.stopped_epoch
  ([0, 0], [2, 2])
  """

  _counters = ("best_epoch", "wait", "stopped_epoch")

  def __init__(
    self,
    monitor: str = "val_loss",
    mode: str = "auto",
    patience: int = 0,
    min_delta: float = 0.0,
    restore_best_weights: bool = True,
    start_from_epoch: int = 0,
  ) -> None:
    """Takes what Keras' EarlyStopping takes.

    Args:
      monitor: A metric that `GroupMetrics` puts into the logs, without the
        `/group_0` behind it.
      mode: `"min"`, `"max"`, or `"auto"` for what Keras knows of the metric.
      patience: How many evaluations without improvement a group is given.
      min_delta: By how much a value has to be better to be an improvement.
      restore_best_weights: Whether each group gets back the best that it had of
        all in `model.variables`, at the end of `fit`, also if not all have
        stopped. Keras' default is False; here that would leave each group
        where the last one stopped.
      start_from_epoch: How many epochs do not count.
    """
    super().__init__(monitor, mode, patience, min_delta)
    base.check_count("start_from_epoch", start_from_epoch, 0, "epochs")
    self.restore_best_weights = restore_best_weights
    self.start_from_epoch = start_from_epoch
    # Of each variable, what this process' replicas had when they were best.
    self._weights: dict[str, list[replica_values.Array]] = {}

  @property
  def best_epoch(self) -> list[int]:
    """The epoch in which each group had its best value, from 0."""
    return list(map(int, self._numbers.get("best_epoch", ())))

  @property
  def stopped_epoch(self) -> list[int]:
    """The epoch in which each group stopped improving; 0 if it did not."""
    return list(map(int, self._numbers.get("stopped_epoch", ())))

  def state(self) -> dict[str, Any]:
    """Returns the numbers, and the best weights: per group where alike."""
    state = super().state()
    if not self._weights:
      return state
    whole = self.copies()
    for name, own in self._weights.items():
      of_replica = whole.copies.gather(own)
      rows = [[of_replica[r] for r in members] for members in whole.groups]
      is_alike = all(map(replica_values.are_alike, rows))
      state[f"{_WEIGHTS}{name}"] = np.stack(
        [array for row in rows for array in (row[:1] if is_alike else row)]
      )
    return state

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from numbers and best weights; not where all have stopped."""
    super().set_state(state)
    if self.stopped_epoch and all(self.stopped_epoch):
      self.model.stop_training = True
    whole = self.copies()
    order = [replica for members in whole.groups for replica in members]
    places = [order.index(r) for r in whole.copies.engine.replicas_here]
    self._weights = {
      name.removeprefix(_WEIGHTS): [
        rows[place * len(rows) // len(order)] for place in places
      ]
      for name, rows in state.items()
      if name.startswith(_WEIGHTS)
    }

  def on_train_begin(self, logs: Any = None) -> None:
    """Forgets what another `fit` left."""
    super().on_train_begin(logs)
    self._weights = {}

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Judges each group that has not stopped, by its metric in the logs."""
    if not self.begin(logs) or epoch < self.start_from_epoch:
      return
    wait, stopped = self._numbers["wait"], self._numbers["stopped_epoch"]
    judged = stopped == 0
    improved = self.improve(logs, judged)
    # Where no value is ever better, the first weights are the best.
    renewed = improved | (self.restore_best_weights and not self._weights)
    self._numbers["best_epoch"][renewed] = epoch
    if self.restore_best_weights and renewed.any():
      self._keep(self.copies(), renewed)
    wait[judged] += 1
    wait[improved] = 0
    stops = judged & ~improved & (wait >= self.patience)
    stopped[stops] = epoch  # After epoch 0 none stops, as in Keras.
    if stopped.all():
      self.model.stop_training = True

  def on_train_end(self, logs: Any = None) -> None:
    """Gives each group its best weights back."""
    if not self._weights:
      return
    whole = self.copies()
    for part in whole.parts:
      whole.copies.write(part.variable, self._weights[part.name])
    group_state.accept_values(self.model.optimizer)

  def _keep(self, whole: group_state.GroupCopies, renewed: Any) -> None:
    """Takes what these groups have now for their best."""
    replicas = whole.copies.engine.replicas_here
    is_renewed = [renewed[whole.groups.index_of(r)] for r in replicas]
    for part in whole.parts:
      now = whole.copies.here(part.variable)
      before = self._weights.get(part.name, now)
      self._weights[part.name] = [
        new if is_new else old
        for new, old, is_new in zip(now, before, is_renewed, strict=True)
      ]
