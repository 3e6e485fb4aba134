"""`layers.ShardedEmbedding`: rows that the members of a group divide."""

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import lazy_oracle, testbed, training
from tests.support.tables import (
  ROWS,
  TABLE,
  WIDTH,
  batches,
  make,
  take_steps,
  whole,
)


def strategy_of(replicas: int) -> Any:
  """Returns a strategy with a number of replicas."""
  one = tf.distribute.OneDeviceStrategy("CPU:0")
  return testbed.mirrored(replicas) if replicas > 1 else one


@pytest.mark.parametrize(
  ("which", "replicas", "kind"),
  [
    ("keras", 4, "SGD"),
    ("keras", 2, "Adam"),
    ("keras", 4, "AdamW"),
    ("keras", 1, "Adagrad"),
    ("tf_keras", 2, "SGD"),
    ("tf_keras", 4, "Adagrad"),
    ("tf_keras", 1, "Adam"),
  ],
)
def test_steps_are_those_of_a_whole_table(
  which: str, replicas: int, kind: str
) -> None:
  """`equivalence/sharded_tables_test.py` has all combinations."""
  strategy, layer, optimizer = make(which, strategy_of(replicas), kind)
  take_steps(strategy, layer, optimizer)
  right = lazy_oracle.train(kind, TABLE, batches(range(replicas)))
  np.testing.assert_allclose(whole(layer), right, rtol=2e-6, atol=2e-6)
  if kind == "SGD":
    np.testing.assert_array_equal(whole(layer), right.astype("float32"))


@pytest.mark.parametrize("in_cond", [False, True])
@training.in_both
def test_each_group_has_its_own_table(which: str, in_cond: bool) -> None:
  groups = [[0, 2], [1, 3]]
  strategy, layer, optimizer = make(which, strategy_of(4), "Adagrad", groups)
  take_steps(strategy, layer, optimizer, in_cond=in_cond)
  for index, members in enumerate(groups):
    right = lazy_oracle.train("Adagrad", TABLE, batches(members))
    np.testing.assert_allclose(whole(layer, index), right, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("limit", ["clipnorm", "global_clipnorm", "clipvalue"])
@training.in_both
def test_opt_clips_by_the_norm_of_the_whole_table(
  which: str, limit: str
) -> None:
  strategy, layer, optimizer = make(
    which, strategy_of(4), opt={limit: 1.5, "momentum": 0.0}
  )
  take_steps(strategy, layer, optimizer)
  table = TABLE.astype("float64")
  for ids, rows in batches(range(4)):
    grad = np.zeros_like(table)
    np.add.at(grad, ids, rows)
    if limit == "clipvalue":
      grad = np.clip(grad, -1.5, 1.5)
    else:
      grad *= min(1, 1.5 / np.linalg.norm(grad))
    table -= lazy_oracle.RATE * grad
  np.testing.assert_allclose(whole(layer), table, rtol=1e-5, atol=1e-6)


@training.in_both
def test_clipvalue_does_not_merge_rows_again(which: str) -> None:
  counts = []
  for opt in ({}, {"clipvalue": 1.5}):
    strategy, layer, optimizer = make(which, strategy_of(4), opt=opt)
    with strategy.scope():
      optimizer.build(layer.trainable_variables)

    def step(layer: Any = layer, optimizer: Any = optimizer) -> None:
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([3, 7, 3])))
      variables = training.native(layer.trainable_variables)
      grads = tape.gradient(loss, variables)
      optimizer.apply_gradients(zip(grads, variables, strict=True))

    run = tf.function(functools.partial(strategy.run, step), autograph=False)
    graph = run.get_concrete_function().graph.as_graph_def()
    nodes = [graph.node, *(f.node_def for f in graph.library.function)]
    counts.append(sum(node.op == "Unique" for own in nodes for node in own))
  assert counts[0] == counts[1] > 0


