"""Curves of groups, which TensorBoard lays over each other."""

from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard.callbacks import base, summaries
from tf_cross_shard.inner_optimizer import optimizer_state
from tf_cross_shard.replica_state import group_state

_OF_OPTIMIZER: Final = ("noise_scale", "gradient_norm")


class GroupTensorBoard(base.GroupCallback):
  """Writes one TensorBoard run per group, after each epoch.

      log_dir/group_0    val_loss, val_accuracy, learning_rate, drift, ...
      log_dir/group_1    the same tags, so that one picture has both curves
      log_dir/ensemble   val_loss, val_accuracy

  With `PerGroup([0.1, 0.01])` the groups' runs are `lr=0.1` and `lr=0.01`.
  `val_loss` and so on are what `GroupMetrics` put into the logs. `drift` is how
  far the trained weights `w_i` of group `i` are from the mean over the groups:

      drift_i = sqrt(mean over all elements of (w_i - mean_j w_j)**2)

  `noise_scale` and `gradient_norm` are written where the optimizer has them.
  TensorBoard's HParams page has a row for each group: its name, as `group`, and
  its `learning_rate` when the first epoch ended.

  >>> import os, tempfile
  >>> from tf_cross_shard import callbacks
  >>> model = tf.keras.Sequential(
  ...   [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ... )
  >>> model.compile("sgd", "mse")
  >>> x = tf.ones([4, 1])
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   board = callbacks.GroupTensorBoard(folder)
  ...   _ = model.fit(x, x, verbose=0, callbacks=[board])
  ...   os.listdir(folder)
  ['group_0']

  On several machines the first worker writes.
  """

  follows_groups = True

  def __init__(self, log_dir: Any) -> None:
    """Names the place.

    Args:
      log_dir: A folder, which need not be there; or what else
        `tf.summary.create_file_writer` takes.
    """
    super().__init__()
    self._log_dir = log_dir
    self._runs = summaries.Runs(log_dir)
    self._run_rates: Any = None

  def on_train_begin(self, logs: Any = None) -> None:
    """Forgets what another `fit` left."""
    super().on_train_begin(logs)
    self._run_rates = None

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Writes; the number of the epoch, from 0, is the step in the curves."""
    optimizer = self.model.optimizer
    copies = self.copies()
    copies.agree("drawing groups")
    first = [members[0] for members in copies.groups]
    tags: dict[str, list[Any]] = {
      "learning_rate": self._rates(copies),
      "drift": _drift(copies, first),
    }
    for layer in optimizer_state.nested_optimizers(optimizer):
      for name in _OF_OPTIMIZER:
        variable = getattr(layer, name, None)
        if variable is not None:
          tags[name] = copies.copies.read(variable, first)
    runs: dict[str, dict[str, Any]] = {
      f"group_{i}": {tag: values[i] for tag, values in tags.items()}
      for i in range(len(first))
    }
    for name, value in (logs or {}).items():
      tag, _, run = name.rpartition("/")
      if run in (*runs, "ensemble"):
        runs.setdefault(run, {})[tag] = value
    if copies.copies.is_first:
      folders = [*base.group_names(optimizer), "ensemble"]
      for folder, scalars in zip(folders, runs.values(), strict=False):
        hparams = {}
        if folder != "ensemble":
          hparams = {"group": folder, "learning_rate": scalars["learning_rate"]}
        self._runs.write(folder, epoch, scalars, hparams)

  def on_train_end(self, logs: Any = None) -> None:
    """Closes the files."""
    self._runs.close()

  def _rates(self, copies: group_state.GroupCopies) -> list[float]:
    """Returns each group's learning rate, as its replicas see it."""
    strategy, optimizer = copies.copies.engine.strategy, self.model.optimizer

    def rate() -> tf.Tensor:
      value = optimizer.learning_rate
      if callable(value):  # tf_keras' legacy optimizers return the schedule.
        value = value(optimizer.iterations)
      return tf.cast(value, tf.float32)

    if self._run_rates is None:
      self._run_rates = tf.function(lambda: strategy.run(rate), autograph=False)
    values = strategy.experimental_local_results(self._run_rates())
    rates = copies.copies.gather([value.numpy() for value in values])
    return [float(rates[members[0]]) for members in copies.groups]


def _drift(copies: group_state.GroupCopies, first: list[int]) -> list[float]:
  """Returns the rms distance of each group's trained weights from the mean."""
  squares, size = np.zeros(len(first)), 0
  for part in copies.parts:
    if part.is_shared:
      of_group = np.stack(copies.copies.read(part.variable, first))
      away = of_group.astype(np.float64)
      away -= away.mean(axis=0)
      squares += np.sum(away.reshape(len(first), -1) ** 2, axis=1)
      size += away[0].size
  return [float(rms) for rms in np.sqrt(squares / max(size, 1))]
