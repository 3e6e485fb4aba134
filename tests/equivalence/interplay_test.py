"""Two Kerases, mixed precision and loss scaling, in one process, pairwise."""
# bazel: size=large

import functools
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
  x, y = given.x[0, 0], given.y[0, 0]
  right = np.mean(x * y, axis=0)[:, np.newaxis]  # half of the slope of a square
  assert (right != 0).all()
  np.testing.assert_array_equal(bias, np.mean(y, axis=0))
  np.testing.assert_array_equal(kernel, 0 if cell.scale is None else right)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
