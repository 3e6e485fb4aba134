"""The kinds of update: what each member of a group sums, keeps and applies.

                 reduce                 apply
replicated       all-reduce             opt.update(weights)
tables           gather rows            opt.update(rows in the batch)
elementwise      reduce-scatter         opt.update(own part), gather all parts
by variable      reduce to the owner    opt.update(own weights), gather

This module contains the interface and the replicated update, which is
data-parallel training as usual. See `embedding_tables`, `flat_update`
(elementwise) and `owner_update` (by variable) for the others.
"""

import abc
from collections.abc import Sequence
from typing import Any

from tf_cross_shard._src.core import context as context_lib
from tf_cross_shard._src.core.collectives import wire as wire_lib
from tf_cross_shard._src.core.gradients import indexed_slices
from tf_cross_shard._src.core.gradients.clipping import Gradient
from tf_cross_shard._src.core.update import embedding_tables


class Update(context_lib.Stage, abc.ABC):
  """How a group sums gradients, and how its members apply the sums."""

  def __init__(
    self,
    context: context_lib.Context,
    wire: wire_lib.Wire,
    tables: embedding_tables.Tables,
  ) -> None:
    """Creates an update.

    Args:
      context: The settings, the encapsulated optimizer and the engine.
      wire: Sums gradients over the group, in the dtype in which they are sent.
      tables: Knows and updates the embedding tables that are updated by rows.
    """
    super().__init__(context)
    self._wire = wire
    self._tables = tables

  @property
  def checkpointed(self) -> Any:
    """The object whose children a checkpoint saves as the optimizer's."""
    return self.encapsulated.optimizer

  @abc.abstractmethod
  def build(self, variables: Sequence[Any]) -> Any:
    """Creates the slots of the encapsulated optimizer.

    Returns:
      The state with whole slots, a `plain_state.PlainState`, if the optimizer
      keeps its slots in shards; otherwise None.
    """

  @abc.abstractmethod
  def reduce(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    overwrites: Sequence[bool],
  ) -> Sequence[Gradient]:
    """Returns the group's sums, or the part of them that this member applies.

    Args:
      grads: This replica's own gradients.
      variables: The variables of the gradients.
      overwrites: For each variable, whether its gradient is its next value.
    """

  @abc.abstractmethod
  def own_part(
    self, sums: Sequence[Gradient], variables: Sequence[Any]
  ) -> Sequence[Gradient]:
    """Returns this member's part of sums that all members have."""

  @abc.abstractmethod
  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: embedding_tables.ApplyOnce,
  ) -> None:
    """Updates the weights. Afterwards all members have the same weights.

    Args:
      sums: What `reduce` or `own_part` returned.
      variables: All variables of the step.
      apply_once: Lets the encapsulated optimizer apply sums to variables.
    """

  @abc.abstractmethod
  def write_averages(self, variables: Sequence[Any]) -> None:
    """Ends `fit`: writes moving averages into the variables."""

  def all_reduce(
    self, grads: Sequence[Gradient], overwrites: Sequence[bool]
  ) -> list[Gradient]:
    """Sums gradients over the group; averages those that overwrite a variable.

        sum[v] = sum over r in group of grads_r[v]
        sum[v] = the same / group_size, where grads_r[v] is the next value of v

    Args:
      grads: This replica's own gradients.
      overwrites: For each gradient, whether it is its variable's next value.
    """
    # Values are sent exactly. Gradients may be rounded to `wire_dtype`.
    values = [
      g for g, is_value in zip(grads, overwrites, strict=True) if is_value
    ]
    sums, summed_values = self._wire.sum(
      [None if v else g for g, v in zip(grads, overwrites, strict=True)],
      exact=values,
    )
    mean = 1.0 / self.engine.groups.group_size
    means = (indexed_slices.times(value, mean) for value in summed_values)
    return [
      next(means) if is_value else total
      for total, is_value in zip(sums, overwrites, strict=True)
    ]


class ReplicatedUpdate(Update):
  """Every member keeps all of the state and updates all of the weights."""

  def build(self, variables: Sequence[Any]) -> None:
    """Creates the slots of all variables."""
    self.encapsulated.build(variables)

  def reduce(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    overwrites: Sequence[bool],
  ) -> Sequence[Gradient]:
    """Returns the group's sums, by an all-reduce."""
    del variables
    return self.all_reduce(grads, overwrites)

  def own_part(
    self, sums: Sequence[Gradient], variables: Sequence[Any]
  ) -> Sequence[Gradient]:
    """Returns the sums: each member applies all of them."""
    del variables
    return sums

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: embedding_tables.ApplyOnce,
  ) -> None:
    """Applies the sums to the variables."""
    self._tables.apply(sums, variables, apply_once)

  def write_averages(self, variables: Sequence[Any]) -> None:
    """Writes moving averages into the variables."""
    self.encapsulated.write_averages(variables)
