"""Lowers the learning rate of each model whose metric has stopped improving."""

from typing import Any

import numpy as np

from tf_cross_shard._src.fit import per_model_callback, per_model_rates


class PerModelReduceLROnPlateau(per_model_callback.PerModelMonitor):
  """Lowers the learning rate of each model that has stopped improving.

  The callback works like `tf.keras.callbacks.ReduceLROnPlateau`, but monitors
  each model separately, by the model's own metric. The learning rate of the
  optimizer must be a number, or a `schedules.PerModel` of numbers. Changing a
  learning rate does not trace the training step again. As Keras' callback does,
  this one writes the learning rates of the epoch into the logs, as
  `learning_rate/model_0` and so on.

  >>> import numpy as np, tensorflow as tf
  >>> from tf_cross_shard import VectorizedStrategy, callbacks, schedules
  >>> with VectorizedStrategy(2).scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   sgd = tf.keras.optimizers.SGD(schedules.PerModel([2.0, 0.01]))
  ...   model.compile(sgd, "mse")  # 2.0 is too large: training diverges
  >>> x = np.ones([4, 1], "float32")
  >>> lower = callbacks.PerModelReduceLROnPlateau(factor=0.5, patience=1)
  >>> data = (x, 5 * x)
  >>> _ = model.fit(
  ...   *data, validation_data=data, epochs=3, verbose=0, callbacks=[lower]
  ... )
  >>> [round(rate, 4) for rate in lower.learning_rates]
  [0.5, 0.01]

  `Models.save` saves the learning rates together with the optimizer.

  Attributes:
    learning_rates: The learning rate of each model after the last epoch.
  """

  _counters = ("wait", "cooldown_counter")

  def __init__(
    self,
    monitor: str = "val_loss",
    factor: float = 0.1,
    patience: int = 10,
    mode: per_model_callback.Mode = "auto",
    min_delta: float = 1e-4,
    cooldown: int = 0,
    min_lr: float = 0.0,
  ) -> None:
    """Sets arguments, which have the same meaning as in ReduceLROnPlateau.

    `verbose` is not supported. Pass arguments by keyword: their order differs
    from Keras.

    Args:
      monitor: The metric that decides, as `fit` or `PerModelMetrics` names it,
        without the suffix `/model_0`.
      factor: The number, between 0 and 1, by which a learning rate is
        multiplied.
      patience: The number of evaluations without improvement after which the
        learning rate of a model is lowered.
      mode: `"min"`, `"max"`, or `"auto"` to let Keras decide by the metric.
      min_delta: A metric has to be better by more than this to count as an
        improvement.
      cooldown: The number of evaluations after a change during which the model
        is not monitored.
      min_lr: The least learning rate.
    """
    super().__init__(monitor, mode, patience, min_delta)
    cooldown = per_model_callback.check_count(
      "cooldown", cooldown, 0, "evaluations"
    )
    per_model_callback.check_number("min_lr", min_lr)
    per_model_callback.check_number("factor", factor)
    if not 0.0 < factor < 1.0:
      raise ValueError(f"`factor` must be between 0 and 1; got {factor!r}.")
    self.factor = factor
    self.cooldown = cooldown
    self.min_lr = min_lr
    self.learning_rates: list[float] = []

  def set_model(self, model: Any) -> None:
    """Sets the model, whose optimizer has learning rates that can be set."""
    super().set_model(model)
    per_model_rates.check(model, "PerModelReduceLROnPlateau")

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Lowers the learning rates of the models whose metric is on a plateau."""
    rates = per_model_rates.read(self.model)
    if logs is not None:
      named = zip(self.keys, rates, strict=True)
      logs.update({f"learning_rate/{key}": rate for key, rate in named})
    values = self.read(logs)
    if values is None:
      return
    is_on_plateau = self._on_plateau(values)
    for i, rate in enumerate(rates):
      if is_on_plateau[i] and rate > np.float32(self.min_lr):
        rates[i] = max(rate * self.factor, self.min_lr)
        self._numbers["cooldown_counter"][i] = self.cooldown
        self._numbers["wait"][i] = 0
    self.learning_rates = rates
    per_model_rates.write(self.model, rates)

  def _on_plateau(self, values: Any) -> Any:
    """Counts evaluations; returns which models are on a plateau."""
    wait, cooldown = self._numbers["wait"], self._numbers["cooldown_counter"]
    improved = self.improve(values)
    wait[improved] = 0
    cooldown[cooldown > 0] -= 1
    # During a cooldown, `wait` stays 0.
    waits = ~improved & (cooldown == 0)
    wait[waits] += 1
    return waits & (wait >= self.patience)
