"""Learning rates lowered on a plateau, each group's own."""

from typing import Any

import numpy as np

from tf_cross_shard.callbacks import base, group_rates


class GroupReduceLROnPlateau(base.GroupMonitor):
  """Lowers the learning rate of each group that has stopped improving.

  Each group is judged by its own metric, as
  `tf.keras.callbacks.ReduceLROnPlateau` judges a model trained alone. The
  optimizer has one rate for all groups, or `schedules.PerGroup` of numbers.
  Nothing is traced again.

  >>> import numpy as np, tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, callbacks, schedules
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   sgd = tf.keras.optimizers.SGD(schedules.PerGroup([2.0, 0.01]))
  ...   model.compile(
  ...     CrossShardOptimizer(sgd, group_assignment=[[0], [1]]), "mse"
  ...   )
  >>> x = np.ones([4, 1], "float32")
  >>> lower = callbacks.GroupReduceLROnPlateau(factor=0.5, patience=1)
  >>> _ = model.fit(
  ...   *(x, 5 * x),
  ...   epochs=3,
  ...   verbose=0,
  ...   callbacks=[callbacks.GroupMetrics((x, 5 * x)), lower],
  ... )
  >>> [round(rate, 4) for rate in lower.learning_rates]
  [0.5, 0.01]

  The rates are saved with the optimizer by `replica_state.save`.
  """

  _counters = ("wait", "cooldown_counter")

  def __init__(
    self,
    monitor: str = "val_loss",
    factor: float = 0.1,
    patience: int = 10,
    mode: str = "auto",
    min_delta: float = 1e-4,
    cooldown: int = 0,
    min_lr: float = 0.0,
  ) -> None:
    """Takes what Keras' ReduceLROnPlateau takes.

    Args:
      monitor: A metric that `GroupMetrics` puts into the logs, without the
        `/group_0` behind it.
      factor: What a rate is multiplied by, less than 1.
      patience: How many evaluations without improvement a group is given.
      mode: `"min"`, `"max"`, or `"auto"` for what Keras knows of the metric.
      min_delta: By how much a value has to be better to be an improvement.
      cooldown: For how many evaluations a group is not judged afterwards.
      min_lr: No rate is lowered below it.
    """
    super().__init__(monitor, mode, patience, min_delta)
    base.check_count("cooldown", cooldown, 0, "evaluations")
    base.check_number("min_lr", min_lr)
    base.check_number("factor", factor)
    if not 0.0 < factor < 1.0:
      raise ValueError(f"`factor` must be between 0 and 1; got {factor!r}.")
    self.factor = factor
    self.cooldown = cooldown
    self.min_lr = min_lr
    self.learning_rates: list[float] = []

  def set_model(self, model: Any) -> None:
    """Makes a variable of what PerGroup's rates are multiplied by.

    In a loop of one's own call it before the first step is traced.
    """
    super().set_model(model)
    group_rates.prepare(model, "GroupReduceLROnPlateau")

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Lowers the rates of groups whose metric in the logs is on a plateau."""
    if not self.begin(logs):
      return
    rates = group_rates.read(self.model)
    is_on_plateau = self._on_plateau(logs)
    for i, rate in enumerate(rates):
      if is_on_plateau[i] and rate > np.float32(self.min_lr):
        rates[i] = max(rate * self.factor, self.min_lr)
        self._numbers["cooldown_counter"][i] = self.cooldown
        self._numbers["wait"][i] = 0
    self.learning_rates = rates
    group_rates.write(self.model, rates)

  def _on_plateau(self, logs: Any) -> Any:
    """Counts evaluations; returns of which groups the rate is to be lowered."""
    wait, cooldown = self._numbers["wait"], self._numbers["cooldown_counter"]
    improved = self.improve(logs)
    wait[improved] = 0  # In a cooldown it is 0 already.
    cooldown[cooldown > 0] -= 1
    waits = ~improved & (cooldown == 0)
    wait[waits] += 1
    return waits & (wait >= self.patience)