@training.in_both
def test_all_members_skip_a_step_with_a_nan(which: str) -> None:
  library, package = training.KERASES[which]
  strategy = testbed.mirrored()
  with strategy.scope():
    layer = package.ShardedEmbedding(ROWS, WIDTH)
    layer.build()
    dense = package.Embedding(2, 1, embeddings_initializer="ones")
    dense.build((None,))
    optimizer = package.CrossShardOptimizer(
      library.optimizers.SGD(0.5), skip_nonfinite=True
    )
  layer.load_own_variables({"0": TABLE})

  def step() -> None:
    # Only the owner of row 2 sees the NaN.
    with tf.GradientTape() as tape:
      rows = layer(tf.constant([2])) * tf.constant([[np.nan, 1.0]])
      loss = tf.reduce_sum(rows) + tf.reduce_sum(dense(tf.constant([0])))
    variables = training.native(
      layer.trainable_variables + dense.trainable_variables
    )
    grads = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(grads, variables, strict=True))

  tf.function(lambda: strategy.run(step), autograph=False)()
  np.testing.assert_array_equal(whole(layer), TABLE)
  for copy in testbed.copies(dense.trainable_variables[0]):
    np.testing.assert_array_equal(copy, [[1.0], [1.0]])
  assert {int(c) for c in testbed.copies(optimizer.skipped_steps)} == {1}


def model_of(library: Any, embedding: Any) -> Any:
  """Returns a model that multiplies the rows of two ids."""
  return library.Sequential(
    [
      library.Input((2,), dtype="int32"),
      embedding,
      library.layers.Flatten(),
      library.layers.Dense(1, kernel_initializer="ones"),
    ]
  )


@pytest.mark.parametrize(
  ("which", "policy"), [("keras", "mixed_float16"), ("tf_keras", "float32")]
)
def test_fit_predicts_and_evaluates_as_plain_keras(
  which: str, policy: str
) -> None:
  """A dense table in plain Keras, on one device, has the same numbers."""
  library, package = training.KERASES[which]
  x = np.random.default_rng(3).integers(0, ROWS, [48, 2])
  y = np.random.default_rng(4).normal(size=[48, 1]).astype("float32")
  results = []
  for ours in (False, True):
    strategy = testbed.mirrored(2) if ours else tf.distribute.get_strategy()
    with strategy.scope():
      kind = package.ShardedEmbedding if ours else library.layers.Embedding
      layer = kind(ROWS, WIDTH, dtype=policy)
      model = model_of(library, layer)
      optimizer = library.optimizers.SGD(0.01)
      if ours:
        optimizer = package.CrossShardOptimizer(optimizer)
      model.compile(optimizer, "mse")
    layer.load_own_variables({"0": TABLE})
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    history = model.fit(data, epochs=2, verbose=0)
    results.append(
      (
        np.array(history.history["loss"]),
        np.array(model.evaluate(data, verbose=0)),
        model.predict(data, verbose=0),
        whole(layer) if ours else np.array(layer.embeddings),
      )
    )
  tolerance = 1e-5 if policy == "float32" else 2e-3
  for right, out in zip(*results, strict=True):
    np.testing.assert_allclose(out, right, rtol=tolerance, atol=tolerance)


@training.in_both
def test_two_features_share_a_table_and_one_has_weights(which: str) -> None:
  library, package = training.KERASES[which]
  rng = np.random.default_rng(0)
  data = tf.data.Dataset.from_tensor_slices(
    (
      (
        rng.integers(0, ROWS, [32, 3]),
        rng.random([32, 3], np.float32),
        rng.integers(0, ROWS, [32, 1]),
      ),
      rng.random([32, WIDTH], np.float32),
    )
  ).batch(16)
  results = []
  for ours in (False, True):
    strategy = testbed.mirrored(2) if ours else tf.distribute.get_strategy()
    with strategy.scope():
      many = library.Input((3,), dtype="int32")
      weights = library.Input((3,))
      one = library.Input((1,), dtype="int32")
      optimizer = library.optimizers.SGD(0.5)
      if ours:
        layer = package.ShardedEmbedding(ROWS, WIDTH, "ones", combiner="sum")
        both = layer(many, weights=weights) + layer(one)
        optimizer = package.CrossShardOptimizer(optimizer)
      else:
        layers = library.layers
        layer = layers.Embedding(ROWS, WIDTH, "ones")
        weighted = layers.Dot(1)([layer(many), layers.Reshape((3, 1))(weights)])
        both = layers.Add()(
          [layers.Flatten()(weighted), layers.Flatten()(layer(one))]
        )
      model = library.Model([many, weights, one], both)
      model.compile(optimizer, "mse")
    model.fit(data, epochs=2, verbose=0)
    results.append(whole(layer) if ours else np.array(layer.embeddings))
  np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


