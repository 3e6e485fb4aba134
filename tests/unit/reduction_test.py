"""Gradients to their sums: dense, sparse, None, mixed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard.collectives import base
from tf_cross_shard.step import reduction

PAIR = groups_lib.Groups([[0, 1]])


class Recording(base.Engine):
  """Pretends to be one of two replicas that hold the same values."""

  def __init__(
    self, keeps_rows: bool = True, groups: groups_lib.Groups | None = None
  ) -> None:
    super().__init__(tf.distribute.get_strategy(), groups or PAIR)
    self.reduced: list[tf.Tensor] = []
    self.gathered: list[tf.Tensor] = []
    self._keeps_rows = keeps_rows

  @property
  def keeps_rows(self) -> bool:
    return self._keeps_rows

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    self.reduced += tensors
    return [tensor * 2 for tensor in tensors]

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    self.gathered += tensors
    return [tf.concat([tensor, tensor], axis=0) for tensor in tensors]


def _mixed() -> tuple[list[Any], list[Any]]:
  rows = tf.IndexedSlices(
    tf.constant([[1.0], [2.0], [4.0]]),
    tf.constant([2, 0, 2]),
    tf.constant([3, 1]),
  )
  grads = [
    tf.constant([1.0, 2.0]),
    None,
    rows,
    tf.constant([[3.0]], tf.float16),
    tf.constant(5.0),
  ]
  variables = [
    tf.Variable(tf.zeros(shape, dtype))
    for shape, dtype in (
      ([2], tf.float32),
      ([4], tf.float32),
      ([3, 1], tf.float32),
      ([1, 1], tf.float16),
      ([], tf.float32),
    )
  ]
  return grads, variables


def test_everything_at_once_in_order() -> None:
  engine = Recording()
  grads, variables = _mixed()
  assert reduction.make_reducible(grads, variables, engine) == grads
  sums, _ = reduction.reduce_gradients(grads, engine)
  np.testing.assert_array_equal(sums[0], [2.0, 4.0])
  assert sums[1] is None
  np.testing.assert_array_equal(sums[2].indices, [2, 0])
  np.testing.assert_array_equal(sums[2].values, [[10.0], [4.0]])
  np.testing.assert_array_equal(sums[3], [[6.0]])
  assert sums[3].dtype == tf.float16
  assert float(sums[4]) == 10.0
  # One buffer per dtype; the rows travel as values and indices.
  assert sorted(t.dtype.name for t in engine.reduced) == ["float16", "float32"]
  assert [t.dtype.name for t in engine.gathered] == ["float32", "int32"]


def test_rows_become_dense_where_they_cannot_be_gathered() -> None:
  engine = Recording(keeps_rows=False)
  grads, variables = _mixed()
  dense = reduction.make_reducible(grads, variables, engine)
  sums, _ = reduction.reduce_gradients(dense, engine)
  np.testing.assert_array_equal(sums[2], [[4.0], [0.0], [10.0]])
  assert engine.gathered == []


def test_groups_of_one_send_nothing() -> None:
  engine = Recording(groups=groups_lib.singletons(2))
  grads, _ = _mixed()
  sums, _ = reduction.reduce_gradients(grads, engine)
  assert engine.reduced == engine.gathered == []
  assert sums[0] is grads[0]
  np.testing.assert_array_equal(sums[2].values, [[5.0], [2.0]])


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
