"""Tests that all members of a group skip and count a nonfinite step.

Under strategies they are in `mixed_precision_test.py`.
"""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer

keras = tf.keras
SGD = keras.optimizers.SGD
BAD = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize(
  ("grads", "options"),
  [
    ([1.0, BAD[1]], {"clipvalue": 1.0}),  # Clipping does not hide it.
    ([2e38, 2e38], {}),  # float32 ends at 3.4e38.
    ([2e38, 2e38], {"shard_update": True}),
    ([BAD[0], 1.0], {"shard_update": True, "wire_dtype": "bfloat16"}),
  ],
)
def test_sums_are_checked(grads: list[float], options: Any) -> None:
  """All members skip the step if the gradient of one member is nonfinite."""
  rows = [[grads[0], 1.0], [1.0, 1.0], [grads[1], 1.0], [1.0, 1.0]]
  weights, optimizer = training.build(
    *("keras", lambda library: library.optimizers.SGD(0.5), {"w": [1.0, 2.0]}),
    group_assignment=testbed.GROUPINGS["strided"],
    skip_nonfinite=True,
    **options,
  )
  training.train(weights, optimizer, [np.array([rows])], mode="eager")
  assert testbed.copies(optimizer.skipped_steps) == [1, 0, 1, 0]
  values = [copy.tolist() for copy in testbed.copies(weights[0])]
  assert values == [[1.0, 2.0], [0.0, 1.0]] * 2


def test_without_the_setting_a_step_is_applied() -> None:
  optimizer = CrossShardOptimizer("sgd")
  assert optimizer.skipped_steps is None
  weight = keras.Variable(1.0)
  optimizer.apply_gradients([(tf.constant(BAD[0]), weight)])
  assert np.isnan(weight.numpy())


def test_the_count_is_not_among_the_variables() -> None:
  counting, plain = (
    CrossShardOptimizer("adam", skip_nonfinite=counts)
    for counts in (True, False)
  )
  weight = keras.Variable([1.0])
  for optimizer in (counting, plain):
    optimizer.build([weight])
  assert len(counting.variables) == len(plain.variables)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", ["rows", "complex", "bfloat16"])
def test_gradients_of_other_kinds(kind: str, bad: float) -> None:
  """Gradients that are None stand beside them."""
  dtype = {"complex": "complex64", "bfloat16": "bfloat16"}.get(kind, "float32")
  weight = tf.Variable(tf.ones([2, 1], dtype))
  unused = tf.Variable(1.0)
  optimizer = CrossShardOptimizer(SGD(1.0), skip_nonfinite=True)
  optimizer.build([weight, unused])
  for number in (bad, 2.0):
    value = complex(0, number) if kind == "complex" else number
    grad = tf.constant([[value], [1.0]], dtype)
    if kind == "rows":
      grad = tf.IndexedSlices(grad, tf.constant([1, 0]), tf.constant([2, 1]))
    optimizer.apply_gradients([(grad, weight), (None, unused)])
  assert int(optimizer.skipped_steps) == 1
  assert np.isfinite(weight.numpy().astype("complex64")).all()


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


@pytest.mark.parametrize("rows", [[BAD[0], 1.0], [1.0, BAD[0]]])
def test_a_nan_among_rows_of_one_index_is_found(rows: list[float]) -> None:
  """Plain Keras 3 with a loss scale looks at the last of these rows only."""
  opt = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
  optimizer = CrossShardOptimizer(opt)
  table = keras.Variable([[1.0], [2.0]])
  grad = tf.IndexedSlices(
    tf.constant([[row] for row in rows]), tf.constant([1, 1]), [2, 1]
  )
  optimizer.apply_gradients([(grad, table)])
  assert table.numpy().tolist() == [[1.0], [2.0]]
  assert float(opt.dynamic_scale.numpy()) == 2.0**14
