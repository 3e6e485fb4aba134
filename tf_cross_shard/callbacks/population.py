"""Population based training: the worst groups go on from the best ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_cross_shard import trials
from tf_cross_shard.callbacks import base, trial_monitor
from tf_cross_shard.replica_state import group_models, group_state


class Population(trial_monitor.TrialMonitor):
  """Every few epochs, lets the worst groups go on from the best ones.

  With k the `share` of the groups, the k worst receive the weights and slots of
  the k best, the worst those of the best. Of each setting in `explore` they
  receive the best one's number too, times one of the factors.

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
    table: A trial for each group, once `fit` has begun.
    copied: What happened, in order: dictionaries of `epoch`, which counts from
      0, `source`, `target` and the target's new settings.
    settings: The settings of each group that are explored, as they are now.

  References:
    Jaderberg et al., Population Based Training of Neural Networks, 2017 (arXiv
    1711.09846): truncation selection, and the perturbation of settings.
  """

  def __init__(
    self,
    monitor: str = "val_loss",
    every: int = 1,
    explore: "Mapping[str, Sequence[float]] | Sequence[float] | None" = (
      0.8,
      1.25,
    ),
    share: float = 0.25,
    mode: str = "auto",
    seed: int = 0,
    table: trials.Table | None = None,
  ) -> None:
    """Takes what decides who copies whom.

    Args:
      monitor: A metric that `GroupMetrics` puts into the logs, without the
        `/group_0` behind it.
      every: The number of epochs from copy to copy; none follows the last.
      explore: What the learning rate is multiplied by, chosen by chance; or
        that of several settings, `{"weight_decay": [0.5, 2.0], ...}`, of those
        that `group_settings` takes, or of the table. What is not explored stays
        the target's own; so does all with None.
      share: The part of the groups that are replaced, at least one of them and
        at most one half.
      mode: `"min"`, `"max"`, or `"auto"` for what Keras knows of the metric.
      seed: Of what is chosen by chance. It depends on the epoch too, so that a
        run that goes on after a crash chooses the same.
      table: A trial for each group: the settings that they begin with. It
        notes what each comes to. None makes one of the settings to explore, as
        the optimizer has them.
    """
    super().__init__(monitor, mode)
    base.check_count("every", every, 1, "epochs")
    base.check_count("seed", seed, 0, "random numbers")
    base.check_number("share", share)
    if not 0.0 < share <= 0.5:
      raise ValueError(
        f"`share` must be more than 0 and at most 0.5; got {share!r}."
      )
    if explore is None:
      explore = {}
    elif not isinstance(explore, Mapping):
      explore = {"learning_rate": explore}
    for factors in explore.values():
      for factor in factors:
        base.check_number("explore", factor)
      if not (len(factors) and min(factors) > 0):
        raise ValueError(
          f"`explore` must hold positive numbers; got {explore!r}. None leaves"
          " settings as they are."
        )
    names = list(explore) if table is None else table.names
    if not set(explore) <= set(names):
      raise ValueError(
        f"`explore` must name settings of `table`, {names}; got {explore!r}."
      )
    self.every = every
    self.explore = {name: list(explore[name]) for name in explore}
    self.share = share
    self.seed = seed
    self._makes_table = table is None
    if table is not None:
      self.table = table
    self.names = names
    self.copied: list[dict[str, Any]] = []
    self.settings: list[dict[str, float]] = []

  @property
  def learning_rates(self) -> list[float]:
    """The rate of each group, if rates are explored."""
    return [s["learning_rate"] for s in self.settings if "learning_rate" in s]

  def on_train_begin(self, logs: Any = None) -> None:
    """Forgets what another `fit` left; makes a table if none was given."""
    if self._makes_table:
      self._make_table(self._explored())
    super().on_train_begin(logs)
    groups = self.table.groups.num_groups
    if len(self.table) != groups:
      raise ValueError(
        f"`table` must have a trial for each of the {groups} groups; got"
        f" {len(self.table)}. Halving takes more."
      )
    self.copied = []
    self.settings = [dict(trial.settings) for trial in self.table]
    self.give(self.settings)

  def _explored(self) -> list[dict[str, float]]:
    """Returns what is explored of each group, as the optimizer has it."""
    rows = self.read()
    unknown = set(self.names) - set(rows[0])
    if unknown:
      raise ValueError(
        f"`explore` has {sorted(unknown)}, which the optimizer has not. Name"
        " numbers of `opt`; settings of the model need `table`."
      )
    self._check(rows)
    return rows

  def _make_table(self, rows: Sequence[Mapping[str, float]]) -> None:
    """Makes a trial for each group."""
    with self.model.distribute_strategy.scope():
      groups = group_state.groups_of(self.model.optimizer, None)
      self.table = trials.Table(rows, groups)

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Copies groups, if it is time."""
    last = (self.params or {}).get("epochs")
    if not self.begin(logs):
      return
    self.note(range(len(self.table)), logs)
    if (epoch + 1) % self.every:
      return
    self.improve(logs)
    # Other callbacks may have set rates.
    rows = [{**a, **b} for a, b in zip(self.settings, self.read(), strict=True)]
    if epoch + 1 != last:
      random = np.random.default_rng([self.seed, epoch])
      for source, target in self._pairs(logs):
        group_models.copy_group(
          source, target, self.model.optimizer, self.model
        )
        for name, factors in self.explore.items():
          factor = factors[random.integers(len(factors))]
          rows[target][name] = rows[source][name] * factor
        self.copied.append(
          {"epoch": epoch, "source": source, "target": target, **rows[target]}
        )
      self.give(rows)
    self.settings = rows

  def state(self) -> dict[str, Any]:
    """Returns what happened, too."""
    own = [self.copied, self.settings, self.table.to_list()]
    return {**super().state(), "happened": base.to_array(own)}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from what happened."""
    super().set_state(state)
    self.copied, self.settings, rows = base.from_array(state["happened"])
    if self._makes_table:  # A `fit` before may have changed what they were.
      self._make_table([trial["settings"] for trial in rows[2:]])
    self.table.from_list(rows)
    self.give(self.settings)

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
