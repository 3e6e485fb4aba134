"""Early stopping of groups, each at its own best."""

from typing import Any

from tf_cross_shard.callbacks import base
from tf_cross_shard.replica_state import group_state, replica_values


class GroupEarlyStopping(base.GroupMonitor):
  """Stops `fit` when every group has stopped improving.

  Each group is judged by its own metric as `tf.keras.callbacks.EarlyStopping`
  would judge a model trained alone; what a group does after it has stopped
  does not count. `fit` goes on until the last one has stopped. Then each group
  gets its own best weights back.

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
    self._options = {
      "patience": patience,
      "min_delta": min_delta,
      "restore_best_weights": restore_best_weights,
      "start_from_epoch": start_from_epoch,
    }
    self._groups: list[_Group] = []

  @property
  def best_epoch(self) -> list[int]:
    """The epoch in which each group had its best value, from 0."""
    return [judge.best_epoch for judge in self._judges]

  @property
  def stopped_epoch(self) -> list[int]:
    """The epoch in which each group stopped improving; 0 if it did not."""
    return [judge.stopped_epoch for judge in self._judges]

  def on_train_begin(self, logs: Any = None) -> None:
    """Forgets what another `fit` left.

    Args:
      logs: Not used.
    """
    self._judges = []

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Judges each group that has not stopped.

    Args:
      epoch: The epoch that ended, from 0.
      logs: Has the metric of every group.

    Raises:
      ValueError: If it has not in the first epoch, or Keras does not know
        whether the metric should be small or large.
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
    """Gives each group its best weights back.

    Args:
      logs: Not used.
    """
    for judge in self._judges:
      judge.on_train_end()
    if self._judges and self._options["restore_best_weights"]:
      for each in group_state.watches_of(self.model.optimizer):
        each.accept()

  def _begin(self) -> None:
    """Makes each group's judge, and what that takes for its model."""
    found = group_state.GroupCopies(
      self.model.optimizer, self.model, is_whole=False
    )
    variables = [part.variable for part in found.parts]
    here = list(found.copies.engine.replicas_here)
    self._groups = [
      _Group(
        found.copies, variables, [here.index(r) for r in members if r in here]
      )
      for members in found.groups
    ]
    self.make_judges(len(self._groups), **self._options)
    for group, judge in zip(self._groups, self._judges, strict=True):
      judge.set_model(group)


class _Group:
  """What a callback of Keras takes for a model: the replicas of one group.

  On several machines those of this worker.
  """

  def __init__(
    self,
    copies: replica_values.Copies,
    variables: list[Any],
    members: list[int],
  ) -> None:
    self.stop_training = False
    self._copies = copies
    self._variables = variables
    self._members = members

  def get_weights(self) -> list[list[replica_values.Array]]:
    """What each member has of each variable."""
    whole = map(self._copies.here, self._variables)
    return [[copies[member] for member in self._members] for copies in whole]

  def set_weights(self, weights: list[list[replica_values.Array]]) -> None:
    """Gives the members their values; other groups keep theirs."""
    for variable, values in zip(self._variables, weights, strict=True):
      copies = self._copies.here(variable)
      for member, value in zip(self._members, values, strict=True):
        copies[member] = value
      self._copies.write(variable, copies)
