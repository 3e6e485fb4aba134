"""Tests row updates of embedding tables, exact and with `lazy_rows`."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import oracle, testbed, training
from tf_cross_shard import keras3
from tf_cross_shard import tf_keras as ours_tf_keras

ROWS, WIDTH = 7, 3
PACKAGES = {"keras3": (keras3, keras), "tf_keras": (ours_tf_keras, tf_keras)}
GROUPS = [[0, 1], [2, 3]]
# Keras rounds betas to float32: its 1 - 0.999 is 1.3e-5 of itself too large.
TOLERANCE: Any = {"rtol": 1e-4, "atol": 1e-5}
_RNG = np.random.default_rng(0)
TABLE = _RNG.normal(size=(ROWS, WIDTH))
# Of each replica in each step: overlapping ids, ids that no other has, one id
# twice, none at all; never rows 5 and 6 in group 0.
IDS: Sequence[Sequence[Sequence[int]]] = (
  ([0, 1, 1], [1, 2], [5], [6, 6, 6]),
  ([3], [], [0, 5], [5, 0]),
  ([4, 0, 3], [3, 3], [], []),
)
BATCHES = [
  [(np.array(ids, int), _RNG.normal(size=(len(ids), WIDTH))) for ids in step]
  for step in IDS
]


def _group_batches(members: Sequence[int]) -> list[oracle.Batch]:
  """The rows of all members of a group, in each step."""
  return [
    (
      np.concatenate([step[r][0] for r in members]),
      np.concatenate([step[r][1] for r in members]),
    )
    for step in BATCHES
  ]


def _slices(batch: oracle.Batch, dtype: Any) -> tf.IndexedSlices:
  indices, rows = batch
  return tf.IndexedSlices(
    tf.constant(rows, dtype),
    tf.constant(indices, tf.int64),
    tf.constant([ROWS, WIDTH], tf.int64),
  )


def _opt(package: str, kind: str, **settings: Any) -> Any:
  own = {"learning_rate": oracle.RATE, **oracle.KINDS[kind][1]}
  library = PACKAGES[package][1]
  return getattr(library.optimizers, kind)(**{**own, **settings})


def _optimizer(package: str, kind: str, **options: Any) -> Any:
  opt = _opt(package, kind, **options.pop("settings", {}))
  return PACKAGES[package][0].CrossShardOptimizer(opt, "sum", **options)


def _train_replicas(
  optimizer: Any, weights: Sequence[Any], steps: Sequence[Any]
) -> None:
  """Takes eager steps on a table and, if there is one, a [3, 5] kernel."""
  for batches in steps:

    def step(batches: Any = batches) -> None:
      replica = int(testbed.replica_id())
      dense = np.arange(15.0).reshape(3, 5) * 2**replica - 20.0
      grads = [
        _slices(batches[replica], tf.float64),
        tf.constant(dense, tf.float32),
      ]
      optimizer.apply_gradients(list(zip(grads, weights, strict=False)))

    testbed.run(lambda step=step: [step(), None][1], "eager")


def _train_one(optimizer: Any, dtype: Any = tf.float64) -> np.ndarray:
  """Group 0's batches on one device, in a function; a dense variable too."""
  table, dense = tf.Variable(TABLE, dtype=dtype), tf.Variable(1.0, dtype=dtype)
  optimizer.build([table, dense])

  @tf.function(autograph=False, reduce_retracing=True)
  def step(values: tf.Tensor, indices: tf.Tensor) -> None:
    grad = tf.IndexedSlices(values, indices, tf.constant([ROWS, WIDTH]))
    one = tf.constant(1.0, dtype)
    optimizer.apply_gradients([(grad, table), (one, dense)])

  for batch in _group_batches([0, 1]):
    slices = _slices(batch, dtype)
    step(slices.values, tf.cast(slices.indices, tf.int32))
  return np.array(table.numpy())


