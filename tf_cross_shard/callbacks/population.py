"""Population based training: the worst groups go on from the best ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_cross_shard.callbacks import base, group_rates
from tf_cross_shard.replica_state import group_models


class Population(base.GroupMonitor):
  """Every few epochs, lets the worst groups go on from the best ones.

  With k the `share` of the groups, the k worst receive the weights and slots of
  the k best, the worst those of the best, and the rate of the group that they
  come from, times one of the numbers of `explore`.

  >>> import numpy as np, tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, callbacks, schedules
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   sgd = tf.keras.optimizers.SGD(schedules.PerGroup([0.1, 0.001]))
  ...   model.compile(
  ...     CrossShardOptimizer(sgd, group_assignment=[[0], [1]]), "mse"
  ...   )
  >>> x = np.ones([4, 1], "float32")
  >>> population = callbacks.Population(every=2, explore=[0.5])
  >>> _ = model.fit(
  ...   *(x, 5 * x),
  ...   epochs=3,
  ...   verbose=0,
  ...   callbacks=[callbacks.GroupMetrics((x, 5 * x)), population],
  ... )
  >>> [(c["epoch"], c["source"], c["target"]) for c in population.copied]
  [(1, 0, 1)]
  >>> [round(rate, 4) for rate in population.learning_rates]
  [0.1, 0.05]

  Attributes:
    copied: What happened, in order: dictionaries of `epoch`, which counts from
      0, `source`, `target` and the target's new `learning_rate`.

  References:
    Jaderberg et al., Population Based Training of Neural Networks, 2017 (arXiv
    1711.09846): truncation selection, and the perturbation of rates.
  """

  def __init__(
    self,
    monitor: str = "val_loss",
    every: int = 1,
    explore: Sequence[float] | None = (0.8, 1.25),
    share: float = 0.25,
    mode: str = "auto",
    seed: int = 0,
  ) -> None:
    """Takes what decides who copies whom.

    Args:
      monitor: A metric that `GroupMetrics` puts into the logs, without the
        `/group_0` behind it.
      every: The number of epochs from copy to copy; none follows the last.
      explore: What the rate is multiplied by, chosen by chance; None leaves the
        target its own rate.
      share: The part of the groups that are replaced, at least one of them and
        at most one half.
      mode: `"min"`, `"max"`, or `"auto"` for what Keras knows of the metric.
      seed: Of what is chosen by chance. It depends on the epoch too, so that a
        run that goes on after a crash chooses the same.
    """
    super().__init__(monitor, mode)
    base.check_count("every", every, 1, "epochs")
    base.check_count("seed", seed, 0, "random numbers")
    base.check_number("share", share)
    if not 0.0 < share <= 0.5:
      raise ValueError(
        f"`share` must be more than 0 and at most 0.5; got {share!r}."
      )
    factors = None if explore is None else list(explore)
    for factor in factors or ():
      base.check_number("explore", factor)
    if factors is not None and not (factors and min(factors) > 0):
      raise ValueError(
        f"`explore` must hold positive numbers; got {explore!r}. None leaves"
        " rates as they are."
      )
    self.every = every
    self.explore = factors
    self.share = share
    self.seed = seed
    self.copied: list[dict[str, Any]] = []
    self.learning_rates: list[float] = []

  def set_model(self, model: Any) -> None:
    """Makes rates ones that can be set, where they are to be."""
    super().set_model(model)
    if self.explore is not None:
      group_rates.prepare(model, "Population(explore=)")

  def on_train_begin(self, logs: Any = None) -> None:
    """Forgets what another `fit` left."""
    super().on_train_begin(logs)
    self.copied, self.learning_rates = [], []

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Copies groups, if it is time."""
    last = (self.params or {}).get("epochs")
    if not self.has_metrics(logs) or (epoch + 1) % self.every:
      return
    whole = self.copies()
    self.begin(whole.groups.num_groups)
    self.improve(logs)
    rates = [] if self.explore is None else group_rates.read(self.model, whole)
    if epoch + 1 != last:
      random = np.random.default_rng([self.seed, epoch])
      for source, target in self._pairs(logs):
        group_models.copy_group(
          source, target, self.model.optimizer, self.model
        )
        if self.explore is not None:
          factor = self.explore[random.integers(len(self.explore))]
          rates[target] = rates[source] * factor
        self.copied.append(
          {
            "epoch": epoch,
            "source": source,
            "target": target,
            "learning_rate": rates[target] if rates else None,
          }
        )
      if rates:
        group_rates.write(self.model, whole, rates)
    self.learning_rates = rates

  def state(self) -> dict[str, Any]:
    """Returns what happened, too."""
    rows = [
      [float("nan") if v is None else v for v in c.values()]
      for c in self.copied
    ]
    return {**super().state(), "copied": np.array(rows, float).reshape(-1, 4)}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from what happened."""
    super().set_state(state)
    self.copied = [
      {
        "epoch": int(epoch),
        "source": int(source),
        "target": int(target),
        "learning_rate": None if np.isnan(rate) else float(rate),
      }
      for epoch, source, target, rate in state["copied"]
    ]

  def _pairs(self, logs: Any) -> list[tuple[int, int]]:
    """Returns who is copied to whom; of equal groups none is worse."""
    number = len(self._numbers["best"])
    values = self._sign * np.array(
      [float(logs[f"{self.monitor}/group_{i}"]) for i in range(number)]
    )
    values[np.isnan(values)] = -np.inf  # They are the worst.
    order = [int(i) for i in np.argsort(values, kind="stable")]
    replaced = min(max(1, int(self.share * number)), number // 2)
    pairs = zip(order[::-1][:replaced], order[:replaced], strict=True)
    return [
      (best, worst) for best, worst in pairs if values[best] > values[worst]
    ]
