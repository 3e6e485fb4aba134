"""Mixed precision and loss scaling in both Keras versions.

The tests compare with plain Keras, which trains on the group's concatenated
batch with its own loss scaling. Every pair of settings occurs: Keras, way to
train, policy, place of the loss scale, skipped steps, and engine. Two workers
are in `multi_worker_test.py`.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.support import covering, mixed_precision, testbed
from tests.support.mixed_precision import Cell

GROUPS = {"mirrored": [[0, 1], [2, 3]], "virtual": [[0, 2], [1, 3]]}


def _is_possible(row: tuple[str, ...]) -> bool:
  engine, cell = row[0], Cell(*row[1:])
  # XLA knows nothing of what tf_keras does around a loss scale.
  has_scale = cell.policy == "mixed_float16" or cell.scaling != "none"
  is_lowered = cell.kind == "keras" or not has_scale
  return cell.is_possible and (engine == "mirrored" or is_lowered)


CELLS = [
  ("mirrored", "keras", "minimize", "float32", "none", True),
  *covering.pairwise(
    [
      *(list(GROUPS), mixed_precision.KINDS, mixed_precision.WAYS),
      *(mixed_precision.POLICIES, mixed_precision.SCALINGS, (False, True)),
    ],
    _is_possible,
  ),
]


@pytest.mark.parametrize("row", CELLS, ids=lambda row: "-".join(map(str, row)))
def test_mixed_precision_equals_plain_keras(row: tuple[str, ...]) -> None:
  """A group with a NaN skips one step, and halves its loss scale."""
  engine, cell = row[0], Cell(*row[1:])
  given = mixed_precision.data(testbed.REPLICAS, cell.has_nan)
  held = mixed_precision.run(
    cell, testbed.STRATEGIES[engine](), GROUPS[engine], given
  )
  assert len(held) == testbed.REPLICAS
  mixed_precision.check(cell, held, GROUPS[engine])


@pytest.mark.parametrize("scaling", mixed_precision.SCALINGS)
@pytest.mark.parametrize("kind", mixed_precision.KINDS)
def test_the_loss_is_scaled_before_gradients_are_taken(
  kind: str, scaling: str
) -> None:
  """Gradients as small as these are 0 in float16, unless they are scaled."""
  cell = Cell(kind, "scale_loss", "mixed_float16", scaling, False)
  small = np.float32(2.0**-13)
  x = np.array([[1, -1], [1, -1]], "float32") * small
  y = np.array([[1 / 2], [1 / 4]], "float32") * small
  given = mixed_precision.Data(
    *(x[None, None], y[None, None], np.zeros((2, 1), "f4"), np.zeros(1, "f4"))
  )
  one_device = tf.distribute.OneDeviceStrategy("CPU:0")
  [held] = mixed_precision.run(cell, one_device, None, given)
  kernel, bias, *_ = held
  right = np.mean(x * y, axis=0)[:, np.newaxis]  # half of the slope of a square
  assert (right != 0).all()
  np.testing.assert_array_equal(bias, np.mean(y, axis=0))
  np.testing.assert_array_equal(kernel, 0 if cell.scale is None else right)
