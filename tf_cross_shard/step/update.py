"""How a group keeps the optimizer's state and updates the weights.

replicated     reduce: all-reduce        apply: opt.update(weights)
tables         reduce: gather rows       apply: opt.update(rows)
flat parts     reduce: reduce-scatter    apply: cut, opt.update(part), gather
by owners      reduce: to the owner      apply: opt.update(own), gather
"""

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tf_cross_shard import settings as settings_lib
from tf_cross_shard.collectives import base as engines
from tf_cross_shard.gradients import indexed_slices
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base
from tf_cross_shard.step import noise_scale, reduction, row_update


class Update(abc.ABC):
  """The way in which a group sums, and its members apply the sums."""

  def __init__(
    self,
    settings: settings_lib.Settings,
    inner: base.InnerOptimizer,
    engine: engines.Engine,
    wire: reduction.Wire,
    noise: noise_scale.NoiseScale,
    tables: row_update.Tables,
  ) -> None:
    """Keeps the stages that it has to do with, and prepares itself."""
    self._settings = settings
    self._inner = inner
    self._engine = engine
    self._wire = wire
    self._noise = noise
    self._tables = tables
    self._prepare()

  @abc.abstractmethod
  def _prepare(self) -> None:
    """Checks that the encapsulated optimizer can be updated in this way."""

  @abc.abstractmethod
  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots of the encapsulated optimizer."""

  @abc.abstractmethod
  def reduce(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    calls: noise_scale.Calls,
  ) -> Sequence[Gradient]:
    """Returns the group's sums of what this member applies.

    Args:
      grads: This replica's own.
      variables: Their variables.
      calls: What each of them is the sum or mean of.
    """

  @abc.abstractmethod
  def own_part(
    self, sums: Sequence[Gradient], variables: Sequence[Any]
  ) -> Sequence[Gradient]:
    """Returns what this member applies of sums that all members have."""

  @abc.abstractmethod
  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: row_update.ApplyOnce,
  ) -> None:
    """Updates the weights of this member, as all others do."""

  @abc.abstractmethod
  def write_averages(self, variables: Sequence[Any]) -> None:
    """Ends `fit`: writes moving averages into the variables."""

  def all_reduce(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    calls: noise_scale.Calls,
  ) -> list[Gradient]:
    """Sums gradients; averages the values that take a gradient's place."""
    is_value = list(map(self._inner.is_overwritten, variables))
    values = [g for g, value in zip(grads, is_value, strict=True) if value]
    grads = [g for g, value in zip(grads, is_value, strict=True) if not value]
    sums, beside = self._wire.sum(
      grads,
      [v for v, value in zip(variables, is_value, strict=True) if not value],
      beside=[*values, *self._noise.of_replica(grads, calls)],
    )
    self._noise.after_sum(sums, beside[len(values) :], calls)
    mean = 1.0 / self._engine.groups.group_size
    averages = (indexed_slices.times(value, mean) for value in beside)
    rest = iter(sums)
    return [next(averages if value else rest) for value in is_value]


class ReplicatedUpdate(Update):
  """Every member keeps all of the state and updates all of the weights."""

  def _prepare(self) -> None:
    """Does nothing: every optimizer can."""

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots of all variables."""
    self._inner.build(variables)

  def reduce(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    calls: noise_scale.Calls,
  ) -> Sequence[Gradient]:
    """Returns the group's sums."""
    return self.all_reduce(grads, variables, calls)

  def own_part(
    self, sums: Sequence[Gradient], variables: Sequence[Any]
  ) -> Sequence[Gradient]:
    """Returns the sums."""
    del variables
    return sums

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: row_update.ApplyOnce,
  ) -> None:
    """Applies the sums to the variables."""
    self._tables.apply(sums, variables, apply_once)

  def write_averages(self, variables: Sequence[Any]) -> None:
    """Writes moving averages into the variables."""
    self._inner.write_averages(variables)


@contextlib.contextmanager
def without_clipping(optimizer: Any, *limits: str) -> Iterator[None]:
  """Keeps an optimizer from clipping sums that are clipped already.

  Args:
    optimizer: The innermost one.
    limits: The names of the limits that it is not to see.
  """
  before = {name: getattr(optimizer, name) for name in limits}
  vars(optimizer).update(dict.fromkeys(limits))
  try:
    yield
  finally:
    vars(optimizer).update(before)