@training.in_both
def test_a_model_that_is_built_by_its_first_batch(which: str) -> None:
  library, package = training.KERASES[which]

  class Model(library.Model):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
      super().__init__()
      self.rows = package.ShardedEmbedding(
        ROWS, WIDTH, "uniform", combiner="sum"
      )

    def call(self, ids: Any) -> Any:
      return self.rows(ids)

  tables = []
  for replicas in (2, 4):
    with testbed.mirrored(replicas).scope():
      model = Model()
      model.compile(
        package.CrossShardOptimizer(library.optimizers.SGD(0.0)), "mse"
      )
    model.fit(np.zeros([8, 3], int), np.zeros([8, WIDTH]), verbose=0)
    tables.append(whole(model.rows))
    np.testing.assert_array_equal(
      model.rows.lookup([[3, 7]]).numpy(), tables[-1][[[3, 7]]]
    )
  np.testing.assert_array_equal(*tables)
  assert len(np.unique(tables[0])) == ROWS * WIDTH  # No row is zero.


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("is_ragged", [False, True])
@training.in_both
def test_combiners(which: str, is_ragged: bool, combiner: str) -> None:
  _, package = training.KERASES[which]
  layer = package.ShardedEmbedding(ROWS, WIDTH, combiner=combiner)
  layer.build()
  layer.set_weights([TABLE])
  examples = [[3, 3, 10], [0, 7, 7]] if not is_ragged else [[3, 3], [10], []]
  make_ids = tf.ragged.constant if is_ragged else tf.constant
  ids = make_ids(examples, tf.int64)
  powers = {"sum": 0.0, "mean": 1.0, "sqrtn": 0.5}
  right = [
    TABLE[np.array(e, int)].sum(0) / max(len(e), 1) ** powers[combiner]
    for e in examples
  ]
  np.testing.assert_allclose(np.array(layer(ids)), right, rtol=1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
@training.in_both
def test_weights_of_ids_as_in_tensorflow(
  which: str, kind: str, combiner: str
) -> None:
  _, package = training.KERASES[which]
  layer = package.ShardedEmbedding(ROWS, WIDTH, combiner=combiner)
  layer.build()
  layer.set_weights([TABLE])
  places = [[0, 0], [0, 1], [2, 0], [2, 1]]
  ids = tf.SparseTensor(places, tf.constant([3, 3, 7, 0]), [3, 2])
  weights = tf.SparseTensor(places, tf.constant([0.5, 2.0, -1.0, 3.0]), [3, 2])
  right = np.array(
    tf.nn.embedding_lookup_sparse(
      tf.constant(TABLE), ids, weights, combiner=combiner
    )
  )
  if kind == "sparse":
    out = layer(ids, weights=weights)
  elif kind == "ragged":
    lists = tf.RaggedTensor.from_sparse
    out = layer(lists(ids), weights=lists(weights))
  else:
    dense = tf.sparse.to_dense
    out = layer(dense(ids), weights=dense(weights))
  np.testing.assert_allclose(np.array(out), right, rtol=1e-6)


@training.in_both
def test_ragged_ids_and_masks(which: str) -> None:
  _, package = training.KERASES[which]
  layer = package.ShardedEmbedding(ROWS, WIDTH, mask_zero=True)
  layer.build()
  layer.set_weights([TABLE])
  rows = layer(tf.ragged.constant([[1, 4], [4]]))
  np.testing.assert_array_equal(rows.flat_values, TABLE[[1, 4, 4]])
  mask = layer.compute_mask(tf.constant([[1, 0]]))
  np.testing.assert_array_equal(mask, [[True, False]])
  copy = package.ShardedEmbedding.from_config(layer.get_config())
  copy.build()
  assert copy.mask_zero
  with pytest.raises(TypeError, match="Sparse ids need a combiner"):
    layer(tf.sparse.from_dense([[1, 4]]))
  with pytest.raises(ValueError, match="`weights` needs a combiner"):
    layer(tf.constant([[1, 4]]), weights=tf.constant([[1.0, 2.0]]))


@pytest.mark.parametrize("bad", [-1, ROWS])
@training.in_both
def test_ids_out_of_range(which: str, bad: int) -> None:
  strategy, layer, _ = make(which, strategy_of(4))
  with pytest.raises(tf.errors.InvalidArgumentError, match="from_0_to_10"):
    layer.lookup([bad])
  run = tf.function(
    lambda: strategy.run(lambda: layer(tf.constant([[bad]]))), autograph=False
  )
  with pytest.raises(tf.errors.InvalidArgumentError, match="from_0_to_10"):
    run()


@pytest.mark.parametrize(
  ("arguments", "named"),
  [
    ({"embeddings_initializer": "glorot_uniform"}, "embeddings_initializer"),
    ({"combiner": "max"}, "combiner"),
    ({"combiner": "sum", "mask_zero": True}, "combiner"),
    ({"input_dim": 3}, "input_dim"),
    ({"group_assignment": [[0, 1], [2, 2]]}, "group_assignment"),
  ],
)
@training.in_both
def test_wrong_arguments(
  which: str, arguments: dict[str, Any], named: str
) -> None:
  _, package = training.KERASES[which]
  with strategy_of(4).scope(), pytest.raises(ValueError, match=named):
    package.ShardedEmbedding(
      **{"input_dim": ROWS, "output_dim": WIDTH, **arguments}
    )


@pytest.mark.parametrize(
  ("kind", "settings", "named"),
  [
    ("SGD", {"accumulate_steps": 2}, "accumulate_steps"),
    ("SGD", {"shard_update": True}, "shard_update"),
    ("SGD", {"clipnorm": 1.0}, "clipnorm"),
    ("SGD", {"opt": {"use_ema": True}}, "use_ema"),
    ("Adafactor", {}, "Adafactor"),
    ("Adam", {}, "group_assignment"),
  ],
)
@training.in_both
def test_optimizers_that_cannot_train_it(
  which: str, kind: str, settings: dict[str, Any], named: str
) -> None:
  strategy, layer, optimizer = make(which, strategy_of(2), kind, **settings)
  if named == "group_assignment":
    _, _, optimizer = make(which, strategy, kind, [[0], [1]])
  with pytest.raises(ValueError, match=named):
    take_steps(strategy, layer, optimizer)
  np.testing.assert_array_equal(whole(layer), TABLE)


@training.in_both
def test_a_plain_optimizer_and_assigning_raise_errors(which: str) -> None:
  library, _ = training.KERASES[which]
  strategy, layer, _ = make(which, strategy_of(4))
  with strategy.scope():
    plain = library.optimizers.SGD(1.0)
  with pytest.raises(RuntimeError, match="CrossShardOptimizer"):
    take_steps(strategy, layer, plain)
  [variable] = training.native(layer.trainable_variables)
  with pytest.raises(RuntimeError, match="set_weights"):
    variable.assign(np.zeros(variable.shape))
  with strategy.scope():
    model = library.Sequential([library.Input((2,), dtype="int32"), layer])
  with pytest.raises(RuntimeError, match="get_weights"):
    model.get_weights()
  np.testing.assert_array_equal(whole(layer), TABLE)


def test_the_virtual_tpu_says_what_is_missing() -> None:
  _, package = training.KERASES["keras"]
  with (
    testbed.virtual(2).scope(),
    pytest.raises(NotImplementedError, match=r"layers\.Embedding"),
  ):
    package.ShardedEmbedding(ROWS, WIDTH)


@training.in_both
def test_description(which: str) -> None:
  strategy, layer, optimizer = make(which, strategy_of(4), "Adam")
  with strategy.scope():
    optimizer.build(layer.trainable_variables)
  [row] = optimizer.describe().rows()
  assert row["updated_by"] == "rows"
  # A part of 3 rows with padding, and two slots of it.
  assert row["elements"] == [3 * WIDTH] * 4
  assert row["state_bytes"] == 2 * 3 * WIDTH * 4
