"""Settings of the encapsulated optimizer that differ between groups.

    groups              0      1      2
    weight_decay      0.0    0.01    0.1     each group's own, in its replicas

A replica that applies sums finds its group's number where the optimizer keeps
its own, so that every class, kernel and kind of update reads it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from tf_cross_shard import settings as settings_lib
from tf_cross_shard.collectives import base as engines
from tf_cross_shard.collectives import replica_isolation
from tf_cross_shard.inner_optimizer import base


class GroupSettings:
  """Each group's numbers, in whichever replica asks."""

  def __init__(
    self,
    settings: settings_lib.Settings,
    inner: base.InnerOptimizer,
    engine: engines.Engine,
  ) -> None:
    """Checks the numbers.

    Raises:
      NotImplementedError: If the replicas are one program.
      ValueError: If there are not as many numbers as groups, or nothing of
        their name to differ in.
    """
    numbers = settings.group_settings or {}
    if numbers and engine.is_one_program:
      raise NotImplementedError(
        f"`group_settings` is {numbers}, and replicas of a TPU are one program"
        " with one number for all. Use `per_group` in the model, and"
        " schedules.PerGroup for learning rates."
      )
    groups = engine.groups.num_groups
    for name, values in numbers.items():
      if len(values) != groups:
        raise ValueError(
          f"`group_settings` must have a number for each of the {groups} groups"
          f" {engine.groups.to_lists()}; {name!r} has {values}."
        )
      if name not in settings_lib.LIMITS:
        _check_own(base.innermost(inner.optimizer), name, values)
    self._numbers = numbers
    self._inner = inner
    self._engine = engine

  def limits(self, settings: settings_lib.Settings) -> dict[str, Any]:
    """Returns the limits of this replica's own gradients, by their names."""
    own = self._own()
    return {
      name: own.get(name, limit) for name, limit in settings.limits.items()
    }

  @contextlib.contextmanager
  def in_force(self) -> Iterator[None]:
    """A context in which the optimizer has the numbers of this group."""
    attributes = vars(base.innermost(self._inner.optimizer))
    own = {
      name: number
      for name, number in self._own().items()
      if name not in settings_lib.LIMITS
    }
    before = {name: attributes[name] for name in own}
    attributes.update(own)
    try:
      yield
    finally:
      attributes.update(before)

  def _own(self) -> dict[str, float]:
    """Returns the numbers of the calling replica's group."""
    if not self._numbers:
      return {}
    replica = replica_isolation.replica_id() or 0  # None: the only one.
    group = self._engine.groups.index_of(replica)
    return {name: values[group] for name, values in self._numbers.items()}


def _check_own(optimizer: Any, name: str, values: list[float]) -> None:
  """Raises `ValueError` unless an optimizer can have other numbers."""
  kind = type(optimizer).__name__
  if name == "learning_rate":
    raise ValueError(
      "`group_settings` holds 'learning_rate', which may be a schedule. Use"
      f" {kind}(schedules.PerGroup({values}))."
    )
  own = vars(optimizer).get(name)
  if isinstance(own, bool) or not isinstance(own, (int, float)):
    raise ValueError(
      f"`group_settings` holds {name!r}, and {kind}.{name} is {own!r}. It may"
      " hold settings of `opt` that are numbers; give `opt` one of the"
      " groups'."
    )
  # Keras makes slots, and leaves out operations, by what it is built with.
  if not own and any(values):
    raise ValueError(
      f"`group_settings` holds {name!r}: {values}, and {kind}.{name} is"
      f" {own!r}, with which it has no slots for others. Give `opt` one of the"
      " groups' that is not 0."
    )
