"""What the callbacks share: the groups of a model, and judging each of them."""

from typing import Any

import tensorflow as tf

from tf_cross_shard.replica_state import group_models, group_state


def engine_of(optimizer: Any) -> Any:
  """Returns what adds numbers of the replicas of a CrossShardOptimizer."""
  return optimizer._place.engine


def accept_weights(optimizer: Any) -> None:
  """Has no warning follow of the weights that groups have now."""
  for watch in group_state.warnings_of(optimizer):
    watch.forget()


class GroupCallback(tf.keras.callbacks.Callback):
  """A callback for a compiled model whose optimizer may have groups.

  It serves models of the Keras that `tf.keras` is not, too.
  """

  def _does_nothing_in_batches(self) -> bool:
    """Returns what tf_keras asks, where the base class is that of Keras 3."""
    return False

  _implements_train_batch_hooks = _does_nothing_in_batches
  _implements_test_batch_hooks = _does_nothing_in_batches
  _implements_predict_batch_hooks = _does_nothing_in_batches

  def on_test_begin(self, logs: Any = None) -> None:
    """Warns, once, that evaluating the model blends its groups."""
    for watch in group_state.warnings_of(self.model.optimizer):
      watch.blends()

  def on_predict_begin(self, logs: Any = None) -> None:
    """Warns, once, that predicting with the model blends its groups."""
    self.on_test_begin()


class GroupMonitor(GroupCallback):
  """Judges each group by its own metric, as Keras' EarlyStopping does."""

  def __init__(self, monitor: str, mode: str) -> None:
    """Takes what Keras' EarlyStopping takes."""
    super().__init__()
    self.monitor = monitor
    self.mode = mode
    self._judges: list[Any] = []

  @property
  def best(self) -> list[float]:
    """The best value of each group."""
    return [float(judge.best) for judge in self._judges]

  def has_metrics(self, logs: Any) -> bool:
    """Whether the logs have the groups' metrics; the first time they have to.

    Later they have not where `GroupMetrics` leaves epochs out.
    """
    name = f"{self.monitor}/group_0"
    if name not in (logs or {}) and not self._judges:
      raise ValueError(
        f"{type(self).__name__}(monitor={self.monitor!r}) needs {name!r} in the"
        f" logs, which have {sorted(logs or {})}. Put"
        " GroupMetrics(validation_data) before it in the list of callbacks."
      )
    return name in (logs or {})

  def make_judges(self, num_groups: int, **options: Any) -> None:
    """Makes a callback of Keras for each group."""
    keras = group_models.keras_of(self.model)
    mode = _direction(keras, self.model, self.monitor, self.mode)
    for i in range(num_groups):
      judge = keras.callbacks.EarlyStopping(
        f"{self.monitor}/group_{i}", mode=mode, **options
      )
      judge.on_train_begin()
      self._judges.append(judge)


def _direction(keras: Any, model: Any, monitor: str, mode: str) -> str:
  """Returns `"min"` or `"max"`, as Keras finds it for the same metric."""
  probe = keras.callbacks.EarlyStopping(monitor, mode=mode, patience=9)
  probe.set_model(model)
  probe.on_train_begin()
  for epoch, value in enumerate((0.0, 1.0)):
    probe.on_epoch_end(epoch, {monitor: value})
  return "max" if probe.best == 1.0 else "min"
