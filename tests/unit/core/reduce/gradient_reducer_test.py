"""Sums of gradients: dense, sparse and None; local clipping; and `wire_dtype`.

On machines of their own: `tests/multi_process/multi_worker_test.py`.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import fake_engine, testbed, training
from tf_cross_shard import (
  CrossShardOptimizer,
  virtual_tpu,
)
from tf_cross_shard import groups as groups_lib
from tf_cross_shard._src.core.reduce import gradient_reducer

MARKS = [1.0, 2.0, 4.0, 8.0]  # A sum tells which replicas are in it.
SUMS = [5.0, 10.0, 5.0, 10.0]  # of replicas 0 and 2, and of 1 and 3


def _mixed(mark: float) -> list[Any]:
  rows = tf.IndexedSlices(
    tf.constant([[1.0], [2.0], [4.0]]) * mark,
    tf.constant([2, 0, 2]),
    tf.constant([3, 1]),
  )
  return [
    tf.constant([1.0, 2.0]) * mark,
    None,
    rows,
    tf.constant([[3.0 * mark]], tf.float16),
    tf.constant(5.0 * mark),
  ]


def test_sum_of_dense_sparse_and_none_gradients_keeps_order() -> None:
  engines = fake_engine.engines()

  def reduce(engine: fake_engine.FakeEngine) -> list[Any]:
    return gradient_reducer.GradientReducer(engine).reduce(
      _mixed(MARKS[engine.replica])
    )

  for sums, total in zip(fake_engine.run(reduce, engines), SUMS, strict=True):
    np.testing.assert_array_equal(sums[0], [total, 2 * total])
    assert sums[1] is None
    np.testing.assert_array_equal(sums[2].indices, [2, 0, 2] * 2)
    dense = tf.convert_to_tensor(sums[2])
    np.testing.assert_array_equal(dense, [[2 * total], [0.0], [5 * total]])
    np.testing.assert_array_equal(sums[3], [[3 * total]])
    assert sums[3].dtype == tf.float16
    assert float(sums[4]) == 5 * total
  # One buffer per dtype; the rows travel as values and indices.
  sent = [tensor.dtype.name for tensor in engines[0].sent]
  assert sorted(sent[:2]) == ["float16", "float32"]
  assert sent[2:] == ["float32", "int32"]


def test_groups_of_one_send_nothing() -> None:
  [engine, _] = fake_engine.engines(groups_lib.singletons(2))
  grads = _mixed(1.0)
  sums = gradient_reducer.GradientReducer(engine).reduce(grads)
  assert engine.sent == []
  assert sums[0] is grads[0]
  assert sums[2] is grads[2]


# ------------------------------------------------------------ within a step


def _steps(opt: Any, marks: Any = MARKS, **settings: Any) -> list[float]:
  """Returns what each replica subtracts from its weight, which was 0."""
  trained = fake_engine.replicas(opt, [0.0], **settings)
  fake_engine.train(trained, [np.array([marks], "f")])
  return [-float(replica.values[0]) for replica in trained]


def _sgd(**own: Any) -> Any:
  return lambda: keras.optimizers.SGD(1.0, **own)


LIMITS = ("clipnorm", "global_clipnorm", "clipvalue")


@pytest.mark.parametrize("limit", LIMITS)
def test_clipping_limits_apply_before_the_sum(limit: str) -> None:
  """CrossShardOptimizer clips before the sum, `opt` after it; 0 is no limit."""
  assert _steps(_sgd(), **{limit: 3.0}) == [1 + 3.0, 2 + 3.0] * 2
  assert _steps(_sgd(), **{limit: 0.0}) == SUMS
  assert _steps(_sgd(**{limit: 3.0})) == [3.0] * 4
  assert _steps(_sgd(clipvalue=4.5), **{limit: 3.0}) == [4.0, 4.5] * 2
  mean = {"loss_averaged_over": "replica", "scale_gradients": True}
  scaled = _steps(_sgd(), reduction="mean", **mean, **{limit: 2.0})
  assert scaled == [0.5 + 2.0, 1.0 + 2.0] * 2


@pytest.mark.parametrize("limit", LIMITS)
def test_clipping_is_independent_of_loss_scale(limit: str) -> None:
  def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(_sgd()(), initial_scale=1024.0)

  marks = [1024 * mark for mark in MARKS]
  for opt in (scaled, _sgd(loss_scale_factor=1024.0)):
    assert _steps(opt, marks, **{limit: 3.0}) == [1 + 3.0, 2 + 3.0] * 2


def test_local_clipping_does_not_hide_overflow() -> None:
  def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(_sgd()(), initial_scale=1024.0)

  trained = fake_engine.replicas(scaled, [0.0], clipvalue=0.5)
  fake_engine.train(trained, [np.array([[1.0, np.inf, 1.0, 1.0]]) * 1024])
  assert [float(each.values[0]) for each in trained] == [-1.0, 0.0] * 2
  scales = [float(each.opt.dynamic_scale.numpy()) for each in trained]
  assert scales == [1024.0, 512.0] * 2


def test_updates_wait_for_all_sums() -> None:
  trained = fake_engine.replicas(_sgd(), [0.0, 0.0])
  waited: list[int] = []

  def after_all_sums(sums: Any) -> Any:
    waited.append(len(sums))
    return contextlib.nullcontext()

  for replica in trained:
    replica.engine.after_all_sums = after_all_sums  # type: ignore[method-assign]
  fake_engine.train(trained, [np.array([MARKS], "f")] * 2)
  assert waited == [2] * 4


@pytest.mark.parametrize(
  ("name", "library"), [("Adam", tf_keras), ("SGD", keras), ("SGD", tf_keras)]
)
def test_rows_reach_the_optimizer_once_each(name: str, library: Any) -> None:
  """Adam receives one row per index.

  Its moments use the sum of the rows, and decay in rows without a gradient.
  """

  def opt() -> Any:
    own = {"momentum": 0.5} if name == "SGD" else {}
    return getattr(library.optimizers, name)(0.125, **own)

  ids = np.array([[[0, 0], [1, 0], [2, 0], [1, 2]], [[0, 0]] * 4])
  # Kernels round otherwise, and are for dense gradients.
  ones, fused = [np.ones([3, 1], "f")], {"fused_update": False}
  trained = fake_engine.replicas(opt, ones, library, **fused)
  fake_engine.train(
    trained,
    [ids],
    lambda row: tf.IndexedSlices(tf.ones([2, 1]), tf.constant(row), [3, 1]),
  )
  for replica, first in ((0, [3.0, 0.0, 1.0]), (1, [1.0, 2.0, 1.0])):
    single = groups_lib.singletons(1)
    [alone] = fake_engine.replicas(opt, ones, library, single, **fused)
    for dense in (first, [4.0, 0.0, 0.0]):
      alone.apply([tf.constant(dense)[:, tf.newaxis]])
    for member in (replica, replica + 2):
      np.testing.assert_allclose(
        trained[member].values[0], alone.values[0], rtol=1e-6
      )


# -------------------------------------------------------------- the wire dtype

NEIGHBOURS = [[0, 1], [2, 3]]
NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# The gradients of each replica, and their sums, need 20 bits or more.
GRADS = np.array(
  [[1.0009765625, -3.14159, 100.25], [2.0029296875, 2.71828, 0.3]] * 2, "f4"
) * np.arange(1, 5, dtype="f4").reshape(4, 1)


def _rounded_sums(wire_dtype: str) -> np.ndarray:
  """Each replica's sum of rounded gradients, in float32."""
  rounded = GRADS.astype(NARROW[wire_dtype]).astype("f4")
  pairs = rounded.reshape(2, 2, 3).sum(axis=1, dtype="f4")
  return np.repeat(pairs, 2, axis=0)


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
    groups=groups_lib.Groups(NEIGHBOURS),
    wire_dtype=wire_dtype,
  )
  fake_engine.train(trained, [grads[np.newaxis]], to_grad)
  sent = {tensor.dtype.name for tensor in trained[0].engine.sent}
  assert sent <= {wire_dtype, "int32"}
  return [-replica.values[0] for replica in trained]


