"""Two Kerases, mixed precision and loss scaling, in one process, pairwise."""
# bazel: size=large

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import interplay, testbed
from tests.support.interplay import Cell

ENGINES = ("mirrored", "virtual_tpu", "one_device")
CELLS = interplay.covering_cells(*ENGINES)


@functools.cache
def _one_device() -> tf.distribute.Strategy:
  return tf.distribute.OneDeviceStrategy("CPU:0")


def _of(cell: Cell) -> Any:
  """The strategy, which cells share, and the groups of a cell."""
  strategy = {
    "mirrored": lambda: testbed.mirrored(4),
    "virtual_tpu": lambda: testbed.virtual(4),
    "one_device": _one_device,
  }[cell.engine]()
  [grouping] = interplay.GROUPINGS[cell.engine].values()
  return strategy, grouping


@pytest.mark.parametrize(("cell", "skips"), CELLS, ids=str)
def test_cell(cell: Cell, skips: bool) -> None:
  """Plain Keras' weights; a NaN where a loss is scaled or steps are skipped."""
  strategy, grouping = _of(cell)
  with_nan = cell.scale is not None or skips
  replicas = interplay.REPLICAS[cell.engine]
  given = interplay.data(replicas, with_nan)
  options = {"skip_nonfinite": True} if skips else {}
  done = interplay.run(cell, strategy, grouping, given, **options)
  if skips:
    assert all(len(step.skipped) == replicas for step in done.steps)
  interplay.check(cell, done, grouping, with_nan)


@pytest.mark.parametrize("scaling", interplay.SCALINGS)
@pytest.mark.parametrize("kind", interplay.KERASES)
def test_the_loss_is_scaled_before_gradients_are_taken(
  kind: str, scaling: str
) -> None:
  """Or gradients as small as these were 0 in float16."""
  cell = Cell(kind, "loop", "one_device", "mixed_float16", scaling)
  strategy, grouping = _of(cell)
  given = interplay.tiny_data()
  [step] = interplay.run(cell, strategy, grouping, given).steps
  kernel, bias = step.weights[0]
  right_kernel, right_bias = interplay.by_hand(given, cell.policy, [0])
  assert (right_kernel != 0).all()
  np.testing.assert_array_equal(bias, right_bias)
  if cell.scale is None:
    np.testing.assert_array_equal(kernel, 0)
  else:
    np.testing.assert_array_equal(kernel, right_kernel)


@pytest.mark.parametrize("policy", interplay.POLICIES)
@pytest.mark.parametrize("kind", interplay.KERASES)
def test_what_is_compared_with(kind: str, policy: str) -> None:
  """Plain Keras does what NumPy does; half precision is felt, and exact."""
  given, members = interplay.data(4, with_nan=False), (0, 1)
  steps = interplay.expected(kind, policy, None, 4, members, False)
  right = interplay.by_hand(given, policy, members)
  wide = interplay.by_hand(given, "float32", members)
  for mine, one, other in zip(steps[-1].weights[0], right, wide, strict=True):
    if policy == "float32":
      testbed.assert_close(mine, one, kind)
    else:
      np.testing.assert_array_equal(mine, one)
      assert (one != other).any()


def test_data_differ_between_replicas() -> None:
  for replicas in interplay.SEEDS:
    given = interplay.data(replicas, with_nan=False)
    both = np.concatenate([given.x, given.y], axis=-1)
    for one, other in itertools.combinations(range(replicas), 2):
      assert (both[:, one] != both[:, other]).any(axis=(1, 2)).all()


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
