"""Sums of gradients over the group.

narrow -> pack -> all-reduce -> unpack -> widen      dense gradients
narrow -> gather rows -> widen -> add duplicates     sparse gradients
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard.collectives import base
from tf_cross_shard.gradients import indexed_slices, packing
from tf_cross_shard.gradients.clipping import Gradient


def make_reducible(
  grads: Sequence[Gradient],
  variables: Sequence[Any],
  engine: base.Engine,
) -> list[Gradient]:
  """Makes sparse gradients dense where the engine cannot keep their rows."""
  if engine.keeps_rows:
    return list(grads)
  return [
    indexed_slices.to_dense(grad, variable)
    for grad, variable in zip(grads, variables, strict=True)
  ]


def reduce_gradients(
  grads: Sequence[Gradient],
  engine: base.Engine,
  wire_dtype: tf.DType | None = None,
  wire_scale: Any = None,
  beside: Sequence[tf.Tensor] = (),
) -> tuple[list[Gradient], list[tf.Tensor]]:
  """Sums every gradient over this replica's group.

      result[i] = sum over r in group of grads_r[i]

  None stays None, and a sparse gradient stays sparse, without duplicate rows.

  Args:
    grads: From `make_reducible`, of the same kinds on all members.
    engine: The engine that sums.
    wire_dtype: What gradients are rounded to on the wire; None for exact sums.
    wire_scale: What they are multiplied by meanwhile, so that small ones are
      not rounded to 0; a power of two changes no digit.
    beside: Other dense tensors, which travel in the same buffers and as they
      are.

  Returns:
    The sums of the gradients, and those of `beside`.
  """
  if wire_scale is not None:
    grads = [indexed_slices.times(grad, wire_scale) for grad in grads]
  is_sparse = [isinstance(grad, tf.IndexedSlices) for grad in grads]
  dense = [
    i for i, grad in enumerate(grads) if grad is not None and not is_sparse[i]
  ]
  rows = [i for i in range(len(grads)) if is_sparse[i]]
  sums: list[Gradient] = [None] * len(grads)
  of_dense = _sum_dense([grads[i] for i in dense], engine, wire_dtype, beside)
  of_rows = _sum_sparse([grads[i] for i in rows], engine, wire_dtype)
  for at, totals in ((dense, of_dense[: len(dense)]), (rows, of_rows)):
    for i, total in zip(at, totals, strict=True):
      sums[i] = total
  if wire_scale is not None:
    sums = [indexed_slices.times(grad, 1.0 / wire_scale) for grad in sums]
  return sums, of_dense[len(dense) :]


def _sum_dense(
  grads: Sequence[tf.Tensor],
  engine: base.Engine,
  wire_dtype: tf.DType | None,
  beside: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
  """Sums packed buffers, unless the engine packs by itself."""
  wide = [*grads, *beside]
  if not wide or engine.groups.group_size == 1:
    return wide
  # Narrowing a buffer instead would copy it once more.
  narrow = [*packing.narrow(grads, wire_dtype), *beside]
  add_up = engine.all_reduce_narrow if wire_dtype else engine.all_reduce_sum
  if engine.bucket_bytes is None:
    sums = add_up(narrow)
  else:
    buffers, unpack = packing.pack(narrow, engine.bucket_bytes)
    # The last layers' gradients exist first: their sums need not wait.
    sums = unpack(add_up(buffers[::-1])[::-1])
  return packing.widen(sums, wide)


def _sum_sparse(
  grads: Sequence[tf.IndexedSlices],
  engine: base.Engine,
  wire_dtype: tf.DType | None,
) -> list[tf.IndexedSlices]:
  """Gathers the rows of all members, then adds duplicates."""
  if grads and engine.groups.group_size > 1:
    parts = [part for grad in grads for part in (grad.values, grad.indices)]
    gathered = packing.widen(
      engine.all_gather(packing.narrow(parts, wire_dtype)), parts
    )
    grads = [
      tf.IndexedSlices(values, indices, grad.dense_shape)
      for grad, values, indices in zip(
        grads, gathered[::2], gathered[1::2], strict=True
      )
    ]
  return [indexed_slices.merge_duplicates(grad) for grad in grads]
