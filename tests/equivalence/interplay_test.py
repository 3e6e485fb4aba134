"""Two Kerases, mixed precision and loss scaling, in one process.

{Keras 3, tf_keras, its older optimizers} x {fit, custom loop}
  x {Mirrored, virtual TPU, one device}
  x {float32, mixed_float16, mixed_bfloat16}
  x {no loss scaling of the user's, inside of ours, around ours}
"""
# bazel: size=large data=//:sources

import functools
import itertools
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import interplay, testbed
from tests.support.interplay import Cell

pytestmark = pytest.mark.slow

README = pathlib.Path(__file__).parent.parent.parent / "README.md"
ENGINES = ("mirrored", "virtual_tpu", "one_device")
CELLS = interplay.cells(*ENGINES)


def _strategy(engine: str) -> tf.distribute.Strategy:
  """The strategy of an engine, which all cells share."""
  if engine == "mirrored":
    return testbed.mirrored(4)
  if engine == "virtual_tpu":
    return testbed.virtual(4)
  return _one_device()


@functools.cache
def _one_device() -> tf.distribute.Strategy:
  return tf.distribute.OneDeviceStrategy("CPU:0")


def _of(cell: Cell) -> Any:
  """The strategy and the groups of a cell."""
  [grouping] = interplay.GROUPINGS[cell.engine].values()
  return _strategy(cell.engine), grouping


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell) -> None:
  """Plain Keras' weights; where a loss is scaled, one replica has a NaN."""
  strategy, grouping = _of(cell)
  with_nan = cell.scale is not None
  given = interplay.data(interplay.REPLICAS[cell.engine], with_nan)
  if cell.impossible:
    with pytest.raises(ValueError, match=cell.impossible):
      interplay.run(cell, strategy, grouping, given)
    return
  done = interplay.run(cell, strategy, grouping, given)
  interplay.check(cell, done, grouping, with_nan)


_SKIPPING = [
  cell for cell in CELLS if (cell.policy, cell.scaling) == ("float32", "plain")
]
# These skip by themselves, and are counted.
_COUNTING = [
  Cell(kind, "loop", "mirrored", "mixed_float16", scaling)
  for kind, scaling in itertools.product(
    interplay.KERASES, ("inside", "outside")
  )
]


@pytest.mark.parametrize("cell", [*_SKIPPING, *_COUNTING], ids=str)
def test_skip_nonfinite(cell: Cell) -> None:
  """A group leaves a step out, and counts it."""
  strategy, grouping = _of(cell)
  replicas = interplay.REPLICAS[cell.engine]
  given = interplay.data(replicas, with_nan=True)
  done = interplay.run(cell, strategy, grouping, given, skip_nonfinite=True)
  assert all(len(step.skipped) == replicas for step in done.steps)
  interplay.check(cell, done, grouping, with_nan=True)


@pytest.mark.parametrize(
  "cell",
  [
    Cell(kind, "minimize", "mirrored", "mixed_float16", scaling)
    for kind, scaling in itertools.product(
      interplay.KERASES, interplay.SCALINGS
    )
    # LossScaleOptimizer of Keras 3 has no `minimize`.
    if (kind, scaling) != ("keras3", "outside")
  ],
  ids=str,
)
def test_minimize(cell: Cell) -> None:
  """A loss that is averaged over the replica's own examples."""
  strategy, grouping = _of(cell)
  with_nan = cell.scale is not None
  done = interplay.run(cell, strategy, grouping, interplay.data(4, with_nan))
  interplay.check(cell, done, grouping, with_nan)


_SCALED = [
  cell
  for cell in CELLS
  if (cell.engine, cell.policy) == ("one_device", "mixed_float16")
]


@pytest.mark.parametrize("cell", _SCALED, ids=str)
def test_the_loss_is_scaled_before_gradients_are_taken(cell: Cell) -> None:
  """Or gradients as small as these were 0 in float16."""
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
  for engine, by_name in interplay.GROUPINGS.items():
    replicas = interplay.REPLICAS[engine]
    given = interplay.data(replicas, with_nan=False)
    for grouping in by_name.values():
      for members in testbed.groups_of(grouping, replicas):
        steps = interplay.expected(
          kind, policy, None, replicas, tuple(members), False
        )
        right = interplay.by_hand(given, policy, members)
        wide = interplay.by_hand(given, "float32", members)
        for mine, one, other in zip(
          steps[-1].weights[0], right, wide, strict=True
        ):
          if policy == "float32":
            testbed.assert_close(mine, one, engine)
          else:
            np.testing.assert_array_equal(mine, one)
            assert (one != other).any()


def test_data_differ_between_replicas() -> None:
  for replicas in interplay.SEEDS:
    given = interplay.data(replicas, with_nan=False)
    both = np.concatenate([given.x, given.y], axis=-1)
    for one, other in itertools.combinations(range(replicas), 2):
      assert (both[:, one] != both[:, other]).any(axis=(1, 2)).all()


def test_number_of_cells() -> None:
  cells = interplay.cells(*interplay.ENGINES)
  assert len(cells) == len(set(map(str, cells))) == 216
  assert sum(cell.impossible is not None for cell in cells) == 28


def test_readme() -> None:
  """The README has this file's table."""
  text = README.read_text(encoding="utf-8")
  table = text.split("<!-- interplay -->")[1].split("<!-- /interplay -->")[0]
  assert table.strip() == interplay.table()


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
