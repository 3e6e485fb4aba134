"""Values of replicas and of groups are read as they are.

In one process; several workers are in multi_worker_replicas_test.py.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, Models

ALONE: dict[str, Callable[[], Any]] = {
  "none": tf.distribute.get_strategy,
  "one device": functools.partial(tf.distribute.OneDeviceStrategy, "CPU:1"),
  "one mirrored": functools.partial(tf.distribute.MirroredStrategy, ["CPU:0"]),
}


@pytest.mark.parametrize(
  ("where", "dtype"),
  [
    ("mirrored", "float32"),
    ("virtual", "bfloat16"),
    ("mirrored", "bool"),
  ],
)
def test_values_are_bits_and_copies(where: str, dtype: str) -> None:
  """Each replica's bits, among them kinds of NaN and the signs of zeros."""
  kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
  bits = [
    [0xFF, 0xFF, 0xFF, 0x7F - i] * 2 + [0] * 3 + [128] for i in range(cases.N)
  ]
  mine = [np.array(each, "uint8").view(kind) for each in bits]
  if dtype == "bool":
    mine = [np.array([True, i > 1]) for i in range(cases.N)]
  with cases.STRATEGIES[where]().scope():
    variable = tf.Variable(mine[0], trainable=False)
  cases.spread(variable, mine)
  expected = [array.tobytes() for array in mine]
  assert len(set(expected)) > 1
  for _ in range(2):
    found = testbed.values(variable)
    assert [array.dtype for array in found] == [kind] * cases.N
    assert [array.tobytes() for array in found] == expected
    for array in found:
      array[:] = 1


@pytest.mark.parametrize("where", ["mirrored", "virtual"])
def test_values_of_a_sum_are_each_replicas_part(where: str) -> None:
  strategy = cases.STRATEGIES[where]()
  with strategy.scope():
    metric = tf.keras.metrics.Sum()
    total = tf.Variable(
      0.0,
      synchronization=tf.VariableSynchronization.ON_READ,
      aggregation=tf.VariableAggregation.SUM,
    )

  @tf.function
  def step() -> None:
    strategy.run(
      lambda: total.assign_add(2.0 ** tf.cast(testbed.replica_id(), tf.float32))
    )

  step()
  assert float(total.read_value()) == 15.0
  assert cases.values(total) == [1.0, 2.0, 4.0, 8.0]
  assert len(testbed.values(metric.variables[0])) == cases.N


@pytest.mark.parametrize("where", ALONE)
def test_values_of_one_replica(where: str, tmp_path: pathlib.Path) -> None:
  with ALONE[where]().scope():
    weight = tf.keras.Variable([1.0, 2.0])
    optimizer = CrossShardOptimizer("adam")
    optimizer.build([weight])
  assert cases.values(weight) == [[1.0, 2.0]]
  assert cases.group_values(weight, optimizer) == [[1.0, 2.0]]
  Models([weight], optimizer).assert_in_sync()
  Models([weight], optimizer).save(tmp_path / "a")
  weight.assign([7.0, 7.0])
  Models([weight], optimizer).average()
  assert cases.values(weight) == [[7.0, 7.0]]
  Models([weight], optimizer).restore(tmp_path / "a")
  assert cases.values(weight) == [[1.0, 2.0]]


def test_group_values_are_in_the_order_of_groups() -> None:
  optimizer, [weight, _] = cases.simple("mirrored")
  other, _ = cases.simple("mirrored", [[3], [2], [1], [0]])
  slot = optimizer.get_slot(weight, "momentum")
  alone = tf.Variable([3.0])
  found = Models(optimizer=other).values(weight)
  assert cases.lists(found) == [[20.0] * 2, [20.0] * 2, [10.0] * 2, [10.0] * 2]
  found = Models(optimizer=optimizer).values(slot)
  assert cases.lists(found) == [[10.0] * 2, [20.0] * 2]
  assert cases.values(slot) == [*([[10.0] * 2] * 2), *([[20.0] * 2] * 2)]
  plain = tf.keras.optimizers.SGD()
  assert cases.group_values(weight, plain) == [[10.0, 10.0]]
  with testbed.mirrored().scope():  # It was made outside, and exists once.
    assert cases.values(alone) == [[3.0]]
    assert cases.group_values(alone, optimizer) == [[3.0]] * 2
  with testbed.mirrored(2).scope():
    small = tf.Variable(1.0)
  with pytest.raises(ValueError, match=r"groups of 4 replicas.*have 2"):
    Models(optimizer=optimizer).values(small)


@pytest.mark.parametrize(
  ("variable", "words"),
  [
    (tf.constant(1.0), r"`variable` must be a tf\.Var"),
    ("weight", r"`variable` must be a tf\.Var"),
    (tf.Variable("text"), r"numbers.*string"),
  ],
)
def test_other_objects_are_refused(variable: Any, words: str) -> None:
  with pytest.raises(TypeError, match=words):
    Models([tf.Variable(1.0)]).values(variable)


def test_calls_inside_functions_and_replicas_are_refused() -> None:
  optimizer, weights = cases.simple("mirrored")
  calls = (
    lambda: Models(weights, optimizer).values(weights[0]),
    lambda: Models(weights, optimizer).restore("/nowhere/a"),
  )
  for call in calls:
    with pytest.raises(RuntimeError, match=r"eagerly.*between two steps"):
      tf.function(lambda call=call: call(), autograph=False)()
    with pytest.raises(RuntimeError, match=r"outside `strategy\.run`"):
      testbed.mirrored().run(lambda call=call: call() and None)