@pytest.mark.parametrize(
  ("kind", "package"),
  [(kind, list(PACKAGES)[i % 2]) for i, kind in enumerate(oracle.KINDS)],
)
def test_lazy_rows_of_groups(kind: str, package: str) -> None:
  """Compares with NumPy. Rows that do not occur keep their bits."""
  with testbed.mirrored().scope():
    table = tf.Variable(TABLE, name="table")
    optimizer = _optimizer(
      *(package, kind), group_assignment=GROUPS, lazy_rows=True
    )
    optimizer.build([table])
  # Operations of Keras 3 fail eagerly where a group has no row at all.
  _train_replicas(optimizer, [table], BATCHES[:2])

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    return [oracle.train_rows(kind, TABLE, _group_batches(members)[:2])]

  training.check_groups(
    training.by_replica([table]),
    GROUPS,
    expected,
    lambda value, *_: TOLERANCE["atol"] + TOLERANCE["rtol"] * abs(value),
  )
  np.testing.assert_array_equal(testbed.copies(table)[0][5:], TABLE[5:])


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("lazy_rows", [False, True])
@pytest.mark.parametrize(
  ("kind", "settings"), [("SGD", {"momentum": 0.0}), ("Adagrad", {})]
)
def test_exact_as_plain_keras(
  kind: str, settings: dict[str, Any], lazy_rows: bool, package: str
) -> None:
  """With `lazy_rows`, as plain Keras with dense gradients."""
  optimizer = _optimizer(package, kind, settings=settings, lazy_rows=lazy_rows)
  found = _train_one(optimizer, tf.float32)
  plain = optimizer.inner_optimizer.from_config(
    optimizer.inner_optimizer.get_config()
  )
  table = PACKAGES[package][1].Variable if package == "keras3" else tf.Variable
  weight = table(TABLE.astype("float32"))
  plain.build([weight])
  for batch in _group_batches([0, 1]):
    grad = _slices(batch, tf.float32)
    if lazy_rows:
      grad = tf.convert_to_tensor(grad)
    plain.apply_gradients([(grad, weight)])
  np.testing.assert_allclose(found, weight.numpy(), rtol=0, atol=1e-7)
  np.testing.assert_array_equal(found[5:], np.float32(TABLE[5:]))


def _reads_whole_table(optimizer: Any) -> bool:
  """Whether a traced step has a tensor of the table's size."""
  table = tf.Variable(tf.zeros([ROWS, WIDTH]), name="embeddings")
  optimizer.build([table])
  values = tf.TensorSpec([2, WIDTH])

  @tf.function(autograph=False, input_signature=[values])
  def step(rows: tf.Tensor) -> None:
    shape = tf.constant([ROWS, WIDTH])
    grad = tf.IndexedSlices(rows, tf.constant([1, 4]), shape)
    optimizer.apply_gradients([(grad, table)])

  graph = step.get_concrete_function().graph
  return any(
    output.shape == (ROWS, WIDTH)
    for part in (graph, *graph._functions.values())
    for op in getattr(part, "graph", part).get_operations()
    for output in op.outputs
  )


@pytest.mark.parametrize(
  ("kind", "options", "is_by_rows"),
  [
    ("SGD", {"settings": {"momentum": 0.0}}, True),
    ("Adagrad", {}, True),
    ("Adagrad", {"settings": {"weight_decay": 0.5}}, False),
    ("Adam", {}, False),
    ("Adam", {"lazy_rows": True}, True),
    ("AdamW", {"lazy_rows": True}, True),
    ("Adam", {"lazy_rows": True, "settings": {"global_clipnorm": 1.0}}, True),
    ("Adam", {"lazy_rows": True, "clipnorm": 1.0}, True),
    ("Adagrad", {"accumulate_steps": 2}, False),
  ],
)
def test_lazy_steps_have_no_tensor_of_the_table_size(
  kind: str, options: dict[str, Any], is_by_rows: bool
) -> None:
  optimizer = _optimizer("keras3", kind, **options)
  assert _reads_whole_table(optimizer) is not is_by_rows


