"""Writes the metrics of each model as a separate TensorBoard run."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.fit import per_model_callback
from tf_cross_shard._src.models import archive, group_state

# TensorFlow's own functions write these entries only if TensorBoard is there.
_SCALAR: Final = tf.compat.v1.SummaryMetadata(
  plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR"
)
_TEXT: Final = tf.compat.v1.SummaryMetadata(
  plugin_data={"plugin_name": "text"}, data_class="DATA_CLASS_TENSOR"
)


class PerModelTensorBoard(per_model_callback.PerModelReader):
  """Writes one TensorBoard run per model, after each epoch.

      log_dir/model_0    val_loss, val_accuracy, learning_rate, drift, ...
      log_dir/model_1    the same tags
      log_dir/ensemble   val_loss, val_accuracy

  All models use the same tags, so that TensorBoard draws their curves into one
  chart. With `PerModel([0.1, 0.01])`, the runs of the models are named `lr=0.1`
  and `lr=0.01`. `val_loss` and so on are the metrics of `fit` under
  VectorizedStrategy, and those that `PerModelMetrics` wrote into the logs.
  `drift` is the distance of the trained weights `w_i` of
  model `i` from the mean over all models:

      drift_i = sqrt(mean over all elements of (w_i - mean_j w_j)**2)

  TensorBoard's page of texts shows the name of each model and its learning rate
  after the first epoch.

  >>> import os, tempfile
  >>> import tensorflow as tf
  >>> from tf_cross_shard import callbacks
  >>> model = tf.keras.Sequential(
  ...   [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ... )
  >>> model.compile("sgd", "mse")
  >>> x = tf.ones([4, 1])
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   board = callbacks.PerModelTensorBoard(folder)
  ...   _ = model.fit(x, x, verbose=0, callbacks=[board])
  ...   os.listdir(folder)
  ['model_0']

  On several machines, the first worker writes the files.
  """

  follows_groups = True

  def __init__(self, log_dir: Any) -> None:
    """Sets the folder.

    Args:
      log_dir: A folder, which is created if necessary.
    """
    super().__init__()
    self._log_dir = archive.as_path(log_dir, "log_dir")
    self._writers: dict[str, Any] = {}
    self._run_rates: Any = None

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    self._run_rates = None

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Writes one point to each curve, at the number of the epoch, from 0."""
    optimizer = self.model.optimizer
    state = self.state_of_groups()
    state.compare_workers("drawing models")
    first = [members[0] for members in state.groups]
    tags: dict[str, list[Any]] = {
      "learning_rate": self._rates(state),
      "drift": _drift(state, first),
    }
    runs: dict[str, dict[str, Any]] = {
      key: {tag: values[i] for tag, values in tags.items()}
      for i, key in enumerate(self.keys)
    }
    logs = {} if logs is None else logs
    for name, value in (self.metrics_of_models(logs) | logs).items():
      tag, _, run = name.rpartition("/")
      if run not in (*runs, "ensemble"):
        continue
      numbers = [(tag, value)]
      if np.ndim(value):  # A curve for each number of a vector.
        numbers = [(f"{tag}_{i}", x) for i, x in enumerate(np.ravel(value))]
      for curve, number in numbers:
        runs.setdefault(run, {}).setdefault(curve, number)
    if state.copies.is_first:
      folders = [*per_model_callback.group_names(optimizer), "ensemble"]
      for folder, scalars in zip(folders, runs.values(), strict=False):
        about = {}
        if folder != "ensemble":
          about = {"model": folder, "learning_rate": scalars["learning_rate"]}
        self._write(folder, epoch, scalars, about)

  def on_train_end(self, logs: Any = None) -> None:
    """Closes the files."""
    for writer in self._writers.values():
      writer.close()
    self._writers = {}

  def _write(
    self,
    run: str,
    step: int,
    scalars: Mapping[str, Any],
    about: Mapping[str, Any],
  ) -> None:
    """Adds a point to each curve of a run, whose table begins the file."""
    if run not in self._writers:
      writer = tf.summary.create_file_writer(str(self._log_dir / run))
      self._writers[run] = writer
      if about:
        # A table in Markdown, which TensorBoard shows as such.
        rows = [f"| {name} | {value} |" for name, value in about.items()]
        table = "\n".join(["| name | value |", "| --- | --- |", *rows])
        with writer.as_default(step=0):
          tf.summary.write("hyperparameters", table, metadata=_TEXT)
    with self._writers[run].as_default(step=step):
      for tag, value in scalars.items():
        tf.summary.write(tag, tf.cast(value, tf.float32), metadata=_SCALAR)
    self._writers[run].flush()

  def _rates(self, state: group_state.GroupState) -> list[float]:
    """Returns the learning rate of each model, as its replicas compute it."""
    strategy, optimizer = state.copies.engine.strategy, self.model.optimizer

    def rate() -> tf.Tensor:
      return tf.cast(optimizer.learning_rate, tf.float32)

    if self._run_rates is None:
      self._run_rates = tf.function(lambda: strategy.run(rate), autograph=False)
    values = strategy.experimental_local_results(self._run_rates())
    rates = state.copies.gather([value.numpy() for value in values])
    return [float(rates[members[0]]) for members in state.groups]


def _drift(state: group_state.GroupState, first: list[int]) -> list[float]:
  """Returns the root mean square distance of each model from the mean."""
  squares, size = np.zeros(len(first)), 0
  for entry in state.entries:
    if entry.is_shared:
      of_group = np.stack(state.copies.read(entry.variable, first))
      distances = of_group.astype(np.float64)
      distances -= distances.mean(axis=0)  # w_i - mean_j w_j
      squares += np.sum(distances.reshape(len(first), -1) ** 2, axis=1)
      size += distances[0].size
  return [float(rms) for rms in np.sqrt(squares / max(size, 1))]
