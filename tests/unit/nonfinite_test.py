"""Steps that are not finite are left out by a whole group, and counted."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import fake_engine, group_training, testbed
from tf_cross_shard import CrossShardOptimizer
from tf_cross_shard.step import nonfinite

keras = tf.keras
SGD = keras.optimizers.SGD
HALVES = [[0, 1], [2, 3]]
BAD = (float("nan"), float("inf"), float("-inf"))


def _by_hand(steps: list[float], members: int) -> list[float]:
  """SGD with momentum on the sums [members, step] of the steps applied."""
  value, velocity = np.array([1.0, 2.0]), np.zeros(2)
  for total in steps:
    velocity = 0.5 * velocity - 0.5 * np.array([members, total])
    value = value + velocity
  return value.tolist()


@pytest.mark.parametrize(
  ("engine", "bad"), [("mirrored", BAD[1]), ("virtual", BAD[2])]
)
def test_a_group_skips_what_one_of_it_cannot_apply(
  engine: str, bad: float
) -> None:
  rows = [[1.0, 2.0, 3.0, 4.0], [1.0, bad, 2.0, 2.0], [2.0, 2.0, 1.0, 1.0]]
  grads = np.stack([np.ones([3, 4]), rows], axis=-1)
  strategy = testbed.STRATEGIES[engine]()
  [weight], optimizer = group_training.build(
    *("keras", lambda library: library.optimizers.SGD(0.5, momentum=0.5)),
    *({"weight": np.array([1.0, 2.0], "f")}, strategy),
    group_assignment=HALVES,
    skip_nonfinite=True,
  )
  group_training.train([weight], optimizer, [grads], strategy=strategy)
  first, second = _by_hand([3.0, 4.0], 2), _by_hand([7.0, 4.0, 2.0], 2)
  found = [copy.tolist() for copy in testbed.copies(weight)]
  assert found == [first, first, second, second]
  assert testbed.copies(optimizer.skipped_steps) == [1, 1, 0, 0]
  assert testbed.copies(optimizer.iterations) == [2, 2, 3, 3]


@pytest.mark.parametrize(
  ("grads", "options"),
  [
    ([1.0, BAD[1]], {"clipvalue": 1.0}),  # which does not hide it
    ([2e38, 2e38], {}),  # float32 ends at 3.4e38.
    ([2e38, 2e38], {"shard_update": True}),
    ([BAD[0], 1.0], {"shard_update": True, "wire_dtype": "bfloat16"}),
  ],
)
def test_sums_are_judged(grads: list[float], options: Any) -> None:
  """Members decide alike, also where one alone has the bad part."""
  trained = fake_engine.replicas(
    lambda: SGD(0.5), [[1.0, 2.0]], skip_nonfinite=True, **options
  )
  rows = [[grads[0], 1.0], [1.0, 1.0], [grads[1], 1.0], [1.0, 1.0]]
  fake_engine.train(trained, [[rows]])
  assert [int(each.step.guard.count) for each in trained] == [1, 0, 1, 0]
  values = [each.values[0].tolist() for each in trained]
  assert values == [[1.0, 2.0], [0.0, 1.0]] * 2


def test_without_it_a_step_is_applied_as_it_is() -> None:
  optimizer = CrossShardOptimizer("sgd")
  assert optimizer.skipped_steps is None
  weight = keras.Variable(1.0)
  optimizer.apply_gradients([(tf.constant(BAD[0]), weight)])
  assert np.isnan(weight.numpy())


def test_the_count_is_none_of_the_variables() -> None:
  counting, plain = (
    CrossShardOptimizer("adam", skip_nonfinite=counts)
    for counts in (True, False)
  )
  weight = keras.Variable([1.0])
  for optimizer in (counting, plain):
    optimizer.build([weight])
  assert len(counting.variables) == len(plain.variables)


def test_sparse_and_whole_number_gradients() -> None:
  def is_finite(*values: float) -> bool:
    rows = tf.IndexedSlices(
      tf.constant(values), tf.range(len(values)), tf.constant([9])
    )
    grads = [rows, None, tf.constant([1, 2]), tf.constant(1 + 2j)]
    return bool(nonfinite.all_finite(grads))

  assert is_finite(1.0, 2.0)
  assert not is_finite(1.0, BAD[0])
  assert bool(nonfinite.all_finite([]))
  assert not bool(nonfinite.all_finite([tf.constant(complex(0, BAD[1]))]))
  assert not bool(
    nonfinite.all_finite([tf.constant([1.0, BAD[2]], tf.bfloat16)])
  )


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_global_step_counts_no_step_that_is_skipped(is_scaled: bool) -> None:
  weight, global_step = keras.Variable([1.0]), tf.Variable(0)
  sgd = keras.optimizers.SGD(1.0)
  scaled = keras.optimizers.LossScaleOptimizer(sgd) if is_scaled else sgd
  optimizer = CrossShardOptimizer(scaled, skip_nonfinite=not is_scaled)
  optimizer.build([weight])
  for factor in (BAD[0], 1.0):
    optimizer.minimize(
      lambda f=factor: f * tf.reduce_sum(weight),
      var_list=[weight],
      global_step=global_step,
    )
  assert int(global_step) == int(optimizer.iterations) == 1


def test_losses_of_half_precision() -> None:
  for dtype in ("float16", "bfloat16"):
    weight = keras.Variable([1.0])
    optimizer = CrossShardOptimizer(
      keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=8.0
      )
    )
    optimizer.build([weight])
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(tf.cast(weight.value, dtype) ** 2)
    optimizer.minimize(loss, [weight], tape=tape)
    assert weight.numpy().tolist() == [-1.0]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
