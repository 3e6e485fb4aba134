"""Settings of the wrapped optimizer that differ between groups.

    groups              0      1      2
    weight_decay      0.0    0.01    0.1

While a replica applies sums, the attribute of the wrapped optimizer (such
as `weight_decay`) is set to the number of the replica's group. So every
optimizer class, kernel and kind of update reads this number.
"""

import contextlib
import difflib
from typing import Any, Final

from tf_cross_shard._src.core import context as context_lib
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core.inner import overriding
from tf_cross_shard._src.core.reduce import isolation


class GroupSettings(context_lib.Stage):
  """The numbers of the calling replica's group."""

  def __init__(self, context: context_lib.Context) -> None:
    """Raises an error for numbers that are not valid; see `check`."""
    check(context)
    super().__init__(context)

  def limits(self) -> dict[str, Any]:
    """Returns the limits that clip this replica's own gradients, by name."""
    own = self._values_of_this_replica()
    return {
      name: own.get(name, limit) for name, limit in self.settings.limits.items()
    }

  def in_force(self) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which the optimizer has this group's numbers."""
    own = {
      name: number
      for name, number in self._values_of_this_replica().items()
      if name not in settings_lib.LIMITS
    }
    return overriding.overriding(self.inner.innermost, **own)

  def _values_of_this_replica(self) -> dict[str, float]:
    """Returns the numbers of the calling replica's group."""
    numbers = self.settings.group_settings
    if not numbers:
      return {}
    # The id is None where there is only one replica.
    replica = isolation.replica_id() or 0
    group = self.engine.groups.index_of(replica)
    return {name: values[group] for name, values in numbers.items()}


# Numbers that an optimizer does not read in its update, but when it is built,
# when it scales the loss, or when it counts calls.
_NOT_IN_UPDATE: Final = (
  "ema_overwrite_frequency",
  "gradient_accumulation_steps",
  "initial_accumulator_value",
  "loss_scale_factor",
)


def check(context: context_lib.Context) -> None:
  """Raises an error unless `group_settings` can be applied.

  Raises:
    NotImplementedError: If all replicas run one program, as on a TPU.
    ValueError: If there are not as many numbers as groups, or if the optimizer
      has no such setting.
  """
  numbers = context.settings.group_settings or {}
  groups = context.engine.groups
  if numbers and context.engine.is_spmd:
    raise NotImplementedError(
      f"`group_settings` is {numbers}, but it does not work on TPUs, where all"
      " replicas run one program. Use `per_group` in the model, and"
      " schedules.PerGroup for learning rates."
    )
  for name, values in numbers.items():
    if len(values) != groups.num_groups:
      raise ValueError(
        "`group_settings` must have a number for each of the"
        f" {groups.num_groups} groups {groups.to_lists()}; {name!r} is"
        f" {values}."
      )
    if name not in settings_lib.LIMITS:
      _check_setting(context.inner.innermost, name, values)


def _check_setting(optimizer: Any, name: str, values: list[float]) -> None:
  """Raises `ValueError` unless the optimizer's setting can be replaced."""
  kind = type(optimizer).__name__
  if name == "learning_rate":
    raise ValueError(
      "`group_settings` contains 'learning_rate', which may be a schedule. Use"
      f" {kind}(schedules.PerGroup({values}))."
    )
  if name in _NOT_IN_UPDATE:
    raise ValueError(
      f"`group_settings` contains {name!r}: {values}, but only settings that"
      f" {kind} reads in its update can differ between groups. Pass"
      f" {kind}({name}=...): this setting has one value for all groups."
    )
  if name not in vars(optimizer):
    known = [
      *(x for x in vars(optimizer) if not x.startswith("_")),
      *settings_lib.LIMITS,
    ]
    close = difflib.get_close_matches(name, known, 1)
    remedy = f"Did you mean {close[0]!r}?" if close else f"Use one of {known}."
    raise ValueError(
      f"`group_settings` contains {name!r}, but {kind} has no such setting."
      f" {remedy}"
    )
  own = vars(optimizer)[name]
  if isinstance(own, bool) or not isinstance(own, (int, float)):
    raise ValueError(
      f"`group_settings` contains {name!r}, but {kind}.{name} is {own!r}, and"
      " only numeric settings of `opt` can differ between groups. Set"
      f" {kind}({name}=...) to one of the numbers in `group_settings`."
    )
  # If the setting is 0, Keras creates no slot (momentum), or traces no
  # operation (weight decay).
  if not own and any(values):
    raise ValueError(
      f"`group_settings` contains {name!r}: {values}, but {kind}.{name} is"
      f" {own!r}. With 0, Keras does not create the slots or operations that"
      " the other values need. Create `opt` with one of the nonzero numbers."
    )