@pytest.mark.parametrize("limit", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_limits_of_opt_clip_the_sums(limit: str) -> None:
  """Rows with the same index are summed before they are clipped."""
  optimizer = _optimizer(
    "keras3", "SGD", settings={"momentum": 0.5, limit: 0.5}, lazy_rows=True
  )
  table = tf.Variable(tf.zeros([3, 2]))
  optimizer.build([table])
  grad = tf.IndexedSlices(tf.constant([[1.0, 0.0], [2.0, 4.0]]), [2, 2], [3, 2])
  optimizer.apply_gradients([(grad, table)])
  summed = np.array([3.0, 4.0])
  clipped = np.minimum(summed, 0.5) if limit == "clipvalue" else summed / 10
  np.testing.assert_allclose(table.numpy()[2], -0.125 * clipped, rtol=1e-6)
  assert getattr(optimizer.inner_optimizer, limit) == 0.5


def test_lazy_rows_elementwise_runs_the_users_update_step() -> None:

  class Halving(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
      super().update_step(gradient * 0.5 + variable, variable, rate)

  with pytest.raises(ValueError, match="Halving may use norms"):
    keras3.CrossShardOptimizer(Halving(), lazy_rows=True)
  optimizer = keras3.CrossShardOptimizer(Halving(1.0), lazy_rows="elementwise")
  table = keras.Variable([[1.0], [2.0], [3.0]])
  optimizer.build([table])
  grad = tf.IndexedSlices(tf.constant([[4.0]]), [1], [3, 1])
  optimizer.apply_gradients([(grad, table)])
  assert table.numpy().ravel().tolist() == [1.0, -2.0, 3.0]


@pytest.mark.parametrize("lazy_rows", [True, "elementwise"])
@pytest.mark.parametrize("kind", ["Adafactor", "ScheduleFreeAdamW"])
def test_unsupported_lazy_rows_raise_an_error(
  kind: str, lazy_rows: Any
) -> None:
  make = getattr(keras.optimizers, kind, None)
  if make is None:
    pytest.skip("this Keras is older than the class")
  with pytest.raises(ValueError, match=f"{kind} uses .*Remove `lazy_rows`"):
    keras3.CrossShardOptimizer(make(), lazy_rows=lazy_rows)


def test_accumulated_gradients_are_dense() -> None:
  settings = {"gradient_accumulation_steps": 2}
  with pytest.raises(ValueError, match=r"`lazy_rows` .*accumulation_steps=2"):
    _optimizer("keras3", "Adam", settings=settings, lazy_rows=True)
  with pytest.raises(
    ValueError, match=r"`lazy_rows` .*`accumulate_steps` is 2"
  ):
    _optimizer("keras3", "Adam", lazy_rows=True, accumulate_steps=2)


@pytest.mark.parametrize(
  ("package", "limit"),
  [("keras3", {}), ("tf_keras", {"global_clipnorm": 1.0})],
)
def test_tables_are_in_no_shard(package: str, limit: dict[str, Any]) -> None:
  """Tables have unsharded slots, and the weights of replicated updates."""
  library, values, slots = PACKAGES[package][1], [], []
  for shard_update in (True, False):
    with testbed.mirrored().scope():
      layer = library.layers.Embedding(ROWS, WIDTH, dtype="float64")
      layer.build(None)
      layer.weights[0].assign(TABLE)
      kernel = testbed.variable(np.ones([3, 5], "f"), "kernel", library)
      optimizer = _optimizer(
        *(package, "AdamW"),
        settings=limit,
        group_assignment=GROUPS,
        lazy_rows=True,
        shard_update=shard_update,
        skip_nonfinite=True,
      )
      weights = [layer.weights[0], kernel]
      optimizer.build(weights)
    _train_replicas(optimizer, weights, BATCHES[:2])
    values.append(training.state_of(weights, optimizer))
    kept = optimizer.inner_optimizer.variables
    slots.append(sum(v.shape == (ROWS, WIDTH) for v in kept))
  assert slots == [2, 2]
  for sharded, whole in zip(*values, strict=True):
    np.testing.assert_allclose(sharded, whole, rtol=1e-5, atol=1e-6)
  assert np.abs(values[0][0] - values[0][1]).max() > 0.01  # tables of groups


def test_tables_are_named_before_build() -> None:
  """In a list, and by a part of their paths."""
  with testbed.mirrored().scope():
    names = ("items", "users/table", "kernel")
    weights = [tf.Variable(tf.ones([5, 2]), name=name) for name in names]
    optimizer = _optimizer("keras3", "Adam", lazy_rows=True, shard_update=True)
    optimizer.update_by_rows(weights[:1], ["users"])
    optimizer.build(weights)
  rows = optimizer.describe().rows()
  assert [row["updated_by"] == "rows" for row in rows] == [True, True, False]
  # Adam has two slots of each table, and of a part of 10 / 4 elements.
  shapes = [tuple(v.shape) for v in optimizer.inner_optimizer.variables]
  assert (shapes.count((5, 2)), shapes.count((3,))) == (4, 2)


def test_a_table_that_nobody_named() -> None:
  with testbed.mirrored().scope():
    table = tf.Variable(TABLE)
    optimizer = _optimizer("keras3", "Adam", lazy_rows=True, shard_update=True)
    optimizer.build([table])

  def step() -> None:
    grad = _slices(BATCHES[0][0], tf.float64)
    optimizer.apply_gradients([(grad, table)])

  # TensorFlow keeps each `tf.function` that `strategy.run` was given, and with
  # it the optimizer, whose groups other tests of the strategy would meet.
  with pytest.raises(ValueError, match=r"optimizer\.update_by_rows"):
    testbed.run(step)
  with pytest.raises(RuntimeError, match="Call it before"):
    optimizer.update_by_rows(var_list=[table])
  np.testing.assert_array_equal(table.numpy(), TABLE)


@pytest.mark.parametrize(
  ("kind", "lazy_rows", "number", "settings"),
  [
    ("Adam", True, np.nan, {}),
    ("Adam", True, np.inf, {"clipvalue": 0.5}),
    ("SGD", False, np.inf, {"clipvalue": 0.5}),
  ],
)
def test_steps_that_are_not_finite_change_no_row(
  kind: str, lazy_rows: bool, number: float, settings: dict[str, Any]
) -> None:
  """An infinity skips the step even if `opt` would clip the infinity."""
  optimizer = _optimizer(
    *("keras3", kind),
    **{"lazy_rows": lazy_rows, "skip_nonfinite": True, "settings": settings},
  )
  table = tf.Variable(tf.ones([3, 2]))
  optimizer.build([table])

  @tf.function(autograph=False)
  def step(value: tf.Tensor) -> None:
    grad = tf.IndexedSlices(tf.fill([1, 2], value), [1], [3, 2])
    optimizer.apply_gradients([(grad, table)])

  step(tf.constant(number))
  np.testing.assert_array_equal(table.numpy(), np.ones([3, 2]))
  step(tf.constant(1.0))
  assert (table.numpy() != 1).any(axis=1).tolist() == [False, True, False]
  assert int(optimizer.skipped_steps.numpy()) == 1


def test_compiled_by_xla_all_is_dense() -> None:
  """Weight decay is applied to all rows, too."""
  tables = []
  for lazy_rows in (False, True):
    optimizer = _optimizer("keras3", "AdamW", lazy_rows=lazy_rows)
    table = tf.Variable(tf.ones([4, 2]))
    optimizer.build([table])

    @tf.function(autograph=False, jit_compile=True)
    def step(optimizer: Any, table: Any) -> None:
      grad = tf.IndexedSlices(
        tf.ones([1, 2]), tf.constant([1]), tf.constant([4, 2])
      )
      optimizer.apply_gradients([(grad, table)])

    for _ in "12":
      step(optimizer, table)
    tables.append(table.numpy())
  np.testing.assert_array_equal(*tables)
  assert (tables[0] != 1).all()


# ---------------------------------------------------------------- mixed dtypes

MIXED = {"a": np.float32([2.0, 8.0]), "b": np.float64([4.0, 16.0])}
# Sums of two replicas: the norm of (3, 0, 0, 4) is 5, which is clipped to 1.
MIXED_GRADS = [
  np.array([[[1.0, 0.0], [2.0, 0.0]]]),
  np.array([[[0.0, 1.0], [0.0, 3.0]]]),
]


@training.in_both
@pytest.mark.parametrize(
  ("options", "is_scaled"), [({}, True), ({"shard_update": True}, False)]
)
def test_global_norm_over_two_dtypes(
  which: str, options: dict[str, Any], is_scaled: bool
) -> None:
  """Plain Keras fails with an error of TensorFlow in these cases."""

  def make(library: Any) -> Any:
    sgd = library.optimizers.SGD(5.0, global_clipnorm=1.0)
    if not is_scaled:
      return sgd
    mixed_precision = library.mixed_precision
    return mixed_precision.LossScaleOptimizer(sgd, initial_scale=1.0)

  strategy = testbed.mirrored(2)
  weights, optimizer = training.build(which, make, MIXED, strategy, **options)
  training.train(weights, optimizer, MIXED_GRADS, strategy=strategy)
  for weight, value in zip(weights, ([-1.0, 8.0], [4.0, 12.0]), strict=True):
    replicas = testbed.copies(weight)
    assert len(replicas) == 2
    for each in replicas:
      np.testing.assert_allclose(each, value, rtol=1e-6)
    assert replicas[0].dtype == MIXED[str(weight.name)[0]].dtype


def test_lion_of_tf_keras_in_a_loss_scale_optimizer() -> None:
  """From such a configuration, tf_keras would create the Lion of Keras 3."""
  with testbed.mirrored(2).scope():
    weight = tf.Variable([4.0, 8.0])
    lion = tf_keras.optimizers.Lion(0.5)
    optimizer = ours_tf_keras.CrossShardOptimizer(
      tf_keras.mixed_precision.LossScaleOptimizer(lion),
      shard_update=True,
    )
    optimizer.build([weight])
  grads = [np.array([[[1.0, -1.0], [1.0, -3.0]]])]
  training.train([weight], optimizer, grads, strategy=testbed.mirrored(2))
  assert [list(v) for v in testbed.copies(weight)] == [[3.5, 8.5]] * 2
