"""Sums of gradients: dense, sparse and None; and local clipping."""

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import fake_engine
from tf_cross_shard import groups as groups_lib
from tf_cross_shard._src.core.reduce import wire

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


def _variables() -> list[Any]:
  shapes = [([2], "float32"), ([4], "float32"), ([3, 1], "float32")]
  shapes += [([1, 1], "float16"), ([], "float32")]
  return [tf.Variable(tf.zeros(shape, dtype)) for shape, dtype in shapes]


def test_sum_of_dense_sparse_and_none_gradients_keeps_order() -> None:
  engines = fake_engine.engines()

  def reduce(engine: fake_engine.FakeEngine) -> list[Any]:
    grads = _mixed(MARKS[engine.replica])
    kept = wire.make_reducible(grads, _variables(), engine)
    assert kept == grads
    return wire.Wire(engine).sum(kept)

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


def test_rows_become_dense_where_they_cannot_be_gathered() -> None:
  def reduce(engine: fake_engine.FakeEngine) -> list[Any]:
    grads = _mixed(MARKS[engine.replica])
    dense = wire.make_reducible(grads, _variables(), engine)
    return wire.Wire(engine).sum(dense)

  found = fake_engine.run(reduce, fake_engine.engines(supports_sparse=False))
  for sums, total in zip(found, SUMS, strict=True):
    np.testing.assert_array_equal(sums[2], [[2 * total], [0.0], [5 * total]])


def test_groups_of_one_send_nothing() -> None:
  [engine, _] = fake_engine.engines(groups_lib.singletons(2))
  grads = _mixed(1.0)
  sums = wire.Wire(engine).sum(grads)
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

  def all_or_nothing(sums: Any) -> Any:
    waited.append(len(sums))
    return contextlib.nullcontext()

  for replica in trained:
    replica.engine.all_or_nothing = all_or_nothing  # type: ignore[method-assign]
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
