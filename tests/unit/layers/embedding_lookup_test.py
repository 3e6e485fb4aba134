"""`layers.Embedding`: Keras' layer, except that it reads the rows alone."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training

ROWS, WIDTH = 12, 3
# In ragged ids, the second example has one id.
RAGGED = tf.ragged.constant([[1, 4], [4]])


def _layer(which: str, **options: Any) -> tuple[Any, Any]:
  """Returns Keras' layer and ours, built, with the same weights."""
  library, package = training.KERASES[which]
  weights = np.arange(ROWS * WIDTH, dtype="float32").reshape(ROWS, WIDTH)
  plain = library.layers.Embedding(ROWS, WIDTH, **options)
  ours = package.Embedding(ROWS, WIDTH, **options)
  for layer in (plain, ours):
    layer.build((None, 2))
    layer.set_weights([weights])
  return plain, ours


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
@pytest.mark.parametrize(
  "ids",
  [
    pytest.param(tf.constant([[1, 4], [0, 11]]), id="int32"),
    pytest.param(tf.constant([[1, 4]], tf.int64), id="int64"),
    pytest.param(tf.constant([[1.0, 4.0]]), id="float32"),
    pytest.param(RAGGED, id="ragged"),
    pytest.param(np.array([[1, 4]], np.uint8), id="numpy"),
    pytest.param(tf.sparse.from_dense([[1, 4], [0, 2]]), id="sparse"),
  ],
)
@training.in_both
def test_outputs_are_those_of_keras(which: str, ids: Any, dtype: str) -> None:
  plain, ours = _layer(which, dtype=dtype)
  right, out = plain(ids), ours(ids)
  assert out.dtype == right.dtype
  if isinstance(right, tf.RaggedTensor):
    right, out = right.to_tensor(), out.to_tensor()
  assert out.shape == right.shape
  np.testing.assert_array_equal(out, right)


@training.in_both
def test_masks_are_those_of_keras(which: str) -> None:
  plain, ours = _layer(which, mask_zero=True)
  ids = tf.constant([[1, 0], [0, 11]])
  np.testing.assert_array_equal(ours.compute_mask(ids), plain.compute_mask(ids))


def test_negative_ids_count_from_the_last_row() -> None:
  plain, ours = _layer("keras")
  ids = tf.constant([[-1, 2]])
  np.testing.assert_array_equal(ours(ids), plain(ids))


@pytest.mark.parametrize("what", ["lora", "int8"])
def test_other_tables_are_read_by_keras(what: str) -> None:
  plain, ours = _layer("keras")
  for layer in (plain, ours):
    if what == "lora":
      layer.enable_lora(2, a_initializer="ones", b_initializer="ones")
    else:
      layer.quantize("int8", type_check=False)
  ids = tf.constant([[1, 4]])
  np.testing.assert_array_equal(ours(ids), plain(ids))
  assert (ours(ids) != 0).numpy().any()


@training.in_both
@pytest.mark.parametrize("shards", [False, True])
def test_training_has_no_tensor_of_the_table_size(
  which: str, shards: bool
) -> None:
  """No tensor of the step has the shape of the table, on any replica."""
  library, package = training.KERASES[which]
  strategy = testbed.mirrored()
  with strategy.scope():
    model = library.Sequential(
      [library.Input((2,), dtype="int32"), package.Embedding(ROWS, WIDTH)]
    )
    optimizer = package.CrossShardOptimizer(
      library.optimizers.Adam(0.1), lazy_rows=True, shard_update=shards
    )
    optimizer.build(model.trainable_variables)
  [table] = model.trainable_variables
  before = np.array(table)

  @tf.function(autograph=False)
  def step() -> None:
    def replica_step() -> None:
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.constant([[1, 4]]), training=True))
      grads = tape.gradient(loss, training.native([table]))
      assert isinstance(grads[0], tf.IndexedSlices)
      optimizer.apply_gradients([(grads[0], table)])

    strategy.run(replica_step)

  graph = step.get_concrete_function().graph
  shapes = [out.shape for op in graph.get_operations() for out in op.outputs]
  assert (ROWS, WIDTH) not in shapes
  step()
  copies = testbed.values(table)
  assert len(copies) == strategy.num_replicas_in_sync > 1
  for copy in copies:
    moved = (copy != before).any(axis=1)
    assert moved.nonzero()[0].tolist() == [1, 4]


@training.in_both
def test_files_load_and_weights_move_both_ways(
  which: str, tmp_path: pathlib.Path
) -> None:
  library, package = training.KERASES[which]
  models = [
    library.Sequential([library.Input((2,), dtype="int32"), layer])
    for layer in (
      package.Embedding(ROWS, WIDTH, name="items"),
      library.layers.Embedding(ROWS, WIDTH, name="items"),
    )
  ]
  ours, plain = models
  ids = np.array([[1, 4]])
  ours.save(tmp_path / "model.keras")
  loaded = library.models.load_model(tmp_path / "model.keras")
  assert type(loaded.layers[-1]) is package.Embedding
  np.testing.assert_array_equal(loaded(ids), ours(ids))
  ours.save_weights(tmp_path / "ours.weights.h5")
  plain.load_weights(tmp_path / "ours.weights.h5")
  np.testing.assert_array_equal(plain(ids), ours(ids))
  plain.layers[-1].set_weights([np.ones([ROWS, WIDTH])])
  plain.save_weights(tmp_path / "plain.weights.h5")
  ours.load_weights(tmp_path / "plain.weights.h5")
  np.testing.assert_array_equal(ours(ids), np.ones([1, 2, WIDTH]))
