"""`wire_dtype` where replicas share a process, and on TPUs.

On machines of their own: `tests/multi_process/multi_worker_test.py`.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.support import fake_engine, testbed, training
from tf_cross_shard import CrossShardOptimizer, virtual_tpu
from tf_cross_shard import groups as groups_lib

PAIRS = [[0, 1], [2, 3]]
NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# The gradients of each replica, and their sums, need 20 bits or more.
GRADS = np.array(
  [[1.0009765625, -3.14159, 100.25], [2.0029296875, 2.71828, 0.3]] * 2, "f4"
) * np.arange(1, 5, dtype="f4").reshape(4, 1)


def _sgd() -> Any:
  return tf.keras.optimizers.SGD(1.0)


def _rounded_sums(wire_dtype: str) -> np.ndarray:
  """Each replica's sum of rounded gradients, in float32."""
  rounded = GRADS.astype(NARROW[wire_dtype]).astype("f4")
  pairs = rounded.reshape(2, 2, 3).sum(axis=1, dtype="f4")
  return np.repeat(pairs, 2, axis=0)


def test_virtual_tpu() -> None:
  strategy = testbed.virtual(4)
  [weight], optimizer = training.build(
    *("keras", lambda _: _sgd(), {"weight": np.zeros(3, "f4")}, strategy),
    group_assignment=PAIRS,
    wire_dtype="bfloat16",
  )
  training.train([weight], optimizer, [GRADS[np.newaxis]], None, strategy)
  sums = -np.array(testbed.copies(weight))
  ulp = 2.0**-8  # half a unit in the last place, of gradients and sums
  exact = np.repeat(GRADS.reshape(2, 2, 3).sum(axis=1), 2, axis=0)
  bound = ulp * (
    np.abs(GRADS).reshape(2, 2, 3).sum(axis=1) + np.abs(exact[::2])
  )
  assert (np.abs(sums - exact) <= np.repeat(bound, 2, axis=0)).all()
  np.testing.assert_array_equal(sums[::2], sums[1::2])
  assert (sums != exact).any()


def _train_one(
  make_opt: Callable[[], Any],
  grads: np.ndarray,
  to_grad: Any = tf.constant,
  wire_dtype: str = "float16",
) -> list[np.ndarray]:
  """Returns what each replica subtracts in one step, without a strategy."""
  trained = fake_engine.replicas(
    make_opt,
    [np.zeros([4, 3], "f")],
    groups=groups_lib.Groups(PAIRS),
    wire_dtype=wire_dtype,
  )
  fake_engine.train(trained, [grads[np.newaxis]], to_grad)
  sent = {tensor.dtype.name for tensor in trained[0].engine.sent}
  assert sent <= {wire_dtype, "int32"}
  return [-replica.values[0] for replica in trained]


def test_float16_gradients_are_sent_with_the_loss_scale() -> None:
  """Gradients that float16 would round to 0 arrive if the loss is scaled."""
  tiny = np.arange(1, 49, dtype="f4").reshape(4, 4, 3) * 2.0**-31
  assert not np.any(_train_one(_sgd, tiny))

  def scaled() -> Any:
    return tf.keras.optimizers.LossScaleOptimizer(_sgd(), initial_scale=2.0**20)

  found = _train_one(scaled, tiny * 2.0**20)
  expected = np.repeat(tiny.reshape(2, 2, 4, 3).sum(axis=1), 2, axis=0)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("wire_dtype", NARROW)
def test_gradients_are_rounded_once(wire_dtype: str) -> None:
  """Each replica rounds its gradients; the sums are float32."""
  rows = np.repeat(GRADS[:, np.newaxis], 4, axis=1)
  found = np.array(_train_one(_sgd, rows, wire_dtype=wire_dtype))
  right = _rounded_sums(wire_dtype)
  np.testing.assert_array_equal(found, np.repeat(right[:, np.newaxis], 4, 1))
  assert (right != np.repeat(GRADS.reshape(2, 2, 3).sum(1), 2, 0)).any(1).all()

  def to_grad(row: np.ndarray) -> tf.IndexedSlices:
    return tf.IndexedSlices(
      tf.constant(row)[tf.newaxis], tf.constant([2]), [4, 3]
    )

  found = np.array(_train_one(_sgd, GRADS, to_grad, wire_dtype))
  np.testing.assert_array_equal(found[:, 2], right)
  assert not found[:, [0, 1, 3]].any()


@pytest.mark.parametrize(("wire_dtype", "size"), [(None, 4), ("bfloat16", 2)])
def test_the_tpu_compiler_sends_half(wire_dtype: str | None, size: int) -> None:
  strategy = testbed.virtual(8)
  with strategy.scope():
    weights = [tf.Variable(tf.zeros(n)) for n in ([64, 10], [10])]
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.SGD(0.1), wire_dtype=wire_dtype
    )
    optimizer.build(weights)

  def replica_step() -> None:
    grads = [2.0 * each + 1.0 for each in weights]
    optimizer.apply_gradients(zip(grads, weights, strict=True))

  report = virtual_tpu.compile_for("v5e:4x2", replica_step, strategy=strategy)
  assert len(report.collectives) == 1
  assert report.wire_bytes == size * 650
