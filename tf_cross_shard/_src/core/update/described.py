"""Describes what an update does to each variable, for `describe()`.

No step runs this code.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.inner import fused, kernels
from tf_cross_shard._src.core.update import replicated, sharded


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


class DescribedUpdate:
  """An update in numbers and words.

  Attributes:
    shards: A member's copies of the parts of the weights that it updates.
  """

  def __init__(self, update: replicated.Update) -> None:
    """Describes an update, which is built or not."""
    self._update = update
    self._inner, self._engine = update.inner, update.engine
    self._members = update.engine.groups.group_size
    self._buckets: list[sharded.WeightBucket] = []
    if isinstance(update, sharded.ShardedUpdate):
      self._buckets = update.buckets
    shards = [bucket.shard for bucket in self._buckets]
    self.shards = [shard for shard in shards if shard is not None]

  @property
  def padding_sent(self) -> int:
    """The bytes of zeros that a replica sends in a step to fill buffers."""
    return sum(
      self._bytes_sent(
        self._members * bucket.layout.part_size - sum(bucket.layout.sizes),
        bucket.natives[0],
      )
      for bucket in self._buckets
    )

  def is_rounded(self, row: VariableUpdate) -> bool:
    """Returns whether `wire_dtype` rounds the gradient of a variable."""
    dtype = tf.as_dtype(row.dtype)
    return self._update.wire.bytes_of(dtype) < dtype.size

  def rows(
    self, variables: Sequence[Any], is_dense: bool
  ) -> list[VariableUpdate]:
    """Returns what a step does to each of the weights, in this order.

    Gradients of the weights of `Embedding` and of declared tables are assumed
    to be row-sparse, and all others dense.

    Args:
      variables: The weights, after `build`.
      is_dense: Whether all gradients are made dense before they are summed.
    """
    update = self._update
    if not isinstance(update, sharded.ShardedUpdate):
      return self._whole_rows(variables, is_dense)
    tables = update.unsharded_tables
    rows = dict(
      zip(map(id, tables), self._whole_rows(tables, is_dense), strict=True)
    )
    ways = []  # How each member updates its variables, by their `id`.
    for member in range(self._members):
      own = [*update.variables_of(member), *tables]
      are_sparse = [False] * (len(own) - len(tables))
      are_sparse += self._are_sparse(tables, is_dense)
      ways.append(
        dict(zip(map(id, own), self._ways(own, are_sparse), strict=True))
      )
    for bucket in self._buckets:
      for index, variable in enumerate(bucket.variables):
        rows[id(variable)] = self._sharded_row(bucket, index, ways)
    return [rows[id(variable)] for variable in variables]

  def _whole_rows(
    self, variables: Sequence[Any], is_dense: bool
  ) -> list[VariableUpdate]:
    """Returns the rows of variables that all members update as a whole."""
    are_sparse = self._are_sparse(variables, is_dense)
    ways = self._ways(variables, are_sparse)
    return list(map(self._whole_row, variables, are_sparse, ways))

  def _are_sparse(self, variables: Sequence[Any], is_dense: bool) -> list[bool]:
    """Returns which gradients are row-sparse; arguments as in `rows`."""
    supports_sparse = self._engine.supports_sparse and not is_dense
    is_embedding = self._update.tables.is_embedding
    return [supports_sparse and is_embedding(v) for v in variables]

  def _ways(
    self, variables: Sequence[Any], are_sparse: Sequence[bool]
  ) -> list[fused.Way]:
    """Returns for each variable how one member updates it."""
    optimizer, tables = self._inner.innermost, self._update.tables
    plan = fused.plan(
      optimizer,
      self._inner.fused,
      self._engine.is_spmd or fused.is_compiled(optimizer),
      in_function=True,
    )
    natives = list(map(variables_lib.native, variables))
    if tables.clips_to_dense(variables):
      are_sparse = [False] * len(variables)
    by_rows = fused.Way("rows", "only the rows in the batch")
    return [
      by_rows if is_sparse and tables.is_by_rows(variable) else way
      for variable, is_sparse, way in zip(
        variables, are_sparse, plan.ways(natives, are_sparse), strict=True
      )
    ]

  def _whole_row(
    self, variable: Any, is_sparse: bool, way: fused.Way
  ) -> VariableUpdate:
    """Returns the row of a variable that all members update as a whole."""
    size, dtype = num_elements(variable), _dtype_of(variable)
    item = self._update.wire.bytes_of(dtype)
    # An all-reduce is a reduce-scatter and an all-gather.
    sent = self._ring_bytes(2 * size * item)
    return VariableUpdate(
      **_named(variable),
      updated_by=way.name,
      reason=way.reason,
      elements=(size,) * self._members,
      owner=None,
      bytes_sent=None if is_sparse and self._members > 1 else sent,
      state_bytes=num_bytes(self._inner.state.slots(variable).values()),
    )

  def _sharded_row(
    self,
    bucket: sharded.WeightBucket,
    index: int,
    ways: Sequence[dict[int, fused.Way]],
  ) -> VariableUpdate:
    """Returns the row of a weight that is in a bucket."""
    variable, layout = bucket.variables[index], bucket.layout
    # A weight without elements is in no member's part.
    member = layout.owners.get(index, 0)
    updated = variable if bucket.shard is None else bucket.shard
    way = ways[member][id(updated)]
    kept = num_bytes(self._inner.state.slots(updated).values())
    if bucket.shard is not None:
      # A member keeps one n-th of the weight's elements, on average.
      kept += num_bytes([bucket.shard])
      kept = -(
        -layout.sizes[index] * kept // (layout.part_size * self._members)
      )
    return VariableUpdate(
      **_named(variable),
      updated_by=way.name,
      reason=way.reason,
      elements=tuple(
        sum(cut.size for cut in cuts if cut.index == index)
        for cuts in layout.cuts
      ),
      owner=member if bucket.shard is None else None,
      bytes_sent=self._bytes_sent(layout.sizes[index], bucket.natives[index]),
      state_bytes=kept,
    )

  def _bytes_sent(self, size: int, native: Any) -> int:
    """Returns the bytes that a member sends in a step for some elements.

    Gradients may be rounded to `wire_dtype`; weights are gathered exactly.
    """
    dtype = _dtype_of(native)
    # An engine that cannot run the two halves of an all-reduce separately
    # runs a whole all-reduce for each half.
    halves = 1 if self._engine.can_scatter else 2
    item_bytes = self._update.wire.bytes_of(dtype) + int(dtype.size)
    return self._ring_bytes(halves * size * item_bytes)

  def _ring_bytes(self, size: int) -> int:
    """Returns the bytes that a member sends in one half of a ring's all-reduce.

    Of a buffer of `size` bytes, a member keeps its own part, one n-th.
    """
    return -(-size * (self._members - 1) // self._members)


def num_elements(variable: Any) -> int:
  """Returns the number of elements of one replica's copy of a variable."""
  return math.prod(map(int, variables_lib.native(variable).shape))


def num_bytes(variables: Iterable[Any]) -> int:
  """Returns the bytes of one replica's copies of variables."""
  return sum(int(_dtype_of(v).size) * num_elements(v) for v in variables)


def _dtype_of(variable: Any) -> Any:
  """Returns the dtype in which a variable is stored."""
  return kernels.dtype_of(variables_lib.native(variable))


def _named(variable: Any) -> dict[str, Any]:
  """Returns the path, the shape and the dtype of a variable."""
  return {
    "path": variables_lib.path_of(variable),
    "shape": tuple(map(int, variables_lib.native(variable).shape)),
    "dtype": _dtype_of(variable).name,
  }
