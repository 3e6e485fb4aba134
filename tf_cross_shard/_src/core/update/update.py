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
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import context as context_lib
from tf_cross_shard._src.core import owned_rows
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.collectives import wire as wire_lib
from tf_cross_shard._src.core.encapsulated import fused_update, kernels
from tf_cross_shard._src.core.gradients import indexed_slices
from tf_cross_shard._src.core.gradients.clipping import Gradient
from tf_cross_shard._src.core.update import embedding_tables, plain_state


@dataclasses.dataclass(frozen=True)
class VariableUpdate:
  """The effect of a step on one variable: a row of `optimizer.describe()`.

  `CrossShardOptimizer.describe` documents the fields.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
  updated_by: str
  reason: str
  elements: tuple[int, ...]
  owner: int | None
  bytes_sent: int | None
  state_bytes: int


class Update(context_lib.Stage, abc.ABC):
  """How a group sums gradients, and how its members apply the sums.

  Attributes:
    sharding: How the weights are divided: "elementwise" or "by_variable"; None
      if every member updates all weights.
    checkpointed: The object whose children a checkpoint saves as the
      optimizer's.
  """

  sharding: str | None = None

  def __init__(
    self,
    context: context_lib.Context,
    wire: wire_lib.Wire,
    tables: embedding_tables.Tables,
  ) -> None:
    """Creates an update that sums gradients with `wire`."""
    super().__init__(context)
    self._wire = wire
    self._tables = tables
    self.checkpointed: Any = self.encapsulated.optimizer

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
    apply_once: embedding_tables.ApplyOnce,
  ) -> None:
    """Updates the weights.

    Afterwards all members have the same weights.

    Args:
      sums: What `reduce` or `cut_sums` returned.
      variables: The user's weights.
      apply_once: Lets the encapsulated optimizer apply sums to the variables
        that it was built on: the weights or, with elementwise sharding, shards.
    """

  @abc.abstractmethod
  def write_averages(self, variables: Sequence[Any]) -> None:
    """Ends `fit`: writes moving averages into the variables."""

  @property
  def shards(self) -> list[Any]:
    """Copies of parts of the weights that this member keeps."""
    return []

  @property
  def padding_sent(self) -> int:
    """The bytes of zeros that a replica sends in a step to fill buffers."""
    return 0

  def describe(
    self, variables: Sequence[Any], is_dense: bool
  ) -> list[VariableUpdate]:
    """Returns what a step does to each of the weights, in this order.

    Gradients of the weights of `Embedding` and of declared tables are assumed
    to be row-sparse, and all others dense.

    Args:
      variables: The weights, after `build`.
      is_dense: Whether all gradients are made dense before they are summed.
    """
    are_sparse = self._are_sparse(variables, is_dense)
    ways = self._ways(variables, are_sparse)
    return [
      self._describe_whole(variable, is_sparse, way)
      for variable, is_sparse, way in zip(
        variables, are_sparse, ways, strict=True
      )
    ]

  def is_rounded(self, row: VariableUpdate) -> bool:
    """Returns whether `wire_dtype` rounds the gradient of a variable."""
    dtype = tf.as_dtype(row.dtype)
    return self._wire.bytes_of(dtype) < dtype.size

  def _are_sparse(self, variables: Sequence[Any], is_dense: bool) -> list[bool]:
    """Returns which gradients are row-sparse; arguments as in `describe`."""
    keeps_rows = self.engine.keeps_rows and not is_dense
    return [keeps_rows and self._tables.is_embedding(v) for v in variables]

  def _ways(
    self, variables: Sequence[Any], are_sparse: Sequence[bool]
  ) -> list[fused_update.Way]:
    """Returns how one member updates all variables that it updates."""
    optimizer = self.encapsulated.innermost
    plan = fused_update.plan(
      optimizer,
      self.encapsulated.fused,
      self.engine.is_one_program or fused_update.is_compiled(optimizer),
      in_function=True,
    )
    natives = list(map(variables_lib.native, variables))
    if self._tables.clips_to_dense(variables):
      are_sparse = [False] * len(variables)
    by_rows = fused_update.Way("rows", "only the rows in the batch")
    value = fused_update.Way("assign", "the gradient is the next value")
    return [
      value
      if self.encapsulated.is_overwritten(variable)
      else by_rows
      if is_sparse and self._tables.is_by_rows(variable)
      else way
      for variable, is_sparse, way in zip(
        variables, are_sparse, plan.ways(natives, are_sparse), strict=True
      )
    ]

  def _describe_whole(
    self, variable: Any, is_sparse: bool, way: fused_update.Way
  ) -> VariableUpdate:
    """Returns the row of a variable that all members update as a whole."""
    size, dtype = num_elements(variable), dtype_of(variable)
    group_size = self.engine.groups.group_size
    is_value = self.encapsulated.is_overwritten(variable)
    item = dtype.size if is_value else self._wire.bytes_of(dtype)
    # An all-reduce is a reduce-scatter and an all-gather.
    sent = self._ring_bytes(2 * size * item)
    return VariableUpdate(
      **named(variable),
      updated_by=way.name,
      reason=way.reason,
      elements=(size,) * group_size,
      owner=None,
      bytes_sent=None if is_sparse and group_size > 1 else sent,
      state_bytes=num_bytes(self.encapsulated.state.slots(variable).values()),
    )

  def _ring_bytes(self, size: int) -> int:
    """Returns what a member sends in a ring's reduce-scatter or all-gather.

    Of a buffer of `size` bytes, a member keeps its own part, one n-th.
    """
    members = self.engine.groups.group_size
    return -(-size * (members - 1) // members)

  def all_reduce(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    overwrites: Sequence[bool],
  ) -> list[Gradient]:
    """Sums gradients over the group; averages those that overwrite a variable.

        sum[v] = sum over r in group of grads_r[v]
        sum[v] = the same / group_size, where grads_r[v] is the next value of v
        sum[v] = grads_r[v], where r owns rows of v (`owned_rows`)

    `overwrites` says for each gradient whether it is a next value.
    """
    if owned_rows.any_of(variables):
      is_owned = [owned_rows.of(v) is not None for v in variables]
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

  def build(self, variables: Sequence[Any]) -> plain_state.PlainState | None:
    """Creates the slots of all variables.

    Returns:
      The state with whole slots if this call creates slots of divided tables.
    """
    is_built = self.encapsulated.is_built
    self.encapsulated.build(variables)
    if is_built or not owned_rows.any_of(variables):
      return None
    # The slots of a divided table are divided in the same way.
    for variable in variables:
      if (owned := owned_rows.of(variable)) is not None:
        for slot in self.encapsulated.state.slots(variable).values():
          owned_rows.mark(slot, owned)
    if self.engine.groups.group_size == 1:
      return None
    self.checkpointed = plain_state.CheckpointView(
      {}, self.encapsulated.optimizer
    )
    return plain_state.of_divided_tables(
      self.encapsulated, variables, self.engine
    )

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
    apply_once: embedding_tables.ApplyOnce,
  ) -> None:
    """Applies the sums to the variables."""
    self._tables.apply(sums, variables, apply_once)

  def write_averages(self, variables: Sequence[Any]) -> None:
    """Writes moving averages into the variables."""
    self.encapsulated.write_averages(variables)


def dtype_of(variable: Any) -> Any:
  """Returns the dtype in which a variable is stored."""
  return kernels.dtype_of(variables_lib.native(variable))


def num_elements(variable: Any) -> int:
  """Returns the number of elements of one replica's copy of a variable."""
  return math.prod(map(int, variables_lib.native(variable).shape))


def num_bytes(variables: Iterable[Any]) -> int:
  """Returns the bytes of one replica's copies of variables."""
  return sum(int(dtype_of(v).size) * num_elements(v) for v in variables)


def named(variable: Any) -> dict[str, Any]:
  """Returns the path, the shape and the dtype of a variable."""
  return {
    "path": variables_lib.path_of(variable),
    "shape": tuple(map(int, variables_lib.native(variable).shape)),
    "dtype": dtype_of(variable).name,
  }
