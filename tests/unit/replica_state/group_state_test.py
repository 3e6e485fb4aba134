"""State of groups: averaged over groups, and compared within each group."""

import functools
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, replica_state


@pytest.mark.parametrize(
  ("where", "slots"), [("mirrored", True), ("virtual", False)]
)
def test_average(where: str, slots: bool) -> None:
  optimizer, weights = cases.simple(where)
  with cases.STRATEGIES[where]().scope():
    count = tf.Variable(3, trainable=False, name="count")
    half = tf.Variable([1.0], dtype=tf.bfloat16, name="half")
  cases.spread(count, [1, 2, 3, 4])
  cases.spread(half, [np.array([2.0**i], ml_dtypes.bfloat16) for i in range(4)])
  model = [*weights, count, half]
  cases.spread(weights[1], [1.0, 2.0, 4.0, 8.0])
  replica_state.average(optimizer, model, slots=slots)
  assert cases.values(weights[0]) == [[15.0, 15.0]] * cases.N
  assert cases.values(weights[1]) == [3.75] * cases.N
  assert cases.values(half) == [[3.75]] * cases.N
  assert cases.values(count) == [1, 2, 3, 4]
  momentum = replica_state.values(optimizer.get_slot(weights[0], "momentum"))
  assert momentum[0].tolist() == ([15.0] * 2 if slots else [10.0] * 2)
  assert momentum[3].tolist() == ([15.0] * 2 if slots else [20.0] * 2)
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
  replica_state.average(optimizer, [weight])
  first, *others = replica_state.values(weight)
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


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
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


class _Dicts(tf.keras.optimizers.SGD):  # type: ignore[misc]
  """Keeps slots in dicts, in three ways."""

  def build(self, variables: Any) -> None:
    super().build(variables)
    new = self.add_variable_from_reference
    self._slots = {"trace": [new(v, "trace") for v in variables]}
    self._by_path = {v.path: new(v, "seen") for v in variables[:1]}
    self._by_key = {
      self._var_key(v): {"a": new(v), "b": new(v)} for v in variables
    }


def test_average_reaches_slots_in_dicts() -> None:
  with testbed.mirrored().scope():
    weights = [tf.keras.Variable([0.0], name=name) for name in ("a", "a_b")]
    optimizer = CrossShardOptimizer(_Dicts(0.5), group_assignment=cases.PAIRS)
    optimizer.build(weights)
  slots = [v for v in optimizer.variables if v.shape == (1,)]
  assert len(slots) == 2 + 1 + 4
  for slot in slots:
    cases.spread(slot, [[10.0], [10.0], [20.0], [20.0]])
  names = [*optimizer.get_slot_names()]
  assert names == ["trace", "seen", "var", "var#2"]
  assert optimizer.get_slot(weights[1], "seen") is None
  replica_state.average(optimizer, weights[1:], slots=True)
  mine = [optimizer.get_slot(weights[1], n) for n in ("trace", "var", "var#2")]
  for slot in slots:
    is_mine = any(slot is each for each in mine)
    expected = [15.0] * cases.N if is_mine else [10.0, 10.0, 20.0, 20.0]
    assert [float(v[0]) for v in replica_state.values(slot)] == expected


def test_average_reaches_slots_of_a_multi_optimizer(
  tmp_path: pathlib.Path,
) -> None:
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
  replica_state.save(tmp_path / "a", optimizer, weights)
  replica_state.average(optimizer, weights, slots=True)
  for variable in (*slots, *weights):
    assert cases.values(variable) == [[15.0]] * cases.N
  replica_state.restore(tmp_path / "a", optimizer, weights)
  for variable in (*slots, *weights):
    found = replica_state.group_values(variable, optimizer)
    assert cases.lists(found) == [[10.0], [20.0]]


def test_members_that_are_not_equal(tmp_path: pathlib.Path) -> None:
  optimizer, weights = cases.simple("mirrored")
  replica_state.assert_in_sync(optimizer, weights)
  cases.spread(weights[0], [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.25, -4.0]])
  with pytest.raises(
    AssertionError,
    match=r"`model/weight` differs within group 1 \[2, 3\] at assert_in_sync:"
    r" replicas 2 and 3 differ by up to 8\. Members",
  ) as info:
    replica_state.assert_in_sync(optimizer, weights)
  assert isinstance(info.value, replica_state.OutOfSyncError)
  with pytest.raises(replica_state.OutOfSyncError, match="at saving a:"):
    replica_state.save(tmp_path / "a", optimizer, weights)
  assert not (tmp_path / "a").exists()
  replica_state.assert_in_sync(optimizer)
  cases.spread(optimizer.iterations, [0, 1, 0, 0])
  with pytest.raises(
    AssertionError,
    match=r"`optimizer/sgd/iteration` differs within group 0 .* up to 1\."
    " 1 more variables differ, too",
  ):
    replica_state.assert_in_sync(optimizer, weights)
  replica_state.average(optimizer, weights)
  cases.spread(optimizer.iterations, [0, 0, 1, 1])
  replica_state.assert_in_sync(optimizer, weights)


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
      replica_state.assert_in_sync(optimizer, weights)
    else:
      with pytest.raises(replica_state.OutOfSyncError, match=words):
        replica_state.assert_in_sync(optimizer, weights)


def test_a_plain_optimizer_has_one_group(tmp_path: pathlib.Path) -> None:
  with testbed.mirrored().scope():
    weight = tf.keras.Variable([1.0, 2.0], name="weight")
    plain = tf.keras.optimizers.Adam()
    plain.build([weight])
    sharded = CrossShardOptimizer(tf.keras.optimizers.Adam())
    sharded.build([weight])
  replica_state.save(tmp_path / "a", plain, [weight])
  weight.assign([0.0, 0.0])
  replica_state.restore(tmp_path / "a", sharded, [weight])
  assert cases.values(weight) == [[1.0, 2.0]] * cases.N
  with pytest.raises(ValueError, match="`slots` needs a CrossShardOptimizer"):
    replica_state.average(plain, [weight], slots=True)
  cases.spread(weight, [[1.0, 2.0]] * 3 + [[1.0, 3.0]])
  with pytest.raises(AssertionError, match=r"group 0 \[0, 1, 2, 3\].*up to 1"):
    replica_state.assert_in_sync(plain, [weight])
  replica_state.average(plain, [weight])
  replica_state.assert_in_sync(plain, [weight])
