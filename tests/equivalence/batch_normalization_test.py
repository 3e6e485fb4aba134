"""Batch normalization in groups against plain Keras on one device."""
# bazel: size=medium tags=slow

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import batch_normalization as bed
from tests.support import testbed
from tf_cross_shard import (
  callbacks,
  keras3,
  layers,
  tf_keras,
)

STRIDED = [[0, 2], [1, 3]]


def _run(
  strategy: tf.distribute.Strategy,
  layer: Any,
  x: np.ndarray,
  counts: np.ndarray,
  mode: str = "function",
  mask: Any = None,
) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
  """What each replica has of `bed.step`, and of the moving statistics."""

  def replica_step() -> list[tf.Tensor]:
    mine = testbed.replica_id()
    options = {} if mask is None else {"mask": tf.constant(mask)[mine]}
    return bed.step(
      layer, tf.constant(x)[mine], tf.constant(counts)[mine], **options
    )

  def run() -> Any:
    return strategy.run(replica_step)

  call = tf.function(run, autograph=False) if mode == "function" else run
  found = [strategy.experimental_local_results(each) for each in call()]
  statistics = map(testbed.copies, layer.non_trainable_variables)
  return (
    [[each.numpy() for each in own] for own in zip(*found, strict=True)],
    [list(own) for own in zip(*statistics, strict=True)],
  )


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize(
  ("engine", "mode", "grouping", "axis"),
  [
    ("mirrored", "function", "contiguous", 1),
    ("mirrored", "eager", "strided", -1),
    ("mirrored", "function", "singletons", -1),
    ("virtual", "function", "strided", -1),
    ("virtual", "function", "ungrouped", 1),
  ],
)
def test_a_group_is_one_batch(
  engine: str, mode: str, grouping: str, axis: int
) -> None:
  strategy = getattr(testbed, engine)(testbed.REPLICAS)
  x, counts = bed.data(testbed.REPLICAS)
  assignment = testbed.GROUPINGS[grouping]
  with strategy.scope():
    layer = bed.make(layers.SyncBatchNormalization, assignment, axis=axis)
  found, statistics = _run(strategy, layer, x, counts, mode)
  groups = testbed.groups_of(assignment)
  bed.check(found, statistics, groups.assignment, x, counts, axis=axis)


@pytest.mark.parametrize("package", [keras3, tf_keras])
def test_masked_examples_do_not_count(package: Any) -> None:
  strategy = testbed.mirrored()
  x, counts = bed.data(testbed.REPLICAS)
  mask = np.random.default_rng(5).random(x.shape[:-1]) < 0.5
  assert len({each.sum() for each in mask}) > 1
  library = package.keras
  with strategy.scope():
    layer = bed.make(package.SyncBatchNormalization, STRIDED, library=library)
  found, statistics = _run(strategy, layer, x, counts, mask=mask)
  # Keras 3 divides by one example and 1e-7 more.
  bed.check(
    *(found, statistics, STRIDED, x, counts),
    tolerance=1e-6 if package is keras3 else 1e-9,
    library=library,
    mask=mask,
  )


@pytest.mark.parametrize("package", [keras3, tf_keras])
def test_keras_own_layer_mixes_groups_and_is_warned_of(
  package: Any, said: list[str]
) -> None:
  strategy = testbed.mirrored()
  library = package.keras
  x, counts = bed.data(testbed.REPLICAS)
  with strategy.scope():
    keras_own, ours, other = (
      bed.make(layer, *args, library=library, **options)
      for layer, args, options in (
        (library.layers.BatchNormalization, (), {"synchronized": True}),
        (package.SyncBatchNormalization, (STRIDED,), {}),
        (library.layers.BatchNormalization, (), {}),
      )
    )
    for groups, trained in (
      (STRIDED, [ours, other]),
      (None, [keras_own]),
      (STRIDED, [ours, keras_own]),
    ):
      assert not said
      optimizer = package.CrossShardOptimizer("sgd", group_assignment=groups)
      model = library.Sequential(trained)
      model.compile(optimizer, "mse")
      for _ in "12":
        callbacks.GroupTensorBoard("").set_model(model)
  [line] = said
  assert "trains 2 groups apart, but BatchNormalization(synchronized" in line
  found, statistics = _run(strategy, keras_own, x, counts)
  bed.check(found, statistics, [[0, 1, 2, 3]], x, counts, 1e-6, library=library)


@pytest.mark.parametrize("package", [keras3, tf_keras])
def test_a_replica_without_examples(package: Any) -> None:
  """Group 0 has examples on replica 0 only, and group 1 has none at all."""
  strategy = testbed.mirrored()
  x, counts = bed.data(1)
  with strategy.scope():
    layer = bed.make(
      package.SyncBatchNormalization, [[0, 1], [2, 3]], library=package.keras
    )
  x, counts = x[0], counts[0]

  @tf.function(autograph=False)
  def run() -> Any:
    def replica_step() -> list[tf.Tensor]:
      rows = tf.where(testbed.replica_id() == 0, len(x), 0)
      return bed.step(layer, tf.constant(x)[:rows], tf.constant(counts)[:rows])

    return strategy.run(replica_step)

  found = [strategy.experimental_local_results(each) for each in run()]
  right, (mean, variance) = bed.plain(x, counts, library=package.keras)
  for ours, expected in zip(found, right, strict=True):
    np.testing.assert_allclose(ours[0], expected, 1e-9, 1e-9)
  for kept, new, initial in zip(
    layer.non_trainable_variables, (mean, variance), (0.0, 1.0), strict=True
  ):
    copies = testbed.copies(kept)
    np.testing.assert_allclose(copies[:2], [new, new], 1e-9)
    np.testing.assert_allclose(copies[2:], np.full((2, 5), initial), 1e-9)


@pytest.mark.parametrize("package", [keras3, tf_keras])
def test_files_keep_the_groups(package: Any, tmp_path: pathlib.Path) -> None:
  """And on one device a loaded model trains as Keras' layer does."""
  library = package.keras
  layer = package.SyncBatchNormalization(STRIDED, momentum=0.5)
  model = library.Sequential([library.Input((4,)), layer])
  path = tmp_path / "model.keras"
  model.save(path)
  loaded = library.models.load_model(path)
  layer = loaded.layers[0]
  assert type(layer) is package.SyncBatchNormalization
  assert (layer.group_assignment, layer.momentum) == (STRIDED, 0.5)
  x = np.random.default_rng(0).normal(size=(8, 4)).astype("f4")
  keras_own = library.layers.BatchNormalization(momentum=0.5)
  expected = keras_own(x, training=True).numpy()
  testbed.assert_close(layer(x, training=True).numpy(), expected, "outputs")
  for own, right in zip(layer.variables, keras_own.variables, strict=True):
    testbed.assert_close(own.numpy(), right.numpy(), own.name)


def test_groups_of_another_strategy_are_an_error() -> None:
  strategy = testbed.mirrored()
  with strategy.scope():
    layer = layers.SyncBatchNormalization([[0, 1]])
    layer.build((None, 2))
  before = [v.numpy() for v in layer.variables]
  with pytest.raises(ValueError, match=r"range\(4\) .* 2 is missing"):
    testbed.run(lambda: layer(tf.ones([3, 2]), training=True))
  for own, value in zip(layer.variables, before, strict=True):
    np.testing.assert_array_equal(own.numpy(), value)
  with pytest.raises(ValueError, match="exactly once"):
    layers.SyncBatchNormalization([[0, 1], [1, 2]])
  with pytest.raises(TypeError, match="synchronized"):
    layers.SyncBatchNormalization(None, synchronized=False)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
