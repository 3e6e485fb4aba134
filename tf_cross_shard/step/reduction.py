"""Sums of gradients over the group, and the wire that they travel on.

narrow -> pack -> all-reduce -> unpack -> widen      dense gradients
narrow -> gather rows -> widen -> add duplicates     sparse gradients
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard.collectives import base as engines
from tf_cross_shard.gradients import indexed_slices, layout, packing
from tf_cross_shard.gradients.clipping import Gradient

# Residuals, and their next values.
Left = list[tuple[Any, tf.Tensor]]


def make_reducible(
  grads: Sequence[Gradient],
  variables: Sequence[Any],
  engine: engines.Engine,
) -> list[Gradient]:
  """Makes sparse gradients dense where the engine cannot keep their rows."""
  if engine.keeps_rows:
    return list(grads)
  return [
    indexed_slices.to_dense(grad, variable)
    for grad, variable in zip(grads, variables, strict=True)
  ]


class Wire:
  """The way of gradients between members: exact, or in half precision."""

  def __init__(
    self,
    engine: engines.Engine,
    dtype: tf.DType | None = None,
    scale: Callable[[], Any] | None = None,
  ) -> None:
    """Keeps no state.

    Args:
      engine: The engine that sums.
      dtype: What wider gradients are rounded to; None for exact sums.
      scale: Returns what they are multiplied by meanwhile, so that small ones
        are not rounded to 0, or None; a power of two changes no digit.
    """
    self._engine = engine
    self._dtype = dtype
    self._scale = scale or (lambda: None)

  @property
  def variables(self) -> list[Any]:
    """What rounding has left on each replica; empty if it is lost."""
    return []

  def build(self, variables: Sequence[Any]) -> None:
    """Makes room for what rounding leaves of their dense gradients."""
    del variables

  def sum(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any] = (),
    beside: Sequence[tf.Tensor] = (),
  ) -> tuple[list[Gradient], list[tf.Tensor]]:
    """Sums every gradient over this replica's group.

        result[i] = sum over r in group of grads_r[i]

    None stays None, and a sparse gradient stays sparse, without duplicate rows.

    Args:
      grads: From `make_reducible`, of the same kinds on all members.
      variables: Their variables, where the wire was built on variables.
      beside: Other dense tensors, which travel as they are.

    Returns:
      The sums of the gradients, and those of `beside`.
    """
    variables = variables or [None] * len(grads)
    scale = self._scale()
    if scale is not None:
      grads = [indexed_slices.times(grad, scale) for grad in grads]
    is_sparse = [isinstance(grad, tf.IndexedSlices) for grad in grads]
    dense = [
      i for i, grad in enumerate(grads) if grad is not None and not is_sparse[i]
    ]
    rows = [i for i in range(len(grads)) if is_sparse[i]]
    sums: list[Gradient] = [None] * len(grads)
    of_dense, left = self._sum_dense(
      [grads[i] for i in dense], [variables[i] for i in dense], beside
    )
    of_rows = self._sum_sparse([grads[i] for i in rows])
    for at, totals in ((dense, of_dense[: len(dense)]), (rows, of_rows)):
      for i, total in zip(at, totals, strict=True):
        sums[i] = total
    if scale is not None:
      sums = [indexed_slices.times(grad, 1.0 / scale) for grad in sums]
    of_beside = of_dense[len(dense) :]
    self.keep(left, [*sums, *of_beside])
    return sums, of_beside

  def sum_part(
    self,
    grads: Sequence[tf.Tensor],
    variables: Sequence[Any],
    parts: layout.Layout,
  ) -> tuple[tf.Tensor, Left]:
    """Returns this member's part of the sums, and what is to be kept then.

    Args:
      grads: Flat ones of one dtype.
      variables: Their variables.
      parts: Which elements each member receives.
    """
    del variables
    scale = self._scale()
    factor = 1.0 if scale is None else scale
    scaled = [indexed_slices.times(grad, factor) for grad in grads]
    narrow = packing.narrow(scaled, self._dtype)
    part = tf.cast(self._engine.reduce_part(narrow, parts), grads[0].dtype)
    return part if scale is None else part / tf.cast(scale, part.dtype), []

  def keep(self, left: Left, sums: Sequence[Gradient]) -> None:
    """Keeps what rounding has left, unless the step is to be left out."""
    del left, sums

  def _sum_dense(
    self,
    grads: Sequence[tf.Tensor],
    variables: Sequence[Any],
    beside: Sequence[tf.Tensor],
  ) -> tuple[list[tf.Tensor], Left]:
    """Sums packed buffers, unless the engine packs by itself."""
    del variables
    wide = [*grads, *beside]
    engine = self._engine
    if not wide or engine.groups.group_size == 1:
      return wide, []
    # Narrowing a buffer instead would copy it once more.
    narrow = [*packing.narrow(grads, self._dtype), *beside]
    add_up = engine.all_reduce_narrow if self._dtype else engine.all_reduce_sum
    if engine.bucket_bytes is None:
      sums = add_up(narrow)
    else:
      buffers, unpack = packing.pack(narrow, engine.bucket_bytes)
      # The last layers' gradients exist first: their sums need not wait.
      sums = unpack(add_up(buffers[::-1])[::-1])
    return packing.widen(sums, wide), []

  def _sum_sparse(
    self, grads: Sequence[tf.IndexedSlices]
  ) -> list[tf.IndexedSlices]:
    """Gathers the rows of all members, then adds duplicates."""
    if grads and self._engine.groups.group_size > 1:
      parts = [part for grad in grads for part in (grad.values, grad.indices)]
      gathered = packing.widen(
        self._engine.all_gather(packing.narrow(parts, self._dtype)), parts
      )
      grads = [
        tf.IndexedSlices(values, indices, grad.dense_shape)
        for grad, values, indices in zip(
          grads, gathered[::2], gathered[1::2], strict=True
        )
      ]
    return [indexed_slices.merge_duplicates(grad) for grad in grads]
