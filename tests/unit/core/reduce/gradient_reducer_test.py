"""Sums of gradients: dense, sparse and None; local clipping; and `wire_dtype`.

On machines of their own: `tests/multi_process/multi_worker_test.py`.
"""

from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer, virtual_tpu

MARKS = [1.0, 2.0, 4.0, 8.0]  # A sum tells which replicas are in it.
STRIDED = testbed.GROUPINGS["strided"]
NEIGHBOURS = testbed.GROUPINGS["contiguous"]


@pytest.mark.parametrize("mode", ["eager", "cond"])
def test_dense_sparse_and_none_gradients_in_any_order(mode: str) -> None:
  with testbed.mirrored().scope():
    dtypes = {"a": "float32", "none": "float32", "table": "float32"}
    weights = [
      tf.Variable(tf.zeros([3, 1], dtype), name=name)
      for name, dtype in {**dtypes, "half": "float16", "b": "float32"}.items()
    ]
    optimizer = CrossShardOptimizer(_sgd(), "sum", group_assignment=STRIDED)
    optimizer.build(weights)

  def apply() -> Any:
    mark = testbed.mark()
    rows = tf.constant([[1.0], [2.0], [4.0]])
    grads = [
      rows * mark,
      None,
      tf.IndexedSlices(rows * mark, tf.constant([2, 0, 2]), [3, 1]),
      3.0 * tf.cast(rows * mark, "float16"),
      tf.fill([3, 1], 5.0 * mark),
    ]
    optimizer.apply_gradients(list(zip(grads, weights, strict=True)))
    return mark

  def in_cond() -> Any:
    return tf.cond(testbed.replica_id() >= 0, apply, testbed.mark)

  testbed.run(*((in_cond, "function") if mode == "cond" else (apply, "eager")))
  right = np.array([[1, 2, 4], [0, 0, 0], [2, 0, 5], [3, 6, 12], [5, 5, 5]])
  for weight, sums in zip(weights, right, strict=True):
    for copy, total in zip(testbed.copies(weight), [5, 10] * 2, strict=True):
      np.testing.assert_array_equal(copy[:, 0], -sums * total)


# ------------------------------------------------------------ within a step


def _sgd(**own: Any) -> Any:
  return keras.optimizers.SGD(1.0, **own)


def _scaled(scale: float = 1024.0) -> Any:
  return keras.optimizers.LossScaleOptimizer(_sgd(), initial_scale=scale)


def _step(
  opt: Any, grads: Any, groups: Any = STRIDED, **options: Any
) -> np.ndarray:
  """Returns what each replica subtracts, of gradients [replicas, ...]."""
  grads = np.array(grads, "f")
  [weight], optimizer = training.build(
    *("keras", lambda _: opt(), {"weight": np.zeros_like(grads[0])}),
    group_assignment=groups,
    **options,
  )
  training.train([weight], optimizer, [grads[np.newaxis]], mode="eager")
  return -np.array(testbed.copies(weight))


@pytest.mark.parametrize("limit", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clipping_is_independent_of_loss_scale(limit: str) -> None:
  marks = [1024 * mark for mark in MARKS]
  for opt in (_scaled, lambda: _sgd(loss_scale_factor=1024.0)):
    assert _step(opt, marks, **{limit: 3.0}).tolist() == [4.0, 5.0] * 2


# -------------------------------------------------------------- the wire dtype

NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# The gradients of each replica, and their sums, need 20 bits or more.
GRADS = np.array(
  [[1.0009765625, -3.14159, 100.25], [2.0029296875, 2.71828, 0.3]] * 2, "f4"
) * np.arange(1, 5, dtype="f4").reshape(4, 1)


def test_float16_gradients_are_sent_with_the_loss_scale() -> None:
  """Gradients that float16 would round to 0 arrive if the loss is scaled."""
  tiny = np.array(MARKS) * 2.0**-31
  wire = {"wire_dtype": "float16"}
  assert not np.any(_step(_sgd, tiny, **wire))
  found = _step(lambda: _scaled(2.0**20), tiny * 2.0**20, **wire)
  assert (found * 2.0**31).tolist() == [5.0, 10.0] * 2


@pytest.mark.parametrize("wire_dtype", NARROW)
def test_gradients_are_rounded_once(wire_dtype: str) -> None:
  """Each replica rounds its gradients; the sums are float32."""
  rounded = GRADS.astype(NARROW[wire_dtype]).astype("f4")
  right, exact = (
    np.repeat(grads.reshape(2, 2, 3).sum(axis=1), 2, axis=0)
    for grads in (rounded, GRADS)
  )
  assert (right != exact).any(1).all()
  found = _step(_sgd, GRADS, NEIGHBOURS, wire_dtype=wire_dtype)
  np.testing.assert_array_equal(found, right)

  with testbed.mirrored().scope():
    table = tf.Variable(tf.zeros([4, 3]))
    optimizer = CrossShardOptimizer(
      *(_sgd(), "sum", "ours", NEIGHBOURS), wire_dtype=wire_dtype
    )
    optimizer.build([table])

  def step() -> None:
    row = tf.constant(GRADS)[testbed.replica_id()]
    rows = tf.IndexedSlices(row[tf.newaxis], tf.constant([2]), [4, 3])
    optimizer.apply_gradients([(rows, table)])

  testbed.run(lambda: [step(), None][1], "eager")
  found = -np.array(testbed.copies(table))
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


def test_wire_dtype_on_the_virtual_tpu() -> None:
  strategy = testbed.virtual(4)
  [weight], optimizer = training.build(
    *("keras", lambda _: _sgd(), {"weight": np.zeros(3, "f4")}, strategy),
    group_assignment=NEIGHBOURS,
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