def test_float16_gradients_are_sent_with_the_loss_scale() -> None:
  """Gradients that float16 would round to 0 arrive if the loss is scaled."""
  tiny = np.arange(1, 49, dtype="f4").reshape(4, 4, 3) * 2.0**-31
  assert not np.any(_train_one(_sgd(), tiny))

  def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(_sgd()(), initial_scale=2.0**20)

  found = _train_one(scaled, tiny * 2.0**20)
  expected = np.repeat(tiny.reshape(2, 2, 4, 3).sum(axis=1), 2, axis=0)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("wire_dtype", NARROW)
def test_gradients_are_rounded_once(wire_dtype: str) -> None:
  """Each replica rounds its gradients; the sums are float32."""
  rows = np.repeat(GRADS[:, np.newaxis], 4, axis=1)
  found = np.array(_train_one(_sgd(), rows, wire_dtype=wire_dtype))
  right = _rounded_sums(wire_dtype)
  np.testing.assert_array_equal(found, np.repeat(right[:, np.newaxis], 4, 1))
  assert (right != np.repeat(GRADS.reshape(2, 2, 3).sum(1), 2, 0)).any(1).all()

  def to_grad(row: np.ndarray) -> tf.IndexedSlices:
    return tf.IndexedSlices(
      tf.constant(row)[tf.newaxis], tf.constant([2]), [4, 3]
    )

  found = np.array(_train_one(_sgd(), GRADS, to_grad, wire_dtype))
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
    *("keras", lambda _: _sgd()(), {"weight": np.zeros(3, "f4")}, strategy),
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
