"""Checkpoints that contain the best epoch of each group."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.fit import per_model_callback
from tf_cross_shard._src.models import archive, group_state


class PerModelCheckpoint(per_model_callback.PerModelMonitor):
  """Keeps the best weights and optimizer state of each model in one file.

  When a model improves, the model's current state is written to the file. The
  other models' parts of the file do not change.
  `Models(model).restore(path)` then gives each model its own
  best state, from which training continues as if there had been no later
  epochs. A crash while the file is written leaves the previous file unchanged.

  >>> import tempfile
  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import Models, VectorizedStrategy, callbacks
  >>> from tf_cross_shard import schedules
  >>> with VectorizedStrategy(2).scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   sgd = tf.keras.optimizers.SGD(schedules.PerModel([2.0, 0.01]))
  ...   model.compile(sgd, "mse")  # 2.0 is too large: training diverges
  >>> x = np.ones([4, 1], "float32")
  >>> data = (x, 5 * x)
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   keep = callbacks.PerModelCheckpoint(f"{folder}/best")
  ...   _ = model.fit(
  ...     *data, validation_data=data, epochs=3, verbose=0, callbacks=[keep]
  ...   )
  ...   Models(model).restore(f"{folder}/best")
  >>> Models(model).values(sgd.iterations).tolist()
  [1, 3]

  As Keras' ModelCheckpoint does, a new callback begins anew, whatever file is
  at its path, and the same callback in another `fit` keeps its best values. A
  run that `BackupAndRestore` resumes continues with the file: it replaces a
  model's state only with a better one. The first worker keeps a copy of the
  file's contents in memory.
  """

  _counters = ("best_epoch",)

  def __init__(
    self,
    path: Any,
    monitor: str = "val_loss",
    mode: per_model_callback.Mode = "auto",
  ) -> None:
    """Sets the file and the metric.

    Args:
      path: The file. Its folder is created if necessary.
      monitor: The metric that decides, as `fit` or `PerModelMetrics` names it,
        without the suffix `/model_0`.
      mode: `"min"`, `"max"`, or `"auto"` to let Keras decide by the metric.
    """
    super().__init__(monitor, mode)
    self._path = archive.as_path(path)
    archive.check_not_keras(self._path)
    # The arrays in the file.
    self._kept: dict[str, archive.Array] = {}
    self._is_new = True

  def on_train_begin(self, logs: Any = None) -> None:
    """Creates the folder.

    Raises:
      OSError: If the folder cannot be created; raised on all workers.
    """
    numbers = self._numbers
    super().on_train_begin(logs)
    if len(numbers.get("best", ())) == len(self.keys):
      self._numbers = numbers  # Of an earlier `fit`.
    else:
      self._kept = {}
    copies = replicas_lib.Copies(self.model.distribute_strategy)
    topic = f"creating {self._path.parent.name}"
    with group_state.raising_on_all(copies.workers, topic):
      if copies.is_first:
        archive.make_folder(self._path.parent)
    self._is_new = False

  def set_state(self, state: dict[str, Any]) -> None:
    """Reads the file of the run that continues, and its best values."""
    del state  # The file is newer if epochs have ended since.
    copies = replicas_lib.Copies(self.model.distribute_strategy)
    topic = f"reading {self._path.name}"
    with group_state.raising_on_all(copies.workers, topic) as outcomes:
      if copies.is_first:
        # If the first write was killed where a rename is not atomic, no epoch
        # was best yet.
        with archive.as_os_errors(self._path):
          exists = self._path.exists() and archive.is_complete(self._path)
        outcomes[0]["numbers"] = self._read() if exists else {}
    super().set_state(outcomes[0]["numbers"])

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Writes the file if the metric of any model in the logs improved.

    Raises:
      OSError: If the file cannot be written; raised on all workers.
      OutOfSyncError: If members of a group differ in trained weights.
    """
    if self._is_new:  # A training loop of your own need not call it.
      self.on_train_begin()
    is_first = not self._sign
    values = self.read(logs)
    if values is None:
      return
    state = self.state_of_groups(with_optimizer=True)
    if is_first:
      with state.raising_on_all(f"checking {self._path.name}"):
        self._check_fits(state)
    # The file needs a state of each model, also before a model has improved.
    has_none = np.isinf(self._numbers["best"])
    improved = self.improve(values)
    self._numbers["best_epoch"][improved] = epoch
    if (improved | has_none).any():
      self._write(state, np.flatnonzero(improved | has_none))

  def _read(self) -> dict[str, Any]:
    """Returns the best values in the file; keeps the models' arrays."""
    groups = nested_lib.groups_of(self.model.optimizer)
    with archive.reading(self._path) as file:
      self._kept = {n: file[n] for n in file if n.startswith("model_")}
      numbers = {
        name: file[f"{self.monitor}/{name}"].tolist()
        for name in ("best", *self._counters)
        if f"{self.monitor}/{name}" in file
      }
    if len(numbers.get("best", ())) != groups.num_groups:
      raise self._misfit(f"{self.monitor} of {groups.num_groups} models")
    if self.model.built:
      self._check_fits(self.state_of_groups())
    return numbers

  def _check_fits(self, state: group_state.GroupState) -> None:
    """Raises an error unless the file has the variables of the model."""
    for entry in state.entries if self._kept else ():
      keys = [
        group_state.key_in_file(entry.key, 0, member) for member in (None, 0)
      ]
      shapes = [self._kept[key].shape for key in keys if key in self._kept]
      # The shape may have unknown dimensions.
      shape = tf.TensorShape(entry.variable.shape)
      if not any(map(shape.is_compatible_with, shapes)):
        raise self._misfit(f"`{entry.name}` of shape {shape.as_list()}")

  def _misfit(self, wanted: str) -> archive.CheckpointError:
    """Returns the error for a file of another model or metric."""
    return archive.CheckpointError(
      f"PerModelCheckpoint cannot continue with {self._path}, which does not"
      f" hold {wanted}. Name another file, or delete this one to start again."
    )

  def _write(
    self, state: group_state.GroupState, improved: Iterable[int]
  ) -> None:
    """Replaces the improved models' part of the file with their new state."""
    topic = f"saving {self._path.name}"
    prefixes = tuple(f"model_{i}/" for i in improved)
    new = state.arrays(topic).items()
    kept = {n: a for n, a in self._kept.items() if not n.startswith(prefixes)}
    self._kept = kept | {n: a for n, a in new if n.startswith(prefixes)}
    arrays = dict(self._kept)
    for name, array in super().state().items():
      arrays[f"{self.monitor}/{name}"] = array
    state.write(self._path, topic, arrays)
