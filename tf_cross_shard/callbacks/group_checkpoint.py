"""A checkpoint with each group at its best."""

import sys
from typing import Any

from tf_cross_shard.callbacks import base
from tf_cross_shard.replica_state import archive, group_state


class GroupCheckpoint(base.GroupMonitor):
  """Keeps the best of each group, weights and optimizer state, in one file.

  When a group improves, its part of the file is renewed; those of the others
  stay. `replica_state.restore(path, optimizer, model)` then gives each group
  its own best, from which it goes on as if it had not stopped there. A crash
  while the file is written leaves the older one.

  >>> import tempfile
  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, callbacks, replica_state
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   sgd = tf.keras.optimizers.SGD(2.0)  # Too much: it diverges.
  ...   optimizer = CrossShardOptimizer(sgd, group_assignment=[[0], [1]])
  ...   model.compile(optimizer, "mse")
  >>> x = np.ones([4, 1], "float32")
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   keep = callbacks.GroupCheckpoint(f"{folder}/best")
  ...   _ = model.fit(
  ...     *(x, 5 * x),
  ...     epochs=3,
  ...     verbose=0,
  ...     callbacks=[callbacks.GroupMetrics((x, 5 * x)), keep],
  ...   )
  ...   replica_state.restore(f"{folder}/best", optimizer, model)
  >>> [int(i) for i in replica_state.group_values(sgd.iterations, optimizer)]
  [1, 1]

  What is best is counted over all calls of `fit` with this object. Memory for
  the file's content is taken on the first worker.
  """

  def __init__(
    self, path: Any, monitor: str = "val_loss", mode: str = "auto"
  ) -> None:
    """Names the file.

    Args:
      path: A file in a folder that is there. One that is there is replaced.
      monitor: A metric that `GroupMetrics` puts into the logs, without the
        `/group_0` behind it.
      mode: `"min"`, `"max"`, or `"auto"` for what Keras knows of the metric.

    Raises:
      TypeError: If `path` is no path.
      ValueError: If `path` is no file's.
    """
    super().__init__(monitor, mode)
    self._path = archive.as_path(path)
    self._kept: dict[str, archive.Array] = {}

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Writes the file if a group improved.

    Args:
      epoch: The epoch that ended, from 0.
      logs: Has the metric of every group.

    Raises:
      ValueError: If it has not in the first epoch, or Keras does not know
        whether the metric should be small or large.
      OSError: If the file cannot be written; on all workers.
      OutOfSyncError: If members of a group differ in what is trained.
      MissingWorkerError: If another worker does not call this too.
    """
    if not self.has_metrics(logs):
      return
    found = group_state.GroupCopies(self.model.optimizer, self.model)
    is_first = not self._judges
    if is_first:
      self.make_judges(found.groups.num_groups, patience=sys.maxsize)
    improved = []
    for i, judge in enumerate(self._judges):
      before = judge.best
      judge.on_epoch_end(epoch, logs)
      if is_first or judge.best is not before:
        improved.append(i)
    if improved:
      self._write(found, improved)

  def _write(self, found: group_state.GroupCopies, improved: list[int]) -> None:
    """Renews what is kept of these groups, and writes what is kept of all."""
    topic = f"saving {self._path.name}"
    found.agree(topic)
    found.apart(topic)  # Raises an error where members differ and must not.
    own = [part.name for part in found.parts if not part.is_shared]
    for name, array in found.arrays(own).items():
      if name.startswith(tuple(f"group_{i}/" for i in improved)):
        self._kept[name] = array
    found.write(self._path, topic, _joined(self._kept, own, found))


def _joined(
  kept: dict[str, archive.Array], own: list[str], found: group_state.GroupCopies
) -> dict[str, archive.Array]:
  """What members of groups have alike, once per group, as `save` writes it."""
  joined = dict(kept)
  groups, members = range(found.groups.num_groups), found.groups.group_size
  for name in own if kept else ():
    of_group = [
      [kept[group_state.key(name, i, j)] for j in range(members)]
      for i in groups
    ]
    if all(each.tobytes() == a[0].tobytes() for a in of_group for each in a):
      for i in groups:
        for j in range(members):
          del joined[group_state.key(name, i, j)]
        joined[group_state.key(name, i)] = of_group[i][0]
  return joined
