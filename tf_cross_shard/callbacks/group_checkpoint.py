"""A checkpoint with each group at its best."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard.callbacks import base
from tf_cross_shard.replica_state import archive, group_state, replica_values


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

  What is best is counted over all calls of `fit` with this object, and over
  those that wrote the file before: a run that goes on replaces a group's best
  only by a better one. Delete the file to begin anew. Memory for its content is
  taken on the first worker.
  """

  moves_optimizer = True
  _counters = ("best_epoch",)

  def __init__(
    self, path: Any, monitor: str = "val_loss", mode: str = "auto"
  ) -> None:
    """Names the file.

    Args:
      path: A file; its folder is made.
      monitor: A metric that `GroupMetrics` puts into the logs, without the
        `/group_0` behind it.
      mode: `"min"`, `"max"`, or `"auto"` for what Keras knows of the metric.
    """
    super().__init__(monitor, mode)
    self._path = archive.as_path(path)
    self._kept: dict[str, archive.Array] = {}
    self._is_new = True

  def state(self) -> dict[str, Any]:
    """Returns nothing: it is in the file, beside what is best."""
    return {}

  def on_train_begin(self, logs: Any = None) -> None:
    """Makes the folder, or reads the file that is there.

    Raises:
      CheckpointError: If another kind of run wrote the file; on all workers.
      OSError: If the file cannot be read, or its folder not made; likewise.
    """
    super().on_train_begin(logs)
    self._kept = {}
    copies = replica_values.Copies(self.model.distribute_strategy)
    topic = f"reading {self._path.name}"
    with group_state.together(copies.workers, topic) as outcomes:
      if copies.is_first:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        outcomes[0]["numbers"] = self._read() if self._path.exists() else {}
    self.set_state(outcomes[0]["numbers"])
    self._is_new = False

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Writes the file if a group improved, by its metric in the logs.

    Raises:
      OSError: If the file cannot be written; on all workers.
      OutOfSyncError: If members of a group differ in what is trained.
    """
    if self._is_new:  # A loop of one's own need not call it.
      self.on_train_begin()
    is_first = not self._sign
    if not self.begin(logs):
      return
    copies = self.copies(is_whole=True)
    if is_first:
      with copies.together(f"checking {self._path.name}"):
        self._check_fits(copies)
    # The file has to have something of each group.
    improved = np.isinf(self._numbers["best"]) | self.improve(logs)
    if improved.any():
      self._numbers["best_epoch"][improved] = epoch
      self._write(copies, np.flatnonzero(improved))

  def _read(self) -> dict[str, Any]:
    """Returns the numbers in the file; keeps the arrays."""
    groups = group_state.groups_of(self.model.optimizer, None)
    with archive.reading(self._path) as file:
      self._kept = {n: file[n] for n in file if n.startswith("group_")}
      numbers = {
        name: file[f"{self.monitor}/{name}"].tolist()
        for name in ("best", *self._counters)
        if f"{self.monitor}/{name}" in file
      }
    if len(numbers.get("best", ())) != groups.num_groups:
      raise self._misfit(f"{self.monitor} of {groups.num_groups} groups")
    if self.model.built:
      self._check_fits(self.copies())
    return numbers

  def _check_fits(self, copies: group_state.GroupCopies) -> None:
    """Raises an error unless what was read of the file has the variables."""
    for part in copies.parts if self._kept else ():
      keys = [group_state.key(part.name, 0, member) for member in (None, 0)]
      shapes = [self._kept[key].shape for key in keys if key in self._kept]
      own = tf.TensorShape(part.variable.shape)  # [None, 2] of a window
      if not any(map(own.is_compatible_with, shapes)):
        raise self._misfit(f"`{part.name}` of shape {own.as_list()}")

  def _misfit(self, wanted: str) -> archive.CheckpointError:
    """Returns the error for a file of another kind of run."""
    return archive.CheckpointError(
      f"GroupCheckpoint cannot go on from {self._path}, which does not hold"
      f" {wanted}. Name another file, or delete it to begin anew."
    )

  def _write(
    self, copies: group_state.GroupCopies, improved: Iterable[int]
  ) -> None:
    """Renews what is kept of these groups, and writes what is kept of all."""
    topic = f"saving {self._path.name}"
    copies.agree(topic)
    renewed = tuple(f"group_{i}/" for i in improved)
    new = copies.arrays(copies.apart(topic)).items()
    kept = {n: a for n, a in self._kept.items() if not n.startswith(renewed)}
    self._kept = kept | {n: a for n, a in new if n.startswith(renewed)}
    arrays = dict(self._kept)
    for name, array in super().state().items():
      arrays[f"{self.monitor}/{name}"] = array
    copies.write(self._path, topic, arrays)
