"""The kinds of update: what each member of a group sums, keeps and applies.

             reduce               returns        clips  apply
replicated   all-reduce           sums           -      opt.update(weights)
tables       gather rows          sums of rows   -      opt.update(rows)
elementwise  reduce-scatter       parts of sums  c, g   opt.update(shards)
by variable  reduce to the owner  sums it owns   g      opt.update(own weights)

`reduce` receives this replica's gradients of the weights, which `StepPipeline`
has clipped by the CrossShardOptimizer's limits. `cut_sums` receives the group's
sums of the weights, and returns the same. Both clip by the limits c
(`clipnorm`) and g (`global_clipnorm`) of `opt` where `opt` would see parts
only. `opt` clips by its other limits in `apply`; for tables, `embedding_tables`
does it instead. Sharded updates gather the weights at the end.

This module contains the interface and the replicated update, which is
data-parallel training as usual. See `embedding_tables`, `elementwise_update`
(elementwise) and `by_variable_update` (by variable) for the others.
"""

import abc
from collections.abc import Sequence
from typing import Any

from tf_cross_shard._src.core import context as context_lib
from tf_cross_shard._src.core import divided_rows
from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.gradients.clipping import Gradient
from tf_cross_shard._src.core.reduce import wire as wire_lib
from tf_cross_shard._src.core.update import rows as rows_lib
from tf_cross_shard._src.core.update import saved_state


class Update(context_lib.Stage, abc.ABC):
  """How a group sums gradients, and how its members apply the sums.

  Attributes:
    sharding: How the weights are divided: "elementwise" or "by_variable"; None
      if every member updates all weights.
    wire: Sums gradients over the group.
    tables: The embedding tables that are updated by rows.
    checkpointed: The object whose children a checkpoint saves as the children
      of the optimizer.
  """

  sharding: str | None = None

  def __init__(
    self,
    context: context_lib.Context,
    wire: wire_lib.Wire,
    tables: rows_lib.Tables,
  ) -> None:
    """Creates an update that sums gradients with `wire`."""
    super().__init__(context)
    self.wire = wire
    self.tables = tables
    self.checkpointed: Any = self.inner.optimizer

  @abc.abstractmethod
  def build(self, variables: Sequence[Any]) -> Any:
    """Creates the slots of the wrapped optimizer.

    Returns:
      The state with whole slots, a `saved_state.PlainState`, if the optimizer
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

    `overwrites` says for each variable whether its gradient is its next value.
    """

  @abc.abstractmethod
  def cut_sums(
    self, sums: Sequence[Gradient], variables: Sequence[Any]
  ) -> Sequence[Gradient]:
    """Returns this member's part of sums that all members have."""

  @abc.abstractmethod
  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: rows_lib.ApplyOnce,
  ) -> None:
    """Updates the weights.

    Afterwards all members have the same weights.

    Args:
      sums: What `reduce` or `cut_sums` returned.
      variables: The user's weights.
      apply_once: Lets the wrapped optimizer apply sums to the variables
        that it was built on: the weights or, with elementwise sharding, shards.
    """

  @abc.abstractmethod
  def write_averages(self, variables: Sequence[Any]) -> None:
    """Ends `fit`: writes moving averages into the variables."""

  def all_reduce(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    overwrites: Sequence[bool],
  ) -> list[Gradient]:
    """Sums gradients over the group; averages those that overwrite a variable.

        sum[v] = sum over r in group of grads_r[v]
        sum[v] = the same / group_size, where grads_r[v] is the next value of v
        sum[v] = grads_r[v], where r owns rows of v (`divided_rows`)

    `overwrites` says for each gradient whether it is a next value.
    """
    if divided_rows.any_of(variables):
      is_owned = [divided_rows.of(v) is not None for v in variables]
      others = [
        None if own else grad for grad, own in zip(grads, is_owned, strict=True)
      ]
      sums = self._all_reduce_unowned(others, overwrites)
      return [
        grad if own else total
        for grad, total, own in zip(grads, sums, is_owned, strict=True)
      ]
    return self._all_reduce_unowned(grads, overwrites)

  def _all_reduce_unowned(
    self, grads: Sequence[Gradient], overwrites: Sequence[bool]
  ) -> list[Gradient]:
    """Sums or averages gradients of variables that are not divided."""
    # Values are sent exactly. Gradients may be rounded to `wire_dtype`.
    values = [
      g for g, is_value in zip(grads, overwrites, strict=True) if is_value
    ]
    sums, summed_values = self.wire.sum(
      [None if v else g for g, v in zip(grads, overwrites, strict=True)],
      exact=values,
    )
    mean = 1.0 / self.engine.groups.group_size
    means = (row_sparse.times(value, mean) for value in summed_values)
    return [
      next(means) if is_value else total
      for total, is_value in zip(sums, overwrites, strict=True)
    ]


class ReplicatedUpdate(Update):
  """Every member keeps all of the state and updates all of the weights."""

  def build(self, variables: Sequence[Any]) -> saved_state.PlainState | None:
    """Creates the slots of all variables.

    Returns:
      The state with whole slots if this call creates slots of divided tables.
    """
    is_built = self.inner.is_built
    self.inner.build(variables)
    if is_built or not divided_rows.any_of(variables):
      return None
    # The slots of a divided table are divided in the same way.
    for variable in variables:
      if (owned := divided_rows.of(variable)) is not None:
        for slot in self.inner.slots(variable).values():
          divided_rows.mark(slot, owned)
    if self.engine.groups.group_size == 1:
      return None
    self.checkpointed = saved_state.CheckpointView({}, self.inner.optimizer)
    return saved_state.of_divided_tables(self.inner, variables, self.engine)

  def reduce(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    overwrites: Sequence[bool],
  ) -> Sequence[Gradient]:
    """Returns the group's sums, by an all-reduce."""
    return self.all_reduce(grads, variables, overwrites)

  def cut_sums(
    self, sums: Sequence[Gradient], variables: Sequence[Any]
  ) -> Sequence[Gradient]:
    """Returns the sums: each member applies all of them."""
    del variables
    return sums

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: rows_lib.ApplyOnce,
  ) -> None:
    """Applies the sums to the variables."""
    self.tables.apply(sums, variables, apply_once)

  def write_averages(self, variables: Sequence[Any]) -> None:
    """Writes moving averages into the variables."""
    self.inner.write_averages(variables)
