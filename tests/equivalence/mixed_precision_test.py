"""Mixed precision and loss scaling in both Keras versions.

The tests compare with plain Keras, which trains on the group's concatenated
batch with its own loss scaling. Every pair of settings occurs: Keras, way to
train, policy, loss scale, skipped steps, and engine. Two workers
are in `multi_worker_test.py`.
"""

import pathlib
import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import covering, mixed_precision, testbed, training
from tests.support.mixed_precision import Cell

GROUPS = {"mirrored": [[0, 1], [2, 3]], "virtual": [[0, 2], [1, 3]]}


def _is_possible(row: tuple[str, ...]) -> bool:
  engine, cell = row[0], Cell(*row[1:])
  # XLA knows nothing of what tf_keras does around a loss scale.
  has_scale = cell.policy == "mixed_float16" or cell.scaling != "none"
  is_lowered = cell.kind == "keras" or not has_scale
  return engine == "mirrored" or is_lowered


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


def _trained(library: Any, optimizer: Any, batches: int) -> Any:
  """Trains a model; its last batch overflows, which halves the loss scale."""
  library.utils.set_random_seed(1)
  model = library.Sequential(
    [library.Input((3,)), library.layers.Dense(2, dtype="float32")]
  )
  model.compile(optimizer, "mse")
  for i in range(batches):
    x = X.copy()
    x[0, 0] = np.inf if i == batches - 1 else 1.0
    model.train_on_batch(x, X[:, :2])
  return model


def _state(model: Any) -> list[np.ndarray]:
  """Returns weights, the optimizer's variables, and the loss scale."""
  scaler = model.optimizer
  if not hasattr(scaler, "dynamic_growth_steps"):
    scaler = scaler.inner_optimizer
  scale = getattr(scaler, "dynamic_scale", None)
  scale = scaler.loss_scale if scale is None else scale
  return [
    np.array(v) for v in (*model.weights, *model.optimizer.variables, scale)
  ]


MIXED = {
  which: Cell(which, "fit", "mixed_float16", "none", False)
  for which in training.KERASES
}
X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


@pytest.mark.parametrize("form", ["keras", "checkpoint"])
@pytest.mark.parametrize(
  "way", ["ours to ours", "ours to plain", "plain to ours"]
)
@training.in_both
def test_files_load_with_and_without_the_wrapper(
  which: str, way: str, form: str, tmp_path: pathlib.Path
) -> None:
  """Weights, slots, iterations and loss scale of `fit` in `mixed_float16`."""
  library, package = training.KERASES[which]
  with mixed_precision.policy(MIXED[which]):
    source, target = (
      _trained(
        library,
        package.CrossShardOptimizer("adam") if kind == "ours" else "adam",
        batches,
      )
      for kind, batches in zip(way.split(" to "), (4, 0), strict=True)
    )
    target.optimizer.build(target.trainable_variables)
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      if form == "keras":
        source.save(tmp_path / "model.keras")
        target.load_weights(tmp_path / "model.keras")
      else:
        path = tf.train.Checkpoint(source).save(str(tmp_path / "checkpoint"))
        tf.train.Checkpoint(target).restore(path).assert_consumed()
    saved, loaded = _state(source), _state(target)
    assert saved[-1] == mixed_precision.SCALE_OF_COMPILE / 2
    if (which, form) == ("tf_keras", "keras"):  # No loss scale, as in plain.
      del saved[-1], loaded[-1]
    for mine, right in zip(loaded, saved, strict=True):
      np.testing.assert_array_equal(mine, right)
    # Plain Keras 3 reads the optimizer in a loss scale twice. Ours is once in
    # the file.
    skipped = [
      str(each.message) for each in caught if "Skipping" in str(each.message)
    ]
    expected = (which, form, way) == ("keras", "keras", "ours to plain")
    assert ["saved optimizer has 0" in text for text in skipped] == (
      [True] * expected
    )


@training.in_both
def test_a_model_file_keeps_the_loss_scale_inside(
  which: str, tmp_path: pathlib.Path
) -> None:
  library, package = training.KERASES[which]
  with mixed_precision.policy(MIXED[which]):
    source = _trained(library, package.CrossShardOptimizer("adam"), 4)
    source.save(tmp_path / "model.keras")
    loaded = library.models.load_model(tmp_path / "model.keras")
  assert type(loaded.optimizer) is package.CrossShardOptimizer
  base = testbed.base_optimizer(loaded.optimizer)
  assert loaded.optimizer.inner_optimizer.inner_optimizer is base
  states = [_state(source), _state(loaded)]
  if which == "tf_keras":  # Its files have no loss scale.
    states = [state[:-1] for state in states]
  for mine, right in zip(*states, strict=True):
    np.testing.assert_array_equal(mine, right)
