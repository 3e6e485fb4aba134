"""Early stopping of groups, each at its own best."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_cross_shard.callbacks import base
from tf_cross_shard.replica_state import group_state, replica_values


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
    super().__init__(monitor, mode)
    base.check_count("patience", patience, 0, "evaluations")
    base.check_count("start_from_epoch", start_from_epoch, 0, "epochs")
    base.check_number("min_delta", min_delta)
    self.patience = patience
    self.min_delta = min_delta
    self.restore_best_weights = restore_best_weights
    self.start_from_epoch = start_from_epoch
    self._groups: list[_Group] = []

  @property
  def best_epoch(self) -> list[int]:
    """The epoch in which each group had its best value, from 0."""
    return [judge.best_epoch for judge in self._judges]

  @property
  def stopped_epoch(self) -> list[int]:
    """The epoch in which each group stopped improving; 0 if it did not."""
    return [judge.stopped_epoch for judge in self._judges]

  def state(self) -> dict[str, Any]:
    """Returns the judges' numbers, and the best weights of all groups."""
    state = super().state()
    if not self._judges or self._judges[0].best_weights is None:
      return state
    copies, groups = self._copies.copies, self._copies.groups
    for i, part in enumerate(self._copies.parts):
      own: dict[int, Any] = {}
      for judge in self._judges:
        own |= judge.best_weights[i]
      of_replica = copies.gather([own[r] for r in copies.engine.replicas_here])
      rows = [[of_replica[r] for r in members] for members in groups]
      is_alike = all(len({a.tobytes() for a in row}) == 1 for row in rows)
      state[f"best_weights/{part.name}"] = np.stack(
        [array for row in rows for array in (row[:1] if is_alike else row)]
      )
    return state

  def on_train_begin(self, logs: Any = None) -> None:
    """Forgets what another `fit` left."""
    super().on_train_begin(logs)
    self._judges = []

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Judges each group that has not stopped.

    Args:
      epoch: The epoch that ended, from 0.
      logs: Has the metric of every group.
    """
    if not self.has_metrics(logs):
      return
    if not self._judges:
      self._begin()
    for group, judge in zip(self._groups, self._judges, strict=True):
      if not group.stop_training:
        judge.on_epoch_end(epoch, logs)
    if all(group.stop_training for group in self._groups):
      self.model.stop_training = True

  def on_train_end(self, logs: Any = None) -> None:
    """Gives each group its best weights back."""
    for judge in self._judges:
      judge.on_train_end()
    if self._judges and self.restore_best_weights:
      group_state.accept_values(self.model.optimizer)
    self._restored = {}

  def _begin(self) -> None:
    """Makes each group's judge, and what that takes for its model."""
    self._copies = group_state.GroupCopies(
      self.model.optimizer, self.model, is_whole=False
    )
    self._groups = [
      _Group(self._copies, members) for members in self._copies.groups
    ]
    restored = self._restored
    self.make_judges(
      len(self._groups),
      patience=self.patience,
      min_delta=self.min_delta,
      restore_best_weights=self.restore_best_weights,
      start_from_epoch=self.start_from_epoch,
    )
    best = [
      restored[f"best_weights/{part.name}"]
      for part in self._copies.parts
      if f"best_weights/{part.name}" in restored
    ]
    for i, judge in enumerate(self._judges):
      judge.set_model(self._groups[i])
      self._groups[i].stop_training = judge.stopped_epoch > 0
      if best:
        judge.best_weights = self._groups[i].of_rows(i, best)


class _Group:
  """The replicas of one group, as the model of a callback of Keras.

  On several machines those of this worker.
  """

  def __init__(
    self, copies: group_state.GroupCopies, members: Sequence[int]
  ) -> None:
    self.stop_training = False
    self._copies = copies.copies
    self._variables = [part.variable for part in copies.parts]
    self._members = members
    self._here = copies.copies.engine.replicas_here
    self._num_replicas = copies.groups.num_replicas

  def get_weights(self) -> list[dict[int, replica_values.Array]]:
    """Returns what each member has of each variable."""
    whole = map(self._copies.here, self._variables)
    start = self._here.start
    return [
      {r: copies[r - start] for r in self._members if r in self._here}
      for copies in whole
    ]

  def set_weights(self, weights: list[dict[int, replica_values.Array]]) -> None:
    """Gives the members their values; other groups keep theirs."""
    for variable, values in zip(self._variables, weights, strict=True):
      copies = self._copies.here(variable)
      for replica, value in values.items():
        copies[replica - self._here.start] = value
      self._copies.write(variable, copies)

  def of_rows(
    self, index: int, arrays: Sequence[replica_values.Array]
  ) -> list[dict[int, replica_values.Array]]:
    """Returns the weights in arrays of a row per group, or per member."""
    size = len(self._members)
    return [
      {
        r: array[(index * size + j) * len(array) // self._num_replicas]
        for j, r in enumerate(self._members)
        if r in self._here
      }
      for array in arrays
    ]
