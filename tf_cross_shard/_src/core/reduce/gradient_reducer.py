"""Sums gradients over the group, exactly or in half precision.

dense gradients     compress ▶ pack ▶ all-reduce ▶ unpack ▶ decompress
sparse gradients    compress ▶ all-gather rows ▶ decompress
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core.gradients import compression, packing, row_sparse
from tf_cross_shard._src.core.reduce import engine as engines
from tf_cross_shard._src.core.reduce import layout as layouts
from tf_cross_shard._src.core.variables import Gradient


class GradientReducer:
  """Sums gradients over a group; rounds them to `dtype` to send them."""

  def __init__(
    self,
    engine: engines.Engine,
    dtype: tf.DType | None = None,
    scale: Callable[[], Any] | None = None,
  ) -> None:
    """Takes a factor for the wire, so that float16 does not round to 0."""
    self.engine = engine
    self._dtype = dtype
    self._scale = scale or (lambda: None)

  def reduce(self, grads: Sequence[Gradient]) -> list[Gradient]:
    """Sums every gradient over this replica's group; None stays None."""
    scale = self._scale()
    if scale is not None:
      grads = [row_sparse.times(grad, scale) for grad in grads]
    # Dense and sparse gradients are sent differently. Note the positions of
    # both.
    is_sparse = [isinstance(grad, tf.IndexedSlices) for grad in grads]
    dense = [
      i for i, grad in enumerate(grads) if grad is not None and not is_sparse[i]
    ]
    rows = [i for i in range(len(grads)) if is_sparse[i]]
    sums: list[Gradient] = [None] * len(grads)
    of_dense = self._sum_dense([grads[i] for i in dense])
    of_rows = self._sum_sparse([grads[i] for i in rows])
    for at, totals in ((dense, of_dense), (rows, of_rows)):
      for i, total in zip(at, totals, strict=True):
        sums[i] = total
    if scale is not None:
      sums = [row_sparse.times(grad, 1.0 / scale) for grad in sums]
    return sums

  def reduce_part(
    self, grads: Sequence[tf.Tensor], layout: layouts.Layout
  ) -> tf.Tensor:
    """Returns this member's part, `[part_size]`, of sums of flat gradients."""
    scale = self._scale()
    factor = 1.0 if scale is None else scale
    scaled = [row_sparse.times(grad, factor) for grad in grads]
    compressed = compression.compress(scaled, self._dtype)
    part = tf.cast(self.engine.reduce_part(compressed, layout), grads[0].dtype)
    return part if scale is None else part / tf.cast(scale, part.dtype)

  def _sum_dense(self, wide: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums gradients, which are sent in the dtype of the wire."""
    engine = self.engine
    if not wide or engine.groups.group_size == 1:
      return list(wide)
    # Before packing: to compress a packed buffer would copy it once more.
    compressed = compression.compress(wide, self._dtype)
    add_up = (
      engine.all_reduce_accumulate_f32 if self._dtype else engine.all_reduce_sum
    )
    if engine.bucket_bytes is None:  # The engine packs, or needs no packing.
      sums = add_up(compressed)
    else:
      buffers, unpack = packing.pack(compressed, engine.bucket_bytes)
      # The backward pass computes the gradients of the last layers first. Sum
      # these gradients first, while it still computes the others.
      sums = unpack(add_up(buffers[::-1])[::-1])
    return compression.decompress(sums, wide)

  def _sum_sparse(
    self, grads: Sequence[tf.IndexedSlices]
  ) -> list[tf.IndexedSlices]:
    """Gathers the rows of all members, as one device has them for the batch."""
    if not grads or self.engine.groups.group_size == 1:
      return list(grads)
    # One all-gather for the values and indices of all gradients.
    parts = [part for grad in grads for part in (grad.values, grad.indices)]
    gathered = compression.decompress(
      self.engine.all_gather(compression.compress(parts, self._dtype)), parts
    )
    return [
      tf.IndexedSlices(values, indices, grad.dense_shape)
      for grad, values, indices in zip(
        grads, gathered[::2], gathered[1::2], strict=True
      )
    ]
