"""Population based training: the worst groups continue from the best groups.

every few epochs   1. rank the groups by their metric
                   2. the worst groups copy weights and slots of the best
                   3. the copies continue with changed settings
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tf_cross_shard._src.core import per_group as per_group_lib
from tf_cross_shard._src.core import validation
from tf_cross_shard._src.core.inner import names as names_lib
from tf_cross_shard._src.fit import group_callback
from tf_cross_shard._src.replica_state import group_models
from tf_cross_shard._src.search import table as table_lib
from tf_cross_shard._src.search import trial_monitor

# Keras' settings that must be less than 1: momentums and decay rates of means.
_LESS_THAN_1: Final = ("beta_1", "beta_2", "ema_momentum", "momentum", "rho")


@dataclasses.dataclass(frozen=True)
class _Range:
  """How the copies of one setting change.

  Attributes:
    factors: Each copy is multiplied by one of them.
    lowest: The smallest value of the setting.
    highest: The largest value of the setting.
    is_less_than_1: Whether a factor that leads to 1 or more is not applied.
  """

  factors: Sequence[float]
  lowest: float
  highest: float
  is_less_than_1: bool

  @classmethod
  def of(cls, name: str, given: Any) -> "_Range":
    """Returns the range that `explore` gives for a setting.

    Raises:
      TypeError: If a number has the wrong type.
      ValueError: If a factor is not positive, or there is no value between the
        bounds.
    """
    factors, *bounds = given if _has_bounds(given) else (given,)
    if not all(map(validation.is_number, (*factors, *bounds))):
      raise TypeError(
        f"`explore` must contain numbers; {name!r} is {given!r}. Use for"
        " example [0.8, 1.25]."
      )
    if not (len(factors) and min(factors) > 0):
      raise ValueError(
        f"`explore` must contain positive factors; {name!r} is {given!r}. Pass"
        " `explore=None` to copy without changing settings."
      )
    lowest, highest = bounds or (-math.inf, math.inf)
    if not lowest <= highest:
      raise ValueError(
        "In `explore`, `lowest` must not exceed `highest`;"
        f" {name!r} is {given!r}. Use (factors, lowest, highest)."
      )
    return cls(factors, lowest, highest, not bounds and name in _LESS_THAN_1)

  def change(self, number: float, random: np.random.Generator) -> float:
    """Returns the setting of a copy."""
    factor = self.factors[int(random.integers(len(self.factors)))]
    changed = min(max(number * factor, self.lowest), self.highest)
    return number if self.is_less_than_1 and changed >= 1 else changed


def _has_bounds(given: Any) -> bool:
  """Returns whether a value of `explore` is (factors, lowest, highest)."""
  return len(given) == 3 and isinstance(given[0], Sequence)


class Population(trial_monitor.TrialMonitor):
  """Population based training: copies the best groups over the worst groups.

  Every few epochs, the worst groups, a fraction `share` of all groups, receive
  the weights and slots of the best groups: the worst group becomes a copy of
  the best group, the second worst group a copy of the second best, and so on.
  Each setting in `explore` is copied, too, and multiplied by one of its
  factors, which is chosen at random:

      setting of the target = setting of the source * factor

  A setting with bounds is clipped to them. Without bounds, a factor that would
  make a momentum or a decay rate (`momentum`, `beta_1`, `rho`, ...) 1 or more
  is not applied.

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
    table: The trials, one for each group; set when `fit` begins. The history
      of a trial contains the settings that its group had in each epoch.
    copied: All copies, in order: dictionaries with `epoch`, which counts from
      0, `source`, `target` and the new settings of the target.
    settings: The present settings of each group.

  References:
    Jaderberg et al., Population Based Training of Neural Networks, 2017 (arXiv
    1711.09846): exploit by truncation selection, explore by perturbation.
  """

  def __init__(
    self,
    monitor: str = "val_loss",
    every: int = 1,
    explore: "Mapping[str, Sequence[Any]] | Sequence[float] | None" = (
      0.8,
      1.25,
    ),
    share: float = 0.25,
    mode: group_callback.Mode = "auto",
    seed: int = 0,
    table: table_lib.Table | None = None,
  ) -> None:
    """Sets the rules for copying groups and changing settings.

    Args:
      monitor: The metric that decides, as `GroupMetrics` names it, without the
        suffix `/group_0`.
      every: The number of epochs between copies. Nothing is copied after the
        last epoch of `fit`.
      explore: Factors for the learning rate, such as `[0.5, 2.0]`. Each copy
        chooses one of them at random. To change several settings, pass a
        dictionary, `{"weight_decay": [0.5, 2.0], ...}`, with names from the
        table or names that `group_settings` accepts. To keep a setting between
        two bounds, pass the factors and the bounds: `{"dropout": ([0.8, 1.25],
        0.0, 0.5)}`. The target keeps its values of all other settings. None
        changes no setting.
      share: The fraction of the groups that are replaced, more than 0 and at
        most 0.5. At least one group is replaced.
      mode: `"min"`, `"max"`, or `"auto"` to let Keras decide by the metric.
      seed: The seed of the random choices. A choice depends on the seed and on
        the epoch only, so a run that resumes after a crash makes the same
        choices.
      table: The trials, one for each group, with the initial settings. The
        trials receive their metrics. None creates a table of the settings to
        explore, with the optimizer's values.

    Raises:
      TypeError: If a number has the wrong type.
      ValueError: If an argument is not valid.
    """
    super().__init__(monitor, mode)
    every = group_callback.check_count("every", every, 1, "epochs")
    seed = validation.check_integer("seed", seed, "Use for example 0.", 0)
    group_callback.check_number("share", share)
    if not 0.0 < share <= 0.5:
      raise ValueError(
        f"`share` must be more than 0 and at most 0.5; got {share!r}."
      )
    if explore is None:
      explore = {}
    elif not isinstance(explore, Mapping):
      explore = {"learning_rate": explore}
    ranges = {name: _Range.of(name, given) for name, given in explore.items()}
    names = list(explore) if table is None else table.names
    if not set(explore) <= set(names):
      [wrong, *_] = sorted(set(explore) - set(names))
      close = difflib.get_close_matches(wrong, names, 1)
      meant = f" Did you mean {close[0]!r}?" if close else ""
      raise ValueError(
        f"`explore` must name settings of `table`, {names}; got {wrong!r}."
        f"{meant}"
      )
    self.every = every
    self.explore = {name: list(explore[name]) for name in explore}
    self._ranges = ranges
    self.share = share
    self.seed = seed
    self._makes_table = table is None
    self._argument = "explore" if table is None else "table"
    if table is not None:
      self.table = table
    self.names = names
    self.copied: list[dict[str, Any]] = []
    self.settings: list[dict[str, float]] = []

  @property
  def learning_rates(self) -> list[float]:
    """The learning rate of each group; empty if it is not a setting."""
    return [s["learning_rate"] for s in self.settings if "learning_rate" in s]

  def on_train_begin(self, logs: Any = None) -> None:
    if self._makes_table:
      self._make_table(self._explored())
    super().on_train_begin(logs)
    groups = self.table.groups.num_groups
    if len(self.table) != groups:
      raise ValueError(
        f"`table` must have a trial for each of the {groups} groups; got"
        f" {len(self.table)} trials. For more trials, use callbacks.Halving."
      )
    self.copied = []
    self.settings = [dict(trial.settings) for trial in self.table]
    self.apply_settings(self.settings)

  def _explored(self) -> list[dict[str, float]]:
    """Returns the optimizer's values of the settings to explore, per group."""
    rows = self.read()
    unknown = set(self.names) - set(rows[0])
    if unknown:
      raise ValueError(
        f"`explore` names {sorted(unknown)}, but the optimizer has no such"
        " setting. Name numeric settings of `opt`, or pass a `table` with the"
        " settings of the model."
      )
    for name in self.names:
      if None in (own := [row[name] for row in rows]):
        raise ValueError(
          f"`explore` changes {name!r}, but its values in the groups are {own}."
          " Create the optimizer with a number for it."
        )
    self._check(rows)
    return rows

  def _make_table(self, rows: Sequence[Mapping[str, float]]) -> None:
    with self.model.distribute_strategy.scope():
      groups = names_lib.groups_of(self.model.optimizer, None)
      self.table = table_lib.Table(rows, groups)

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Records the metrics, and copies groups every few epochs."""
    last = (self.params or {}).get("epochs")
    if not self.begin(logs):
      return
    # Another callback may have changed learning rates.
    rows = [{**a, **b} for a, b in zip(self.settings, self.read(), strict=True)]
    self.note(range(len(self.table)), logs, rows)
    if (epoch + 1) % self.every:
      return
    self.improve(logs)
    if epoch + 1 != last:
      random = np.random.default_rng([self.seed, epoch])
      for source, target in self._pairs(logs):
        group_models.copy_group(
          source, target, self.model.optimizer, self.model
        )
        for name, explored in self._ranges.items():
          rows[target][name] = explored.change(rows[source][name], random)
        self.copied.append(
          {"epoch": epoch, "source": source, "target": target, **rows[target]}
        )
      self.apply_settings(rows)
    self.settings = rows

  def best_model(self, into: Any = None) -> Any:
    """Returns the group that was best in the last epoch, as a plain model.

    Call this when `fit` has ended. The model has the weights of the last epoch,
    because groups continue from each other.

    Args:
      into: A plain model that receives the weights, as for
        `replica_state.load_group`. None lets Keras clone the model.

    Returns:
      A plain Keras model. From now on, `table.value` returns the settings of
      the best group in all groups.

    Raises:
      ValueError: If no group has a value of the metric.
    """
    histories = [trial.history for trial in getattr(self, "table", ())]
    last = [self._sign * row[self.monitor][-1] for row in histories if row]
    if not np.isfinite(last).any():
      raise ValueError(
        f"No group has a finite {self.monitor!r}. Call fit first; `table` has"
        " the metrics of each epoch, if `fit` was called."
      )
    best = int(np.argmax(np.where(np.isfinite(last), last, -np.inf)))
    table_lib.results_of(self.table).assign([self.settings[best]] * len(last))
    with per_group_lib.as_group(0):
      return group_models.load_group(
        self.model, best, self.model.optimizer, into=into
      )

  def state(self) -> dict[str, Any]:
    own = [
      self.copied,
      self.settings,
      table_lib.results_of(self.table).to_list(),
    ]
    return {**super().state(), "happened": group_callback.to_array(own)}

  def set_state(self, state: dict[str, Any]) -> None:
    super().set_state(state)
    self.copied, self.settings, rows = group_callback.from_array(
      state["happened"]
    )
    # The optimizer's present settings need not be those that it began with.
    if self._makes_table:
      self._make_table([trial["settings"] for trial in rows[2:]])
    table_lib.results_of(self.table).from_list(rows)
    self.apply_settings(self.settings)

  def _pairs(self, logs: Any) -> list[tuple[int, int]]:
    """Returns (source, target) pairs of groups: the target copies the source.

    Groups with equal metrics do not copy each other.
    """
    number = len(self._numbers["best"])
    values = self._sign * np.array(
      [float(logs[f"{self.monitor}/group_{i}"]) for i in range(number)]
    )
    values[np.isnan(values)] = -np.inf  # A group with NaN is the worst.
    # The groups from the worst to the best.
    order = [int(i) for i in np.argsort(values, kind="stable")]
    replaced = min(max(1, int(self.share * number)), number // 2)
    pairs = zip(order[::-1][:replaced], order[:replaced], strict=True)
    return [
      (best, worst) for best, worst in pairs if values[best] > values[worst]
    ]
