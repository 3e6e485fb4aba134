"""The update of data-parallel training: every member updates all weights.

                reduce               returns             apply
    replicated  all-reduce           sums                opt.update(weights)
    sharded     reduce-scatter       parts of sums       opt.update(shards)

`reduce` receives this replica's gradients of the weights. `cut` receives the
group's sums instead. The sharded update gathers the weights at the end.
"""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tf_cross_shard._src.core.gradients import clipping
from tf_cross_shard._src.core.reduce import gradient_reducer
from tf_cross_shard._src.core.update import rows as rows_lib
from tf_cross_shard._src.core.variables import Gradient, Variable
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


class Update:
  """How a group sums gradients, and how its members apply the sums.

  This class is the replicated update, and the base of the sharded one.
  """

  sharding: str | None = None  # How the weights are divided, for `describe`.

  def __init__(
    self,
    wrapped: wrapped_lib.WrappedOptimizer,
    reducer: gradient_reducer.GradientReducer,
    tables: rows_lib.Tables,
  ) -> None:
    self.wrapped = wrapped
    self.reducer = reducer
    self.engine = reducer.engine
    self.tables = tables

  def build(self, variables: Sequence[Variable]) -> None:
    self.wrapped.build(variables)

  def reduce(
    self, grads: Sequence[Gradient], variables: Sequence[Variable]
  ) -> Sequence[Gradient]:
    """Returns the group's sums, or the part that this member applies."""
    del variables
    return self.reducer.reduce(grads)

  def cut(
    self, sums: Sequence[Gradient], variables: Sequence[Variable]
  ) -> Sequence[Gradient]:
    """Returns this member's part of sums that all members have."""
    del variables
    return sums

  def read_weights(self) -> None:
    """Copies the current weights into this member's shards, if it has any."""

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Variable],
    through_apply: bool,
  ) -> None:
    """Lets the user's optimizer update the weights, or this member's part."""
    with contextlib.ExitStack() as rare:
      limits = clipping.limits_of(self.wrapped.base_optimizer)
      if limits["global_clipnorm"] and wrapped_lib.has_several_dtypes(sums):
        rare.enter_context(self.wrapped.clipping_rows(sums_rows=False))
      if any(isinstance(total, tf.IndexedSlices) for total in sums):
        sums = rare.enter_context(self.tables.in_force(sums, variables))
      self.wrapped.apply(sums, variables, through_apply, self.tables.row_step)

  def gather_weights(self, sums: Sequence[Gradient]) -> None:
    """Ends a step: gives all members of the group the same weights."""
    del sums
    wrapped = self.wrapped
    self.engine.broadcast_from_first(
      [*wrapped.trainable_variables, *wrapped.variables]
    )

  def write_averages(self, variables: Sequence[Variable]) -> None:
    """Ends `fit`: writes moving averages into the variables."""
    self.wrapped.write_averages(variables)
