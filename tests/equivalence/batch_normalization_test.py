"""Batch normalization in groups against plain Keras on one device."""

import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras as tf_keras_library

from tests.support import testbed, training
from tf_cross_shard import callbacks, keras3, layers, tf_keras

LIBRARIES = {keras3: keras, tf_keras: tf_keras_library}

STRIDED = [[0, 2], [1, 3]]
SHAPE = (3, 2, 4, 5)  # of a replica's batch
OPTIONS = {"momentum": 0.75, "epsilon": 0.125, "dtype": "float64"}


def data(replicas: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns every replica's inputs, and the weights of its outputs in the loss.

  They are float64 with means far from 0: an imprecise variance is noticed.
  """
  rng = np.random.default_rng(3)
  shape = (replicas, *SHAPE)
  x = 30.0 + 5.0 * rng.normal(size=shape)
  x += 10.0 * np.arange(replicas).reshape(-1, 1, 1, 1, 1)
  return x, rng.normal(size=shape)


def make(layer: Any, *args: Any, library: Any = tf.keras, **kwargs: Any) -> Any:
  """Builds a layer whose scale and offset are not 1 and 0."""
  constant = library.initializers.Constant
  made = layer(
    *args,
    gamma_initializer=constant(1.5),
    beta_initializer=constant(-0.5),
    **{**OPTIONS, **kwargs},
  )
  made.build((None, *SHAPE[1:]))
  return made


def step(layer: Any, x: Any, counts: Any, **options: Any) -> list[tf.Tensor]:
  """Returns the outputs, and the gradients of inputs, scale and offset."""
  x = tf.convert_to_tensor(x)
  with tf.GradientTape() as tape:
    tape.watch(x)
    outputs = layer(x, training=True, **options)
    loss = tf.reduce_sum(outputs * counts)
  return [outputs, *tape.gradient(loss, [x, *layer.trainable_variables])]


def plain(
  x: np.ndarray,
  counts: np.ndarray,
  *,
  library: Any = tf.keras,
  mask: Any = None,
  **options: Any,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Calls Keras on all examples; returns what `step` does, and statistics."""
  if not hasattr(library, "Variable"):
    options["fused"] = False  # Its kernel multiplies variances by n / (n - 1).
  layer = make(library.layers.BatchNormalization, library=library, **options)
  masked = {} if mask is None else {"mask": tf.constant(mask)}
  found = step(layer, x, counts, **masked)
  return [np.array(value) for value in found], [
    variable.numpy() for variable in layer.non_trainable_variables
  ]


def check(
  found: Sequence[Sequence[np.ndarray]],
  statistics: Sequence[Sequence[np.ndarray]],
  groups: Sequence[Sequence[int]],
  x: np.ndarray,
  counts: np.ndarray,
  tolerance: float = 1e-9,
  **options: Any,
) -> None:
  """Compares with plain Keras on each group's concatenated batch.

  `found` holds what `step` returned on each replica; `options` go to `plain`.
  """
  assert len(found) == len(statistics) == len(x) > 1
  assert len({value[0].tobytes() for value in found}) == len(x), "same data"
  masks = options.pop("mask", None)
  for members in groups:
    rows = list(members)
    mask = None if masks is None else np.concatenate(masks[rows])
    (outputs, slopes, *weights), moving = plain(
      np.concatenate(x[rows]),
      np.concatenate(counts[rows]),
      mask=mask,
      **options,
    )
    mine = [found[replica] for replica in members]
    pairs = [
      (np.concatenate([each[0] for each in mine]), outputs),
      (np.concatenate([each[1] for each in mine]), slopes),
      *(
        (sum(each[i] for each in mine), weight)
        for i, weight in enumerate(weights, 2)
      ),
      *(
        (statistics[replica][i], value)
        for replica in members
        for i, value in enumerate(moving)
      ),
    ]
    assert len(pairs) == 4 + 2 * len(rows)
    for i, (actual, expected) in enumerate(pairs):
      np.testing.assert_allclose(
        actual, expected, tolerance, tolerance, err_msg=f"{members}, {i}"
      )


def _run(
  strategy: tf.distribute.Strategy,
  layer: Any,
  x: np.ndarray,
  counts: np.ndarray,
  mode: str = "function",
  mask: Any = None,
) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
  """Returns each replica's results of `step`, and its moving statistics."""

  def replica_step() -> list[tf.Tensor]:
    mine = testbed.replica_id()
    options = {} if mask is None else {"mask": tf.constant(mask)[mine]}
    return step(
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
def test_group_is_normalized_as_one_batch(
  engine: str, mode: str, grouping: str, axis: int
) -> None:
  strategy = getattr(testbed, engine)(testbed.REPLICAS)
  x, counts = data(testbed.REPLICAS)
  assignment = testbed.GROUPINGS[grouping]
  with strategy.scope():
    layer = make(layers.SyncBatchNormalization, assignment, axis=axis)
  found, statistics = _run(strategy, layer, x, counts, mode)
  groups = testbed.groups_of(assignment)
  check(found, statistics, groups.assignment, x, counts, axis=axis)


@pytest.mark.parametrize("package", [keras3, tf_keras])
def test_masked_examples_do_not_count(package: Any) -> None:
  strategy = testbed.mirrored()
  x, counts = data(testbed.REPLICAS)
  mask = np.random.default_rng(5).random(x.shape[:-1]) < 0.5
  assert len({each.sum() for each in mask}) > 1
  library = LIBRARIES[package]
  with strategy.scope():
    layer = make(package.SyncBatchNormalization, STRIDED, library=library)
  found, statistics = _run(strategy, layer, x, counts, mask=mask)
  # Keras 3 divides by one example and 1e-7 more.
  check(
    *(found, statistics, STRIDED, x, counts),
    tolerance=1e-6 if package is keras3 else 1e-9,
    library=library,
    mask=mask,
  )


@pytest.mark.parametrize("package", [keras3, tf_keras])
def test_keras_layer_logs_a_warning(package: Any, said: list[str]) -> None:
  strategy = testbed.mirrored()
  library = LIBRARIES[package]
  with strategy.scope():
    keras_own, ours, other = (
      make(layer, *args, library=library, **options)
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
        callbacks.PerModelTensorBoard("unused").set_model(model)
  [line] = said
  assert "trains 2 separate groups, but BatchNormalization(synchronized" in line


@pytest.mark.parametrize("package", [keras3, tf_keras])
def test_a_replica_without_examples(package: Any) -> None:
  """Group 0 has examples on replica 0 only, and group 1 has none at all."""
  strategy = testbed.mirrored()
  x, counts = data(1)
  with strategy.scope():
    layer = make(
      package.SyncBatchNormalization,
      [[0, 1], [2, 3]],
      library=LIBRARIES[package],
    )
  x, counts = x[0], counts[0]

  @tf.function(autograph=False)
  def run() -> Any:
    def replica_step() -> list[tf.Tensor]:
      rows = tf.where(testbed.replica_id() == 0, len(x), 0)
      return step(layer, tf.constant(x)[:rows], tf.constant(counts)[:rows])

    return strategy.run(replica_step)

  found = [strategy.experimental_local_results(each) for each in run()]
  right, (mean, variance) = plain(x, counts, library=LIBRARIES[package])
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
  """A model that is loaded on one device trains like Keras' layer."""
  library = LIBRARIES[package]
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
  training.assert_close(layer(x, training=True).numpy(), expected, "outputs")
  for own, right in zip(layer.variables, keras_own.variables, strict=True):
    training.assert_close(own.numpy(), right.numpy(), own.name)


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
