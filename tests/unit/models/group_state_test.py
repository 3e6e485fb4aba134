"""State of groups: averaged over groups, and compared within each group."""

import functools
import pathlib

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, Models, models


@pytest.mark.parametrize("where", ["mirrored", "virtual"])
def test_average(where: str) -> None:
  optimizer, weights = cases.simple(where)
  with cases.STRATEGIES[where]().scope():
    count = tf.Variable(3, trainable=False, name="count")
    half = tf.Variable([1.0], dtype=tf.bfloat16, name="half")
  cases.spread(count, [1, 2, 3, 4])
  cases.spread(half, [np.array([2.0**i], ml_dtypes.bfloat16) for i in range(4)])
  model = [*weights, count, half]
  cases.spread(weights[1], [1.0, 2.0, 4.0, 8.0])
  Models(model, optimizer).average()
  assert cases.values(weights[0]) == [[15.0, 15.0]] * cases.N
  assert cases.values(weights[1]) == [3.75] * cases.N
  assert cases.values(half) == [[3.75]] * cases.N
  assert cases.values(count) == [1, 2, 3, 4]
  momentum = testbed.values(optimizer.get_slot(weights[0], "momentum"))
  assert momentum[0].tolist() == [10.0] * 2
  assert momentum[3].tolist() == [20.0] * 2
  for own in (optimizer.iterations, optimizer.learning_rate):
    assert cases.values(own) == [10, 10, 20, 20]


def _average(rows: np.ndarray) -> np.ndarray:
  with testbed.mirrored().scope():
    optimizer = CrossShardOptimizer(
      "sgd", group_assignment=[[0], [1], [2], [3]]
    )
    weight = tf.Variable(tf.zeros(rows.shape[1], tf.as_dtype(rows.dtype)))
    optimizer.build([weight])
  cases.spread(weight, list(rows))
  Models([weight], optimizer).average()
  first, *others = testbed.values(weight)
  assert all(other.tobytes() == first.tobytes() for other in others)
  return first


def test_means_are_added_in_order_in_float64() -> None:
  """The order makes means have the same bits on all replicas."""
  # In float32 the ones are lost, in any order but from the last.
  arrays = np.float32([[2.0**24, 0.1], [1.0, 0.2], [1.0, 0.3], [1.0, 0.7]])
  total = np.zeros(2)
  for array in arrays:
    total = total + array
  expected = (total / cases.N).astype("float32")
  assert expected[0] > 2.0**22
  assert _average(arrays).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_means_of_large_values_do_not_overflow(dtype: str) -> None:
  kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
  largest = tf.as_dtype(dtype).max
  rows = np.array(
    [
      [largest, largest, 1.0, np.inf],
      [largest, -largest, 2.0, 1.0],
      [largest, largest, 2.0, 1.0],
      [largest, -largest, 3.0, 1.0],
    ]
  ).astype(kind)
  expected = np.array([largest, 0.0, 2.0, np.inf]).astype(kind)
  assert _average(rows).tobytes() == expected.tobytes()


def test_slots_of_a_multi_optimizer(tmp_path: pathlib.Path) -> None:
  optimizers = tf.keras.optimizers
  if not hasattr(optimizers, "MultiOptimizer"):
    pytest.skip("this Keras has no MultiOptimizer")
  wrap = functools.partial(CrossShardOptimizer, group_assignment=cases.PAIRS)
  with testbed.mirrored().scope():
    weights = [tf.keras.Variable([0.0], name=name) for name in "ab"]
    optimizer = optimizers.MultiOptimizer(
      optimizers.OptimizerMap(
        wrap(optimizers.SGD(0.5, momentum=0.5)),
        {"b": wrap(optimizers.Adam(0.5))},
      )
    )
    optimizer.build(weights)
  slots = [v for v in optimizer.variables if v.shape == (1,)]
  assert len(slots) == 1 + 2
  for variable in (*slots, *weights):
    cases.spread(variable, [[10.0], [10.0], [20.0], [20.0]])
  Models(weights, optimizer).save(tmp_path / "a")
  for variable in (*slots, *weights):
    cases.spread(variable, [[0.0]] * cases.N)
  Models(weights, optimizer).restore(tmp_path / "a")
  for variable in (*slots, *weights):
    found = Models(optimizer=optimizer).values(variable)
    assert cases.lists(found) == [[10.0], [20.0]]


def test_members_that_are_not_equal(tmp_path: pathlib.Path) -> None:
  optimizer, weights = cases.simple("mirrored")
  Models(weights, optimizer).assert_in_sync()
  cases.spread(weights[0], [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.25, -4.0]])
  with pytest.raises(
    AssertionError,
    match=r"`weight` differs within group 1 \[2, 3\] at assert_in_sync:"
    r" replicas 2 and 3 differ by up to 8\. Members",
  ) as info:
    Models(weights, optimizer).assert_in_sync()
  assert isinstance(info.value, models.OutOfSyncError)
  with pytest.raises(models.OutOfSyncError, match="at saving a:"):
    Models(weights, optimizer).save(tmp_path / "a")
  assert not (tmp_path / "a").exists()
  Models(optimizer=optimizer).assert_in_sync()
  cases.spread(optimizer.iterations, [0, 1, 0, 0])
  with pytest.raises(
    AssertionError,
    match=r"sgd.*/iteration` differs within group 0 .* up to 1\."
    " 1 more variables differ, too",
  ):
    Models(weights, optimizer).assert_in_sync()
  Models(weights, optimizer).average()
  cases.spread(optimizer.iterations, [0, 0, 1, 1])
  Models(weights, optimizer).assert_in_sync()


def test_bits_are_compared() -> None:
  optimizer, weights = cases.simple("mirrored")
  for bits, words in (
    ([0x7FC00001, 0x7FC00001], None),
    ([0x7FC00001, 0x7FC00002], "differ in bits only"),
    ([0x00000000, 0x80000000], "differ in bits only"),
    ([0x7F800000, 0x3F800000], "differ by up to inf"),
  ):
    pair = [np.array(one, "uint32").view("float32") for one in bits]
    cases.spread(weights[1], pair + [np.float32(1.0)] * 2)
    if words is None:
      Models(weights, optimizer).assert_in_sync()
    else:
      with pytest.raises(models.OutOfSyncError, match=words):
        Models(weights, optimizer).assert_in_sync()


def test_a_plain_optimizer_has_one_group(tmp_path: pathlib.Path) -> None:
  with testbed.mirrored().scope():
    weight = tf.keras.Variable([1.0, 2.0], name="weight")
    plain = tf.keras.optimizers.Adam()
    plain.build([weight])
    sharded = CrossShardOptimizer(tf.keras.optimizers.Adam())
    sharded.build([weight])
  Models([weight], plain).save(tmp_path / "a")
  weight.assign([0.0, 0.0])
  Models([weight], sharded).restore(tmp_path / "a")
  assert cases.values(weight) == [[1.0, 2.0]] * cases.N
  cases.spread(weight, [[1.0, 2.0]] * 3 + [[1.0, 3.0]])
  with pytest.raises(AssertionError, match=r"group 0 \[0, 1, 2, 3\].*up to 1"):
    Models([weight], plain).assert_in_sync()
  Models([weight], plain).average()
  Models([weight], plain).assert_in_sync()
